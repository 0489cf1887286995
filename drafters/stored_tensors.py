"""A draft checkpoint's tensors as others store them, brought under our names and meanings."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from drafters.config import DraftConfig

#: parts of an Eagle3 layer that have names of their own here; the rest is `layers.0.` less that prefix
_EAGLE_PARTS = {"input_layernorm.weight": "enorm.weight", "hidden_norm.weight": "hnorm.weight"}
_OWN_COPIES_OF_TARGET = ("verifier_lm_head.", "verifier_norm.")
#: two roundings of one value to bf16 differ by less, relatively
_ROUNDING = 2**-7
_AT_ONCE = 4096  # rows that are compared at a time: both in fp32 would be gigabytes


def under_our_names(config: DraftConfig, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that we read, `d2t` [V'] among them as target ids. Raises ValueError for a bad mapping."""
    tensors: dict[str, torch.Tensor] = {}
    for full, value in stored.items():
        name = full.removeprefix("model.")
        if name in ("t2d", "d2t") or name.startswith(_OWN_COPIES_OF_TARGET) or "rotary_emb." in name:
            continue
        tensors[_chain_name(name) if config.family == "eagle3" else name] = value
    if "d2t" in stored:
        ids = target_ids(stored["d2t"], config.layers.vocab_size, stored.get("t2d"))
        if not _all_of_them(ids, config.layers.vocab_size):
            tensors["d2t"] = ids
    elif config.draft_vocab_size is not None:
        raise ValueError(f"a draft vocabulary of {config.draft_vocab_size} tokens, but no d2t says which")
    return tensors


def _chain_name(name: str) -> str:
    for prefix in ("layers.0.", "midlayer."):
        if name.startswith(prefix):
            part = name.removeprefix(prefix)
            return _EAGLE_PARTS.get(part, part)
    return name


def target_ids(d2t: torch.Tensor, vocab: int, t2d: torch.Tensor | None = None) -> torch.Tensor:
    """Target ids [V'] of a draft vocabulary that is stored as ids, or as offsets from the draft's own ids.

    `t2d` [V], true for target tokens that the draft knows, decides where it is there. Without it, offsets are
    what everybody writes who writes a d2t, so ids they are only where offsets make no sense: they would name
    a token twice, or none. Raises ValueError if neither reading does.
    """
    d2t = d2t.long()
    known = None if t2d is None or t2d.dtype != torch.bool else t2d.nonzero().flatten()
    for ids in (d2t + torch.arange(len(d2t)), d2t):
        distinct = torch.unique(ids)  # sorted
        if len(distinct) < len(ids) or not 0 <= int(distinct[0]) <= int(distinct[-1]) < vocab:
            continue
        if known is None or torch.equal(distinct, known):
            return ids
    raise ValueError("d2t names no set of the target's tokens, neither as ids nor as offsets")


def _all_of_them(ids: torch.Tensor, vocab: int) -> bool:
    return len(ids) == vocab and bool((ids == torch.arange(vocab)).all())


def differs(stored: torch.Tensor | None, targets: torch.Tensor) -> bool:
    """Whether a checkpoint's embedding or head is its own, and no copy of the target's [n, d] on any device.

    Raises ValueError if the two cannot belong together.
    """
    if stored is None:
        return False
    if stored.shape != targets.shape:
        raise ValueError(
            f"the checkpoint's embedding or head is {tuple(stored.shape)}, the target's is "
            f"{tuple(targets.shape)}: it is for another target"
        )
    pieces = zip(torch.split(stored, _AT_ONCE), torch.split(targets, _AT_ONCE), strict=True)
    return not all(
        torch.allclose(a.float(), b.to(a.device).float(), rtol=_ROUNDING, atol=1e-6) for a, b in pieces
    )


def check_shapes(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless `found` has what a model wants, in its shapes, and nothing else."""
    missing, unexpected = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or unexpected:
        raise ValueError(f"missing {missing}, unexpected {unexpected}")
    for name, value in found.items():
        if value.shape != wanted[name].shape:
            raise ValueError(f"{name} is {tuple(value.shape)}, but must be {tuple(wanted[name].shape)}")
