"""Request fields beyond the ones that we act on: accepted without effect, or refused by name.

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
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# field -> the values, besides null, that ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}


def refuse_unsupported(body: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """The part of `body` that `model` knows; raises ApiError for what may not be left out."""
    if body.get("tool_choice") == "none":
        body = {name: value for name, value in body.items() if name not in ("tools", "tool_choice")}
    known = {}
    for name, value in body.items():
        if name in model.model_fields:
            known[name] = value
        elif name in NO_EFFECT:
            continue
        elif name not in NEUTRAL:
            raise invalid(f"Unknown parameter: {name}", name, "unknown_parameter")
        elif value is not None and not any(value == neutral for neutral in NEUTRAL[name]):
            raise invalid(f"{name} is not supported by this server.", name, "unsupported_parameter")
    return known
