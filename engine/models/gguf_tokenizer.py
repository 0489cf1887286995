"""The tokenizer.json and tokenizer_config.json that a GGUF file's metadata amount to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.models.unsupported import UnsupportedModel

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_PATTERNS: Mapping[str, str] = {
    "llama-bpe": _WORDS % r"\p{N}{1,3}",
    "qwen2": _WORDS % r"\p{N}",
}


def build_tokenizer(metadata: Mapping[str, Any], source: Path) -> Tokenizer:
    """The tokenizer that the metadata of the GGUF file `source` describe. Raises UnsupportedModel."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level(metadata)
    if kind == "llama":
        return _sentence_piece(source)
    raise UnsupportedModel(f"GGUF tokenizer {kind!r} is not supported; use the model's safetensors release")


def build_tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json contents: special tokens, whether a start token is added, the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    # llama.cpp's rule for files that leave the flag out.
    by_default = metadata.get("tokenizer.ggml.model") == "llama" or _pre(metadata) == "llama-bpe"
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", by_default)),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if token is not None and token < len(tokens):
            config[f"{ours}_token"] = tokens[token]
    template = metadata.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    return config


def _pre(metadata: Mapping[str, Any]) -> str:
    return str(metadata.get("tokenizer.ggml.pre") or "default")


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    pre = _pre(metadata)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre == "llama-bpe",
        )
    )
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif pre in _SPLIT_PATTERNS:
        split = pre_tokenizers.Split(Regex(_SPLIT_PATTERNS[pre]), behavior="isolated")
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, spell])
    elif pre in ("gpt-2", "default"):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        raise UnsupportedModel(
            f"GGUF pre-tokenizer {pre!r} is not supported; use the model's safetensors release"
        )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    marked = list(zip(tokens, kinds, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in marked if kind == _CONTROL]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token, kind in marked
            if kind == _USER_DEFINED
        ]
    )
    return tokenizer


def _sentence_piece(source: Path) -> Tokenizer:
    # Merges have to be recovered from scores; transformers does that, and only this path pays for its import.
    import transformers

    try:
        loaded = transformers.AutoTokenizer.from_pretrained(
            str(source.parent), gguf_file=source.name, trust_remote_code=False, local_files_only=True
        )
        backend: Tokenizer = loaded.backend_tokenizer
    except Exception as error:
        raise UnsupportedModel(
            f"the SentencePiece tokenizer of {source.name} could not be read: {error}"
        ) from error
    return backend
