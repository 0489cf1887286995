"""`dspark accuracy`: how far the executor's distributions are from fp32's, on real text.

The text is cut into windows; of each, the second half's positions are compared, so that every one has a
context. This is the protocol of llama.cpp's `llama-perplexity --kl-divergence`, so the figures compare.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from server.options import SettingsError, add_flags, load

_CHUNK = 64  # rows a forward pass; logits of a whole window would fill the memory


def main(argv: Sequence[str]) -> int:
    """Entry point of `dspark accuracy`; returns the exit code."""
    options = vars(_parser().parse_args(argv))
    text, window, count = options.pop("text"), options.pop("window"), options.pop("windows")
    try:
        settings = load(options)
        content = Path(text).read_text(encoding="utf-8")
    except (SettingsError, OSError, ValueError) as error:
        print(f"dspark accuracy: {error}", file=sys.stderr)
        return 2
    from server.wiring import BadSettings, build_comparison

    try:
        tokenizer, reference, tested = build_comparison(
            settings, window, lambda line: print(line, file=sys.stderr)
        )
    except (BadSettings, OSError, ValueError) as error:
        print(f"dspark accuracy: {error}", file=sys.stderr)
        return 1
    ids = list(tokenizer.encode(content))
    windows = [ids[at : at + window] for at in range(0, len(ids) - window + 1, window)][:count]
    if not windows:
        print(f"dspark accuracy: {text} has fewer than {window} tokens", file=sys.stderr)
        return 1
    _report(_compare(reference, tested, windows), len(windows), tested.describe())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dspark accuracy",
        usage="dspark accuracy TEXT [MODEL] [options]",
        description="Compare the executor's distributions with fp32's on a text file.",
        allow_abbrev=False,
    )
    parser.add_argument("text", metavar="TEXT", help="a text file")
    group = parser.add_argument_group("Accuracy")
    group.add_argument("--window", type=int, default=512, metavar="N", help="tokens a window")
    group.add_argument("--windows", type=int, default=16, metavar="N", help="windows at most")
    add_flags(parser)
    return parser


def _compare(reference: Any, tested: Any, windows: list[list[int]]) -> Iterator[tuple[float, bool]]:
    """Of every position compared: KL(fp32 || tested) in nats, and whether the likeliest token is the same."""
    for number, window in enumerate(windows, 1):
        for wanted, found in zip(_logits(reference, window), _logits(tested, window), strict=True):
            p, q = wanted.double().log_softmax(-1), found.double().log_softmax(-1)
            kl = (p.exp() * (p - q)).sum(-1)
            same = wanted.argmax(-1) == found.argmax(-1)
            yield from zip(kl.tolist(), same.tolist(), strict=True)
        print(f"\r{number}/{len(windows)} windows", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def _logits(executor: Any, window: list[int]) -> Iterator[Any]:
    """Logits after each token of the second half but the last, _CHUNK rows at a time."""
    import numpy as np

    from engine.batch import BatchItem, DraftBlock, VerificationBatch
    from engine.params import SamplingParams
    from engine.sampling import SamplingState

    state = SamplingState(SamplingParams(), 0, frozenset())
    pages = np.arange(-(-len(window) // executor.page_size), dtype=np.int32)
    half = len(window) // 2
    for start in range(0, len(window) - 1, _CHUNK):
        stop = min(start + _CHUNK, len(window) - 1)
        # As if all but the chunk's first token had been drafted: logits of every row come back.
        known, block = (
            np.array(window[: start + 1], dtype=np.int32),
            DraftBlock(tuple(window[start + 1 : stop])),
        )
        rows = stop - start
        item = BatchItem(0, known, start, rows, pages, True, state, rows, 0, block, rows - 1)
        logits = executor.forward(VerificationBatch((item,))).logits
        if stop > half:
            yield logits[max(half - start, 0) :]


def _report(figures: Iterator[tuple[float, bool]], windows: int, info: Any) -> None:
    import numpy as np

    kl, same = (np.array(column) for column in zip(*figures, strict=True))
    margin = kl.std() / np.sqrt(len(kl))
    print(f"executor   {info['executor']} {info['dtype']}")
    print(f"positions  {len(kl)} in {windows} windows")
    print(f"mean KL    {kl.mean():.6f} +- {margin:.6f}")
    print(f"p99 KL     {np.quantile(kl, 0.99):.6f}")
    print(f"max KL     {kl.max():.6f}")
    print(f"same top   {same.mean():.3%}")
