"""The training loop: resumable at any moment, validated while it runs; what is kept is averaged weights."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from drafters import checkpoint
from drafters.config import DraftConfig
from drafters.evaluation.plots import can_plot, training_curve
from drafters.model import DraftModel
from drafters.training.batches import Batch, make_batch, predict, targets
from drafters.training.corpus import Corpus
from drafters.training.features import FeatureSource
from drafters.training.losses import block_losses, expected_length, total_weight
from drafters.training.ranks import Ranks
from drafters.training.recipe import Recipe
from drafters.training.target_start import LayerTensors, begin_as_target, fits
from drafters.training.warm_start import bigram_factors, feature_scale, teach_bigrams
from engine.models.config import ModelConfig

Progress = Callable[[str], None]

_VALIDATION_TEXTS = 40
_FEW_TEXTS = 8


@dataclass(frozen=True)
class Validation:
    """On held-out texts, teacher-forced at uniform anchors: tau at T = 1 and T = 0, loss, c* by position.

    tau at T = 0 compares likeliest tokens of the draft vocabulary; that of a reduced one is a little hopeful.
    """

    tau: float
    tau_greedy: float
    loss: float
    overlap: list[float]


class Borrowed(Protocol):
    """What a draft model takes from its target, in fp32; see `TargetTensors`."""

    config: ModelConfig
    embedding: torch.Tensor
    head: torch.Tensor
    norm: torch.Tensor

    def last_layers(self, count: int) -> Sequence[LayerTensors]:
        """Tensors of so many layers by their names within them."""


class Trainer:
    """All lives in `folder`: recipe.json, state.pt, metrics.csv, curve.png, draft/ (the averaged weights)."""

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        corpus: Corpus,
        source: FeatureSource,
        target: Borrowed,
        progress: Progress = print,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.ranks = Ranks(self.device)
        self.folder, self.recipe, self.progress = folder, recipe, progress
        self.corpus, self.source = corpus, source
        folder.mkdir(parents=True, exist_ok=True)
        train, held_out = corpus.split()
        self.train_texts = corpus.trainable(corpus.shuffled(train)[: recipe.most_texts])
        self.held_out = corpus.trainable(held_out)
        torch.manual_seed(recipe.seed)
        state = self._saved()
        d2t = self._draft_vocabulary(state)
        config = DraftConfig.for_target(
            target.config,
            num_layers=recipe.num_layers,
            block_size=recipe.block_size,
            mask_token_id=recipe.mask_token_id,
            target_layer_ids=source.layers,
            head=recipe.head,
            rank=recipe.rank,
            window=recipe.window,
            draft_vocab_size=None if d2t is None else len(d2t),
            family=recipe.family,
            sample_from_anchor=recipe.sample_from_anchor,
            kv_heads=recipe.kv_heads if recipe.family == "block" else None,
        )
        self.t2d: torch.Tensor | None = None
        if d2t is not None:
            self.t2d = torch.full((target.config.vocab_size,), -1, device=self.device)
            self.t2d[d2t] = torch.arange(len(d2t), device=self.device)
        head = target.head if d2t is None else target.head[d2t]
        self.model = checkpoint.build(config, target.embedding, head, d2t).to(self.device)
        self.average = checkpoint.build(config, target.embedding, head, d2t).to(self.device)
        self.scale: torch.Tensor | None = None
        if state is None:
            self._start(d2t, target)
        self.average.load_state_dict(self.model.state_dict())
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, fused=True
        )
        self.step = 0
        self.seconds = 0.0
        if self.ranks.first:
            recipe.save(folder / "recipe.json")
        if state is not None:
            self._resume(state)
        self.ranks.agree(self.step, [*self.model.state_dict().values(), *self.average.state_dict().values()])

    def _draft_vocabulary(self, state: dict[str, Any] | None) -> torch.Tensor | None:
        """Target ids [V'] of a reduced vocabulary: the run's own, where it starts from, or frequent ones."""
        if state is not None:
            known: torch.Tensor | None = state["d2t"]
            return None if known is None else known.cpu()
        if self.recipe.start_from is not None:
            return checkpoint.load_tensors(Path(self.recipe.start_from))[1].get("d2t")
        if self.recipe.draft_vocab is None:
            return None
        return torch.from_numpy(self.corpus.frequent(self.recipe.draft_vocab)).long()

    def _start(self, d2t: torch.Tensor | None, target: Borrowed) -> None:
        """A fresh run's first weights."""
        model, recipe = self.model, self.recipe
        if recipe.warm_start and model.config.family != "mtp":
            scale = feature_scale(self.source, self.train_texts).to(self.device)
            self.scale = self.ranks.sum(scale) / self.ranks.size  # the same in all processes
        if recipe.start_from is not None:
            config, tensors = checkpoint.load_tensors(Path(recipe.start_from))
            if config.to_dict() != model.config.to_dict():
                raise ValueError(f"{recipe.start_from} is another kind of model than the recipe says")
            known = {name: tensors[name].to(self.device).float() for name in model.state_dict()}
            if self.scale is not None:
                known["fc.weight"] = known["fc.weight"] * self.scale
            model.load_state_dict(known)
        else:
            if recipe.target_start and fits(model, target.config):
                self._begin_as_target(target)
            if recipe.warm_start and isinstance(model, DraftModel) and model.markov_head is not None:
                vocab, rank = model.config.layers.vocab_size, model.config.rank
                pair = bigram_factors(self.corpus, self.train_texts, vocab, d2t, rank)
                teach_bigrams(model.markov_head, *(factor.to(self.device) for factor in pair))

    def _begin_as_target(self, target: Borrowed) -> None:
        ready = self.source.ready(self.train_texts)[:_FEW_TEXTS]
        if not len(ready):
            return
        config, size = self.model.config, target.config.hidden_size
        layers = [
            {name: value.to(self.device) for name, value in layer.items()}
            for layer in target.last_layers(config.layers.num_layers)
        ]
        stored = [self.source.texts(ready[i : i + 1]) for i in range(len(ready))]
        # A text's first token is an attention sink, unlike any other.
        read = [(each.final if config.family == "mtp" else each.layers[:, -size:])[1:] for each in stored]
        hidden = torch.cat(read).to(self.device).float()
        scale = torch.ones(size, device=self.device)
        if self.scale is not None:
            scale = self.scale.expand(len(config.target_layer_ids) * size)[-size:]
        begin_as_target(self.model, target.config, layers, target.norm.to(self.device), hidden, scale)

    # ---- state

    @property
    def _state_file(self) -> Path:
        return self.folder / "state.pt"

    def _saved(self) -> dict[str, Any] | None:
        if not self._state_file.exists():
            return None
        state: dict[str, Any] = torch.load(self._state_file, weights_only=True, map_location=self.device)
        return state

    def _resume(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scale = state["scale"]
        self.step, self.seconds = int(state["step"]), float(state["seconds"])
        self.progress(f"resumed at step {self.step}, {self.seconds:.0f} s of training behind it")

    def save(self) -> None:
        """Write state and draft; an interruption leaves the files of the last save."""
        partial = self._state_file.with_suffix(".partial")
        torch.save(
            {
                "model": self.model.state_dict(),
                "average": self.average.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scale": self.scale,
                "d2t": self.model.d2t,
                "step": self.step,
                "seconds": self.seconds,
            },
            partial,
        )
        os.replace(partial, self._state_file)
        checkpoint.save(self.average, self.folder / "draft", feature_scale=self.scale)

    # ---- the loop

    def run(self, save_every: float = 300.0, until: float = float("inf")) -> None:
        """Train to the recipe's last step, or for `until` seconds.

        Validate and save every `save_every` seconds.
        """
        begun = saved = time.monotonic()
        parts: list[tuple[float, ...]] = []
        late = False
        while self.step < self.recipe.steps and not late:
            before = time.monotonic()
            *measured, votes = self.train_step(before - begun >= until)
            parts.append(tuple(measured))
            late = votes > 0
            self.seconds += time.monotonic() - before
            if time.monotonic() - saved >= save_every or self.step == self.recipe.steps:
                self._report(parts)
                parts, saved = [], time.monotonic()
        if parts:
            self._report(parts)

    def _batch(self, rng: np.random.Generator) -> Batch:
        ready = self.source.ready(self.train_texts)
        if not len(ready):
            raise ValueError("no features are there yet")
        most, least = self.model.config.gamma, self.recipe.least_slots
        slots = most if least is None else int(rng.integers(least, most + 1))
        anchors = self.recipe.anchors * most // slots if self.recipe.fill else self.recipe.anchors
        return self._make(rng.choice(ready, self.recipe.texts), anchors, slots, rng)

    def _make(
        self, texts: npt.NDArray[np.int64], anchors: int, slots: int, rng: np.random.Generator
    ) -> Batch:
        config = self.model.config
        what = (self.corpus, self.source, texts, anchors, slots, rng, self.device)
        batch = make_batch(*what, last_hidden=config.family == "mtp", window=config.window)
        return batch if self.scale is None else replace(batch, features=batch.features / self.scale)

    def train_step(self, stop: bool = False) -> list[float]:
        """Loss, its parts and tau, of all processes; and how many of them want this to be the last step."""
        # A generator per step: a resumed run draws what an uninterrupted one would have drawn.
        rng = np.random.default_rng(self.ranks.key(self.recipe.seed, self.step))
        batch = self._batch(rng)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.step)
        logits, confidence = predict(self.model, batch, self.recipe.amp)
        weight = self.ranks.sum(total_weight(batch.mask))
        losses = block_losses(logits, confidence, targets(batch, self.model, self.t2d), weight)
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(losses.total)
        self.ranks.sum_gradients(self.model.parameters())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.step += 1
        # Young averages forget faster, or they would remember the random start.
        decay = min(self.recipe.ema, (1.0 + self.step) / (10.0 + self.step))
        with torch.no_grad():
            for mean, value in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(value, 1.0 - decay)
        tau = expected_length(losses.overlap, batch.mask).mean() / self.ranks.size
        parts = (losses.total, losses.cross_entropy, losses.l1, losses.confidence, tau, tau.new_tensor(stop))
        measured: list[float] = self.ranks.sum(torch.stack([part.detach() for part in parts])).tolist()
        return measured

    @torch.no_grad()
    def validate(self) -> Validation | None:
        """The averaged weights on held-out texts; the same anchors every time. None while none is ready."""
        texts = self.source.ready(self.held_out)[:_VALIDATION_TEXTS]
        sums: list[tuple[float, ...]] = []
        overlaps, counts, model = [], [], self.average
        for index in texts.tolist():
            rng = np.random.default_rng(index)
            batch = self._make(np.array([index]), 24, model.config.gamma, rng)
            logits, confidence = predict(model, batch)
            wanted = targets(batch, model, self.t2d)
            losses = block_losses(logits, confidence, wanted)
            same = (logits.argmax(-1) == wanted.logits.argmax(-1)).float()
            sums.append(
                (
                    float(expected_length(losses.overlap, batch.mask).mean()),
                    float(expected_length(same, batch.mask).mean()),
                    float(losses.total),
                )
            )
            overlaps.append((losses.overlap * batch.mask).sum(0).cpu())
            counts.append(batch.mask.sum(0).cpu())
        if not sums:
            return None
        tau, greedy, loss = (sum(column) / len(column) for column in zip(*sums, strict=True))
        overlap = torch.stack(overlaps).sum(0) / torch.stack(counts).sum(0)
        return Validation(tau, greedy, loss, overlap.tolist())

    def _report(self, parts: list[tuple[float, ...]]) -> None:
        if not self.ranks.first:
            return
        self.save()
        validation = self.validate()
        means = [sum(column) / len(column) for column in zip(*parts, strict=True)]
        row = {
            "step": self.step,
            "seconds": round(self.seconds, 1),
            "texts": len(self.source.ready(self.train_texts)),
            "rate": self.recipe.rate(self.step),
            **dict(zip(("loss", "ce", "l1", "bce", "tau_train"), means, strict=True)),
        }
        gamma = self.model.config.gamma
        if validation is None:  # the same columns all the same
            unknown = float("nan")
            validation = Validation(unknown, unknown, unknown, [unknown] * gamma)
        row |= {
            "loss_held_out": validation.loss,
            "tau_held_out": validation.tau,
            "tau_greedy_held_out": validation.tau_greedy,
            **{f"overlap_{k + 1}": value for k, value in enumerate(validation.overlap)},
        }
        path = self.folder / "metrics.csv"
        fresh = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(row))
            if fresh:
                writer.writeheader()
            writer.writerow(row)
        if can_plot():
            training_curve(path, self.folder / "curve.png")
        self.progress(
            f"step {self.step}/{self.recipe.steps}  {self.seconds / 60:.0f} min  loss {row['loss']:.3f}  "
            f"tau train {row['tau_train']:.3f}  held out {row['tau_held_out']:.3f} (T=1) "
            f"{row['tau_greedy_held_out']:.3f} (T=0)  texts {row['texts']}"
        )
