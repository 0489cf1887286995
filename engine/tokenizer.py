"""Text to token ids and back, over the `tokenizers` library: importing transformers takes seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from engine.chat_template import ChatTemplate, ChatTemplateError
from engine.models.unsupported import UnsupportedModel
from engine.token_bytes import token_bytes

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer and chat template. Every method may be called from any thread.

    vocab_size: number of ids, i.e. the largest id plus one (the model's output may be padded beyond it).
    token_bytes[id]: the bytes that the id contributes to the text; special tokens have their literal text.
    special_ids: ids that `decode` leaves out by default.
    """

    def __init__(
        self, backend: Backend, config: Mapping[str, Any], chat_templates: Mapping[str, str] | None = None
    ) -> None:
        """`config` as in tokenizer_config.json; `chat_templates` by name, the usual one being "default"."""
        # A tokenizer file may carry the truncation and padding of its training.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = {
            name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name))) is not None
        }
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.token_bytes: list[bytes] = token_bytes(backend, self.special_ids)
        self.vocab_size = len(self.token_bytes)
        self._chat_templates = {name: ChatTemplate(text) for name, text in (chat_templates or {}).items()}
        start: list[int] = backend.encode("", add_special_tokens=True).ids
        self._backend_adds_bos = bool(start) and start[0] == self.bos_token_id
        wanted = config.get("add_bos_token")
        self._add_bos = self._backend_adds_bos if wanted is None else bool(wanted)

    @classmethod
    def from_folder(cls, path: Path | str, chat_template: str | None = None) -> Tokenizer:
        """Load the tokenizer of a model folder; `chat_template` (template text) replaces the model's own.

        Raises FileNotFoundError without any tokenizer file, UnsupportedModel for one that cannot be read,
        ChatTemplateError for a template that does not compile.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        config = _read_json(folder / "tokenizer_config.json")
        if file.is_file():
            try:
                backend = Backend.from_file(str(file))
            except Exception as error:  # the library raises bare Exception
                raise UnsupportedModel(f"{file} could not be read: {error}") from error
        else:
            backend = _through_transformers(folder)
        templates = _find_chat_templates(folder, config)
        if chat_template is not None:
            templates = {"default": chat_template}
        return cls(backend, config, templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds what the model expects around a text.

        The start token is added where tokenizer_config.json (add_bos_token) or else the tokenizer says so,
        and never before a text that begins with it already.
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        bos = self.bos_token_id
        if not add_special_tokens or bos is None:
            return ids
        if self._backend_adds_bos and (not self._add_bos or ids[1:2] == [bos]):
            return ids[1:]
        if self._add_bos and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 come out as U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """The token's own text, valid UTF-8, with U+FFFD for parts of characters; "" for an unknown id."""
        known = 0 <= token_id < self.vocab_size
        return self.token_bytes[token_id].decode(errors="replace") if known else ""

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_templates)

    def chat_template(self, tools: bool = False) -> ChatTemplate | None:
        """The template for chats, or for those with tools, where the model has one of its own for them."""
        name = "tool_use" if tools and "tool_use" in self._chat_templates else "default"
        return self._chat_templates.get(name)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of the rendered chat; arguments as ChatTemplate.render. Raises ChatTemplateError."""
        template = self.chat_template(bool(tools))
        if template is None:
            raise ChatTemplateError("this model has no chat template")
        text = template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **{**self._special_tokens, **kwargs},
        )
        return self.encode(text, add_special_tokens=False)

    def _named_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        found: int | None = None if token is None else self._backend.token_to_id(token)
        return found


def _token_text(value: Any) -> str | None:
    """A special token's text: a string, or an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _find_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name, from wherever the versions of transformers have kept them, newest place first."""
    found: dict[str, str] = {}
    file = folder / "chat_template.jinja"
    if file.is_file():
        found["default"] = file.read_text(encoding="utf-8")
        for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            found[extra.stem] = extra.read_text(encoding="utf-8")
        return found
    stored = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(stored, str):
        found["default"] = stored
    elif isinstance(stored, list):
        found.update({entry["name"]: entry["template"] for entry in stored})
    return found


def _through_transformers(folder: Path) -> Backend:
    """A tokenizer kept in an older format, converted by transformers."""
    import transformers

    try:
        loaded = transformers.AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        raise FileNotFoundError(
            f"{folder} has no tokenizer.json and no other tokenizer to read: {error}"
        ) from error
    backend: Backend | None = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModel(f"the tokenizer in {folder} has no fast version; add a tokenizer.json")
    return backend
