"""Values of single settings that no type tells apart. Each returns the value or raises ValueError."""

from __future__ import annotations

import os
import re


def no_blanks(values: list[str]) -> list[str]:
    if any(not value.strip() for value in values):
        raise ValueError("must not be empty")
    return values


def holds_keys(path: str | None) -> str | None:
    """A file of API keys, one a line."""
    try:
        if path is not None and not keys_in(path):
            raise ValueError(f"there is no key in {path}")
    except OSError as exc:
        raise ValueError(f"cannot read {path}: {exc.strerror}") from None
    return path


def keys_in(path: str) -> list[str]:
    """The keys of such a file; lines that begin with # are comments."""
    with open(path, encoding="utf-8") as file:
        lines = (line.strip() for line in file)
        return [line for line in lines if line and not line.startswith("#")]


def absolute_path(value: str) -> str:
    if value and not re.fullmatch(r"(/[\w.~-]+)+", value, re.ASCII):
        raise ValueError("must be a path like /llm, without a slash at its end")
    if f"{value}/".startswith("/v1/"):
        raise ValueError("must not begin with /v1, which is part of the endpoints' own paths")
    return value


def metric_prefix(value: str) -> str:
    if not re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?", value):
        raise ValueError("may hold only letters, digits, _ and :, and not begin with a digit")
    return value


def existing_template(value: str | None) -> str | None:
    """A chat template, or the path of one."""
    if value is not None and not is_template_text(value) and not os.path.isfile(value):
        raise ValueError(f"there is no file {value!r} (and it is no template text either)")
    return value


def is_template_text(value: str) -> bool:
    return "{{" in value or "{%" in value
