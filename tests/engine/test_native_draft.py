"""The blocks of draft models against the same thing written down plainly in torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.batch import VerificationBatch
from engine.models.config import ModelConfig
from engine.models.weights import CorruptModel
from engine.native.draft import NativeDraftModel, SequentialHead, Slot, Span
from engine.native.loader import NativeError, supported
from engine.native.weights import Rows, as_bf16
from engine.native_executor import NativeExecutor
from tests.engine.test_forward import item
from tests.engine.test_native import tiny

pytestmark = pytest.mark.skipif(not supported(), reason="the kernels were not built")

RANK, FEATURES, DRAFT_VOCAB = 32, 3, 40


def rounded(*shape: int, scale: float = 0.2) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(torch.bfloat16).float()


def rows(values: torch.Tensor) -> Rows:
    (entry,) = as_bf16([("x", values)]).values()
    assert isinstance(entry, Rows)
    return entry


class World:
    """A tiny target, a draft model of as many layers, and all weights in plain sight."""

    def __init__(self, kind: str = "markov", reduced: bool = False, kernels: str | None = None, **config):
        torch.manual_seed(7)
        self.target_config, self.target_tensors = tiny("qwen3")
        _, tensors = tiny("qwen3")
        self.config = (
            self.target_config if not config else ModelConfig(**{**vars_of(self.target_config), **config})
        )
        self.tensors = {key.removeprefix("model."): value for key, value in tensors.items()}
        hidden = self.config.hidden_size
        self.tensors["fc.weight"] = rounded(hidden, FEATURES * hidden)
        self.tensors["hidden_norm.weight"] = torch.rand(hidden) + 0.5
        vocab = DRAFT_VOCAB if reduced else self.target_config.vocab_size
        self.w1, self.w2 = (
            rounded(self.target_config.vocab_size, RANK, scale=1.0),
            rounded(vocab, RANK, scale=1.0),
        )
        self.ids = np.sort(np.random.default_rng(0).permutation(self.target_config.vocab_size)[:vocab])
        width = {"gated": hidden + RANK, "rnn": 2 * RANK + hidden}.get(kind)
        out = RANK if kind == "gated" else 3 * RANK
        self.mix = rounded(out, width) if width else None
        self.mix_bias = torch.randn(out) if width else None
        self.confidence = torch.randn(hidden + RANK)
        self.kind = kind
        self.target = NativeExecutor(
            self.target_config, as_bf16(self.target_tensors.items()), 40, 2, 512, kernels
        )
        self.head = rounded(vocab, hidden) if reduced else self.target_tensors["lm_head.weight"]
        self.draft = NativeDraftModel(
            self.target.model,
            self.config,
            as_bf16(self.tensors.items()),
            SequentialHead(
                kind,
                rows(self.w1),
                rows(self.w2),
                None if self.mix is None else rows(self.mix),
                None if self.mix_bias is None else self.mix_bias.numpy(),
                self.confidence.numpy(),
                0.25,
                self.ids.astype(np.int32) if reduced else None,
            ),
            40,
            2,
            512,
            rows(self.head) if reduced else None,
        )

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.tensors[name], self.config.rms_eps)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        from engine.models.decoder import rope_frequencies

        angles = torch.outer(positions.float(), rope_frequencies(self.config))[:, None]
        a, b = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def keys_and_values(self, layer: int, x: torch.Tensor, positions: torch.Tensor):
        prefix, heads = f"layers.{layer}.self_attn", self.config.num_kv_heads
        k = (x @ self.tensors[f"{prefix}.k_proj.weight"].T).view(len(x), heads, -1)
        v = (x @ self.tensors[f"{prefix}.v_proj.weight"].T).view(len(x), heads, -1)
        return self.rotate(self.norm(k, f"{prefix}.k_norm.weight"), positions), v

    def backbone(self, features: torch.Tensor, tokens: torch.Tensor, window: int | None = None):
        """(logits, hidden) of a block behind a context, as in paper eq. 2 and 3."""
        fused = self.norm(features @ self.tensors["fc.weight"].T, "hidden_norm.weight")
        start, count = len(features), len(tokens)
        before, inside = torch.arange(start), torch.arange(start, start + count)
        x = self.target_tensors["model.embed_tokens.weight"][tokens]
        for layer in range(self.config.num_layers):
            prefix = f"layers.{layer}"
            h = self.norm(x, f"{prefix}.input_layernorm.weight")
            parts = self.keys_and_values(layer, fused, before), self.keys_and_values(layer, h, inside)
            k, v = (torch.cat(pair) for pair in zip(*parts, strict=True))
            if window:
                k, v = k[max(0, start - window) :], v[max(0, start - window) :]
            q = (h @ self.tensors[f"{prefix}.self_attn.q_proj.weight"].T).view(
                count, self.config.num_heads, -1
            )
            q = self.rotate(self.norm(q, f"{prefix}.self_attn.q_norm.weight"), inside)
            group = self.config.num_heads // self.config.num_kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            weights = torch.einsum("qhd,khd->hqk", q, k).div(math.sqrt(q.shape[-1])).softmax(-1)
            attended = torch.einsum("hqk,khd->qhd", weights, v).reshape(count, -1)
            x = x + attended @ self.tensors[f"{prefix}.self_attn.o_proj.weight"].T
            h = self.norm(x, f"{prefix}.post_attention_layernorm.weight")
            gate, up = (h @ self.tensors[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (torch.nn.functional.silu(gate) * up) @ self.tensors[f"{prefix}.mlp.down_proj.weight"].T
        hidden = self.norm(x, "norm.weight")
        return hidden @ self.head.T, hidden

    def corrected(self, logits: torch.Tensor, hidden: torch.Tensor, tokens: list[int]):
        """Logits of each slot given the tokens before it, and its confidence (paper eq. 5 to 8)."""
        state, rows_out, confidences = torch.zeros(RANK), [], []
        for u, h, token in zip(logits, hidden, tokens, strict=True):
            e = self.w1[token]
            if self.kind == "gated":
                mixed = torch.sigmoid(self.mix @ torch.cat((h, e)) + self.mix_bias) * e
            elif self.kind == "rnn":
                gate, candidate, out = (self.mix @ torch.cat((state, e, h)) + self.mix_bias).chunk(3)
                state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
                mixed = torch.tanh(out)
            else:
                mixed = e
            rows_out.append(u + self.w2 @ mixed)
            confidences.append(float(self.confidence @ torch.cat((h, e)) + 0.25))
        return torch.stack(rows_out), confidences


def vars_of(config: ModelConfig) -> dict:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Up to K and V in bf16."""
    assert (found - wanted).abs().max() < 0.03 * wanted.abs().max()


