"""What happens around a start: the socket, the limits, the log, and the line that tells what was set up."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import ssl
import sys
from typing import TYPE_CHECKING

from server.log_format import formatter

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine

BACKLOG = 2048
_PAGE_TOKENS = 16


class StartError(RuntimeError):
    """The server cannot start; the message is for the operator."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, so that a port in use is found out before a model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as exc:
        raise StartError(f"cannot resolve --host {host}: {exc.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        raise StartError(f"cannot listen on {host} port {port}: {os.strerror(exc.errno or 0)}") from None
    return listener


def check_certificate(certificate: str | None, key: str | None) -> None:
    """Find out now what the first connection would otherwise. Raises StartError."""
    if certificate is None:
        if key is not None:
            raise StartError("--ssl-keyfile needs --ssl-certfile")
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as exc:
        raise StartError(f"cannot use --ssl-certfile {certificate}: {exc.strerror or exc}") from None


def raise_file_limit() -> None:
    """Every connection is a file; the usual soft limit of 1024 ends a storm of clients early."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def configure_logging(name: str, kind: str) -> None:
    """Log to stderr at uvicorn's level `name`, as text or JSON."""
    level = logging.DEBUG if name == "trace" else getattr(logging, name.upper())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(kind))
    logging.basicConfig(
        level=max(level, logging.INFO) if level > logging.DEBUG else level, handlers=[handler]
    )
    logging.getLogger("dspark").setLevel(level)
    # uvicorn tells of every start and stop; ours are told above.
    logging.getLogger("uvicorn").setLevel(level if level <= logging.DEBUG else max(level, logging.WARNING))
    logging.getLogger("asyncio").setLevel(max(level, logging.WARNING))


def start_line(engine: AsyncEngine) -> str:
    """What an operator needs to know about capacity and setup, in one line."""
    info = engine.info
    pages = info.get("pages") or engine.gauges().pages_total
    tokens = pages * info.get("page_size", _PAGE_TOKENS)
    contexts = tokens / engine.max_model_len
    return (
        f"{info.get('model')}: {info.get('dtype')} on {info.get('device')}, {info.get('executor')} executor, "
        f"{info.get('threads')} threads; {pages} pages = {tokens:,} tokens = {contexts:.1f} full contexts of "
        f"{engine.max_model_len:,}; drafter {info.get('drafter')}, policy {info.get('verify_policy')}"
    )
