"""What becomes of the flags that a run and a sweep share."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from loadtest.prompts import Prompt, read_prompts
from loadtest.slo import Slo
from loadtest.target import flush_cache
from loadtest.workload import Workload

SAMPLING = ("temperature", "top_p", "top_k", "min_p")


class UsageError(ValueError):
    """A flag that makes no sense; the message names it."""


def read_workload(args: argparse.Namespace) -> Workload:
    """Raises UsageError or OSError."""
    if not 0.0 <= args.cancel_share <= 1.0:
        raise UsageError("--cancel-share is between 0 and 1")
    if args.turns < 1:
        raise UsageError("--turns is at least 1")
    if args.scenario is not None and (args.seeded or args.prefix_cache == "text"):
        flag = "--seeded" if args.seeded else "--prefix-cache text"
        raise UsageError(f"{flag} cannot change what the tasks of a --scenario ask")
    prompts = _prompts(args)
    body = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None} | args.body
    workload = Workload(
        endpoint=args.endpoint,
        prompts=tuple(prompts),
        weights=_weights(args.mix, prompts),
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        ignore_eos=args.ignore_eos,
        turns=args.turns,
        system=_text(args.system),
        shared_prefixes=args.shared_prefixes,
        prefix_tokens=args.prefix_tokens,
        body=body,
        seeded=args.seeded,
        cancel_share=args.cancel_share,
        think=_bounds(args.think),
    )
    if args.endpoint == "chat" and any(prompt.token_ids for prompt in prompts):
        raise UsageError("prompts given as token ids need --endpoint completions")
    return workload


def read_slo(args: argparse.Namespace) -> Slo | None:
    """Raises UsageError."""
    if args.fail_on_slo and not args.slo:
        raise UsageError("--fail-on-slo needs --slo")
    try:
        return Slo.parse(args.slo) if args.slo else None
    except ValueError as error:
        raise UsageError(str(error)) from None


def fresh_to_the_cache(workload: Workload, how: str, url: str) -> Workload:
    """The same workload with prompts that the server has not seen. Raises TargetError."""
    if how == "salt":
        return replace(workload, body=dict(workload.body) | {"cache_salt": secrets.token_hex(8)})
    if how == "text":
        return replace(workload, opening=f"[{secrets.token_hex(4)}]")
    if how == "flush":
        flush_cache(url)
    return workload


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    files = [Path(name) for name in args.prompts]
    if args.data is not None:
        found = sorted(Path(args.data).glob("eval_*.jsonl"))
        if not found:
            raise UsageError(f"--data {args.data}: there is no eval_*.jsonl")
        files += found
    try:
        return [prompt for file in files for prompt in read_prompts(file)]
    except ValueError as error:
        raise UsageError(str(error)) from None


def _weights(words: Sequence[str], prompts: Sequence[Prompt]) -> dict[str, float]:
    weights: dict[str, float] = {}
    known = {prompt.domain for prompt in prompts}
    for word in words:
        domain, _, number = word.rpartition("=")
        try:
            weights[domain] = float(number)
        except ValueError:
            raise UsageError(f"--mix {word!r}: give DOMAIN=WEIGHT") from None
        if domain not in known:
            raise UsageError(f"--mix {word!r}: prompts are of {', '.join(sorted(known)) or 'no domain'}")
    if weights and (min(weights.values()) < 0 or not sum(weights.values()) > 0):
        raise UsageError("--mix: weights must not be negative, nor all zero")
    return weights


def _bounds(text: str) -> tuple[float, float]:
    try:
        numbers = [float(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not 0.0 <= numbers[0] <= numbers[-1] < float("inf"):
        raise UsageError(f"--think {text!r}: give seconds, or the least and the most of them as A,B")
    return numbers[0], numbers[-1]


def _text(given: str | None) -> str | None:
    return Path(given[1:]).read_text(encoding="utf-8") if given and given.startswith("@") else given
