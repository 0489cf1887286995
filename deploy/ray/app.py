"""The server as a Ray Serve deployment: replicas on any number of machines, as many as the requests need.

    serve run deploy.ray.app:build                               # settings from DSPARK_... variables
    serve run deploy.ray.app:build max_replicas=4 model=DIR      # or as arguments, by their names
    serve run deploy.ray.app:build num_gpus=1                    # a GPU for each replica

A replica reserves `threads` cores of its machine (4, unless that is given), and its kernels use as many.

Ray's proxy takes the place of a load balancer: it prefers replicas with fewer requests under way and passes
streams on as they come. Replicas come and go by the number of requests, waiting or running, that each has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, ClassVar

from ray import serve
from ray.serve import Application
from starlette.types import ASGIApp, Receive, Scope, Send

from server.app import create_app
from server.observing import observed_context
from server.options import load
from server.settings import Settings
from server.startup import StartError, configure_logging
from server.wiring import build_engine

logger = logging.getLogger("dspark")
_THREADS = 4  # whatever the machine where this is read, which may be another than a replica's
EngineBuilder = Callable[[Settings, Any, Callable[[str], None]], Any]


class Server:
    """One replica's server, as an ASGI application whose lifespan is the engine's."""

    #: of this process; a replica has one of its own
    current: ClassVar[Server | None] = None

    def __init__(self, settings: Settings, build: EngineBuilder) -> None:
        self._settings = settings
        self._build = build
        configure_logging(settings.uvicorn_log_level, settings.log_format)
        self.context, self._spans = observed_context(settings)
        self._app: ASGIApp = create_app(self.context)
        Server.current = self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Ray sends no request before the start is complete, and none after it has asked for the end."""
        await receive()
        try:
            engine = await asyncio.to_thread(self._build, self._settings, self.context.metrics, logger.info)
            await engine.start()
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": f"cannot load the model: {error}"})
            return
        self.context.engine = engine
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self.context.draining = True
        await engine.drain(self._settings.shutdown_timeout)
        self.context.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.shutdown)  # sends what is left
        await send({"type": "lifespan.shutdown.complete"})


class Replica:
    """What Ray asks of a deployment apart from its application."""

    def check_health(self) -> None:
        """Asked every few seconds; a replica for which it raises is replaced."""
        server = Server.current
        if server is not None and server.context.engine is not None and server.context.engine.state == "dead":
            raise StartError("the engine has died")


def build(arguments: dict[str, str], engine: EngineBuilder = build_engine) -> Application:
    """The application for `serve run` and for Ray's own configuration files."""
    given = dict(arguments)
    least, most = int(given.pop("min_replicas", "1")), int(given.pop("max_replicas", "2"))
    gpus = float(given.pop("num_gpus", "0"))
    settings = load({"threads": str(_THREADS)} | given)

    def application() -> Server:
        return Server(settings, engine)

    deployment = serve.deployment(
        serve.ingress(application)(Replica),
        name="dspark",
        # Above it Ray's proxy lets requests wait; the engine's own queue is where their order is known.
        max_ongoing_requests=settings.max_num_seqs + settings.max_num_queued_reqs,
        autoscaling_config={
            "min_replicas": least,
            "max_replicas": most,
            "target_ongoing_requests": settings.max_num_seqs,  # more than that have to wait
            "upscale_delay_s": 10,
            "downscale_delay_s": 300,
        },
        graceful_shutdown_timeout_s=settings.shutdown_timeout + 10,
        ray_actor_options={"num_cpus": settings.threads or _THREADS, "num_gpus": gpus},
    )
    return deployment.bind()
