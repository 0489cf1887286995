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
NAMES = "off, fixed:K, lookahead, lagged, algorithm1 or threshold[:base=B,sensitivity=S,min=N,max=N]"

_THRESHOLD = {"base": "base", "sensitivity": "sensitivity", "min": "least", "max": "most"}


def parse_policy(text: str) -> VerifyPolicy:
    """A policy from its name. Raises ValueError, naming what is allowed."""
    if text == "off":
        return Fixed(0)
    if text in _ADAPTIVE:
        return _ADAPTIVE[text]()
    kind, _, value = text.partition(":")
    if kind == "threshold":
        return _threshold(text, value)
    if kind == "fixed" and value.isdigit() and int(value) <= 64:
        return Fixed(int(value))
    raise ValueError(f"verify policy {text!r} is none of {NAMES}, K from 0 to 64")


def _threshold(text: str, options: str) -> Threshold:
    values: dict[str, float | int] = {}
    for option in options.split(","):
        name, _, number = option.partition("=")
        try:
            field = _THRESHOLD[name]
            values[field] = float(number) if field in ("base", "sensitivity") else int(number)
        except (KeyError, ValueError):
            raise ValueError(f"verify policy {text!r}: {option!r} is no option of {NAMES}") from None
    policy = Threshold(**values)  # type: ignore[arg-type]
    policy.name = text
    return policy
