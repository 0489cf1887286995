"""Features recomputed whenever they are asked for: for a GPU, where that costs less than a disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from drafters.training.corpus import Corpus
from drafters.training.target import TextFeatures

_HEAD_ROWS = 4096  # whose logits are held at a time


class LiveFeatures:
    """A `FeatureSource` without a disk. Loads the target once more, in `dtype`."""

    def __init__(
        self,
        folder: Path,
        corpus: Corpus,
        layers: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self.corpus, self.layers, self.device = corpus, layers, device
        self._decoder, self._head = model.model.to(device).eval(), model.lm_head.weight.to(device).float()
        self._captured: dict[int, torch.Tensor] = {}
        for layer in layers:
            module = self._decoder.embed_tokens if layer == -1 else self._decoder.layers[layer]
            module.register_forward_hook(self._capture(layer))

    def _capture(self, layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            self._captured[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    def ready(self, texts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """All of them."""
        return texts

    @torch.no_grad()
    def texts(
        self, indices: npt.NDArray[np.int64], spans: Sequence[tuple[int, int]] | None = None
    ) -> TextFeatures:
        """Of these texts, or of parts of them, one behind another; one padded forward pass."""
        texts = [torch.from_numpy(self.corpus.text(i).astype(np.int64)) for i in indices.tolist()]
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(self.device)
        lengths = torch.tensor([len(text) for text in texts], device=self.device)
        # Padding on the right needs no mask: causal attention never looks there.
        place = torch.arange(ids.shape[1], device=self.device)
        inside = place < lengths[:, None]
        if spans is not None:
            first, end = torch.tensor(spans, device=self.device).T[..., None]
            inside = (place >= first) & (place < end)
        final = self._decoder(input_ids=ids, use_cache=False).last_hidden_state[inside].float()
        layers = [self._captured[layer][inside] for layer in self.layers]
        # In full precision, as the trainer computes logits: or probabilities would not add up to 1.
        parts = [(rows @ self._head.T).logsumexp(-1) for rows in torch.split(final, _HEAD_ROWS)]
        return TextFeatures(torch.cat(layers, -1).float(), final, torch.cat(parts))
