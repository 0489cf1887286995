"""A converted GGUF file is the model that it was made from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from engine.models import gguf_convert
from engine.models.blocks import load_blocks
from engine.models.config import ModelConfig, UnsupportedModel
from engine.models.gguf_convert import convert_gguf, source_gguf
from engine.models.locate import cache_folder, locate_model
from engine.models.weights import CorruptModel, load_tensors
from engine.tokenizer import Tokenizer
from tests.engine.full_disk import full_disk

SMALL: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
NAMES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, kind = name.removeprefix("model.").rsplit(".", 1)
    if stem == "norm":
        return f"output_norm.{kind}"
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, layer, inner = stem.split(".", 2)
    return f"blk.{layer}.{NAMES[inner]}.{kind}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row by row what llama.cpp's converter does to q and k of Llama models."""
    dim = rows.shape[0] // heads
    order = [h * dim + half * dim // 2 + i for h in range(heads) for i in range(dim // 2) for half in (0, 1)]
    return rows[order]


def byte_characters() -> list[str]:
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(b) for b in kept] + [chr(0x100 + i) for i in range(256 - len(kept))]


def write_gguf(path: Path, model: Any, arch: str, **changes: Any) -> None:
    """`changes`: kind of quantisation, metadata overrides by key, tensors to add."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), arch)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    tokens = ["<s>", "</s>", *byte_characters(), "he", "ll", "hell", "hello", "<tool>", "Ġhello"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * 256, 1, 1, 1, 1, 4, 1])
    writer.add_token_merges(["h e", "l l", "he ll", "hell o", "Ġ hello"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    for name, value in changes.get("metadata", {}).items():
        writer.add_uint32(f"{arch}.{name}", value)
    tensors = {k: v.numpy() for k, v in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    for name, values in tensors.items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            values = interleave(values, heads if "q_proj" in name else kv_heads)
        kind = changes.get("kind")
        if kind is not None and values.ndim == 2:
            packed = gguf.quantize(values, kind)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    for name, values in changes.get("tensors", {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_weights_config_and_logits_equal_the_original(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny(kind, **changes)
    write_gguf(tmp_path / "m.gguf", model, kind)
    folder = convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    original = model.state_dict()
    converted = dict(load_tensors(folder))
    assert set(original) - set(converted) == (
        {"lm_head.weight"} if changes.get("tie_word_embeddings") else set()
    )
    for name, values in converted.items():
        assert values.dtype == torch.float32
        assert torch.equal(values, original[name]), name
    ours = ModelConfig.from_folder(folder)
    theirs = ModelConfig.from_dict(model.config.to_dict())
    for fact in (
        "model_type",
        "head_dim",
        "num_kv_heads",
        "rope_theta",
        "rms_eps",
        "tie_embeddings",
        "max_position",
    ):
        assert getattr(ours, fact) == getattr(theirs, fact), fact
    for fact in ("qkv_bias", "output_bias", "mlp_bias", "qk_norm", "sliding_windows", "fused"):
        assert getattr(ours, fact) == getattr(theirs, fact), fact
    assert (ours.bos_token_id, ours.eos_token_ids) == (0, {1})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(10)[None]
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0])
def test_quantised_values_are_exact(kind: Any, tmp_path: Path) -> None:
    model = tiny("llama", tie_word_embeddings=True)
    write_gguf(tmp_path / "m.gguf", model, "llama", kind=kind)
    converted = dict(load_tensors(convert_gguf(tmp_path / "m.gguf", tmp_path / "out")))
    for name, values in model.state_dict().items():
        if values.ndim == 2 and name in converted:
            expected = gguf.dequantize(gguf.quantize(values.numpy(), kind), kind)
            assert np.array_equal(converted[name].numpy(), expected), name


def test_llama3_scaling_is_recovered_from_its_tensor(tmp_path: Path) -> None:
    model = tiny("llama", rope_parameters=LLAMA3)
    plain = LLAMA3["rope_theta"] ** (-np.arange(0, 16, 2) / 16)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors.max() > 7
    path = tmp_path / "m.gguf"
    write_gguf(path, model, "llama", tensors={"rope_freqs.weight": divisors})
    config = ModelConfig.from_folder(convert_gguf(path, tmp_path / "out"))
    assert config.rope_scaling == {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    write_gguf(path, model, "llama", tensors={"rope_freqs.weight": divisors + np.float32(0.5)})
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        convert_gguf(path, tmp_path / "out2")


def test_tokenizer_and_its_config(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama")
    folder = convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_folder(folder)
    texts = [tokenizer.token_text(i) for i in tokenizer.encode("hello<tool> hello12")]
    assert texts == ["<s>", "hello", "<tool>", " hello", "1", "2"]
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.has_chat_template
    stored = json.loads((folder / "tokenizer_config.json").read_text())
    assert (stored["bos_token"], stored["eos_token"], stored["add_bos_token"]) == ("<s>", "</s>", True)


def test_sentence_piece_vocabularies(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    pieces = ["▁", "h", "i", "hi", "▁hi"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-5.0, -4.0, -3.0, -1.0, -2.0])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * 5])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata, _ = gguf_convert._read(tmp_path / "m.gguf")
    backend = gguf_convert.build_tokenizer(metadata, tmp_path / "m.gguf")
    tokenizer = Tokenizer(backend, gguf_convert.build_tokenizer_config(metadata))
    ids = tokenizer.encode("hi hié")
    assert [tokens[i] for i in ids] == ["<s>", "▁hi", "▁hi", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "hi hié"
    assert b"".join(tokenizer.token_bytes[i] for i in ids[1:]) == " hi hié".encode()
    assert {1, 2} <= tokenizer.special_ids


def test_long_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_convert, "_SHARD_BYTES", 100_000)
    model = tiny("qwen2")
    write_gguf(tmp_path / "m.gguf", model, "qwen2")
    folder = convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert len(list(folder.glob("*.safetensors"))) > 2
    converted = dict(load_tensors(folder))
    assert all(torch.equal(converted[name], values) for name, values in model.state_dict().items())
    transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_source_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny("qwen2"), "qwen2")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    folder = convert_gguf(path, tmp_path / "out")
    record = json.loads((folder / "source.json").read_text())
    assert (record["sha256"], record["file"]) == (digest, "m.gguf")
    assert source_gguf(folder) == path
    moved = convert_gguf(path, tmp_path / "kept", keep_source=True)
    assert source_gguf(moved) == moved / "m.gguf"
    assert source_gguf(folder) is None


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf", tiny("qwen2"), "qwen2")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_convert, "_write_tensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("room", [0, 1_000, 50_000])  # the config, the tokenizer, the weights
def test_a_full_disk_leaves_nothing(tmp_path: Path, room: int) -> None:
    write_gguf(tmp_path / "m.gguf", tiny("qwen2"), "qwen2")
    with pytest.raises(OSError, match="File too large"), full_disk(room):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("room", [0, 50_000])
def test_blocks_that_cannot_be_kept_are_read_all_the_same(
    tmp_path: Path, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    write_gguf(tmp_path / "m.gguf", tiny("qwen2"), "qwen2", kind=gguf.GGMLQuantizationType.Q8_0)
    folder = convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    before = sorted(folder.iterdir())
    with full_disk(room):
        unkept = list(load_blocks(folder))
    assert "every start will read GGUF" in caplog.text
    assert sorted(folder.iterdir()) == before
    for _ in range(2):  # made, then read
        kept = list(load_blocks(folder))
        assert (folder / "blocks.bin").is_file()
        for one, other in zip(unkept, kept, strict=True):
            assert one[:2] == other[:2]
            assert np.array_equal(one[2], other[2])
            assert one[2].dtype == other[2].dtype


@pytest.mark.parametrize(
    ("arch", "changes", "words"),
    [
        ("falcon", {}, "architecture 'falcon'"),
        ("qwen2", {"metadata": {"expert_count": 8}}, "mixture-of-experts"),
        ("qwen2", {"pre": "no-such-splitter"}, "pre-tokenizer"),
        ("qwen2", {"tensors": {"blk.0.ssm_a.weight": np.zeros(4, np.float32)}}, "ssm_a"),
    ],
)
def test_what_is_not_supported(arch: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny("qwen2"), arch, **changes)
    with pytest.raises(UnsupportedModel, match=words):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny("qwen2"), "qwen2")
    content = path.read_bytes()
    for broken in (content[: len(content) // 2], content[:100], b"no model at all" * 10, b""):
        path.write_bytes(broken)
        with pytest.raises(CorruptModel, match=r"m\.gguf"):
            convert_gguf(path, tmp_path / "out")


def test_a_file_that_is_cut_or_scrambled_anywhere_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny("llama"), "llama")
    content = path.read_bytes()
    for end in np.linspace(0, len(content) - 1, 40, dtype=int):
        path.write_bytes(content[:end])
        with pytest.raises(CorruptModel, match=r"m\.gguf"):
            convert_gguf(path, tmp_path / "out")
    rng = np.random.default_rng(0)
    refused: list[str] = []
    for turn in range(150):  # the weights come last, and may be anything
        scrambled = bytearray(content)
        for at in rng.integers(0, 6_000 if turn % 2 else 600, 3):
            scrambled[at] = int(rng.integers(256))
        path.write_bytes(scrambled)
        try:
            convert_gguf(path, tmp_path / f"out {turn}")
        except (CorruptModel, UnsupportedModel) as error:
            refused.append(str(error))
    assert len(refused) > 30
    assert all(refused)


@pytest.mark.model
def test_default_model_values() -> None:
    folder = locate_model(None, cache_folder(), print)
    source = source_gguf(folder)
    assert source is not None
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(str(source)).tensors}
    wanted = {
        "model.embed_tokens.weight": ("token_embd.weight", 0),
        "model.layers.3.mlp.down_proj.weight": ("blk.3.ffn_down.weight", 0),
        "model.layers.7.self_attn.q_proj.weight": ("blk.7.attn_q.weight", 9),
        "model.layers.7.self_attn.k_proj.weight": ("blk.7.attn_k.weight", 3),
        "model.layers.7.self_attn.v_proj.weight": ("blk.7.attn_v.weight", 0),
    }
    seen = 0
    for name, values in load_tensors(folder):
        seen += 1
        if name not in wanted:
            continue
        theirs, heads = wanted[name]
        expected = gguf.dequantize(reader[theirs].data, reader[theirs].tensor_type)
        actual = interleave(values.numpy(), heads) if heads else values.numpy()
        assert np.array_equal(actual, expected), name
    assert seen == len(reader)
