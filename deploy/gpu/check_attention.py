"""Step 1 of `make gpu-check`: FlashInfer's paged attention against the same thing written down in torch.

Ragged lengths over shuffled pages of 16, query groups of 3, 4, 7 and 8, bf16, slots of length zero, causal
(verification, prefill) and not (the draft block), called directly and replayed from a CUDA graph whose
lengths change between replays. Error is the largest difference to fp32, in roundings of the result to bf16.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deploy.gpu.check_step import StepOptions, table_of

PAGE = 16
#: (query heads, K/V heads, head dim): SmolLM2-135M, Qwen3-8B, Qwen2-7B, Qwen3-32B
SHAPES = ((9, 3, 64), (32, 8, 128), (28, 4, 128), (64, 8, 128))
_TOLERANCE = 4.0  # roundings to bf16 (2^-8 of the value): softmax weights are rounded, then products of them
_WORKSPACE = 512 << 20


@dataclass(frozen=True)
class Batch:
    """Rows and keys of each request; both zero for a slot that nobody uses."""

    name: str
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool = True


@dataclass(frozen=True)
class Plan:
    """What a wrapper is planned with: CSR of rows and pages on the host, page ids on the device."""

    rows: torch.Tensor
    pages: torch.Tensor
    ids: torch.Tensor
    last: torch.Tensor


def run(options: StepOptions) -> dict[str, Any]:
    """All shapes, all batches, direct and replayed. One entry a combination."""
    rng = np.random.default_rng(0)
    cases: list[dict[str, Any]] = []
    longest = 60 if options.dry else 3000
    for heads, kv_heads, dim in SHAPES[:2] if options.dry else SHAPES:
        check = _Check(heads, kv_heads, dim, longest, options)
        for batch in batches(rng, longest):
            cases.append(check.direct(batch))
        cases += check.replayed([_verification(rng, longest, f"replay {i}", 64) for i in range(6)])
    return {"cases": cases, "passed": all(case["passed"] for case in cases)}


def table(result: dict[str, Any]) -> str:
    """The worst of each kind of batch."""
    worst: dict[tuple[str, str], dict[str, Any]] = {}
    for case in result["cases"]:
        key = case["shape"], case["batch"].partition(" ")[0]
        if key not in worst or case["roundings"] > worst[key]["roundings"]:
            worst[key] = case
    rows = [
        [shape, batch, f"{case['roundings']:.2f}", f"{case['us']:.0f}", "ok" if case["passed"] else "WRONG"]
        for (shape, batch), case in worst.items()
    ]
    return table_of(["heads/kv/dim", "batch", "error in roundings", "us a call", ""], rows)


def batches(rng: np.random.Generator, longest: int) -> list[Batch]:
    """Plain decode, ragged verification with unused slots, chunked prefill, the draft block."""
    contexts = tuple(int(n) for n in rng.integers(1, longest, 32))
    prompt = max(20, longest // 5)
    return [
        Batch("decode", (1,) * 32, contexts),
        _verification(rng, longest, "verification", 96),
        Batch("prefill", (prompt, 1, 17, 0, 5), (prompt, 1, longest, 0, 5)),
        Batch("draft-block", (7,) * 32, tuple(n + 7 for n in contexts), causal=False),
    ]


def _verification(rng: np.random.Generator, longest: int, name: str, rows: int) -> Batch:
    """As many slots as rows; 1 to 8 rows a request until all rows are taken, the other slots empty."""
    sizes: list[int] = []
    while sum(sizes) < rows:
        sizes.append(min(int(rng.integers(1, 9)), rows - sum(sizes)))
    if name.startswith("replay") and not name.endswith(" 0"):
        sizes.pop()  # a replay with rows to spare: padding that belongs to nobody
    keys = [int(n) + size for n, size in zip(rng.integers(1, longest, len(sizes)), sizes, strict=True)]
    empty = rows - len(sizes)
    order = rng.permutation(rows)  # unused slots between the others
    all_rows, all_keys = np.array(sizes + [0] * empty)[order], np.array(keys + [0] * empty)[order]
    return Batch(name, tuple(all_rows.tolist()), tuple(all_keys.tolist()))


def plan_of(batch: Batch, pool_pages: int, rng: np.random.Generator, device: torch.device) -> Plan:
    """Page ids are drawn without order, as they are after a while of serving."""
    counts = [-(-keys // PAGE) for keys in batch.keys]
    ids = rng.permutation(pool_pages)[: sum(counts)]
    last = [(keys - 1) % PAGE + 1 if keys else 0 for keys in batch.keys]
    csr = [
        torch.tensor(np.concatenate(([0], np.cumsum(part))), dtype=torch.int32)
        for part in (batch.rows, counts)
    ]
    return Plan(
        csr[0], csr[1], torch.tensor(ids, dtype=torch.int32).to(device), torch.tensor(last, dtype=torch.int32)
    )


def reference(batch: Batch, plan: Plan, q: torch.Tensor, pool: Sequence[torch.Tensor]) -> torch.Tensor:
    """[rows, heads, dim] in fp32, request by request."""
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for slot, (rows, keys) in enumerate(zip(batch.rows, batch.keys, strict=True)):
        if not rows:
            continue
        own = plan.ids[int(plan.pages[slot]) : int(plan.pages[slot + 1])].long()
        k, v = (part[own].flatten(0, 1)[:keys].float() for part in pool)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        first = int(plan.rows[slot])
        mine = q[first : first + rows].float()
        scores = torch.einsum("qhd,khd->hqk", mine, k) / math.sqrt(q.shape[2])
        if batch.causal:  # bottom right: the last row sees all keys
            position = torch.arange(keys, device=q.device)
            scores = scores.masked_fill(position > position[keys - rows :, None], -torch.inf)
        out[first : first + rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out


class _Check:
    """One shape: a pool of random K and V, and wrappers over it."""

    def __init__(self, heads: int, kv_heads: int, dim: int, longest: int, options: StepOptions) -> None:
        self.heads, self.kv_heads, self.dim, self.device = heads, kv_heads, dim, options.device
        self.shape = f"{heads}/{kv_heads}/{dim}"
        self.rng = np.random.default_rng(heads)
        self.pages = 96 * (-(-(longest + 8) // PAGE))
        torch.manual_seed(heads)
        size = (self.pages, PAGE, kv_heads, dim)
        self.pool = tuple(torch.randn(size, device=self.device).bfloat16() for _ in range(2))
        self.wrapper, self.capture = _tools(options)
        self.workspace = torch.zeros(
            1 << 10 if options.dry else _WORKSPACE, dtype=torch.uint8, device=self.device
        )

    def direct(self, batch: Batch) -> dict[str, Any]:
        """Planned and run as a step without a graph is."""
        wrapper = self.wrapper(self.workspace, "NHD", backend="fa2")
        plan = plan_of(batch, self.pages, self.rng, self.device)
        self._plan(wrapper, plan, batch)
        q = self._queries(sum(batch.rows))
        out = wrapper.run(q, self.pool)
        microseconds = self._time(lambda: wrapper.run(q, self.pool, out=out))
        return self._case(batch, out, reference(batch, plan, q, self.pool), microseconds)

    def replayed(self, sets: list[Batch]) -> list[dict[str, Any]]:
        """Captured once, with every row taken; replayed for other lengths after a new plan each."""
        slots = len(sets[0].rows)
        ints = {"dtype": torch.int32, "device": self.device}
        wrapper = self.wrapper(
            self.workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=torch.zeros(slots + 1, **ints),
            paged_kv_indptr_buf=torch.zeros(slots + 1, **ints),
            paged_kv_indices_buf=torch.zeros(self.pages, **ints),
            paged_kv_last_page_len_buf=torch.zeros(slots, **ints),
            backend="fa2",
        )
        q = self._queries(slots)
        out = torch.zeros_like(q)
        self._plan(wrapper, plan_of(sets[0], self.pages, self.rng, self.device), sets[0])
        replay = self.capture(lambda: wrapper.run(q, self.pool, out=out))
        cases = []
        for batch in sets:
            plan = plan_of(batch, self.pages, self.rng, self.device)
            q.copy_(self._queries(slots))
            out.fill_(7.0)
            self._plan(wrapper, plan, batch)
            replay()
            rows = sum(batch.rows)
            wanted = reference(batch, plan, q, self.pool)
            case = self._case(batch, out[:rows], wanted[:rows], self._time(replay))
            case["padding_untouched"] = bool((out[rows:] == 7.0).all())
            cases.append(case)
        return cases

    def _plan(self, wrapper: Any, plan: Plan, batch: Batch) -> None:
        wrapper.plan(
            plan.rows,
            plan.pages,
            plan.ids,
            plan.last,
            self.heads,
            self.kv_heads,
            self.dim,
            PAGE,
            causal=batch.causal,
            sm_scale=self.dim**-0.5,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
            o_data_type=torch.bfloat16,
            seq_lens=torch.tensor(batch.keys, dtype=torch.int32),
            max_token_per_sequence=max(batch.rows),
        )

    def _queries(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, self.heads, self.dim, device=self.device).bfloat16()

    def _case(self, batch: Batch, out: torch.Tensor, wanted: torch.Tensor, us: float) -> dict[str, Any]:
        # A value near zero is a sum that cancelled: its roundings are those of what was summed.
        scale = wanted.abs().clamp_min(wanted.abs().mean()) * 2**-8
        roundings = float(((out.float() - wanted).abs() / scale).max())
        passed = roundings <= _TOLERANCE
        return {"shape": self.shape, "batch": batch.name, "roundings": roundings, "us": us, "passed": passed}

    def _time(self, call: Callable[[], Any], repeats: int = 20) -> float:
        """Microseconds a call, back to back."""
        if self.device.type != "cuda":
            return 0.0
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - begun) / repeats


def _tools(options: StepOptions) -> tuple[Any, Callable[[Callable[[], Any]], Callable[[], Any]]]:
    """FlashInfer's wrapper and a way to capture a graph; stand-ins on a CPU."""
    if options.device.type != "cuda":
        from deploy.gpu.stand_in import TorchWrapper

        return TorchWrapper, lambda call: call
    import flashinfer

    def capture(call: Callable[[], Any]) -> Callable[[], Any]:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    return flashinfer.BatchPrefillWithPagedKVCacheWrapper, capture
