"""What a draft model is: the shapes of its layers, its block, its heads.

Read from and written as DeepSpec's config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from drafters.dialects import DEEPSPEC, in_one_form
from drafters.eagle_dialects import OURS as EAGLE3
from engine.models.config import ModelConfig

HeadKind = Literal["none", "vanilla", "gated", "rnn"]
Family = Literal["block", "eagle3", "mtp"]

#: names of the classes in config.json: DeepSpec's for DSpark and its own DFlash baselines, the others ours
ARCHITECTURES: dict[Family, str] = {
    "block": DEEPSPEC,
    "eagle3": EAGLE3,
    "mtp": "Qwen3MTPModel",
}


@dataclass(frozen=True, slots=True)
class ChainLayout:
    """How Eagle3 layers differ between those who train them. The defaults are DeepSpec's, and ours.

    `qk_norm`: q and k are normed, as Qwen3's are and Llama's are not. `norm_before_fc` norms all features of
    a position as one before they are fused, `fc_norm` each layer's by itself. `norm_before_residual`: the
    residual stream begins with the normed feature. `norm_output`: a chain is fed its output as the head sees
    it, after the final norm.
    """

    qk_norm: bool = True
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A drafter over features of a target: a whole block at once, or a chain (`family`).

    `layers` holds the shapes of the draft layers (Qwen3-type: q and k are normed), at the target's
    dimensions. `block_size` is the number of slots of a block. `target_layer_ids` are 0-based outputs of
    target layers, -1 the embedding. With `sample_from_anchor` (DSpark's layout) slot j predicts the token
    after its position, the anchor's slot too; without (DFlash's own) each mask predicts the token in its
    place. `window` limits the context that a block sees (None: all of it). `draft_vocab_size` is the head's,
    where it is restricted to part of the target's vocabulary. `chain` is for Eagle3 alone.
    """

    layers: ModelConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    head: HeadKind = "vanilla"
    rank: int = 0
    confidence: bool = True
    confidence_with_markov: bool = True
    window: int | None = None
    draft_vocab_size: int | None = None
    family: Family = "block"
    sample_from_anchor: bool = True
    chain: ChainLayout = ChainLayout()

    @property
    def gamma(self) -> int:
        """Tokens drafted at most."""
        return self.block_size - self.unread

    @property
    def unread(self) -> int:
        """Slots before the first that predicts: in DFlash's own layout the anchor's predicts nothing."""
        return 0 if self.sample_from_anchor else 1

    @property
    def vocab_size(self) -> int:
        """Of the draft's head."""
        return self.draft_vocab_size or self.layers.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.layers.hidden_size

    @property
    def confidence_size(self) -> int:
        """Inputs of the confidence head: h, and W1 of the token before."""
        return self.hidden_size + (self.rank if self.confidence_with_markov else 0)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], target_layers: int | None = None) -> DraftConfig:
        """Parse a config in any of `drafters.dialects`. Raises UnsupportedModel or ValueError.

        `target_layers`: how many the target has, for configs that leave out which of them are read.
        """
        try:
            return cls._parsed(in_one_form(raw, target_layers))
        except KeyError as error:
            raise ValueError(f"the draft model's config.json lacks {error}") from None

    @classmethod
    def _parsed(cls, raw: Mapping[str, Any]) -> DraftConfig:
        layers = ModelConfig.from_dict({**raw, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]})
        rank = int(raw.get("markov_rank") or 0)
        kind: HeadKind = raw.get("markov_head_type") or "vanilla" if rank else "none"
        if kind not in ("none", "vanilla", "gated", "rnn"):
            raise ValueError(f"unknown markov_head_type {kind!r}")
        if not layers.fused:
            raise ValueError(
                "the draft model's layers are of a kind that is not supported: only unquantised ones with "
                "silu and plain, linear or llama3 rotary embeddings are"
            )
        window = _window(raw, layers)
        names = raw.get("architectures") or [ARCHITECTURES["block"]]
        family = next((family for family, name in ARCHITECTURES.items() if name == names[0]), None)
        if family is None:
            raise ValueError(
                f"unknown kind of draft model {names[0]!r}; known: {', '.join(ARCHITECTURES.values())}"
            )
        return cls(
            layers=replace(layers, sliding_windows=(window,) * layers.num_layers),
            block_size=int(raw["block_size"]),
            mask_token_id=int(raw["mask_token_id"]),
            target_layer_ids=tuple(int(i) for i in raw["target_layer_ids"]),
            head=kind,
            rank=rank,
            confidence=bool(raw.get("enable_confidence_head", False)),
            confidence_with_markov=bool(raw.get("confidence_head_with_markov", rank > 0)) and rank > 0,
            window=window,
            draft_vocab_size=raw.get("draft_vocab_size"),
            family=family,
            sample_from_anchor=bool(raw.get("sample_from_anchor", True)),
            chain=ChainLayout(**raw.get("chain_layout", {})),
        )

    @classmethod
    def from_folder(cls, folder: Path | str, target_layers: int | None = None) -> DraftConfig:
        """See `from_dict`. Raises FileNotFoundError as well."""
        raw = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return cls.from_dict(raw, target_layers)

    @classmethod
    def for_target(
        cls,
        target: ModelConfig,
        *,
        num_layers: int = 2,
        block_size: int = 7,
        mask_token_id: int,
        target_layer_ids: tuple[int, ...] | None = None,
        head: HeadKind = "vanilla",
        rank: int = 64,
        window: int | None = 128,
        draft_vocab_size: int | None = None,
        family: Family = "block",
        sample_from_anchor: bool = True,
        kv_heads: int | None = None,
    ) -> DraftConfig:
        """A fresh draft model at a target's dimensions, but for `kv_heads` if they are given.

        Layer ids default to DFlash's rule: evenly spaced.
        """
        if family not in ARCHITECTURES:
            raise ValueError(f"unknown family {family!r}; known: {', '.join(ARCHITECTURES)}")
        if family != "block":
            num_layers, head, sample_from_anchor = 1, "none", True
        if family == "mtp":
            block_size, target_layer_ids = 1, (target.num_layers - 1,)
        raw = {
            "architectures": [ARCHITECTURES[family]],
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "intermediate_size": target.intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": target.num_heads,
            "num_key_value_heads": kv_heads or target.num_kv_heads,
            "head_dim": target.head_dim,
            "rms_norm_eps": target.rms_eps,
            "rope_theta": target.rope_theta,
            "rope_scaling": target.rope_scaling,
            "max_position_embeddings": target.max_position,
            "tie_word_embeddings": False,
            "num_target_layers": target.num_layers,
            "block_size": block_size,
            "mask_token_id": mask_token_id,
            "target_layer_ids": target_layer_ids or spaced_layers(target.num_layers, 3),
            "markov_rank": rank if head != "none" else 0,
            "markov_head_type": head if head != "none" else None,
            "enable_confidence_head": head != "none",
            "confidence_head_with_markov": head != "none",
            "sample_from_anchor": sample_from_anchor,
            "context_window": window,
            "draft_vocab_size": draft_vocab_size,
        }
        return cls.from_dict(raw)

    def to_dict(self) -> dict[str, Any]:
        """config.json in DeepSpec's dialect, with additions.

        `context_window` and `chain_layout` are ours; `sample_from_anchor` and `draft_vocab_size` are the
        speculators format's.
        """
        shapes = self.layers
        layout = {"chain_layout": asdict(self.chain)} if self.family == "eagle3" else {}
        return {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": "qwen3",
            "vocab_size": shapes.vocab_size,
            "hidden_size": shapes.hidden_size,
            "intermediate_size": shapes.intermediate_size,
            "num_hidden_layers": shapes.num_layers,
            "num_attention_heads": shapes.num_heads,
            "num_key_value_heads": shapes.num_kv_heads,
            "head_dim": shapes.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": shapes.rms_eps,
            "rope_theta": shapes.rope_theta,
            "rope_scaling": shapes.rope_scaling,
            "max_position_embeddings": shapes.max_position,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "layer_types": ["full_attention"] * shapes.num_layers,
            "num_target_layers": shapes.raw.get("num_target_layers"),
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "num_anchors": shapes.raw.get("num_anchors", 512),
            "markov_rank": self.rank,
            "markov_head_type": self.head if self.head != "none" else None,
            "enable_confidence_head": self.confidence,
            "confidence_head_with_markov": self.confidence_with_markov,
            "sample_from_anchor": self.sample_from_anchor,
            "context_window": self.window,
            "draft_vocab_size": self.draft_vocab_size,
            **layout,
        }


def _window(raw: Mapping[str, Any], layers: ModelConfig) -> int | None:
    """Positions before the block that its layers see: our own key, or sliding attention in all of them."""
    if "context_window" in raw:
        return None if raw["context_window"] is None else int(raw["context_window"])
    windows = set(layers.sliding_windows)
    if len(windows) > 1:
        raise ValueError("draft models that mix full and sliding attention are not supported")
    return windows.pop()


def spaced_layers(target_layers: int, count: int) -> tuple[int, ...]:
    """DFlash's rule: `count` layers, evenly spaced from layer 1 to layer n - 3, rounded."""
    if count == 1:
        return (target_layers // 2,)
    first, last = 1, target_layers - 3
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))
