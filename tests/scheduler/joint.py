"""Exact joint output laws of several requests under a verification policy, by enumerating every draft.

Requests have random target laws p and draft laws q over a few tokens, every law a function of the tokens
before. A policy is given each request's chances along its drafted tokens, so that it sees what a real one
sees; texts are completed with p to one token more than a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

GAMMA = 2
Text = tuple[int, ...]
#: chances along each request's drafted tokens -> verify lengths
Decide = Callable[[list[tuple[float, ...]]], Sequence[int]]


@dataclass
class Toy:
    """A request. Chances at position 2 depend on the token at position 1."""

    vocab: int
    rng: np.random.Generator
    p: dict[Text, np.ndarray] = field(default_factory=dict)
    q: dict[Text, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for size in range(GAMMA + 1):
            for prefix in itertools.product(range(self.vocab), repeat=size):
                self.p[prefix] = self._law(sparse=True)
                self.q[prefix] = self._law()
        self.first = self._chance()
        self.second = [self._chance() for _ in range(self.vocab)]

    def _law(self, sparse: bool = False) -> np.ndarray:
        law = self.rng.dirichlet(np.full(self.vocab, 0.7))
        if sparse and self.rng.random() < 0.4:
            law[self.rng.integers(self.vocab)] = 0.0
        return law / law.sum()

    def _chance(self) -> float:
        """Often a round number, so that survivals tie, and certainty and impossibility occur."""
        return float(
            self.rng.choice([0.0, 0.2, 0.5, 0.8, 0.9, 1.0]) if self.rng.random() < 0.6 else self.rng.random()
        )

    def drafts(self) -> list[tuple[Text, float]]:
        out = []
        for text in itertools.product(range(self.vocab), repeat=GAMMA):
            weight = float(np.prod([self.q[text[:k]][text[k]] for k in range(GAMMA)]))
            out.append((text, weight))
        return out

    def chances(self, draft: Text) -> tuple[float, ...]:
        return self.first, self.second[draft[0]]

    def target(self) -> np.ndarray:
        """[V, V, V]"""
        law = np.zeros((self.vocab,) * (GAMMA + 1))
        self._complete((), 1.0, law)
        return law

    def emitted(self, draft: Text, length: int) -> np.ndarray:
        """Law of the text when the first `length` drafts are verified."""
        law, weight = np.zeros((self.vocab,) * (GAMMA + 1)), 1.0
        for k in range(length):
            p, q = self.p[draft[:k]], self.q[draft[:k]]
            accept = min(1.0, p[draft[k]] / q[draft[k]])
            if accept < 1.0:
                left = np.maximum(p - q, 0.0)
                for token, chance in enumerate(left / left.sum()):
                    self._complete((*draft[:k], token), weight * (1.0 - accept) * chance, law)
            weight *= accept
        self._complete(draft[:length], weight, law)
        return law

    def _complete(self, text: Text, weight: float, law: np.ndarray) -> None:
        if len(text) == GAMMA + 1:
            law[text] += weight
        elif weight:
            for token, chance in enumerate(self.p[text]):
                self._complete((*text, token), weight * chance, law)


def error(requests: Sequence[Toy], decide: Decide) -> float:
    """Total variation between the joint law of all texts and the product of the targets'."""
    joint: np.ndarray = np.zeros(())
    known: dict[tuple[int, Text, int], np.ndarray] = {}
    for combination in itertools.product(*(request.drafts() for request in requests)):
        drafts = [draft for draft, _ in combination]
        lengths = decide([request.chances(draft) for request, draft in zip(requests, drafts, strict=True)])
        part = np.ones(())
        for index, (request, draft, length) in enumerate(zip(requests, drafts, lengths, strict=True)):
            key = (index, draft[:length], length)
            if key not in known:
                known[key] = request.emitted(draft, length)
            part = np.multiply.outer(part, known[key])
        joint = joint + part * float(np.prod([weight for _, weight in combination]))
    wanted = np.ones(())
    for request in requests:
        wanted = np.multiply.outer(wanted, request.target())
    return 0.5 * float(np.abs(joint - wanted).sum())
