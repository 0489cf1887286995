"""Request fields beyond those that we act on: accepted without effect, refused by name, or told as unknown.

A field that would change the output is never ignored in silence. It is accepted only with a value that
means "as if absent", which is how clients that send every field spell their defaults.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from server.errors import invalid

# Bookkeeping and hints: the text does not depend on them.
NO_EFFECT = frozenset(
    {
        "metadata",
        "moderation",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# field -> the values, besides null, that ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "background": (False,),
    "best_of": (1,),
    "chat_template": (),
    "context_management": ([],),
    "conversation": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "max_tool_calls": (),
    "modalities": (["text"],),
    "previous_response_id": (),
    "prompt": (),
    "prompt_embeds": (),
    "reasoning": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def refuse_unsupported(body: dict[str, Any], model: type[BaseModel]) -> tuple[dict[str, Any], list[str]]:
    """The part of `body` that `model` knows, and the names that nobody knows.

    Raises ApiError for what may not be left out.
    """
    if body.get("tool_choice") == "none" and "tools" not in model.model_fields:
        body = {name: value for name, value in body.items() if name != "tools"}
    known, unknown = {}, []
    for name, value in body.items():
        if name in model.model_fields:
            known[name] = value
        elif name in NO_EFFECT:
            continue
        elif name not in NEUTRAL:
            unknown.append(name)
        elif value is not None and not any(value == neutral for neutral in NEUTRAL[name]):
            raise invalid(f"{name} is not supported by this server.", name, "unsupported_parameter")
    return known, unknown
