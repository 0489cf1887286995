"""The base of all that clients may send: types are strict ("1" is no number), unknown fields are refused."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

#: unknown fields that are reported one by one
_STRANGERS = 32


class Strict(BaseModel):
    """A JSON object whose fields are what they are said to be."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _not_crowded(cls, value: Any) -> Any:
        """A report of each of a million strangers would cost far more than the body did."""
        if isinstance(value, dict) and len(value) > len(cls.model_fields) + _STRANGERS:
            raise PydanticCustomError("extra_forbidden", "There are too many fields that nobody knows")
        return value
