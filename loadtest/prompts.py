"""Where prompts come from: files by domain, or words drawn to a length."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_COMMON = (
    "the a of to and in that it is was for on with as at by from or an be this which one had not but all "
    "were when there can more if no out so what up about into than them only other new some could time these "
    "two may then do first any my now such like our over man me even most made after also did many before "
    "must through back years where much your way well down should because each just those people how too "
    "little state good very make world still own see men work long get here between both life being "
    "under never day same another know while last might us great old year off come since against go came"
)
_WORDS = _COMMON.split()


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one session begins with. `turns` are a user's messages; later ones follow the answers."""

    domain: str
    turns: tuple[str, ...]
    #: instead of turns, for completions only
    token_ids: tuple[int, ...] = ()


def read_prompts(path: Path) -> list[Prompt]:
    """A JSONL file of objects with `prompt` (a text, a list of a user's turns, or token ids), and perhaps
    `turns` and `domain` (default: the file's name). Raises ValueError, naming the line."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            prompts.append(_prompt(json.loads(line), path.stem))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}:{number}: no prompt: {error!r}") from None
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def _prompt(raw: dict[str, Any], default_domain: str) -> Prompt:
    domain, text = str(raw.get("domain", default_domain)), raw.get("turns") or raw["prompt"]
    if isinstance(text, str):
        return Prompt(domain, (text,))
    if text and all(isinstance(turn, str) for turn in text):
        return Prompt(domain, tuple(text))
    if text and all(type(token) is int for token in text):
        return Prompt(domain, (), tuple(text))
    raise ValueError("a prompt is a text, a list of texts or a list of token ids")


class PromptMix:
    """Draws a domain by its weight, then of that domain's prompts in a shuffled order, over and over."""

    def __init__(self, prompts: Sequence[Prompt], weights: Mapping[str, float], rng: random.Random) -> None:
        self._pools: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            if not weights or prompt.domain in weights:
                self._pools.setdefault(prompt.domain, []).append(prompt)
        missing = weights.keys() - self._pools.keys()
        if missing or not self._pools:
            raise ValueError(f"no prompts of {', '.join(sorted(missing)) or 'any domain'}")
        self._domains = list(self._pools)
        self._weights = [weights.get(domain, 1.0) for domain in self._domains]
        self._rng = rng
        self._left: dict[str, list[Prompt]] = {domain: [] for domain in self._domains}

    def draw(self) -> Prompt:
        (domain,) = self._rng.choices(self._domains, self._weights)
        if not self._left[domain]:
            self._left[domain] = self._rng.sample(self._pools[domain], len(self._pools[domain]))
        return self._left[domain].pop()


def words(count: int, rng: random.Random) -> str:
    """So many common words, each about a token; usage tells how many tokens they were."""
    return " ".join(rng.choices(_WORDS, k=count))


def block_text(block: int, count: int = 512) -> str:
    """The text of a trace's block: the same for the same name."""
    return words(count, random.Random(f"block {block}"))
