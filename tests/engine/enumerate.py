"""Exact enumeration of what `engine.verification.verify` emits, over every draft and every uniform.

`verify` reads its uniforms from `engine.noise.host_uniforms`.
Here they come from a table instead: each uniform
that a run reads is split into cells of [0, 1), one run of the real code per cell, weighted by its width.
The edges of the cells are the places where a correct implementation may change its mind (p/q for an
acceptance, the cumulative sums for a draw), with a narrow cell on either side of each, so that an
implementation that is constant within its cells is exact, and one whose thresholds are off by more than
such a cell is off by at least its width. A uniform grid beside that (`grid`) measures wrong variants.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from unittest import mock

import numpy as np
import torch

from engine import verification
from engine.batch import BatchItem, DraftBlock, Verdict
from engine.noise import Purpose
from engine.params import SamplingParams
from engine.sampling import SamplingState
from tests.engine.plain_law import adjusted, filtered, plain_law

CHUNK = 4096
#: width of the cells beside an edge: far above rounding, far below what a mistake could be
DELTA = {torch.float64: 1e-9, torch.float32: 2e-5}

Text = tuple[int, ...]
Law = dict[Text, float]
Read = tuple[Purpose, int]  # which uniform: purpose and slot


@dataclass
class World:
    """A target, a drafter and a request, small enough to enumerate. Every law depends on the prefix.

    Prefixes are what follows `prompt` and `output`, whose last token is the anchor.
    """

    params: SamplingParams
    vocab: int = 4
    gamma: int = 2
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    budget: int = 1000
    prompt: Text = (0, 2)
    output: Text = (1,)
    #: the draft law: "random", "processed" (near p), "unprocessed" (near the bare softmax), or "reduced"
    #: (random, over some of the vocabulary only and in another order)
    drafter: str = "random"
    _logits: dict[Text, list[float]] = field(default_factory=dict)
    _p: dict[Text, list[float]] = field(default_factory=dict)
    _q: dict[Text, list[float]] = field(default_factory=dict)

    def rng(self, purpose: int, prefix: Text) -> np.random.Generator:
        return np.random.default_rng([self.seed, purpose, len(prefix), *prefix])

    def logits(self, prefix: Text) -> list[float]:
        """The model's logits: multiples of 1/8, so that some tie, and now and then minus infinity."""
        if prefix not in self._logits:
            rng = self.rng(0, prefix)
            row = rng.integers(-16, 17, self.vocab) / 8
            if rng.random() < 0.3:
                row[rng.integers(self.vocab)] = -np.inf
            self._logits[prefix] = row.tolist()
        return self._logits[prefix]

    def p(self, prefix: Text) -> list[float]:
        """The target's own law."""
        if prefix not in self._p:
            self._p[prefix] = plain_law(
                self.logits(prefix), self.params, self.prompt, self.output + prefix, self.stop_ids
            )
        return self._p[prefix]

    @cached_property
    def d2t(self) -> Text | None:
        return (self.vocab - 1, *range(self.vocab - 2)) if self.drafter == "reduced" else None

    def q(self, prefix: Text) -> list[float]:
        """The draft law that verification is told of, over the draft's vocabulary: multiples of 1/16."""
        if prefix not in self._q:
            if self.drafter == "processed":
                law = self.p(prefix)
            elif self.drafter == "unprocessed":
                law = plain_law(self.logits(prefix), SamplingParams())
            else:
                law = self.rng(1, prefix).dirichlet([0.7] * len(self.d2t or range(self.vocab))).tolist()
            self._q[prefix] = sixteenths(law)
        return self._q[prefix]

    def drawn(self, prefix: Text) -> list[float]:
        """The law that drafts are really drawn from; an honest drafter reports it."""
        return self.q(prefix)

    def full_q(self, prefix: Text) -> list[float]:
        """q over the target's vocabulary."""
        law = [0.0] * self.vocab
        for token, weight in zip(self.d2t or range(self.vocab), self.q(prefix), strict=True):
            law[token] += weight
        return law

    def drafts(self) -> Iterator[tuple[DraftBlock, float]]:
        """Every block with its probability."""
        ids = self.d2t or tuple(range(self.vocab))
        d2t = None if self.d2t is None else torch.tensor(self.d2t)
        for tokens in itertools.product(ids, repeat=self.gamma):
            prefixes = [tokens[:i] for i in range(self.gamma)]
            weight = 1.0
            for prefix, token in zip(prefixes, tokens, strict=True):
                weight *= self.drawn(prefix)[ids.index(token)]
            if weight:
                q = torch.tensor([self.q(prefix) for prefix in prefixes], dtype=torch.float32)
                yield DraftBlock(tokens, q, d2t), weight

    def blocks(self) -> Iterator[DraftBlock]:
        """Every block, as a deterministic drafter would propose it."""
        for tokens in itertools.product(range(self.vocab), repeat=self.gamma):
            yield DraftBlock(tokens)

    @cached_property
    def state(self) -> SamplingState:
        """At the anchor; fork it."""
        state = SamplingState(self.params, self.vocab, self.stop_ids, self.prompt)
        for token in self.output:
            state.advance(token)
        return state

    def closed(self, text: Text) -> bool:
        """Whether nothing may follow, for reasons of a subclass."""
        return False

    def ended(self, text: Text) -> bool:
        stopped = bool(text) and text[-1] in self.stop_ids
        return len(text) >= self.budget or stopped or self.closed(text)

    def complete(self, text: Text, weight: float, horizon: int, law: Law) -> None:
        """Let the target continue `text` up to `horizon` tokens."""
        if len(text) >= horizon or self.ended(text):
            law[text] += weight
            return
        for token, chance in enumerate(self.p(text)):
            if chance:
                self.complete((*text, token), weight * chance, horizon, law)

    def target_law(self, horizon: int | None = None) -> Law:
        """The target's own law of the first `horizon` tokens (default: a whole block's)."""
        return self.mixture([{(): 1.0}], [1.0], horizon)

    def mixture(self, emitted: Sequence[Law], weights: Sequence[float], horizon: int | None = None) -> Law:
        """Law of the text of which a round emits the beginning and the target the rest."""
        begun: Law = defaultdict(float)
        for law, weight in zip(emitted, weights, strict=True):
            for text, chance in law.items():
                begun[text] += weight * chance
        result: Law = defaultdict(float)
        for text, weight in begun.items():
            self.complete(text, weight, horizon or self.gamma + 1, result)
        return result

    def edges(self, read: Read, block: DraftBlock, verify: int) -> list[float]:
        """Where a correct decision about this uniform may change."""
        purpose, row = read
        prefix = block.tokens[:row]
        p = self.p(prefix)
        q = [0.0] * self.vocab
        if row < verify:
            x = block.tokens[row]
            q = [float(x == t) for t in range(self.vocab)] if block.q is None else self.full_q(prefix)
            if purpose is Purpose.ACCEPT:
                return [p[x] / q[x]] if q[x] else []
        weights = np.maximum(np.subtract(p, q), 0.0)
        return list((weights.cumsum() / weights.sum()).tolist()) if weights.any() else []


