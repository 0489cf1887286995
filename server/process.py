"""The server process from bind to exit: listen, load the model while probes are answered, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from server.settings import Settings
from server.startup import (
    BACKLOG,
    StartError,
    bind,
    check_certificate,
    configure_logging,
    raise_file_limit,
    start_line,
)

logger = logging.getLogger("dspark")

Progress = Callable[[str], None]
# (settings, observer, progress) -> AsyncEngine; blocking, run on a thread of its own.
EngineBuilder = Callable[[Settings, Any, Progress], Any]


def run(settings: Settings, build: EngineBuilder) -> int:
    """Serve until a signal comes; returns the exit code. Raises StartError."""
    configure_logging(settings.uvicorn_log_level, settings.log_format)
    raise_file_limit()
    check_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    listener = bind(settings.host, settings.port)
    process = _Process(settings, build, listener)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            code = runner.run(process.main())
        except asyncio.CancelledError:
            code = 130
    if not process.loaded or process.hung():
        # A thread is busy; the interpreter's orderly exit would run into it, or wait for ever.
        logging.shutdown()
        os._exit(code)
    return code


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling: a signal must first drain the engine."""

    def __init__(self, app: Any, settings: Settings) -> None:
        from server.http_protocol import BoundedHttp  # late, as in main

        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedHttp,
                ws="none",
                lifespan="off",
                loop="none",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=settings.timeout_keep_alive,
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
                # By now the engine is drained: only clients that do not read are left.
                timeout_graceful_shutdown=5,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Process:
    """One run of the server."""

    def __init__(self, settings: Settings, build: EngineBuilder, listener: socket.socket) -> None:
        self._settings = settings
        self._build = build
        self._listener = listener
        self._stop = asyncio.Event()
        self._engine: Any = None
        self.loaded = False

    def hung(self) -> float:
        """Seconds that a step has been running, after the drain gave it up; 0 if none is."""
        return 0.0 if self._engine is None else self._engine.step_age()

    async def main(self) -> int:
        self._handle_signals()
        # Imported late: this takes a while, and a port in use should be reported at once.
        from server.app import create_app
        from server.observing import observed_context

        settings = self._settings
        context, spans = observed_context(settings)
        server = HttpServer(create_app(context), settings)
        http = asyncio.create_task(server.serve(sockets=[self._listener]))
        stopped = asyncio.create_task(self._stop.wait())
        loading = asyncio.create_task(self._load(context))
        try:
            await asyncio.wait({loading, stopped, http}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                self._announce(context.engine)
                await asyncio.wait({stopped, http}, return_when=asyncio.FIRST_COMPLETED)
            context.draining = True
            if context.engine is not None:
                logger.info("Stopping: running requests get %g s", settings.shutdown_timeout)
                await context.engine.drain(settings.shutdown_timeout)
        except asyncio.CancelledError:
            server.force_exit = True
            raise
        finally:
            loading.cancel()
            stopped.cancel()
            server.should_exit = True
            await http
            context.close()
            if spans is not None:
                await asyncio.to_thread(spans.shutdown)  # sends what is left
        if seconds := self.hung():
            logger.error("Stopped: a step has been running for %.0f s, and its requests are lost", seconds)
            return 1
        logger.info("Stopped")
        return 0

    async def _load(self, context: Any) -> None:
        """Build the engine on a thread that may be abandoned, and start it on the loop."""
        loop = asyncio.get_running_loop()
        built: asyncio.Future[Any] = loop.create_future()

        def finish(engine: Any, error: BaseException | None) -> None:
            self.loaded = True
            if built.done():
                return
            if error is None:
                built.set_result(engine)
            else:
                built.set_exception(error)

        def work() -> None:
            engine, error = None, None
            try:
                engine = self._build(self._settings, context.metrics, logger.info)
            except BaseException as exc:
                error = exc
            with contextlib.suppress(RuntimeError):  # the loop is closed once we were told to stop
                loop.call_soon_threadsafe(finish, engine, error)

        threading.Thread(target=work, name="load", daemon=True).start()
        try:
            engine = await built
            await engine.start()
        except (OSError, ValueError, LookupError, ImportError, RuntimeError, MemoryError) as exc:
            logger.debug("loading failed", exc_info=exc)
            raise StartError(f"cannot load {self._settings.model_names[0]}: {_one_line(exc)}") from exc
        self._engine = context.engine = engine

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        main = asyncio.current_task()
        assert main is not None

        def on_interrupt() -> None:
            if self._stop.is_set():
                main.cancel()  # the second Ctrl+C: do not wait for the requests
            self._stop.set()

        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        loop.add_signal_handler(signal.SIGINT, on_interrupt)

    def _announce(self, engine: Any) -> None:
        logger.info("%s", start_line(engine))
        host, port = self._listener.getsockname()[:2]
        if host in ("0.0.0.0", "::"):
            host = "localhost"
        scheme = "https" if self._settings.ssl_certfile else "http"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        body = json.dumps(
            {
                "model": self._settings.model_names[0],
                "messages": [{"role": "user", "content": "Why is the sky blue?"}],
                "stream": True,
            }
        )
        logger.info("Ready on %s (documentation at /docs, metrics at /metrics). Try:", url)
        key = " -H 'Authorization: Bearer KEY'" if self._settings.api_keys else ""
        logger.info(
            "  curl -N %s/v1/chat/completions -H 'Content-Type: application/json'%s -d %s",
            url,
            key,
            shlex.quote(body),
        )


def _one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split()) or type(exc).__name__


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
