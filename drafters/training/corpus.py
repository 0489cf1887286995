"""Texts to train on: the target's own answers to prompts, as token ids one behind another."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

#: every so-many-th text is held out
HELD_OUT = 25


@dataclass(frozen=True)
class Corpus:
    """Text i is ids[offsets[i] : offsets[i + 1]], its first `prompts[i]` tokens the prompt."""

    ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    prompts: npt.NDArray[np.int32]
    temperatures: npt.NDArray[np.float32]
    domains: tuple[str, ...]

    @classmethod
    def load(cls, path: Path | str) -> Corpus:
        """Read an answers.npz (arrays ids, length, prompt_length, temperature, domain), or a folder of them.

        Raises FileNotFoundError, or ValueError for a file that is something else.
        """
        path = Path(path)
        files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
        if not files:
            raise FileNotFoundError(f"{path} holds no answers (*.npz)")
        parts = []
        for file in files:
            with np.load(file) as arrays:
                missing = {"ids", "length", "prompt_length", "temperature"} - set(arrays)
                if missing:
                    raise ValueError(f"{file} has no {', '.join(sorted(missing))}")
                parts.append({name: arrays[name] for name in arrays})
        lengths = np.concatenate([part["length"] for part in parts]).astype(np.int64)
        unknown = [np.full(len(part["length"]), "") for part in parts]
        return cls(
            np.concatenate([part["ids"] for part in parts]).astype(np.int32),
            np.concatenate([[0], np.cumsum(lengths)]),
            np.concatenate([part["prompt_length"] for part in parts]).astype(np.int32),
            np.concatenate([part["temperature"] for part in parts]).astype(np.float32),
            tuple(
                str(name)
                for part, none in zip(parts, unknown, strict=True)
                for name in part.get("domain", none)
            ),
        )

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return int((self.offsets[1:] - self.offsets[:-1]).max())

    def text(self, index: int) -> npt.NDArray[np.int32]:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @property
    def fingerprint(self) -> str:
        """Changes with any token or boundary."""
        digest = hashlib.blake2b(self.ids.tobytes(), digest_size=8)
        digest.update(self.offsets.tobytes())
        return digest.hexdigest()

    def split(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(texts to train on, texts held out)."""
        every = np.arange(len(self))
        held = every % HELD_OUT == 0
        return every[~held], every[held]

    @staticmethod
    def shuffled(texts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The order in which texts are prepared, always the same: a part of them is a fair sample."""
        return np.random.default_rng(0).permutation(texts)

    def trainable(self, texts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those whose answers have an anchor: two tokens or more."""
        lengths = self.offsets[texts + 1] - self.offsets[texts]
        chosen: npt.NDArray[np.int64] = texts[lengths - self.prompts[texts] >= 2]
        return chosen

    def frequent(self, count: int) -> npt.NDArray[np.int32]:
        """The `count` most frequent token ids of the answers, in ascending order; the lowest ids fill up."""
        answers = np.concatenate([self.text(i)[self.prompts[i] :] for i in range(len(self))])
        counts = np.bincount(answers, minlength=count)
        return np.sort(np.argsort(-counts, kind="stable")[:count]).astype(np.int32)
