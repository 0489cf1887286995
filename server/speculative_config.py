"""The object of --speculative-config, and what a verify policy may be called."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from scheduler.policies import parse_policy
from scheduler.policy import Fixed

MAX_DRAFT = 16
LOOKUP_TOKENS = 5  # that prompt lookup proposes unless told otherwise


class SpeculativeConfig(BaseModel):
    """How drafts are made; the JSON object of --speculative-config."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: auto: the hybrid with the draft model that is shipped for the target, else prompt lookup
    method: Literal["auto", "off", "ngram", "dspark", "dflash", "eagle3", "mtp", "hybrid"] = "auto"
    #: folder or hub id of a draft model (default: the shipped one); hybrid takes any, the others their own
    model: str | None = None
    #: None: as many as pay, or five of prompt lookup
    num_speculative_tokens: int | None = Field(default=None, ge=1, le=MAX_DRAFT)
    prompt_lookup_min: int = Field(default=2, ge=1, le=64)
    prompt_lookup_max: int = Field(default=5, ge=1, le=64)
    #: the same as --verify-policy
    verify_policy: str | None = None
    #: as vLLM has it: look-ahead, or (false) all that are drafted; None: see --verify-policy
    enable_adaptive_verification: bool | None = None
    #: drafts are drawn from the drafter's distribution, never its argmax
    draft_sample_method: Literal["probabilistic"] = "probabilistic"

    @field_validator("verify_policy")
    @classmethod
    def _known_policy(cls, value: str | None) -> str | None:
        return checked_policy(value)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("prompt_lookup_min must not exceed prompt_lookup_max")
        if self.verify_policy is not None and self.enable_adaptive_verification is not None:
            raise ValueError("give verify_policy or enable_adaptive_verification, not both")
        return self

    @property
    def policy(self) -> str | None:
        """The verify policy that these keys ask for, if they ask for one."""
        if self.enable_adaptive_verification and self.method != "off":
            return "lookahead"
        return self.verify_policy  # all that are drafted: known once the drafter is


def checked_policy(value: str | None) -> str | None:
    """`value`, if it names a policy or is None. Raises ValueError."""
    if value is not None:
        policy = parse_policy(value)
        if isinstance(policy, Fixed) and policy.k > MAX_DRAFT:
            raise ValueError(f"at most {MAX_DRAFT} drafts are verified, not {value!r}")
    return value
