"""Everything that a training run depends on, kept beside its checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from drafters.config import Family, HeadKind


@dataclass(frozen=True, slots=True)
class Recipe:
    """`steps` fixes the cosine; `ema` is the decay of the averaged weights, which are what is kept.

    `family` and `head` say which drafter; a chain has one layer, and MTP-1 one slot, whatever stands here.
    `kv_heads` of a block drafter: more than the target's (None) carry more of a place's features to slots.
    A step trains `anchors` blocks in each of `texts` texts (few blocks of many texts teach more than many of
    few: they are less alike), drawn from the first `most_texts` of a fixed order (None: all), so that runs
    with the same limit see the same data. With `least_slots` each step's
    blocks have a random number of slots from there to `block_size`: cheaper, and a draft of fewer slots than
    gamma is no surprise to the model; with `fill` there are as many more of them as they are shorter, so that
    the first drafts, which matter most, see more of the texts at the same cost. `amp`: the layers'
    products in bf16.
    `warm_start` and `target_start`: see the modules of these names. `start_from`: the folder of a draft model
    to go on from.
    """

    family: Family = "block"
    head: HeadKind = "vanilla"
    rank: int = 64
    num_layers: int = 2
    block_size: int = 7
    sample_from_anchor: bool = True
    window: int | None = 128
    kv_heads: int | None = None
    draft_vocab: int | None = 16384
    mask_token_id: int = 16
    feature_layers: tuple[int, ...] = ()
    steps: int = 60_000
    texts: int = 8
    anchors: int = 4
    least_slots: int | None = None
    fill: bool = False
    most_texts: int | None = None
    learning_rate: float = 1.5e-3
    warmup: float = 0.04
    weight_decay: float = 0.0
    clip: float = 1.0
    ema: float = 0.999
    amp: bool = False
    warm_start: bool = True
    target_start: bool = True
    start_from: str | None = None
    seed: int = 42

    def rate(self, step: int) -> float:
        """Learning rate: linear warm-up, then a cosine to 0."""
        ramp = max(1, round(self.warmup * self.steps))
        if step < ramp:
            return self.learning_rate * (step + 1) / ramp
        done = min(1.0, (step - ramp) / max(1, self.steps - ramp))
        return self.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Recipe:
        """Raises ValueError for a file with unknown or unusable entries."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        try:
            return cls(**{**raw, "feature_layers": tuple(raw.get("feature_layers", ()))})
        except TypeError as error:
            raise ValueError(f"{path}: {error}") from None
