"""Step 4 of `make gpu-check`: what verification and drafting cost by size, and what the device waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deploy.gpu.check_step import StepOptions, shown, table_of
from deploy.gpu.drive import Steps, prompts_of, run_engine, stream
from engine.params import SamplingParams
from scheduler.policies import parse_policy


def run(options: StepOptions) -> dict[str, Any]:
    """The measured curves, then service at a few loads: speed, and the time in which no kernel ran."""
    seen, loads = Steps(), (1, 4) if options.dry else (1, 16, 64)
    most = max(loads)
    rows = {} if options.dry else {"max_num_batched_tokens": 512}
    parts = options.parts(
        seen,
        speculative_config=options.drafts,
        verify_policy="fixed:3",  # measured below, not here
        max_num_seqs=most,
        num_pages=64 * most,
        **rows,
    )
    costs = parts.loop.speculation.throughput = parts.profile(True)
    parts.loop.speculation.policy = parse_policy("lookahead")
    seconds = 0.3 if options.dry else min(4.0, options.seconds / 15)
    prompts = prompts_of(parts, 2 * most, 60)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)

    async def serve(engine: Any) -> list[dict[str, Any]]:
        found = []
        for streams in loads:
            row = await stream(engine, prompts, params, streams, seconds, seen)
            with DeviceTime(options.device) as busy:  # by itself, since it slows everything down
                await stream(engine, prompts, params, streams, seconds / 3, seen)
            found.append({"streams": streams, **row, "device_idle": busy.idle})
        return found

    return {
        "verify": costs.verify.to_list(),
        "draft": costs.draft.to_list(),
        "per_context_ns": 1e9 * costs.per_context,
        "service": run_engine(parts, serve),
        "passed": True,
    }


class DeviceTime:
    """Around a stretch of work: `idle` is the share of it in which no kernel ran, None on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.idle: float | None = None
        activities = [torch.profiler.ProfilerActivity.CUDA]
        self._profile = torch.profiler.profile(activities=activities) if device.type == "cuda" else None

    def __enter__(self) -> DeviceTime:
        if self._profile is not None:
            self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._profile is None:
            return
        self._profile.__exit__(*error)
        self.idle = idle_share(
            [
                (event.time_range.start, event.time_range.end)
                for event in self._profile.events()
                if event.device_type == torch.autograd.DeviceType.CUDA
            ]
        )


def idle_share(spans: Sequence[tuple[float, float]]) -> float | None:
    """Of the time from the first begin to the last end, what no span covers; None without spans."""
    if not spans:
        return None
    ordered = sorted(spans)
    busy, until = 0.0, ordered[0][0]
    for begin, end in ordered:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return 1.0 - busy / max(1e-9, until - ordered[0][0])


def table(result: dict[str, Any]) -> str:
    parts = [
        table_of([name, "ms"], [[f"{size:.0f}", f"{1e3 * cost:.2f}"] for size, cost in result[key]])
        for key, name in (("verify", "rows verified"), ("draft", "tokens drafted"))
    ]
    names = ("streams", "tokens_per_second", "step_ms", "verified", "tau", "worker_idle", "device_idle")
    parts.append(table_of(names, [[shown(row[name]) for name in names] for row in result["service"]]))
    return "\n\n".join(parts)
