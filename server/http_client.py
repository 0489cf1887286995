"""What the terminal commands know of a server: where it is, and how to read its streams."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Generator, Iterator
from typing import Any

import httpx


class Unreachable(Exception):
    """Nobody answers at that address, or the connection broke."""


class Refused(Exception):
    """The server answered with an error; the message is its own."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Where the server is, and how it is to answer."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--model", help="name of the model (default: the server's first)")
    parser.add_argument("--api-key", help="default: DSPARK_API_KEY or OPENAI_API_KEY of the environment")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before all else")
    parser.add_argument("--max-tokens", type=int, metavar="N")
    parser.add_argument("--temperature", type=float, metavar="T")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--seed", type=int, metavar="N")


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request body that were given as flags."""
    fields = {name: getattr(arguments, name) for name in ("max_tokens", "temperature", "top_p", "seed")}
    return {name: value for name, value in fields.items() if value is not None}


class Client:
    """One connection to one server; a context manager. Raises Unreachable for an address that is none."""

    def __init__(self, url: str, api_key: str | None) -> None:
        environment = os.environ.get("DSPARK_API_KEY") or os.environ.get("OPENAI_API_KEY") or ""
        key = api_key or next(iter(environment.replace(",", " ").split()), None)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._url = url.rstrip("/")
        # A request may wait in the queue for long, but a connection is made at once or not at all.
        timeout = httpx.Timeout(None, connect=10.0)
        try:
            self._http = httpx.Client(base_url=self._url, headers=headers, timeout=timeout)
        except httpx.InvalidURL as exc:
            raise Unreachable(f"{url}: {exc}") from exc

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def first_model(self) -> str:
        """The name of the first model that the server has. Raises Unreachable or Refused."""
        try:
            reply = self._http.get("/v1/models")
            _check(reply)
            return str(reply.json()["data"][0]["id"])
        except httpx.HTTPError as exc:
            raise self._unreachable(exc) from exc
        except (ValueError, LookupError, TypeError) as exc:
            raise Refused("this is not an OpenAI-compatible server") from exc

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of a streamed reply. Raises Unreachable or Refused, also in its middle."""
        try:
            with self._http.stream("POST", path, json=body | {"stream": True}) as reply:
                if reply.status_code != 200:
                    reply.read()
                _check(reply)
                for line in _lines(reply.iter_bytes()):
                    if line == b"data: [DONE]":
                        return
                    if line.startswith(b"data: "):
                        yield _event(line[6:])
        except httpx.HTTPError as exc:
            raise self._unreachable(exc) from exc

    def _unreachable(self, exc: httpx.HTTPError) -> Unreachable:
        return Unreachable(f"{self._url}: {exc or type(exc).__name__}")


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    # Not httpx's own lines: those also end at characters that may stand inside JSON.
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.rstrip(b"\r") for line in whole)


def _event(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise Refused("the server sent an event that is not JSON") from None
    if not isinstance(value, dict):
        raise Refused("the server sent an event that is not an object")
    if "error" in value:
        raise Refused(_message(value))
    return value


def _check(reply: httpx.Response) -> None:
    if reply.status_code == 200:
        return
    try:
        told = _message(reply.json())
    except ValueError:
        told = f"the server answered with status {reply.status_code}"
    raise Refused(told)


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error["message"]) if isinstance(error, dict) and "message" in error else str(body)[:500]