@pytest.mark.parametrize("kernels", supported())
@pytest.mark.parametrize("window", [None, 7])
def test_backbone_sees_its_context_and_its_whole_block(kernels, window):
    windows = {"sliding_windows": (window,) * 3} if window else {}
    world = World(kernels=kernels, **windows)
    features = torch.randn(2, 50, FEATURES * world.config.hidden_size)
    pages = np.random.default_rng(1).permutation(40).astype(np.int32)
    spans, blocks = [], []
    for index, (context, count) in enumerate(((50, 5), (17, 3))):
        held = pages[index * 6 : index * 6 + 6]
        # Context arrives in pieces, as verification yields it.
        for start, stop in ((0, context // 3), (context // 3, context)):
            world.draft.write_context([Span(start, stop - start, held)], features[index, start:stop].clone())
        spans.append(Span(context, count, held))
        blocks.append(torch.arange(3, 3 + count) + index)
    logits, hidden = world.draft.backbone(spans, torch.cat(blocks).tolist())
    at = 0
    for index, (span, block) in enumerate(zip(spans, blocks, strict=True)):
        wanted = world.backbone(features[index, : span.start], block, window)
        close(logits[at : at + span.count], wanted[0])
        close(hidden[at : at + span.count], wanted[1])
        at += span.count
    # A block leaves nothing behind: the next context overwrites it, and the same block comes out again.
    again = world.draft.backbone(spans[1:], blocks[1].tolist())[0]
    assert torch.equal(again, logits[5:])


def test_a_causal_pass_is_the_targets_own():
    """With its own head and nothing but a block, a draft model is an ordinary decoder."""
    world = World()
    tokens = np.arange(5, 25, dtype=np.int32)
    world.tensors.pop("fc.weight")
    own = NativeExecutor(world.target_config, as_bf16(world.target_tensors.items()), 40, 2, 512)
    wanted = own.forward(
        VerificationBatch((item(tokens[:1], 0, 20, np.arange(2), draft=tokens[1:].tolist()),))
    )
    logits, _ = world.draft.backbone(
        [Span(0, 20, np.arange(2, dtype=np.int32))], tokens.tolist(), causal=True
    )
    assert torch.equal(logits, wanted.logits)


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("kind", ["markov", "gated", "rnn"])
def test_sequential_head_follows_the_drawn_tokens(kind, reduced):
    world = World(kind, reduced)
    vocab = world.draft.vocab
    counts, anchors = (4, 2, 3), [9, 21, 30]
    total = sum(counts)
    base, hidden = torch.randn(total, vocab) * 2, torch.randn(total, world.config.hidden_size)
    laws = torch.zeros(total, vocab)
    slots, row = (Slot * total)(), 0
    for sequence, count in enumerate(counts):
        for k in range(count):
            slot = slots[row]
            slot.row, slot.sequence, slot.kind = row, sequence, (0, 1, 1)[sequence]
            slot.temperature, slot.top_p, slot.u = 0.7, (1.0, 1.0, 0.8)[sequence], 0.1 + 0.2 * k
            slot.law = laws[row].data_ptr()
            row += 1
    logits = base.clone()
    world.draft.sequential(slots, anchors, logits, hidden)
    row = 0
    for sequence, count in enumerate(counts):
        chosen = [slots[row + k].token for k in range(count)]
        before = [anchors[sequence], *chosen[:-1]]
        wanted, confidences = world.corrected(base[row : row + count], hidden[row : row + count], before)
        close(logits[row : row + count], wanted)
        for k in range(count):
            slot = slots[row + k]
            assert slot.confidence == pytest.approx(confidences[k], rel=1e-3, abs=1e-3)
            place = int(np.flatnonzero(world.ids == slot.token)[0]) if reduced else slot.token
            if slot.kind == 0:
                assert place == int(logits[row + k].argmax())
                continue
            law = laws[row + k]
            assert float(law.sum()) == pytest.approx(1.0, abs=1e-5)
            p = torch.softmax(logits[row + k] / 0.7, -1)
            if slot.top_p < 1.0:
                assert float(p[law > 0].sum()) >= 0.8 - 1e-5
                assert float(p[law > 0].sum() - p[law > 0].min()) < 0.8 + 1e-5
                p = torch.where(law > 0, p, 0.0) / p[law > 0].sum()
            assert torch.allclose(law, p, atol=1e-5)
            below = float(law[:place].sum())
            assert below - 1e-5 <= slot.u <= below + float(law[place]) + 1e-5
        row += count


def test_coupled_drafts_see_the_noise_of_target_tokens():
    from engine.noise import gumbels

    world = World("markov", reduced=True)
    hidden, base = torch.randn(6, world.config.hidden_size), torch.randn(6, DRAFT_VOCAB)
    slots = (Slot * 6)()
    for i, slot in enumerate(slots):
        slot.row, slot.sequence, slot.kind = i, i, 2
        slot.temperature, slot.top_p, slot.key0, slot.key1 = 1.0, 1.0, 77 + i, 2**31 + i
    logits = base.clone()
    world.draft.sequential(slots, [1, 2, 3, 4, 5, 6], logits, hidden)
    for i, slot in enumerate(slots):
        key = torch.tensor([[77 + i, 2**31 + i - 2**32]], dtype=torch.int32)
        noise = gumbels(key, torch.from_numpy(world.ids.astype(np.int32)))[0]
        assert slot.token == world.ids[int((torch.log_softmax(logits[i], -1) + noise).argmax())]


def test_sizes_that_do_not_fit_are_refused():
    world = World()
    with pytest.raises(NativeError, match="rotary"):
        world.draft.write_context([Span(510, 5, np.arange(40, dtype=np.int32))], torch.zeros(5, 3 * 64))


def test_logits_may_be_changed_ahead_of_each_slot():
    """As a grammar does, by what was drawn before; and what goes wrong there comes out."""
    world = World("rnn")
    vocab, counts, anchors = world.draft.vocab, (3, 2), [9, 21]
    base, hidden = torch.randn(5, vocab), torch.randn(5, world.config.hidden_size)
    slots = (Slot * 5)()
    for row, slot in enumerate(slots):
        slot.row, slot.sequence, slot.kind = row, int(row >= 3), 0
    seen: list[int] = []

    def only_the_next(k: int) -> None:
        seen.append(k)
        for sequence, count in enumerate(counts):
            if k < count:
                row = 3 * sequence + k
                before = slots[row - 1].token if k else anchors[sequence]
                logits[row, torch.arange(vocab) != before + 1] = -torch.inf

    logits = base.clone()
    world.draft.sequential(slots, anchors, logits, hidden, only_the_next)
    assert seen == [0, 1, 2]
    assert [slot.token for slot in slots] == [10, 11, 12, 22, 23]

    def broken(k: int) -> None:
        raise KeyError(k)

    with pytest.raises(KeyError):
        world.draft.sequential(slots, anchors, base.clone(), hidden, broken)


@pytest.mark.parametrize("broken", ["fc", "markov_w1", "markov_w2", "head", "confidence", "q_proj"])
def test_weights_that_do_not_fit_are_refused(broken):
    world = World("gated")
    tensors = dict(world.tensors)
    short = {name: name == broken for name in ("markov_w1", "markov_w2", "head", "confidence")}
    if broken == "fc":
        tensors["fc.weight"] = tensors["fc.weight"][:32]
    if broken == "q_proj":
        tensors["layers.0.self_attn.q_proj.weight"] = tensors["layers.0.self_attn.q_proj.weight"][:64]
    head = SequentialHead(
        "gated",
        rows(world.w1[: -1 if short["markov_w1"] else None]),
        rows(world.w2[: -1 if short["markov_w2"] else None]),
        rows(world.mix[: -1 if short["head"] else None]),
        world.mix_bias.numpy(),
        world.confidence.numpy()[: -1 if short["confidence"] else None],
    )
    with pytest.raises(CorruptModel, match=broken):
        NativeDraftModel(world.target.model, world.config, as_bf16(tensors.items()), head, 40, 2, 512)