def sixteenths(law: Sequence[float]) -> list[float]:
    """The nearest law in multiples of 1/16, which float32 holds exactly."""
    scaled = np.asarray(law) * 16
    parts = np.floor(scaled)
    for token in np.argsort(parts - scaled, kind="stable")[: 16 - int(parts.sum())]:
        parts[token] += 1
    return list((parts / 16).tolist())


def cells(edges: Sequence[float], delta: float, grid: int, purpose: Purpose) -> list[tuple[float, float]]:
    """Cells of [0, 1) as (a uniform inside, width). The first acceptance cell is represented by 0."""
    marks = {i / grid for i in range(grid + 1)}
    for edge in edges:
        marks |= {mark for mark in (edge - delta, edge, edge + delta) if 0.0 < mark < 1.0}
    result = [((a + b) / 2, b - a) for a, b in itertools.pairwise(sorted(marks))]
    if purpose is Purpose.ACCEPT:
        result[0] = (0.0, result[0][1])
    return result


def reads(verdict: Verdict, verify: int) -> list[Read]:
    """The uniforms that decided a verdict, in the order in which they were needed."""
    needed = [(Purpose.ACCEPT, row) for row in range(min(len(verdict.tokens), verify))]
    if len(verdict.tokens) > verdict.accepted:
        needed.append((Purpose.FINAL, verdict.accepted))
    return needed


@dataclass
class Branch:
    """One run of the real code: which case, how likely it is, and the uniforms fixed so far."""

    case: int
    block: DraftBlock
    verify: int
    weight: float = 1.0
    fixed: dict[Read, float] = field(default_factory=dict)


