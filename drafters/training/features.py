"""Features on disk: one file for all texts, filled in any order, read while it is being filled.

bf16 as it is read, 2 (m + 1) d bytes a token. A mark per text says that it is there, so an interrupted run
goes on where it was.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from drafters.training.corpus import Corpus
from drafters.training.target import Target, TextFeatures


class FeatureSource(Protocol):
    """Where a trainer's features come from."""

    #: target layers whose outputs they are
    layers: tuple[int, ...]

    def ready(self, texts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of the texts whose features are there."""

    def texts(
        self, indices: npt.NDArray[np.int64], spans: Sequence[tuple[int, int]] | None = None
    ) -> TextFeatures:
        """Of these texts, or of positions first to end of each, one behind another, fp32."""


class FeatureCache:
    """Belongs to one corpus, target and choice of layers.

    Raises ValueError for a folder that holds another.
    """

    def __init__(
        self, folder: Path, corpus: Corpus, hidden: int, layers: tuple[int, ...], model: str
    ) -> None:
        self.folder, self.corpus, self.layers = Path(folder), corpus, layers
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check({"corpus": corpus.fingerprint, "layers": list(layers), "hidden": hidden, "model": model})
        tokens = int(corpus.offsets[-1])
        self._layers = self._open("layers.bin", np.uint16, (tokens, len(layers) * hidden))
        self._final = self._open("final.bin", np.uint16, (tokens, hidden))
        self._lse = self._open("lse.bin", np.float32, (tokens,))
        self._done = self._open("done.bin", np.uint8, (len(corpus),))

    def _check(self, identity: dict[str, Any]) -> None:
        path = self.folder / "features.json"
        if not path.exists():
            partial = self.folder / f"features.json.{os.getpid()}"  # others may begin at the same moment
            partial.write_text(json.dumps(identity) + "\n", encoding="utf-8")
            os.replace(partial, path)
        if json.loads(path.read_text(encoding="utf-8")) != identity:
            raise ValueError(f"{self.folder} holds features of another corpus or model; take another folder")

    def _open(self, name: str, dtype: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        path = self.folder / name
        mode: Any = "r+" if path.exists() else "w+"  # a new file is sparse: it grows as it is filled
        return np.memmap(path, dtype=dtype, mode=mode, shape=shape)

    def ready(self, texts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of the texts whose features are there."""
        there: npt.NDArray[np.int64] = texts[self._done[texts] == 1]
        return there

    def put(self, index: int, features: TextFeatures) -> None:
        span = self._span(index)
        self._layers[span] = _to_bits(features.layers)
        self._final[span] = _to_bits(features.final)
        self._lse[span] = features.lse.numpy()
        self._done[index] = 1

    def get(self, index: int, part: tuple[int, int] | None = None) -> TextFeatures:
        """fp32 copies, of positions first to end."""
        span = self._span(index)
        if part is not None:
            span = slice(span.start + part[0], span.start + part[1])
        return TextFeatures(
            _from_bits(self._layers[span]),
            _from_bits(self._final[span]),
            torch.from_numpy(self._lse[span].copy()),
        )

    def texts(
        self, indices: npt.NDArray[np.int64], spans: Sequence[tuple[int, int]] | None = None
    ) -> TextFeatures:
        """See `FeatureSource`."""
        if spans is None:
            parts = [self.get(index) for index in indices.tolist()]
        else:
            parts = [self.get(index, span) for index, span in zip(indices.tolist(), spans, strict=True)]
        return TextFeatures(
            torch.cat([part.layers for part in parts]),
            torch.cat([part.final for part in parts]),
            torch.cat([part.lse for part in parts]),
        )

    def _span(self, index: int) -> slice:
        return slice(int(self.corpus.offsets[index]), int(self.corpus.offsets[index + 1]))

    def fill(
        self, target: Target, texts: npt.NDArray[np.int64], progress: Callable[[int, int, float], None]
    ) -> None:
        """Compute what is missing, calling progress(texts done, texts in all, tokens a second)."""
        missing = texts[self._done[texts] == 0]
        begun, tokens = time.monotonic(), 0
        for number, index in enumerate(missing.tolist(), 1):
            text = self.corpus.text(index)
            self.put(index, target.features(text, self.layers))
            tokens += len(text)
            progress(len(texts) - len(missing) + number, len(texts), tokens / (time.monotonic() - begun))


def _to_bits(values: torch.Tensor) -> npt.NDArray[np.uint16]:
    return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def _from_bits(bits: npt.NDArray[np.uint16]) -> torch.Tensor:
    return torch.from_numpy(bits.copy().view(np.int16)).view(torch.bfloat16).float()
