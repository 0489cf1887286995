"""Tokenizer: ids, exact bytes, start tokens and chats, over small vocabularies and the default model's."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from engine.chat_template import ChatTemplateError
from engine.models.locate import cache_folder, locate_model
from engine.models.unsupported import UnsupportedModel
from engine.tokenizer import Tokenizer

TEXTS = [
    "hello world",
    "  two  spaces\n",
    "naïve café",
    "你好，世界",
    "🎉👩‍👩‍👧 done",
    "a\x00b\t\x7f\u00ad",
    "नमस्ते",
]


def byte_level(*special: str) -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return backend


def sentence_piece() -> Backend:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    for token in ("▁", "h", "i", "hi", "▁hi"):
        vocab[token] = len(vocab)
    merges = [("h", "i"), ("▁", "hi")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def joined(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(tokenizer.token_bytes[i] for i in ids)


@pytest.mark.parametrize("backend", [byte_level(), sentence_piece()], ids=["byte-level", "sentence-piece"])
@pytest.mark.parametrize("text", [*TEXTS, "hi hi"])
def test_token_bytes_are_the_text(backend: Backend, text: str) -> None:
    tokenizer = Tokenizer(backend, {})
    ids = tokenizer.encode(text)
    assert joined(tokenizer, ids) == text.encode()
    assert tokenizer.decode(ids) == text


def test_special_tokens() -> None:
    tokenizer = Tokenizer(byte_level("<s>", "</s>"), {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    assert tokenizer.vocab_size == 258
    assert tokenizer.special_ids == {256, 257}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    assert tokenizer.token_bytes[257] == b"</s>"
    assert tokenizer.decode([256, *tokenizer.encode("a"), 257]) == "a"
    assert tokenizer.decode([256, 257], skip_special_tokens=False) == "<s></s>"


def test_part_of_a_character_has_exact_bytes_and_readable_text() -> None:
    tokenizer = Tokenizer(byte_level(), {})
    ids = tokenizer.encode("é")
    assert [tokenizer.token_bytes[i] for i in ids] == [b"\xc3", b"\xa9"]
    assert tokenizer.token_text(ids[0]) == "�"
    assert tokenizer.token_text(10**6) == tokenizer.token_text(-1) == ""


def test_other_vocabularies_fall_back_to_decoding() -> None:
    backend = Backend(models.WordLevel({"hello": 0, "[UNK]": 3}, unk_token="[UNK]"))
    tokenizer = Tokenizer(backend, {})
    assert tokenizer.token_bytes == [b"hello", b"", b"", b"[UNK]"]


@pytest.mark.parametrize("processor", [False, True])
@pytest.mark.parametrize("wanted", [None, True, False])
def test_start_token(processor: bool, wanted: bool | None) -> None:
    backend = byte_level("<s>")
    if processor:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    config: dict[str, Any] = {"bos_token": "<s>"}
    if wanted is not None:
        config["add_bos_token"] = wanted
    tokenizer = Tokenizer(backend, config)
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert 256 not in plain
    adds = processor if wanted is None else wanted
    assert tokenizer.encode("hi") == ([256, *plain] if adds else plain)
    assert tokenizer.encode("<s>hi") == [256, *plain]
    assert tokenizer.encode("") == ([256] if adds else [])


def test_truncation_of_the_file_is_switched_off() -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    assert len(Tokenizer(backend, {}).encode("abcdef")) == 6


def write(folder: Path, config: dict[str, Any]) -> Path:
    byte_level("<s>", "</s>").save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", **config}))
    return folder


def chat(tokenizer: Tokenizer, **arguments: Any) -> str:
    return tokenizer.decode(
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], **arguments), False
    )


def test_chat_template_in_the_config(tmp_path: Path) -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ mood }}"
    tokenizer = Tokenizer.from_folder(write(tmp_path, {"chat_template": source, "add_bos_token": True}))
    assert tokenizer.has_chat_template
    assert chat(tokenizer, mood="!") == "<s>hi!"
    assert chat(Tokenizer.from_folder(tmp_path, chat_template="mine")) == "mine"


def test_named_templates_and_the_file(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = Tokenizer.from_folder(write(tmp_path, {"chat_template": named}))
    assert chat(tokenizer) == "plain"
    assert chat(tokenizer, tools=[{"name": "f"}]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert chat(Tokenizer.from_folder(tmp_path)) == "file"


def test_no_chat_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, {}))
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        chat(tokenizer)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_threads_agree() -> None:
    tokenizer = Tokenizer(byte_level(), {})
    expected = [tokenizer.encode(text) for text in TEXTS]
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: [tokenizer.encode(text) for text in TEXTS], range(50)):
            assert result == expected


def test_transformers_is_not_imported() -> None:
    code = "import engine.tokenizer, engine.models.config, sys; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def default() -> Tokenizer:
    return Tokenizer.from_folder(locate_model(None, cache_folder(), print))


@pytest.mark.model
def test_default_model_splits_digits(default: Tokenizer) -> None:
    assert [default.token_text(i) for i in default.encode("12345")] == list("12345")
    assert default.vocab_size == 49152
    assert default.special_ids == frozenset(range(17))


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_default_model_round_trip(default: Tokenizer, text: str) -> None:
    ids = default.encode(text)
    assert joined(default, ids).decode() == default.decode(ids) == text


@pytest.mark.model
def test_default_model_bytes_equal_decoding_for_every_id(default: Tokenizer) -> None:
    for i in range(default.vocab_size):
        assert default.token_text(i) == default.decode([i], skip_special_tokens=False)


@pytest.mark.model
def test_default_model_chat(default: Tokenizer) -> None:
    text = chat(default)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert default.encode(text, add_special_tokens=False)[0] == default.bos_token_id
