"""Training batches: a few texts, some anchors in each, and what the target says at every slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from drafters.checkpoint import AnyModel
from drafters.model import DraftModel
from drafters.training.corpus import Corpus
from drafters.training.features import FeatureSource
from drafters.training.losses import BlockTargets


@dataclass(frozen=True)
class Batch:
    """Texts one behind another: S positions, A blocks of n slots.

    `features` [S, m * d]; `following` [S], the token after each position; `anchors` [A] positions among S;
    `tokens` [A] at the anchors; `previous` [A, n] the token before each slot's; `sequence` as
    `Backbone.forward` takes it; `final` [A, n, d], what the target's head sees where it predicts the slot's
    token, and `lse` [A, n] its log-sum-exp.
    """

    features: torch.Tensor
    following: torch.Tensor
    anchors: torch.Tensor
    sequence: tuple[torch.Tensor, torch.Tensor]
    previous: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    final: torch.Tensor
    lse: torch.Tensor

    @property
    def tokens(self) -> torch.Tensor:
        return self.previous[:, 0]


_STRETCH = 16  # positions for each anchor of a text, where anchors lie near each other


def draw_anchors(
    prompt: int, length: int, count: int, rng: np.random.Generator, together: bool = False
) -> npt.NDArray[np.int64]:
    """Up to `count` distinct positions whose own and next token belong to the answer, sorted.

    `together`: in one stretch of the answer, anywhere in it, so that what they see overlaps.
    """
    candidates = np.arange(prompt, length - 1)
    size = count * _STRETCH
    if together and len(candidates) > size:
        # Around a place that may be any, or the answer's beginning and end would hardly ever be drawn.
        place = int(rng.integers(len(candidates)))
        first = min(max(place - int(rng.integers(size)), 0), len(candidates) - size)
        others = np.delete(candidates[first : first + size], place - first)
        return np.sort(np.append(rng.choice(others, count - 1, replace=False), candidates[place]))
    if len(candidates) > count:
        candidates = rng.choice(candidates, count, replace=False)
    return np.sort(candidates)


def make_batch(
    corpus: Corpus,
    source: FeatureSource,
    texts: npt.NDArray[np.int64],
    anchors: int,
    slots: int,
    rng: np.random.Generator,
    device: torch.device | str = "cpu",
    last_hidden: bool = False,
    window: int | None = None,
) -> Batch:
    """`anchors` blocks in each text. Slot j of the block at anchor a predicts the token at a + j + 1.

    `last_hidden`: the features are what the target's head sees, not the layers' outputs. With a `window` the
    blocks of a text lie together, and it is cut to what they see: only distances between positions matter to
    the model.
    """
    ids: list[torch.Tensor] = []
    spans: list[tuple[int, int]] = []
    columns: list[tuple[torch.Tensor, ...]] = []
    base = 0
    for index in texts.tolist():
        whole = corpus.text(index)
        drawn = draw_anchors(int(corpus.prompts[index]), len(whole), anchors, rng, bool(window))
        span = (0, len(whole))
        if window:
            span = max(0, int(drawn[0]) - window), min(len(whole), int(drawn[-1]) + slots + 1)
        spans.append(span)
        text = torch.from_numpy(whole[slice(*span)].astype(np.int64))
        ids.append(text)
        places = torch.from_numpy(drawn - span[0])
        at = places[:, None] + torch.arange(slots)
        inside = at + 1 < len(text)
        at = at.clamp_max(len(text) - 2)
        columns.append((places + base, torch.full_like(places, base), at + base, inside))
        base += len(text)
    stored = source.texts(texts, spans)
    where, start, at, mask = (torch.cat(column) for column in zip(*columns, strict=True))
    text, positions = torch.cat(ids), torch.cat([torch.arange(len(each)) for each in ids])
    text, positions, where, start, at, mask = (
        each.to(device) for each in (text, positions, where, start, at, mask)
    )
    layers, final, lse = stored.layers.to(device), stored.final.to(device), stored.lse.to(device)
    return Batch(
        final if last_hidden else layers,
        text.roll(-1),  # across texts too, where nobody looks
        where,
        (start, positions),
        text[at],
        text[at + 1],
        mask,
        final[at],
        lse[at],
    )


def predict(model: AnyModel, batch: Batch, amp: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The draft's logits [A, n, V'] and confidence logits [A, n] along the batch's own texts.

    `amp`: layers in bf16; the heads stay in full precision, since rounded logits would blur the L1 loss.
    """
    with torch.autocast(batch.features.device.type, torch.bfloat16, enabled=amp):
        if isinstance(model, DraftModel):
            unread = model.config.unread
            blocks = model.slots(batch.tokens, batch.previous.shape[1] + unread)
            hidden = model(batch.features, batch.anchors, blocks, batch.sequence)[:, unread:]
        else:
            hidden = model(batch.features, batch.following, batch.anchors, batch.previous, batch.sequence)
    if isinstance(model, DraftModel):
        return model.block_logits(hidden.float(), batch.previous)
    return model.logits(hidden.float()), None


def targets(batch: Batch, model: AnyModel, t2d: torch.Tensor | None) -> BlockTargets:
    """What the target says over the draft vocabulary. t2d [V]: draft id of a target id, -1 for none."""
    with torch.no_grad():
        logits = batch.final @ model.head.T
    labels = batch.labels if t2d is None else t2d[batch.labels]
    return BlockTargets(logits, batch.lse, labels, batch.mask)
