"""A real engine over a tiny random model, with tokens that cut characters, behind a real socket."""

from __future__ import annotations

from typing import Any

import torch

from engine.async_engine import AsyncEngine
from engine.drafter import Drafter
from engine.intake import Intake
from engine.loop import EngineLoop
from engine.pages import PagePool
from engine.speculation import Speculation
from engine.torch_executor import TorchExecutor
from engine.worker import Worker
from scheduler.admission import Limits
from scheduler.policies import parse_policy
from tests.engine.harness import VOCAB, tiny
from tests.server.fake import FakeTokenizer

EOS = 1
#: whole words, one letter, halves of characters, marks that join what is before them, and bytes alone
PIECES = [
    b"<pad>", b"</s>", b"<s>", b"a", b"b", b"ab", b"ba", b" the", b" a", b"\n", b".", b"stop", b"st", b"op",
    b"\xf0\x9f", b"\x91\x8d", b"\xf0\x9f\x91\xa9", b"\xe2\x80\x8d", "👍".encode(), "🏽".encode(),
    "日".encode(), "本".encode(), b"\xe6\x97", b"\xa5", "é".encode(), b"\xc3", b"\xa9", b"\xcc\x81", b"\xcc",
    b"\x81", "한".encode(), b"\xff", b"\xfe", b"\x00", "\u2028".encode(), "\ufeff".encode(), b"\xed\xa0\x80",
    b'"', b"\\", b"{", b"}", b"<", b">",
]  # fmt: skip
PIECES += [bytes([97 + i]) for i in range(VOCAB - len(PIECES))]


class PieceTokenizer(FakeTokenizer):
    """Takes the longest piece that fits, from left to right; bytes that no piece has are left out."""

    vocab_size = VOCAB
    token_bytes = PIECES
    special_ids = frozenset({0, 1, 2})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raw, ids, at = text.encode(), [2] if add_special_tokens else [], 0
        while at < len(raw):
            fits = [i for i in range(3, VOCAB) if raw.startswith(PIECES[i], at)]
            if fits:
                ids.append(max(fits, key=lambda i: len(PIECES[i])))
                at += len(PIECES[ids[-1]])
            else:
                at += 1
        return ids


def tiny_engine(observer: Any, drafter: Drafter | None = None, policy: str = "off") -> AsyncEngine:
    """Pages of 4 tokens, 128 tokens of context, 24 rows a step."""
    executor = TorchExecutor(tiny(), 256, 4, torch.float64)
    intake = Intake(VOCAB, 128, frozenset({EOS}), PIECES, frozenset({0, 1, 2}), seed=7)
    loop = EngineLoop(PagePool(256, 4), intake, Speculation(parse_policy(policy)), Limits(24, 16), observer)
    info = {"model": "tiny", "dtype": "float64", "executor": "torch", "device": "cpu"}
    return AsyncEngine(loop, Worker(executor, drafter), PieceTokenizer(), info=info)  # type: ignore[arg-type]
