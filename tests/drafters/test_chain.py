"""Eagle3 and MTP-1 against the equations written down plainly, and in the engine's loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from drafters.chain import ChainModel
from drafters.chain_drafter import ChainDrafter
from drafters.checkpoint import load, save
from drafters.config import DraftConfig
from engine.batch import Verdict, VerificationBatch
from engine.drafter import DraftRequest
from engine.models.config import ModelConfig
from engine.models.decoder import FusedDecoder, rope_frequencies
from engine.params import SamplingParams
from engine.sampling import SamplingState
from engine.torch_executor import TorchExecutor
from tests.engine.harness import VOCAB, Engine, hf_model
from tests.engine.test_forward import item

PAGES = 60
FAMILIES = ["eagle3", "mtp"]


class Pair:
    """A tiny random target and a chain model over it."""

    def __init__(self, family: str, window: int | None = 12, reduced: bool = False) -> None:
        torch.manual_seed(11)
        model = hf_model("llama", initializer_range=0.3)
        self.target = ModelConfig.from_dict(model.config.to_dict())
        self.tensors = {name: value.detach() for name, value in model.state_dict().items()}
        self.decoder = FusedDecoder(self.target, self.tensors.items(), torch.float32)
        self.d2t = torch.randperm(VOCAB)[: VOCAB // 2].sort().values if reduced else None
        self.config = DraftConfig.for_target(
            self.target,
            block_size=5,
            mask_token_id=0,
            target_layer_ids=(0, 1),
            window=window,
            draft_vocab_size=None if self.d2t is None else len(self.d2t),
            family=family,
        )
        self.embedding = model.get_input_embeddings().weight.detach()
        head = model.get_output_embeddings().weight.detach()
        self.whole_head, self.head = head, head if self.d2t is None else head[self.d2t]
        self.model = ChainModel(self.config, self.embedding, self.head, self.d2t).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(0.0, 0.25)
        self.norm = self.tensors["model.norm.weight"] if family == "mtp" else None

    def drafter(self) -> ChainDrafter:
        return ChainDrafter(self.model, "tiny", PAGES, 16, self.norm)

    def engine(self, policy: str, drafter: ChainDrafter | None = None, pages: int = PAGES) -> Engine:
        if policy != "off":
            drafter = drafter or self.drafter()
        executor = TorchExecutor(self.decoder, PAGES, 16)
        return Engine(self.decoder, drafter, policy, num_pages=pages, page_size=16, wrap=lambda _: executor)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_logits(pair: Pair, features: torch.Tensor, tokens: list[int], drafted: list[int]) -> torch.Tensor:
    """Logits of every step of one chain: pairs one by one, each attending to those before it and itself.

    features [a, m * d] of the positions before the anchor, tokens [a + 1] up to it, drafted the tokens that
    follow it.
    """
    w, shapes = dict(pair.model.named_parameters()), pair.config.layers
    eps, dim = shapes.rms_eps, shapes.head_dim
    eagle = pair.config.family == "eagle3"
    keys, values, out, feedback = [], [], [], None

    def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
        angles = position * rope_frequencies(shapes)
        a, b = x[:, : dim // 2], x[:, dim // 2 :]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    def normed_heads(x: torch.Tensor, norm: str, position: int) -> torch.Tensor:
        return rotated(rms(x.view(-1, dim), w[f"self_attn.{norm}.weight"], eps), position)

    g = features @ w["fc.weight"].T if eagle else features
    anchor = len(tokens) - 1
    for i in range(anchor + len(drafted) - 1):
        current = g[i] if i < anchor else feedback
        token = (tokens + drafted)[i + 1]
        e, h = (
            rms(pair.embedding[token], w["enorm.weight"], eps),
            rms(current, w["hnorm.weight"], eps),
        )
        both = torch.cat((e, h))
        if eagle:
            residual, x = current, both
        else:
            residual = w["eh_proj.weight"] @ both
            x = rms(residual, w["input_layernorm.weight"], eps)
        keys.append(normed_heads(w["self_attn.k_proj.weight"] @ x, "k_norm", i))
        values.append((w["self_attn.v_proj.weight"] @ x).view(-1, dim))
        if i < anchor - 1:
            continue
        # The window is over what the anchor sees; the chain's own pairs come on top.
        first = max(0, anchor - (pair.config.window or anchor))
        q = normed_heads(w["self_attn.q_proj.weight"] @ x, "q_norm", i)
        group, heads = shapes.num_heads // shapes.num_kv_heads, []
        for head in range(shapes.num_heads):
            k = torch.stack([key[head // group] for key in keys[first:]])
            v = torch.stack([value[head // group] for value in values[first:]])
            heads.append(torch.softmax(k @ q[head] / math.sqrt(dim), 0) @ v)
        residual = residual + w["self_attn.o_proj.weight"] @ torch.cat(heads)
        x = rms(residual, w["post_attention_layernorm.weight"], eps)
        gate, up = w["mlp.gate_proj.weight"] @ x, w["mlp.up_proj.weight"] @ x
        feedback = residual + w["mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)
        out.append(pair.head @ rms(feedback, w["norm.weight"], eps))
    return torch.stack(out)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_forward_is_the_plain_chain_for_every_anchor(family, window):
    pair = Pair(family, window)
    slots, rng = pair.config.block_size, np.random.default_rng(1)
    texts = [rng.integers(0, VOCAB, size).tolist() for size in (20, 31)]
    features = torch.randn(51, len(pair.config.target_layer_ids) * pair.config.hidden_size)
    where, begins = [(0, 1), (0, 9), (1, 3), (1, 24)], [0, 20]
    anchors = torch.tensor([begins[text] + a for text, a in where])
    start = torch.tensor([begins[text] for text, _ in where])
    previous = torch.tensor([texts[text][a : a + slots] for text, a in where])
    following = torch.tensor([*texts[0][1:], 0, *texts[1][1:], 0])
    positions = torch.cat((torch.arange(20), torch.arange(31)))
    with torch.no_grad():
        found = pair.model.logits(pair.model(features, following, anchors, previous, (start, positions)))
        for row, (text, a) in enumerate(where):
            own = features[begins[text] : begins[text] + a]
            drafted = texts[text][a + 1 : a + 1 + slots]
            wanted = plain_logits(pair, own, texts[text][: a + 1], drafted)
            assert torch.allclose(found[row], wanted[:slots], atol=2e-3, rtol=1e-3)


def observed(pair: Pair, text: list[int], pieces: list[int]) -> ChainDrafter:
    """A drafter that saw the text arrive in pieces, the last tokens of each as accepted drafts."""
    drafter, executor = pair.drafter(), TorchExecutor(pair.decoder, PAGES, 16)
    pages, start = np.arange(8, dtype=np.int32), 0
    for size in pieces:
        known = text[: start + 1]
        # Two drafts more than are accepted: their rows must leave no trace.
        block = [*text[start + 1 : start + size], 1, 2] if start else text[1:size]
        batch = VerificationBatch((item(known, start, 1 + len(block), pages, draft=block),))
        output = executor.forward(batch, drafter.feature_layers)
        emitted = tuple(text[start + 1 : start + size + 1])
        drafter.observe(batch, output.features, [Verdict(emitted, accepted=size - 1)])
        start += size
    return drafter


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_the_plain_chains_and_forget_how_the_text_arrived(family):
    pair = Pair(family)
    text = np.random.default_rng(2).integers(0, VOCAB, 41).tolist()
    state = SamplingState(SamplingParams(temperature=3.0), VOCAB, frozenset(), stream=(1, 2, 3, 4))
    request = DraftRequest(0, np.array(text), 4, 3, np.arange(8, dtype=np.int32), state)
    (once,) = observed(pair, text, [40]).draft([request])
    (many,) = observed(pair, text, [17, 1, 4, 2, 5, 1, 1, 6, 3]).draft([request])
    assert once.tokens == many.tokens
    assert torch.allclose(once.q, many.q, atol=1e-4)
    executor = TorchExecutor(pair.decoder, PAGES, 16)
    batch = VerificationBatch((item(text[:40], 0, 40, np.arange(8, dtype=np.int32)),))
    features = executor.forward(batch, pair.config.target_layer_ids).features
    if pair.norm is not None:
        features = rms(features, pair.norm, pair.target.rms_eps)
    with torch.no_grad():
        wanted = plain_logits(pair, features, text, list(once.tokens))
    assert torch.allclose(once.q, (wanted / 3.0).softmax(-1), atol=1e-3)
    assert len(once.tokens) == (4 if family == "eagle3" else 1)


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_and_seeded_texts_are_the_same_with_and_without(family, reduced):
    pair = Pair(family, reduced=reduced)

    def texts(policy: str) -> dict[str, list[int]]:
        engine = pair.engine(policy)
        for i in range(6):
            how = {"seed": i, "top_p": 0.95} if i % 2 else {"temperature": 0.0, "frequency_penalty": 0.3}
            engine.add(str(i), [3 + i, 5, 7, 9 + i] * (2 + i), max_tokens=40, ignore_eos=True, **how)
        engine.run()
        return engine.texts()

    assert texts("fixed:4") == texts("fixed:1") == texts("off")


def test_chunked_prefill_and_prefix_hits_leave_the_drafter_as_informed():
    pair = Pair("eagle3", window=None)
    prompt = np.random.default_rng(4).integers(3, VOCAB, 50).tolist()
    usages = []
    engine = pair.engine("fixed:4")
    for name in ("a", "b"):
        active = engine.add(name, prompt, max_tokens=30, temperature=0.0, ignore_eos=True)
        engine.run()
        usages.append(active.usage)
    assert (usages[0].cached_tokens, usages[1].cached_tokens) == (0, 48)
    assert usages[0].accepted_tokens == usages[1].accepted_tokens
    assert usages[0].draft_tokens == usages[1].draft_tokens > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_what_is_loaded(family, tmp_path):
    pair = Pair(family, reduced=True)
    save(pair.model, tmp_path, torch.float32)
    again = load(tmp_path, pair.embedding, pair.whole_head)
    assert isinstance(again, ChainModel)
    assert again.config.family == family
    assert again.config.target_layer_ids == pair.config.target_layer_ids
    for name, value in pair.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
