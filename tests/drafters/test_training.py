"""Losses against hand-computed values; batches, features and recipes; a run that is cut off and goes on."""

from __future__ import annotations

import csv
import math
import os
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from drafters.training.batches import draw_anchors, make_batch, predict, targets
from drafters.training.corpus import Corpus
from drafters.training.features import FeatureCache
from drafters.training.losses import (
    BlockTargets,
    block_losses,
    expected_length,
    position_weights,
    total_weight,
)
from drafters.training.recipe import Recipe
from drafters.training.target import TextFeatures
from drafters.training.trainer import Trainer
from tests.engine.harness import VOCAB, hf_model

LAYERS = (0, 1)


def test_losses_are_the_papers():
    """Two slots over three tokens; the target's mass on a fourth is out of reach."""
    p = torch.tensor([[0.5, 0.2, 0.2], [0.1, 0.6, 0.3]])
    q = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.6, 0.3]])
    logits = q.log()[None] + 3.0
    wanted = BlockTargets(
        p.log()[None] + 1.5, torch.full((1, 2), 1.5), torch.tensor([[1, 2]]), torch.ones(1, 2)
    )
    confidence = torch.tensor([[0.0, 2.0]])
    losses = block_losses(logits, confidence, wanted)
    l1 = [0.25 + 0.3 + 0.05 + 0.1, 0.0]
    overlap = [0.25 + 0.2 + 0.2, 1.0]  # sum of minima
    assert losses.overlap[0].tolist() == pytest.approx(overlap, abs=1e-6)
    assert [1.0 - x / 2 for x in l1] == pytest.approx(overlap)
    w = [1.0, math.exp(-0.25)]
    mean = lambda a, b: (w[0] * a + w[1] * b) / sum(w)  # noqa: E731
    assert float(losses.l1) == pytest.approx(mean(*l1), abs=1e-6)
    assert float(losses.cross_entropy) == pytest.approx(mean(-math.log(0.5), -math.log(0.3)), abs=1e-6)
    bce = [math.log(2.0), -math.log(1.0 / (1.0 + math.exp(-2.0)))]
    assert float(losses.confidence) == pytest.approx(mean(*bce), abs=1e-6)
    total = 0.1 * losses.cross_entropy + 0.9 * losses.l1 + losses.confidence
    assert float(losses.total) == pytest.approx(float(total), abs=1e-6)


def test_gradients_of_the_losses_are_those_of_their_equations():
    """The losses' own backward pass against what autograd makes of the equations, in both kinds of number."""
    torch.manual_seed(3)
    target = torch.randn(4, 3, 11, dtype=torch.float64)
    labels = torch.randint(-1, 11, (4, 3))
    mask = torch.rand(4, 3) > 0.2
    lse = target.logsumexp(-1) + 0.4
    weights = position_weights(3) * mask
    for kind, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        logits = torch.randn(4, 3, 11).to(kind).requires_grad_()
        block_losses(logits, None, BlockTargets(target.float(), lse.float(), labels, mask)).total.backward()
        plain = logits.detach().double().requires_grad_()
        log_q = plain.log_softmax(-1)
        l1 = (log_q.exp() - (target - lse[..., None]).exp()).abs().sum(-1)
        ce = -log_q.gather(-1, labels.clamp_min(0)[..., None])[..., 0] * (labels >= 0)
        ((0.1 * ce + 0.9 * l1) * weights).sum().div(weights.sum()).backward()
        assert plain.grad.abs().max() > 0.01
        torch.testing.assert_close(logits.grad.double(), plain.grad, atol=tolerance, rtol=0)


def test_slots_past_the_end_and_labels_out_of_reach_cost_nothing():
    logits = torch.randn(2, 3, 5)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    labels = torch.tensor([[1, -1, 2], [0, 1, 2]])
    wanted = BlockTargets(torch.randn(2, 3, 5), torch.full((2, 3), 4.0), labels, mask)
    base = block_losses(logits, torch.zeros(2, 3), wanted)
    changed = logits.clone()
    changed[0, 2] += torch.randn(5)
    assert float(block_losses(changed, torch.zeros(2, 3), wanted).total) == float(base.total)
    unlabelled = block_losses(logits, None, replace(wanted, labels=torch.full_like(labels, -1)))
    assert float(unlabelled.cross_entropy) == 0.0
    assert float(unlabelled.confidence) == 0.0


def test_position_weights_follow_the_code():
    wanted = [1.0, 0.779, 0.607, 0.472, 0.368, 0.287, 0.223]
    assert position_weights(7).tolist() == pytest.approx(wanted, abs=5e-4)


