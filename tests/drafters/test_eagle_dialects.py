"""Eagle3 checkpoints of every project: recognised, loaded, and computing what that project computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from drafters.chain import ChainModel
from drafters.checkpoint import load, save
from drafters.config import ChainLayout, DraftConfig
from tests.drafters.checkpoints import (
    DRAFT_VOCAB,
    HIDDEN,
    LAYERS,
    TARGET_LAYERS,
    VOCAB,
    Checkpoint,
    eagle_logits,
    layer,
    matrix,
    norm_weight,
)

SWITCHES = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")


def shared(features: int, **how) -> dict[str, torch.Tensor]:
    own = {"fc.weight": matrix(HIDDEN, features * HIDDEN), "norm.weight": norm_weight()}
    return own | layer(how.pop("prefix", "layers.0"), 2 * HIDDEN, hidden_norm=True, **how)


def vocabulary() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    return ids, {"d2t": ids - torch.arange(DRAFT_VOCAB), "t2d": torch.isin(torch.arange(VOCAB), ids)}


def deepspec() -> Checkpoint:
    """Five features, the target's whole head, Qwen3's layer."""
    embedding, head = matrix(VOCAB, HIDDEN), matrix(VOCAB, HIDDEN)
    tensors = shared(5) | {"embed_tokens.weight": embedding.clone(), "lm_head.weight": head.clone()}
    config = {
        **LAYERS, "architectures": ["Qwen3Eagle3Model"], "num_target_layers": TARGET_LAYERS,
        "target_layer_ids": [1, 3, 5, 7, 8], "ttt_length": 7, "step_loss_decay": 0.8,
        "layer_types": ["full_attention"],
    }  # fmt: skip
    return Checkpoint(config, tensors, embedding, head)


def specforge() -> Checkpoint:
    """Three features of the usual layers, a head of its own, Llama's layer under another name."""
    ids, mapping = vocabulary()
    tensors = shared(3, prefix="midlayer", qk_norm=False) | {"lm_head.weight": matrix(DRAFT_VOCAB, HIDDEN)}
    config = {
        **LAYERS, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "draft_vocab_size": DRAFT_VOCAB, "eagle_config": {"use_aux_hidden_state": True},
    }  # fmt: skip
    embedding, head = matrix(VOCAB, HIDDEN), matrix(VOCAB, HIDDEN)
    return Checkpoint(config, tensors | mapping, embedding, head, ids, "midlayer")


def speculators(kind: str = "llama", *switches: str) -> Checkpoint:
    """An embedding and a head of its own, and switches for where norms are."""
    ids, mapping = vocabulary()
    tensors = shared(3, qk_norm=kind == "qwen3") | mapping
    tensors |= {"embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(DRAFT_VOCAB, HIDDEN)}
    tensors |= {"verifier_norm.weight": norm_weight(), "verifier_lm_head.weight": matrix(DRAFT_VOCAB, HIDDEN)}
    if "norm_before_fc" in switches:
        tensors["input_norm.weight"] = norm_weight(3 * HIDDEN)
    if "fc_norm" in switches:
        tensors |= {f"fc_norm.{i}.weight": norm_weight() for i in range(3)}
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCAB, "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 5, 7], "tie_word_embeddings": False,
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": methods},
        "transformer_layer_config": {**LAYERS, "model_type": kind},
        **{name: name in switches for name in SWITCHES},
    }  # fmt: skip
    return Checkpoint(
        config, tensors, matrix(VOCAB, HIDDEN), matrix(VOCAB, HIDDEN), ids, switches=set(switches)
    )


DIALECTS = {
    "DeepSpec": deepspec,
    "SpecForge": specforge,
    "speculators": lambda: speculators("llama", "norm_before_residual"),
    "speculators-2": lambda: speculators("llama", "norm_before_fc", "norm_before_residual", "norm_output"),
    "speculators-3": lambda: speculators("qwen3", "fc_norm", "norm_output"),
}


def loaded(checkpoint: Checkpoint, folder: Path) -> ChainModel:
    model = load(checkpoint.write(folder), checkpoint.embedding, checkpoint.head, TARGET_LAYERS)
    assert isinstance(model, ChainModel)
    return model.eval()


def our_logits(model: ChainModel, features: torch.Tensor, text: list[int], anchor: int) -> torch.Tensor:
    """Of all slots of the chain behind position `anchor` of a text, its own tokens being the text's."""
    following = torch.tensor([*text[1:], 0])[: len(features)]
    previous = torch.tensor([text[anchor:-1]])
    sequence = (torch.tensor([0]), torch.arange(len(features)))
    with torch.no_grad():
        return model.logits(model(features, following, torch.tensor([anchor]), previous, sequence))[0]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_computes_what_its_project_does(dialect, tmp_path):
    torch.manual_seed(3)
    checkpoint = DIALECTS[dialect]()
    model = loaded(checkpoint, tmp_path)
    text = torch.randint(0, VOCAB, (18,)).tolist()
    features = torch.randn(13, len(model.config.target_layer_ids) * HIDDEN)
    wanted = eagle_logits(checkpoint, features, text[:14], text[14:])
    found = our_logits(model, features, text, 13)
    assert found.shape == (4, VOCAB if checkpoint.ids is None else DRAFT_VOCAB)
    assert torch.allclose(found, wanted, atol=1e-3)
    if checkpoint.ids is not None:
        assert torch.equal(model.d2t, checkpoint.ids)


