"""Getting to know a server before the load: is it there, what does it serve, what does it understand."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import httpx

from loadtest.client import PATHS, Target


class TargetError(RuntimeError):
    """The server cannot be measured like this; the message is for the user."""


def base_url(url: str) -> str:
    """An address without the /v1 that clients' base URLs end in. Raises TargetError if it is none."""
    parsed = httpx.URL(url) if "://" in url else httpx.URL(f"http://{url}")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise TargetError(f"{url!r} is no http:// or https:// address")
    return str(parsed).rstrip("/").removesuffix("/v1").rstrip("/")


def meet(
    url: str,
    endpoint: str,
    body: Mapping[str, Any],
    *,
    model: str | None = None,
    api_key: str | None = None,
    timeout: float = 300.0,
    wait: float = 0.0,
) -> Target:
    """Find the model, and send one small request with the fields that the load will have.

    Waits up to `wait` seconds for the server to come up. Raises TargetError.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=base_url(url), headers=headers, timeout=timeout) as http:
        named = model or _first_model(http, wait)
        tried = _try(http, endpoint, named, body, continuous=True)
        if tried is None:
            return Target(base_url(url), named, api_key, True, timeout)
        # Some servers refuse fields that they do not know; usage at the end is then all there is.
        failure = _try(http, endpoint, named, body, continuous=False)
        if failure is not None:
            raise TargetError(f"{base_url(url)} refused a first request: {failure}")
        return Target(base_url(url), named, api_key, False, timeout)


def flush_cache(url: str) -> None:
    """Have the server forget its prefix cache, where it has an endpoint for that. Raises TargetError."""
    for path in ("/reset_prefix_cache", "/flush_cache"):
        try:
            if httpx.post(base_url(url) + path, timeout=30.0).is_success:
                return
        except httpx.HTTPError as error:
            raise TargetError(f"{url} could not be told to flush its cache: {error}") from None
    raise TargetError(f"{url} has no endpoint to flush its prefix cache: take another --prefix-cache")


def describe(url: str) -> dict[str, Any] | None:
    """What the server says of itself at /version; None if it says nothing."""
    try:
        reply = httpx.get(base_url(url) + "/version", timeout=5.0)
        answer = reply.json() if reply.is_success else None
    except (httpx.HTTPError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None


def _first_model(http: httpx.Client, wait: float) -> str:
    deadline = time.monotonic() + wait
    while True:
        try:
            reply = http.get("/v1/models", timeout=10.0)
            if reply.is_success:
                return str(reply.json()["data"][0]["id"])
            trouble = f"HTTP {reply.status_code}"
        except httpx.HTTPError as error:
            trouble = str(error) or type(error).__name__
        except (ValueError, KeyError, IndexError, TypeError):
            raise TargetError(f"{http.base_url} does not list models: name one with --model") from None
        if time.monotonic() >= deadline:
            raise TargetError(f"{str(http.base_url).rstrip('/')}/v1/models does not answer: {trouble}")
        time.sleep(0.25)


def _try(
    http: httpx.Client, endpoint: str, model: str, body: Mapping[str, Any], continuous: bool
) -> str | None:
    """What the server said against a small request; None if nothing."""
    options = {"include_usage": True} | ({"continuous_usage_stats": True} if continuous else {})
    prompt: dict[str, Any] = {"prompt": "Hello"}
    if endpoint == "chat":
        prompt = {"messages": [{"role": "user", "content": "Hello"}]}
    whole = {"model": model, "stream": True, "stream_options": options, "max_tokens": 2} | prompt | dict(body)
    try:
        reply = http.post(PATHS[endpoint], json=whole)
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__
    return None if reply.is_success else f"HTTP {reply.status_code} {reply.text[:300]}"
