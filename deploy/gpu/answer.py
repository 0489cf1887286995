"""Answers of a model to many prompts at once: left-padded batches through transformers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from deploy.gpu.parcel import batches


@torch.inference_mode()
def answer(
    model: Any,
    prompts: Sequence[np.ndarray],
    heats: np.ndarray,
    *,
    max_tokens: int,
    stop: Sequence[int],
    seed: int,
    deadline: float,
    rows: int = 1024,
    progress: Callable[[str], None] = print,
) -> dict[int, np.ndarray]:
    """Answers by prompt index, with the stop token that ended them.

    heats [n]: each prompt's temperature, 0 is greedy. Only the first batch may begin after `deadline`, a
    time.monotonic().
    """
    device = next(model.parameters()).device
    noise = torch.Generator(device).manual_seed(seed)
    lengths = np.array([len(prompt) for prompt in prompts])
    groups = list(batches(lengths + max_tokens, 1 << 20, rows))
    # In a random order, so that what the deadline cuts off is of no special length.
    order = np.random.default_rng(seed).permutation(len(groups))
    out: dict[int, np.ndarray] = {}
    for number, group in enumerate(order.tolist(), 1):
        if out and time.monotonic() > deadline:
            break
        indices = groups[group].tolist()
        texts = _answer([prompts[i] for i in indices], heats[indices], model, max_tokens, stop, noise)
        out |= dict(zip(indices, texts, strict=True))
        progress(f"answers: {number}/{len(groups)} batches, {len(out)}/{len(prompts)} prompts")
    return out


def _answer(
    prompts: list[np.ndarray],
    heats: np.ndarray,
    model: Any,
    max_tokens: int,
    stop: Sequence[int],
    noise: torch.Generator,
) -> list[np.ndarray]:
    device, width = noise.device, max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, width - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    heat = torch.from_numpy(heats.astype(np.float32)).to(device)[:, None]
    ends = torch.tensor(sorted(stop), device=device)
    over = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    past, steps = None, []
    for _ in range(max_tokens):
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=past,
            use_cache=True,
            logits_to_keep=1,
        )
        past, logits = output.past_key_values, output.logits[:, -1].float()
        drawn = torch.multinomial(torch.softmax(logits / heat.clamp_min(1e-3), -1), 1, generator=noise)[:, 0]
        token = torch.where(heat[:, 0] > 0, drawn, logits.argmax(-1))
        steps.append(torch.where(over, -1, token))
        over |= torch.isin(token, ends)
        ids, positions = token[:, None], positions[:, -1:] + 1
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
        if len(steps) % 16 == 0 and bool(over.all()):
            break
    texts = torch.stack(steps, 1).cpu().numpy()
    return [text[text >= 0].astype(np.int32) for text in texts]