def test_expected_length_counts_the_bonus():
    chances = torch.tensor([[0.5, 0.5, 1.0], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    assert expected_length(chances, mask).tolist() == [1.0 + 0.5 + 0.25 + 0.25, 3.0]


def test_anchors_and_their_next_tokens_belong_to_the_answer():
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(200):
        places = draw_anchors(10, 30, 5, rng)
        assert len(set(places.tolist())) == 5
        assert (np.diff(places) > 0).all()
        seen |= set(places.tolist())
    assert seen == set(range(10, 29))
    assert draw_anchors(10, 13, 5, rng).tolist() == [10, 11]


class Fixture:
    """A tiny target, a corpus of random texts, and their features."""

    def __init__(self, folder, texts: int = 60) -> None:
        from engine.models.config import ModelConfig

        torch.manual_seed(3)
        rng = np.random.default_rng(1)
        self.model = hf_model("llama", initializer_range=0.3)
        self.config = ModelConfig.from_dict(self.model.config.to_dict())
        lengths = rng.integers(16, 40, texts)
        ids = np.concatenate([(np.cumsum(rng.integers(1, 4, n)) % VOCAB) for n in lengths])
        np.savez(
            folder / "answers.npz",
            ids=ids.astype(np.uint16),
            length=lengths.astype(np.int32),
            prompt_length=np.full(texts, 6, np.int32),
            temperature=np.zeros(texts, np.float32),
            domain=np.array(["math"] * texts),
        )
        self.corpus = Corpus.load(folder)
        self.embedding = self.model.get_input_embeddings().weight.detach()
        self.head = self.model.get_output_embeddings().weight.detach()
        self.norm = self.model.model.norm.weight.detach()
        self.cache = FeatureCache(folder / "features", self.corpus, self.config.hidden_size, LAYERS, "tiny")

    @torch.no_grad()
    def features(self, text, layers) -> TextFeatures:
        out = self.model(torch.from_numpy(text.astype(np.int64))[None], output_hidden_states=True)
        states = out.hidden_states
        return TextFeatures(
            torch.cat([states[i + 1][0] for i in layers], -1), states[-1][0], out.logits[0].logsumexp(-1)
        )

    def last_layers(self, count):
        return [
            {name: value.detach() for name, value in layer.named_parameters()}
            for layer in self.model.model.layers[-count:]
        ]

    def fill(self) -> None:
        self.cache.fill(self, np.arange(len(self.corpus)), lambda *_: None)


RECIPE = Recipe(
    rank=8,
    num_layers=1,
    block_size=3,
    window=8,
    draft_vocab=32,
    mask_token_id=1,
    steps=30,
    texts=2,
    anchors=6,
    learning_rate=5e-3,
)


def test_features_resume_where_they_were(tmp_path):
    world = Fixture(tmp_path)
    every = np.arange(len(world.corpus))
    world.cache.fill(world, every[:20], lambda *_: None)
    assert world.cache.ready(every).tolist() == list(range(20))
    again = FeatureCache(tmp_path / "features", world.corpus, world.config.hidden_size, LAYERS, "tiny")
    seen = []
    again.fill(world, every, lambda done, total, rate: seen.append((done, total)))
    assert seen[0] == (21, 60)
    assert seen[-1] == (60, 60)
    wanted, stored = world.features(world.corpus.text(7), LAYERS), again.get(7)
    assert torch.equal(stored.layers, wanted.layers.bfloat16().float())
    assert torch.equal(stored.lse, wanted.lse)
    with pytest.raises(ValueError, match="another"):
        FeatureCache(tmp_path / "features", world.corpus, world.config.hidden_size, (0, 2), "tiny")


def test_who_reads_a_cache_does_not_write_what_it_is(tmp_path):
    """Several runs share one, and one of them may begin while another reads."""
    world = Fixture(tmp_path)
    path = tmp_path / "features" / "features.json"
    path.chmod(0o444)
    before = path.stat().st_mtime_ns, path.stat().st_ino
    FeatureCache(tmp_path / "features", world.corpus, world.config.hidden_size, LAYERS, "tiny")
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before
    assert [file.name for file in path.parent.glob("features.json*")] == ["features.json"]


def test_batches_line_up_features_tokens_and_targets(tmp_path):
    world = Fixture(tmp_path)
    world.fill()
    texts = np.array([3, 9, 14])
    batch = make_batch(world.corpus, world.cache, texts, 4, 3, np.random.default_rng(0))
    joined = np.concatenate([world.corpus.text(i) for i in texts])
    assert batch.features.shape[0] == len(joined)
    ends = np.cumsum([len(world.corpus.text(i)) for i in texts])
    logits = batch.final @ world.head.T
    for block, anchor in enumerate(batch.anchors.tolist()):
        end = int(ends[np.searchsorted(ends, anchor, side="right")])
        assert batch.tokens[block] == joined[anchor]
        for slot in range(3):
            inside = anchor + slot + 1 < end
            assert bool(batch.mask[block, slot]) == inside
            if inside:
                assert batch.previous[block, slot] == joined[anchor + slot]
                assert batch.labels[block, slot] == joined[anchor + slot + 1]
                assert float(logits[block, slot].logsumexp(-1)) == pytest.approx(
                    float(batch.lse[block, slot]), abs=0.05
                )


@pytest.mark.parametrize("family", ["block", "eagle3", "mtp"])
def test_a_text_may_be_cut_to_what_its_blocks_see(tmp_path, family):
    """The same blocks over parts of the texts: everything that the model says of them stays."""
    world = Fixture(tmp_path)
    world.fill()
    texts, window, slots = np.array([3, 9, 14]), 4, 1 if family == "mtp" else 3
    whole, cut = (
        make_batch(
            *(world.corpus, world.cache, texts, 2, slots, np.random.default_rng(5)),
            last_hidden=family == "mtp", window=each,
        )
        for each in (None, window)
    )  # fmt: skip
    assert len(cut.features) < len(whole.features)
    for name in ("previous", "labels", "mask", "final", "lse"):
        assert torch.equal(getattr(cut, name)[whole.mask], getattr(whole, name)[whole.mask]), name
    torch.manual_seed(0)
    recipe = replace(RECIPE, window=window, family=family)
    model = trainer(world, tmp_path / "run", recipe).model
    with torch.no_grad():
        (logits, confidence), (wanted, sure) = predict(model, cut), predict(model, whole)
    assert torch.allclose(logits[whole.mask], wanted[whole.mask], atol=1e-4)
    if family == "block":
        assert torch.allclose(confidence[whole.mask], sure[whole.mask], atol=1e-4)


def test_anchors_that_lie_together_lie_anywhere_in_the_answer():
    rng, counts = np.random.default_rng(0), np.zeros(400)
    for _ in range(20_000):
        drawn = draw_anchors(10, 400, 4, rng, together=True)
        assert len(set(drawn)) == 4
        assert drawn[-1] - drawn[0] < 4 * 16
        counts[drawn] += 1
    assert not counts[:10].any()
    assert not counts[399:].any()
    middle = counts[150:250].mean()
    for edge in (counts[10:14], counts[10:26], counts[383:399], counts[395:399]):
        assert 0.5 * middle < edge.mean() < 1.2 * middle
    apart = [draw_anchors(10, 400, 4, rng) for _ in range(50)]
    assert max(drawn[-1] - drawn[0] for drawn in apart) > 200


def trainer(world: Fixture, folder, recipe: Recipe = RECIPE) -> Trainer:
    return Trainer(folder, recipe, world.corpus, world.cache, world, lambda line: None)


def test_training_learns_and_a_cut_off_run_is_the_same_run(tmp_path):
    world = Fixture(tmp_path)
    world.fill()
    whole = trainer(world, tmp_path / "whole")
    before = whole.validate()
    whole.run()
    after = whole.validate()
    assert after.loss < before.loss
    assert after.tau > before.tau > 1.0
    assert all(0.0 <= overlap <= 1.0 for overlap in after.overlap)

    first = trainer(world, tmp_path / "parts")
    for _ in range(13):
        first.train_step()
    first.save()
    second = trainer(world, tmp_path / "parts")
    assert second.step == 13
    second.run()
    for name, value in whole.average.state_dict().items():
        assert torch.allclose(second.average.state_dict()[name], value, atol=1e-6), name
    with (tmp_path / "whole" / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["tau_held_out"]) == pytest.approx(after.tau)
    from drafters.checkpoint import load

    exported = load(tmp_path / "whole" / "draft", world.embedding, world.head)
    assert exported.config.draft_vocab_size == 32
    assert torch.equal(exported.d2t, whole.model.d2t)


def test_live_features_are_those_of_the_cache(tmp_path):
    from drafters.training.live import LiveFeatures

    world = Fixture(tmp_path)
    world.model.save_pretrained(tmp_path / "model")
    live = LiveFeatures(tmp_path / "model", world.corpus, LAYERS, torch.device("cpu"), torch.float32)
    texts = np.array([9, 3, 14])
    found, alone = live.texts(texts), [world.features(world.corpus.text(i), LAYERS) for i in texts]
    for name in ("layers", "final", "lse"):
        wanted = torch.cat([getattr(each, name) for each in alone])
        assert torch.allclose(getattr(found, name), wanted, atol=1e-4), name
    assert live.ready(texts) is texts
    spans = [(2, 9), (0, 5), (4, 12)]
    parts, stored = live.texts(texts, spans), world.cache
    world.fill()
    assert torch.allclose(parts.layers, stored.texts(texts, spans).layers, rtol=1e-2, atol=1e-2)
    assert len(parts.lse) == 20


def _one_of_two(rank: int, folder: Path, port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    world = Fixture(folder / str(rank))
    world.fill()
    run = trainer(world, folder / "shared", replace(RECIPE, steps=4))
    run.run()
    torch.save(run.model.state_dict(), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_take_the_steps_of_one_with_both_their_batches(tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_one_of_two, (tmp_path, port), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)

    world = Fixture(tmp_path)
    world.fill()
    alone = trainer(world, tmp_path / "alone", replace(RECIPE, steps=4))
    for step in range(4):
        parts = [alone._batch(np.random.default_rng((RECIPE.seed, step, rank))) for rank in range(2)]
        weight = sum(total_weight(part.mask) for part in parts)
        alone.optimizer.zero_grad()
        for part in parts:
            losses = block_losses(*predict(alone.model, part), targets(part, alone.model, alone.t2d), weight)
            losses.total.backward()
        for group in alone.optimizer.param_groups:
            group["lr"] = alone.recipe.rate(step)
        torch.nn.utils.clip_grad_norm_(alone.model.parameters(), RECIPE.clip)
        alone.optimizer.step()
    for name, value in alone.model.state_dict().items():
        assert torch.allclose(first[name], value, atol=1e-5), name
    assert (tmp_path / "shared" / "metrics.csv").read_text().count("\n") == 2  # one process reports


def test_blocks_of_random_length_train_too(tmp_path):
    world = Fixture(tmp_path)
    world.fill()
    run = trainer(world, tmp_path / "run", replace(RECIPE, least_slots=2))
    rng = np.random.default_rng(0)
    lengths = {run._batch(rng).previous.shape[1] for _ in range(30)}
    assert lengths == {2, 3}
    before = run.validate()
    run.run()
    assert run.validate().loss < before.loss


def test_shorter_blocks_may_be_as_many_more(tmp_path):
    world = Fixture(tmp_path)
    world.fill()
    run = trainer(world, tmp_path / "run", replace(RECIPE, anchors=2, least_slots=1, fill=True))
    rng = np.random.default_rng(0)
    shapes = {tuple(run._batch(rng).previous.shape) for _ in range(60)}
    assert shapes == {(2 * 2, 3), (2 * 3, 2), (2 * 6, 1)}


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_a_fresh_head_knows_the_bigrams(tmp_path, head):
    """Those of the texts, which count up by 1 to 3: every other token gets less."""
    world = Fixture(tmp_path)
    world.fill()
    run = trainer(world, tmp_path / "run", replace(RECIPE, head=head, draft_vocab=None, rank=32))
    markov, hidden = run.model.markov_head, torch.zeros(VOCAB, 1, world.config.hidden_size)
    with torch.no_grad():
        bias = markov(markov.markov_w1(torch.arange(VOCAB)[:, None]), hidden)[:, 0]
    ahead = (torch.arange(VOCAB) - torch.arange(VOCAB)[:, None]) % VOCAB
    follows = (ahead >= 1) & (ahead <= 3)
    assert float(bias[follows].mean()) > 4 * float(bias[~follows].abs().mean())


@pytest.mark.parametrize("family", ["block", "eagle3", "mtp"])
def test_a_fresh_model_begins_as_the_targets_last_layer(tmp_path, family):
    world = Fixture(tmp_path)
    world.fill()
    size = world.config.hidden_size
    run = trainer(world, tmp_path / "run", replace(RECIPE, family=family))
    part = run.model.layers[0] if family == "block" else run.model
    (layer,) = world.last_layers(1)
    assert torch.equal(part.self_attn.o_proj.weight, layer["self_attn.o_proj.weight"])
    assert torch.equal(run.average.norm.weight, world.norm)
    if family == "mtp":
        assert torch.equal(run.model.eh_proj.weight[:, -size:], torch.eye(size))
    else:
        assert torch.equal(run.model.fc.weight[:, -size:], torch.diag(run.scale[-size:]))
        assert not run.model.fc.weight[:, :-size].any()
    plain = trainer(world, tmp_path / "plain", replace(RECIPE, family=family, target_start=False))
    part = plain.model.layers[0] if family == "block" else plain.model
    assert not torch.equal(part.self_attn.o_proj.weight, layer["self_attn.o_proj.weight"])


def test_a_model_with_more_layers_than_the_target_begins_as_noise(tmp_path):
    world = Fixture(tmp_path)
    world.fill()
    run = trainer(world, tmp_path / "run", replace(RECIPE, num_layers=4))
    assert not torch.equal(run.model.norm.weight, world.norm)


def test_features_of_any_size_train_alike_and_the_checkpoint_takes_them_as_they_are(tmp_path):
    world = Fixture(tmp_path)
    world.fill()
    run = trainer(world, tmp_path / "run", replace(RECIPE, steps=5))
    layers = torch.cat([world.cache.get(i).layers[1:] for i in run.train_texts[:100]])
    assert torch.allclose((layers / run.scale).pow(2).mean(0), torch.ones(len(run.scale)), atol=1e-3)
    run.run()
    from drafters.checkpoint import load, save

    save(run.average, tmp_path / "whole", torch.float32, run.scale)
    served = load(tmp_path / "whole", world.embedding, world.head)
    batch = run._make(run.held_out[:1], 4, 3, np.random.default_rng(0))
    plain = replace(batch, features=batch.features * run.scale)
    with torch.no_grad():
        ours, _ = predict(run.average, batch)
        theirs, _ = predict(served, plain)
    assert torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3)


def test_a_run_goes_on_from_a_checkpoint_with_other_texts(tmp_path):
    world = Fixture(tmp_path)
    world.fill()
    first = trainer(world, tmp_path / "first")
    first.run()
    after = first.validate()
    world.corpus.ids[:] = (world.corpus.ids + 1) % VOCAB  # whatever is frequent now
    start = str(tmp_path / "first" / "draft")
    second = trainer(world, tmp_path / "second", replace(RECIPE, start_from=start, draft_vocab=None))
    assert torch.equal(second.model.d2t, first.model.d2t)
    world.corpus.ids[:] = (world.corpus.ids - 1) % VOCAB
    assert second.validate().loss == pytest.approx(after.loss, abs=0.02)


def test_dflash_learns_in_its_own_layout(tmp_path):
    world = Fixture(tmp_path)
    world.fill()
    run = trainer(
        world, tmp_path / "run", replace(RECIPE, head="none", sample_from_anchor=False, block_size=4)
    )
    before = run.validate()
    assert len(before.overlap) == 3
    run.run()
    assert run.validate().loss < before.loss


@pytest.mark.parametrize("family", ["block", "eagle3"])
def test_layers_in_bf16_learn_too_and_weights_stay_whole(tmp_path, family):
    world = Fixture(tmp_path)
    world.fill()
    run = trainer(world, tmp_path / "run", replace(RECIPE, amp=True, family=family))
    logits, _ = predict(run.model, run._batch(np.random.default_rng(0)), amp=True)
    assert logits.dtype == torch.float32
    before = run.validate()
    run.run()
    assert run.validate().loss < before.loss
    assert all(parameter.dtype == torch.float32 for parameter in run.model.parameters())


@pytest.mark.parametrize("family", ["eagle3", "mtp"])
def test_chains_learn_too(tmp_path, family):
    world = Fixture(tmp_path)
    world.fill()
    run = trainer(world, tmp_path / "run", replace(RECIPE, family=family))
    before = run.validate()
    run.run()
    assert run.validate().loss < before.loss
    from drafters.checkpoint import load

    assert load(tmp_path / "run" / "draft", world.embedding, world.head).config.family == family


def test_the_target_stays_frozen(tmp_path):
    world = Fixture(tmp_path)
    world.fill()
    embedding, head = world.embedding.clone(), world.head.clone()
    run = trainer(world, tmp_path / "run", replace(RECIPE, head="rnn", draft_vocab=None))
    run.run()
    assert torch.equal(run.model.embedding, embedding)
    assert torch.equal(run.model.head, head)


def test_the_rate_warms_up_and_falls_to_nothing():
    recipe = Recipe(steps=1000, learning_rate=1.0)
    assert recipe.rate(0) == pytest.approx(1 / 40)
    assert recipe.rate(39) == recipe.rate(40) == 1.0
    assert recipe.rate(520) == pytest.approx(0.5)
    assert recipe.rate(1000) == pytest.approx(0.0, abs=1e-12)


def test_a_recipe_with_unknown_entries_is_refused(tmp_path):
    path = tmp_path / "recipe.json"
    Recipe(feature_layers=(1, 2)).save(path)
    assert Recipe.load(path) == Recipe(feature_layers=(1, 2))
    path.write_text('{"learning_rat": 1}')
    with pytest.raises(ValueError, match="learning_rat"):
        Recipe.load(path)
