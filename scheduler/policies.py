"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.adaptive import Algorithm1, Lagged, LookAhead, Threshold
from scheduler.policy import Fixed, VerifyPolicy

_ADAPTIVE: dict[str, Callable[[], VerifyPolicy]] = {
    "lookahead": LookAhead,
    "lagged": Lagged,
    "algorithm1": Algorithm1,
    "threshold": Threshold,
}

#: what may be asked for, as a message says it
NAMES = "off, fixed:K, lookahead, lagged, algorithm1 or threshold"


def parse_policy(text: str) -> VerifyPolicy:
    """A policy from its name. Raises ValueError, naming what is allowed."""
    if text == "off":
        return Fixed(0)
    if text in _ADAPTIVE:
        return _ADAPTIVE[text]()
    kind, _, value = text.partition(":")
    if kind == "fixed" and value.isdigit() and int(value) <= 64:
        return Fixed(int(value))
    raise ValueError(f"verify policy {text!r} is none of {NAMES}, K from 0 to 64")