@dataclass
class Enumeration:
    """Runs `verify` over all branches of a world. `grid` > 1 measures implementations that may be wrong.

    `alias` says which uniform is handed out where another is asked for. `filler` stands in for the
    uniforms that have not been read yet; the result must not depend on it.
    """

    world: World
    grid: int = 1
    alias: Callable[[Read], Read] = lambda read: read
    filler: float = 0.5
    together: int = CHUNK
    dtype: torch.dtype = torch.float64
    verify: Callable[[Sequence[BatchItem], torch.Tensor], list[Verdict]] = verification.verify

    def emitted(self, cases: Sequence[tuple[DraftBlock, int]]) -> list[Law]:
        """For each block and verify length, the law of the tokens that one round emits."""
        laws: list[Law] = [defaultdict(float) for _ in cases]
        pending = [Branch(case, block, verify) for case, (block, verify) in enumerate(cases)]
        while pending:
            now, pending = pending[: self.together], pending[self.together :]
            for branch, verdict in zip(now, self.run(now), strict=True):
                check(self.world, branch.block, branch.verify, verdict)
                needed = reads(verdict, branch.verify) if self.sampled else []
                split = next((r for r in map(self.alias, needed) if r not in branch.fixed), None)
                if split is None:
                    laws[branch.case][verdict.tokens] += branch.weight
                else:
                    pending += self.split(branch, split, needed)
        return laws

    def split(self, branch: Branch, split: Read, needed: Sequence[Read]) -> Iterator[Branch]:
        """A branch for each cell of a uniform that `branch` has read."""
        edges: set[float] = set()
        for read in needed:
            if self.alias(read) == split:
                edges.update(self.world.edges(read, branch.block, branch.verify))
        for u, width in cells(sorted(edges), DELTA[self.dtype], self.grid, split[0]):
            yield replace(branch, weight=branch.weight * width, fixed={**branch.fixed, split: u})

    def law(self, length: Callable[[Text], int], horizon: int | None = None) -> Law:
        """Law of the text when each block is verified up to `length(its tokens)` and then continued."""
        drafts = list(self.world.drafts())
        laws = self.emitted([(block, length(block.tokens)) for block, _ in drafts])
        return self.world.mixture(laws, [weight for _, weight in drafts], horizon)

    @property
    def sampled(self) -> bool:
        return not self.world.params.greedy and self.world.params.seed is None

    def run(self, branches: Sequence[Branch]) -> list[Verdict]:
        """One call of `verify` with an item for each branch."""
        world = self.world
        history = np.asarray(world.prompt + world.output, dtype=np.int32)
        pages = np.zeros(1, dtype=np.int32)
        items, rows = [], []
        for index, branch in enumerate(branches):
            verify, block = branch.verify, branch.block
            items.append(
                BatchItem(
                    sequence=index,
                    history=history,
                    start=len(history) - 1,
                    count=1 + verify,
                    pages=pages,
                    sample=True,
                    state=world.state.fork(),
                    budget=world.budget,
                    round=index,
                    draft=block if verify else None,
                    verify=verify,
                )
            )
            rows += [world.logits(block.tokens[:row]) for row in range(verify + 1)]

        def uniforms(
            streams: object, positions: list[int], rounds: list[int], slots: int, purpose: Purpose
        ) -> list[list[float]]:
            assert set(positions) == {len(history) - 1}
            return [
                [branches[index].fixed.get(self.alias((purpose, slot)), self.filler) for slot in range(slots)]
                for index in rounds
            ]

        with mock.patch.object(verification, "host_uniforms", uniforms):
            return self.verify(items, torch.tensor(rows, dtype=self.dtype))


def check(world: World, block: DraftBlock, verify: int, verdict: Verdict) -> None:
    """What must hold of every verdict, whatever was drawn."""
    tokens, accepted = verdict.tokens, verdict.accepted
    assert len(tokens) - accepted in (0, 1)
    assert accepted <= verify
    assert tokens[:accepted] == block.tokens[:accepted]
    assert not any(token in world.stop_ids for token in tokens[:-1]), "went on past a stop token"
    if tokens[-1] in world.stop_ids:
        assert (verdict.finish, verdict.stop_token) == ("stop", tokens[-1])
    elif world.closed(tokens):
        assert (verdict.finish, verdict.stop_token) == ("stop", None)
    elif len(tokens) == world.budget:
        assert (verdict.finish, verdict.stop_token) == ("length", None)
    else:
        assert len(tokens) < world.budget
        assert (verdict.finish, verdict.stop_token) == (None, None)
        assert len(tokens) == accepted + 1, "stopped without a reason"


def total_variation(a: Law, b: Law) -> float:
    return 0.5 * sum(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in {*a, *b})


def marginal(law: Law, position: int) -> Law:
    """Law of one position; the empty text where the text is shorter."""
    result: Law = defaultdict(float)
    for text, weight in law.items():
        result[text[position : position + 1]] += weight
    return result


def bare_law(world: World, prefix: Text) -> list[float]:
    """The target's law before any filter: adjusted and tempered only."""
    logits = adjusted(world.logits(prefix), world.params, world.prompt, world.output + prefix, world.stop_ids)
    return filtered(logits, SamplingParams(temperature=world.params.temperature))[0]
