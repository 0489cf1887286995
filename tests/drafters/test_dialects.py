"""Draft models' config.json in every dialect: one layer id or one slot off, and nothing is ever accepted."""

from __future__ import annotations

import pytest

from drafters.config import DraftConfig

LAYERS = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "model_type": "qwen3",
    "tie_word_embeddings": False,
}
HEADS = {
    "markov_rank": 16,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
BLOCK = {"block_size": 8, "mask_token_id": 9}

DEEPSPEC = {
    **LAYERS, **HEADS, **BLOCK, "architectures": ["Qwen3DSparkModel"], "target_layer_ids": [1, 4, 7],
    "num_target_layers": 10, "num_anchors": 512,
}  # fmt: skip
ZLAB = {
    **LAYERS, "block_size": 8, "architectures": ["DFlashDraftModel"], "num_target_layers": 10,
    "dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 4, 7]},
}  # fmt: skip
SPECFORGE = {
    **LAYERS, "block_size": 8, "architectures": ["DSparkDraftModel"], "num_target_layers": 10,
    "dflash_config": {
        "mask_token_id": 9, "target_layer_ids": [1, 4, 7], "projector_type": "dspark",
        "confidence_head_alpha": 1.0, **HEADS,
    },
}  # fmt: skip
SPECULATORS = {
    **HEADS, **BLOCK, "speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"],
    "transformer_layer_config": LAYERS, "aux_hidden_state_layer_ids": [2, 5, 8], "sample_from_anchor": True,
    "draft_vocab_size": 64, "target_hidden_size": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "raw", [DEEPSPEC, SPECFORGE, SPECULATORS], ids=["DeepSpec", "SpecForge", "speculators"]
)
def test_dspark_is_the_same_in_every_dialect(raw):
    config, wanted = DraftConfig.from_dict(raw), DraftConfig.from_dict(DEEPSPEC)
    assert config.target_layer_ids == (1, 4, 7)
    assert config.sample_from_anchor
    assert (config.gamma, config.unread) == (8, 0)
    assert (config.head, config.rank, config.confidence) == ("vanilla", 16, True)
    assert config.draft_vocab_size is None
    assert config.to_dict() | {"num_target_layers": 10} == wanted.to_dict()


def test_dflash_has_its_own_slots_and_deepspecs_has_not():
    config = DraftConfig.from_dict(ZLAB)
    assert (config.gamma, config.unread, config.head, config.confidence) == (7, 1, "none", False)
    deepspecs = {name: value for name, value in DEEPSPEC.items() if name not in HEADS} | {"markov_rank": 0}
    config = DraftConfig.from_dict(deepspecs)
    assert (config.gamma, config.unread, config.head) == (8, 0, "none")
    theirs = {**SPECULATORS, "speculators_model_type": "dflash", "markov_rank": 0}
    del theirs["sample_from_anchor"]
    assert DraftConfig.from_dict(theirs).gamma == 7


def test_variants_of_fields():
    inner = {**SPECFORGE["dflash_config"], "shift_label": False}
    assert not DraftConfig.from_dict({**SPECFORGE, "dflash_config": inner}).sample_from_anchor
    named = {**SPECFORGE["dflash_config"], "use_confidence_head": True}
    del named["enable_confidence_head"]
    assert DraftConfig.from_dict({**SPECFORGE, "dflash_config": named}).confidence
    outside = {key: value for key, value in SPECFORGE["dflash_config"].items() if key != "markov_rank"}
    assert DraftConfig.from_dict({**SPECFORGE, "dflash_config": outside, "markov_rank": 32}).rank == 32
    assert DraftConfig.from_dict({**SPECULATORS, "draft_vocab_size": 32}).draft_vocab_size == 32


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        ({**DEEPSPEC, "architectures": ["Gemma4DSparkModel"]}, "Gemma"),
        ({"model_type": "deepseek_v4", "dspark_block_size": 5}, "DeepSeek"),
        ({**SPECULATORS, "speculators_model_type": "mtp"}, "mtp"),
        ({**SPECULATORS, "projector_type": "domino"}, "domino"),
        ({**SPECULATORS, "target_hidden_size": 96}, "width"),
        ({**SPECULATORS, "aux_hidden_state_layer_ids": None}, "which layers"),
        ({**ZLAB, "dflash_config": {**ZLAB["dflash_config"], "projector_type": "domino"}}, "domino"),
        ({**DEEPSPEC, "architectures": ["LlamaForCausalLM"]}, "unknown kind"),
        ({**DEEPSPEC, "markov_head_type": "lstm"}, "lstm"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(raw, word):
    with pytest.raises(ValueError, match=word):
        DraftConfig.from_dict(raw)
