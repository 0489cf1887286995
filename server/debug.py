"""`/debug/scheduler`: what the scheduler knows, and what it decided in the last steps."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Query

from server.context import ServerContext

#: steps that are kept
MOST = 256


def routes(context: ServerContext) -> APIRouter:
    """The endpoint, bound to `context`; for operators, and only where it was enabled."""
    router = APIRouter(tags=["operations"])

    @router.get("/debug/scheduler")
    async def scheduler(last: int = Query(32, ge=1, le=MOST)) -> dict[str, Any]:
        """The cost curves, what drafts are expected to do, and the last steps, oldest first.

        A step's lists have an entry for each decoding sequence, `slots` for each that sampled. Times are in
        seconds, `begun` and `worker_begun` on a clock of the process.
        """
        state = context.loaded().scheduler_state()
        return {**state, "steps": [asdict(stats) for stats in list(context.metrics.recent)[-last:]]}

    return router
