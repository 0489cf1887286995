"""`dspark data regenerate`: the target's own answers to prompts, through our own engine.

Shards of a few hundred answers appear whole or not at all, so an interrupted run goes on with the first
prompts that no shard answers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from server.options import SettingsError, add_flags, load

_OWN = ("prompts", "output_dir", "skip", "limit", "max_tokens", "max_prompt", "temperatures", "shard")


def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    options = vars(_parser().parse_args(argv))
    own = {name: options.pop(name) for name in _OWN}
    from server.wiring import BadSettings, build_parts

    try:
        settings = load({**options, "speculative_config": '{"method": "off"}'})
        from engine.outputs import NullObserver

        parts = build_parts(settings, NullObserver(), print)
        _run(parts, own)
    except (SettingsError, BadSettings, OSError, ValueError) as error:
        print(f"dspark data regenerate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on with the prompts that are left", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dspark data regenerate",
        usage="dspark data regenerate PROMPTS.jsonl --output-dir DIR [MODEL] [options]",
        description="Let the model answer prompts; the answers train a drafter for it.",
        allow_abbrev=False,
    )
    parser.add_argument("prompts", metavar="PROMPTS.jsonl", help='one {"id", "prompt", "domain"} a line')
    parser.add_argument("--output-dir", required=True, metavar="DIR")
    group = parser.add_argument_group("Answers")
    group.add_argument(
        "--skip", metavar="PATH", help="answers (.npz, or a folder of them) that exist already"
    )
    group.add_argument("--limit", type=int, metavar="N", help="prompts at most")
    group.add_argument("--max-tokens", type=int, default=256, metavar="N", help="tokens an answer")
    group.add_argument("--max-prompt", type=int, default=384, metavar="N", help="longer prompts are left out")
    group.add_argument(
        "--temperatures",
        default="0:0.15,0.3:0.15,0.7:0.35,1:0.35",
        metavar="T:SHARE,...",
        help="mix of sampling temperatures",
    )
    group.add_argument("--shard", type=int, default=256, metavar="N", help="answers a file")
    add_flags(parser)
    return parser


def _run(parts: Any, own: dict[str, Any]) -> None:
    folder = Path(own["output_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    prompts = list(_left(Path(own["prompts"]), folder, own["skip"], own["limit"]))
    print(f"{len(prompts)} prompts to answer", flush=True)
    begun, done, tokens = time.monotonic(), 0, 0
    for first in range(0, len(prompts), own["shard"]):
        answers = _answer(parts, prompts[first : first + own["shard"]], own)
        _save(folder, answers)
        done += len(answers)
        tokens += sum(len(ids) - prompt for ids, prompt, *_ in answers)
        rate = tokens / (time.monotonic() - begun)
        print(
            f"{first + own['shard']} of {len(prompts)} prompts, {done} answers, {rate:.0f} tokens/s",
            flush=True,
        )


def _left(source: Path, folder: Path, skip: str | None, limit: int | None) -> Iterator[dict[str, Any]]:
    """Prompts without an answer yet, in a shuffled order that never changes."""
    entries = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    order = np.random.default_rng(0).permutation(len(entries))[:limit]
    known: set[str] = set()
    files = list(folder.glob("*.npz"))
    if skip is not None:
        files += [Path(skip)] if Path(skip).is_file() else list(Path(skip).glob("*.npz"))
    for file in files:
        with np.load(file) as arrays:
            known |= set(map(str, arrays["id"]))
    yield from (entries[i] for i in order if str(entries[i]["id"]) not in known)


Answer = tuple[list[int], int, float, str, str]


def _answer(parts: Any, entries: list[dict[str, Any]], own: dict[str, Any]) -> list[Answer]:
    """(prompt and answer, prompt length, temperature, id, domain) of each prompt that is short enough."""
    from engine.params import SamplingParams
    from engine.request import Request

    heats, shares = zip(*(part.split(":") for part in own["temperatures"].split(",")), strict=True)
    loop, asked = parts.loop, {}
    for entry in entries:
        ids = list(parts.tokenizer.apply_chat_template([{"role": "user", "content": entry["prompt"]}]))
        if len(ids) > own["max_prompt"]:
            continue
        name = str(entry["id"])
        # The temperature is the prompt's own, whatever was answered before it.
        rng = np.random.default_rng(list(name.encode()))
        heat = float(rng.choice([float(h) for h in heats], p=[float(share) for share in shares]))
        loop.add(Request(name, ids, SamplingParams(max_tokens=own["max_tokens"], temperature=heat)))
        asked[name] = (ids, heat, str(entry.get("domain", "")))
    texts: dict[str, list[int]] = {name: [] for name in asked}
    while loop.has_work:
        batch = loop.begin()
        if batch is None:
            continue
        for active, delta in loop.commit(batch, parts.worker.run(batch)):
            texts[active.request.request_id] += delta.token_ids
    return [
        (ids + texts[name], len(ids), heat, name, domain)
        for name, (ids, heat, domain) in asked.items()
        if texts[name]
    ]


def _save(folder: Path, answers: list[Answer]) -> None:
    if not answers:
        return
    texts, prompts, heats, names, domains = zip(*answers, strict=True)
    number = len(list(folder.glob("answers-*.npz")))
    partial = folder / f".partial-{os.getpid()}.npz"
    np.savez(
        partial,
        ids=np.concatenate([np.array(text) for text in texts]).astype(np.uint32),
        length=np.array([len(text) for text in texts], np.int32),
        prompt_length=np.array(prompts, np.int32),
        temperature=np.array(heats, np.float32),
        id=np.array(names),
        domain=np.array(domains),
    )
    os.replace(partial, folder / f"answers-{number:05d}.npz")
