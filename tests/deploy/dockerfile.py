"""Reads the Dockerfile as a list of stages with their instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass
class Stage:
    """What follows one FROM."""

    base: str
    name: str | None
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        return [argument for each, argument in self.instructions if each == keyword]


def parse(text: str) -> tuple[dict[str, str], list[Stage]]:
    """The arguments before the first FROM, and the stages."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        keyword, _, rest = line.partition(" ")
        if keyword == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(base, name or None))
        elif not stages:
            name, _, value = rest.partition("=")
            arguments[name] = value
        else:
            stages[-1].instructions.append((keyword, rest.strip()))
    return arguments, stages
