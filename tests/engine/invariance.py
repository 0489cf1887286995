"""The check that a row's bits depend on nothing but its context, shared by tiny and real models."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import VerificationBatch
from engine.native_executor import NativeExecutor
from tests.engine.test_forward import item

Text = npt.NDArray[np.int32]


def rows_alone(executor: NativeExecutor, text: Text, rng: np.random.Generator) -> torch.Tensor:
    """Logits after each token, computed one row at a time on pages of its own."""
    pages = rng.permutation(executor.num_pages)[: -(-len(text) // 16)].astype(np.int32)
    rows = [
        executor.forward(VerificationBatch((item(text[: i + 1], i, 1, pages),))).logits[0]
        for i in range(len(text))
    ]
    return torch.stack(rows)


def check_random_batches(
    alone: NativeExecutor, crowd: NativeExecutor, texts: list[Text], batches: int, rng: np.random.Generator
) -> None:
    """Feed the texts through random batches, again and again, and compare every row with the row alone.

    Spans are single tokens, draft blocks and prefill chunks, in random company, order and pages.
    """
    expected = [rows_alone(alone, text, rng) for text in texts]
    count = 0
    while count < batches:
        shuffled = rng.permutation(crowd.num_pages).astype(np.int32)
        pages, at = [], 0
        for text in texts:
            need = -(-len(text) // 16)
            pages.append(shuffled[at : at + need])
            at += need
        done = [0] * len(texts)
        while any(d < len(text) for d, text in zip(done, texts, strict=True)):
            items, wanted = [], []
            for index in rng.permutation(len(texts))[: rng.integers(1, len(texts) + 1)]:
                left = len(texts[index]) - done[index]
                if not left:
                    continue
                size = int(min(left, rng.choice([1, 2, 3, 5, 8, 40])))
                start, end = done[index], done[index] + size
                block = texts[index][start + 1 : end].tolist()
                items.append(item(texts[index][: start + 1], start, size, pages[index], draft=block))
                wanted.append(expected[index][start:end])
                done[index] = end
            if items:
                logits = crowd.forward(VerificationBatch(tuple(items))).logits
                assert torch.equal(logits, torch.cat(wanted))
                count += 1