@pytest.mark.parametrize(
    ("dialect", "layers", "gamma", "layout"),
    [
        ("DeepSpec", (1, 3, 5, 7, 8), 7, ChainLayout()),
        ("SpecForge", (1, 4, 6), 7, ChainLayout(qk_norm=False)),
        ("speculators", (1, 4, 6), 3, ChainLayout(qk_norm=False, norm_before_residual=True)),
    ],
)
def test_layers_length_and_layout_are_read(dialect, layers, gamma, layout):
    config = DraftConfig.from_dict(DIALECTS[dialect]().config, TARGET_LAYERS)
    assert (config.family, config.target_layer_ids, config.gamma) == ("eagle3", layers, gamma)
    assert config.chain == layout
    assert DraftConfig.from_dict(config.to_dict()).chain == layout


def test_layer_ids_that_are_given_are_taken_as_each_project_counts():
    given = specforge().config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5, 7]}}
    assert DraftConfig.from_dict(given).target_layer_ids == (2, 5, 7)
    theirs = speculators().config
    assert DraftConfig.from_dict(theirs).target_layer_ids == (1, 4, 6)
    silent = theirs | {"eagle_aux_hidden_state_layer_ids": None}
    assert DraftConfig.from_dict(silent, 40).target_layer_ids == (1, 19, 36)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_shift_by_one_layer_or_one_position_changes_the_logits(dialect, tmp_path):
    """With the features of a real forward pass, so that a wrong reading of the ids would be seen here."""
    from tests.engine.harness import fused, hf_model

    torch.manual_seed(3)
    model = loaded(DIALECTS[dialect](), tmp_path)
    target = fused(hf_model("llama", num_hidden_layers=TARGET_LAYERS))
    text = torch.randint(0, VOCAB, (18,)).tolist()

    def features(shift: int) -> torch.Tensor:
        def attend(_layer, q, k, v, *, scale, window=None, softcap=None):
            group = q.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
            out = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True)
            return out.transpose(0, 1)

        layers = tuple(each + shift for each in model.config.target_layer_ids)
        with torch.no_grad():
            return target.forward(torch.tensor(text[:13]), torch.arange(13), attend, layers)[1]

    right = our_logits(model, features(0), text, 13)
    assert not torch.allclose(right, our_logits(model, features(1), text, 13), atol=0.05)
    late = torch.cat((torch.zeros(1, features(0).shape[1]), features(0)[:-1]))
    assert not torch.allclose(right, our_logits(model, late, text, 13), atol=0.05)


def test_a_model_in_another_dialect_is_saved_in_ours(tmp_path):
    torch.manual_seed(3)
    checkpoint = DIALECTS["speculators-2"]()
    model = loaded(checkpoint, tmp_path / "theirs")
    save(model, tmp_path / "ours", torch.float32)
    again = load(tmp_path / "ours", model.embedding, checkpoint.head)
    assert again.config.chain == model.config.chain
    assert again.config.target_layer_ids == model.config.target_layer_ids
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (deepspec().config | {"architectures": ["Gemma4Eagle3Model"]}, "Gemma"),
        (deepspec().config | {"num_hidden_layers": 2}, "2 layers"),
        (specforge().config | {"eagle_config": {"use_aux_hidden_state": False}}, "last layer alone"),
        (specforge().config | {"target_hidden_size": 96, "target_layer_ids": [1, 4, 6]}, "width"),
        (specforge().config, "which layers"),
        (specforge().config | {"hidden_act": "gelu", "target_layer_ids": [1, 4, 6]}, "silu"),
        (speculators().config | {"speculators_model_type": "peagle"}, "peagle"),
        (
            speculators().config | {"transformer_layer_config": {**LAYERS, "model_type": "deepseek_v3"}},
            "deepseek_v3",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(raw, word):
    with pytest.raises(ValueError, match=word):
        DraftConfig.from_dict(raw)


def test_tensors_of_another_kind_of_layer_are_refused_by_name(tmp_path):
    checkpoint = deepspec()
    for change, word in (
        ({"layers.0.self_attn.q_proj.bias": torch.zeros(48)}, r"unexpected \['self_attn.q_proj.bias'\]"),
        ({"fc.weight": matrix(HIDDEN, 3 * HIDDEN)}, r"fc.weight is \(48, 144\), but must be \(48, 240\)"),
        ({"embed_tokens.weight": matrix(VOCAB + 8, HIDDEN)}, "another target"),
    ):
        folder = Checkpoint(
            checkpoint.config, checkpoint.tensors | change, checkpoint.embedding, checkpoint.head
        ).write(tmp_path)
        with pytest.raises(ValueError, match=word):
            load(folder, checkpoint.embedding, checkpoint.head)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["Qwen3Eagle3Model"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_it_drafts_in_the_engine_and_changes_no_text(dialect, tmp_path):
    """From the folder on: layer ids that are counted from the target, vocabularies, own heads, pages."""
    from drafters.loading import load_drafter
    from engine.torch_executor import TorchExecutor
    from tests.engine.harness import Engine, fused, hf_model

    torch.manual_seed(3)
    folder = DIALECTS[dialect]().write(tmp_path / "draft")
    hf = hf_model("llama", num_hidden_layers=TARGET_LAYERS, initializer_range=0.3)
    hf.save_pretrained(tmp_path / "target")
    target = fused(hf)

    def texts(policy: str) -> tuple[dict[str, list[int]], int]:
        executor = TorchExecutor(target, 40, 16)
        drafter = None if policy == "off" else load_drafter(folder, executor, tmp_path / "target", 200)
        engine = Engine(target, drafter, policy, num_pages=40, page_size=16, wrap=lambda _: executor)
        drafted = 0
        for i in range(4):
            how = {"seed": i} if i % 2 else {"temperature": 0.0}
            active = engine.add(str(i), [3 + i, 5, 7], max_tokens=20, ignore_eos=True, **how)
            engine.run()
            drafted += active.usage.draft_tokens
        return engine.texts(), drafted

    plain, drafted = texts("fixed:3")
    assert drafted > 50
    assert plain == texts("off")[0]
