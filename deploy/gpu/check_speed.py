"""Step 5 of `make gpu-check`: tokens/s at 1 to 256 requests on a model of Qwen3-8B's shape, by verify policy.

The weights are random, so nothing would ever be accepted: acceptance is made up, and the results say so.
All the work is real (forward passes, drafts, sampling, scheduling, pages); only how many drafts count as
accepted is drawn, each by a chance that its request and place in the block decide. The drafter's confidence
is that chance.
"""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from deploy.gpu.check_step import StepOptions, shown, table_of
from deploy.gpu.drive import Driver, Steps, prompts_of, run_engine, stream
from deploy.gpu.random_model import DSPARK, QWEN3_8B, write_draft, write_target
from engine.batch import BatchItem, DraftBlock, StepResult, Verdict, VerificationBatch
from engine.params import SamplingParams

POLICIES = ("off", "fixed:4", "lookahead", "lagged")
STREAMS = (64, 1, 256, 16, 4)  # the most telling first, should time run out
#: of a request's first draft, by how easy its text is; a third of the requests each
_CHANCES = (0.9, 0.75, 0.5)
_FADE = 0.95  # of the chance, from one place in the block to the next
_TOY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip


def run(options: StepOptions) -> dict[str, Any]:
    """A row for each number of streams and policy, as far as the time goes."""
    begun = time.monotonic()
    loads = (1, 4) if options.dry else STREAMS
    most = max(loads)
    folder = _folder(options)
    model, draft = _models(options, folder)
    seen = Steps()
    rows = {} if options.dry else {"max_num_batched_tokens": 768}  # for each size up to it there is a graph
    try:
        parts = options.parts(
            seen,
            model,
            speculative_config={"method": "dspark", "model": str(draft)},
            verify_policy="fixed:4",  # costs are measured below
            max_num_seqs=most,
            num_pages=32 * most,
            **rows,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    parts.loop.speculation.throughput = parts.profile(True)
    worker, loaded = SyntheticWorker(parts.worker), time.monotonic() - begun
    prompts = [(prompt * 8)[:128] for prompt in prompts_of(parts, most, 130)]
    params = SamplingParams(temperature=0.0, max_tokens=192, ignore_eos=True)
    driver, found = Driver(parts), []
    each = 0.2 if options.dry else max(1.0, (options.seconds - loaded) / (1.5 * len(loads) * len(POLICIES)))

    async def serve(engine: Any) -> None:
        for streams in loads:
            for policy in POLICIES:
                if time.monotonic() - begun + 3 * each > options.seconds and not options.dry:
                    return
                driver.use(policy)
                row = await stream(engine, prompts, params, streams, each, seen)
                found.append({"streams": streams, "policy": policy, **row})

    run_engine(parts, serve, worker)
    return {
        "acceptance": f"synthetic: first draft {_CHANCES}, times {_FADE} a place; weights are random",
        "shape": "toy" if options.dry else "Qwen3-8B",
        "load_seconds": loaded,
        "rows": found,
        "passed": bool(found),
    }


def table(result: dict[str, Any]) -> str:
    names = ("streams", "policy", "tokens_per_second", "step_ms", "rows", "verified", "tau", "worker_idle")
    lines = table_of(names, [[shown(row[name]) for name in names] for row in result["rows"]])
    return f"{result['shape']}-shaped, random weights; acceptance is {result['acceptance']}\n{lines}"


def _folder(options: StepOptions) -> Path:
    """Where 19 GB are read fastest from: memory, if there is room."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 32 << 30
    folder = (memory if roomy and not options.dry else options.work) / "random-model"
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def _models(options: StepOptions, folder: Path) -> tuple[Path, Path]:
    shape, heads = dict(QWEN3_8B), dict(DSPARK)
    if options.dry:
        shape |= {**_TOY, "vocab_size": 64}
        heads |= {"num_hidden_layers": 1, "target_layer_ids": [0, 1], "mask_token_id": 3, "markov_rank": 8}
    target = write_target(folder / "target", shape, options.work / "model", options.device)
    return target, write_draft(folder / "draft", shape, heads, options.device)


class SyntheticWorker:
    """A worker whose verdicts are replaced by drawn ones once all the work is done."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run(self, batch: VerificationBatch) -> StepResult:
        result: StepResult = self.inner.run(batch)
        verdicts = tuple(
            drawn(item, verdict) for item, verdict in zip(batch.items, result.verdicts, strict=True)
        )
        drafts = tuple(
            None if block is None else confident(block, item.sequence)
            for item, block in zip(batch.items, result.drafts, strict=True)
        )
        return replace(result, verdicts=verdicts, drafts=drafts)


def chances(sequence: int, count: int) -> list[float]:
    """Of each of a block's drafts to be accepted, if those before it were."""
    return [_CHANCES[sequence % len(_CHANCES)] * _FADE**place for place in range(count)]


def drawn(item: BatchItem, verdict: Verdict) -> Verdict:
    """As many drafts as chance says, and one token after them: the real verdict's last."""
    if not verdict.tokens:
        return verdict  # a prefill chunk, or an error
    tokens: list[int] = []
    if item.draft is not None:
        luck = np.random.default_rng([abs(item.sequence), item.round]).random(item.verify)
        for place, chance in enumerate(chances(item.sequence, item.verify)):
            if luck[place] >= chance:
                break
            tokens.append(item.draft.tokens[place])
    accepted = len(tokens)
    tokens = [*tokens, verdict.tokens[-1]][: item.budget]
    finish = "length" if len(tokens) == item.budget else None
    return Verdict(tuple(tokens), min(accepted, len(tokens)), finish=finish)


def confident(block: DraftBlock, sequence: int) -> DraftBlock:
    """The block with the true chances as the drafter's confidence."""
    logits = tuple(math.log(chance / (1.0 - chance)) for chance in chances(sequence, len(block)))
    return replace(block, confidence=logits)
