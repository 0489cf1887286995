"""`dspark serve` itself with a real engine, in a process that may be given faults; small models for it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from tests.engine.harness import VOCAB, hf_model
from tests.server.test_process import FORKS

FORKS.set_forkserver_preload(["server.app", "server.wiring", "tests.server.fake_process", __name__])

# Sizes that the kernels run as well as torch.
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
}


@dataclass(frozen=True)
class Faults:
    """What is wrong with a process: what a file may hold at most, seconds that a step takes longer.

    Steps stand still while the file `frozen` exists. `last_step` is how long the drain waits for the last.
    """

    file_limit: int | None = None
    pace: float = 0.0
    frozen: Path | None = None
    last_step: float = 10.0
    environment: Mapping[str, str] = field(default_factory=dict)


def main(arguments: list[str], log: Path, faults: Faults) -> None:
    """Run the command line, its standard error going to a file."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.environ.update(faults.environment)
    from engine import async_engine
    from engine.worker import Worker
    from server.cli import main as dspark

    torch.set_num_threads(1)
    run = Worker.run

    def faulty(worker: Worker, batch: Any) -> Any:
        time.sleep(faults.pace)
        while faults.frozen is not None and faults.frozen.exists():
            time.sleep(0.01)
        return run(worker, batch)

    Worker.run = faulty  # type: ignore[method-assign]
    async_engine._LAST_STEP = faults.last_step
    if faults.file_limit is not None:  # beyond it, writing fails as it does on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (faults.file_limit, resource.RLIM_INFINITY))
    sys.exit(dspark(["serve", *arguments]))


class Server:
    """A process that serves; its log goes to a file."""

    def __init__(self, log: Path, *arguments: str, faults: Faults | None = None, port: int = 0) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = port or free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        flags = [*arguments, "--port", str(self.port), "--threads", "1"]
        self.process = FORKS.Process(target=main, args=(flags, log, faults or Faults()))
        self.process.start()

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path)

    def complete(self, **fields: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=GREEDY | fields, timeout=60)

    def until(self, path: str, condition: Callable[[httpx.Response], object]) -> httpx.Response:
        """Poll `path` until the reply is right, and return that."""
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.HTTPError):
                reply = self.get(path)
                if condition(reply):
                    return reply
            assert self.process.is_alive(), self.log
            assert time.monotonic() < deadline, f"waited in vain: {self.log}"
            time.sleep(0.02)

    def until_ready(self) -> None:
        self.until("/ready", lambda reply: reply.status_code == 200)

    def until_metric(self, name: str, value: int) -> None:
        def shown(reply: httpx.Response) -> bool:
            lines = [line for line in reply.text.splitlines() if line.startswith(f"dspark:{name}{{")]
            return any(float(line.rpartition(" ")[2]) >= value for line in lines)

        self.until("/metrics", shown)

    def signal(self, which: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, which)

    def exit_code(self, timeout: float = 60) -> int | None:
        self.process.join(timeout)
        return self.process.exitcode

    @property
    def log(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        self.process.kill()
        self.process.join()


#: of every request here: texts that can be compared
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


def write_model(folder: Path, bad_token: int | None = None, family: str = "llama") -> Path:
    """A tiny random model whose words are w0 to w63; the embedding of `bad_token` is no number."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = hf_model(family, **SHAPE)
    if bad_token is not None:
        with torch.no_grad():
            model.get_input_embeddings().weight[bad_token, 3] = torch.nan
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def write_draft(folder: Path, target: Path) -> Path:
    """An untrained DSpark model for a target of `write_model`."""
    from drafters.checkpoint import save
    from drafters.config import DraftConfig
    from drafters.model import DraftModel
    from engine.models.config import ModelConfig

    config = DraftConfig.for_target(
        ModelConfig.from_folder(target), mask_token_id=0, rank=8, target_layer_ids=(0, 1), num_layers=1
    )
    rows = torch.zeros(VOCAB, SHAPE["hidden_size"])
    save(DraftModel(config, rows, rows), folder, torch.float32)
    return folder


def prompt(size: int, seed: int = 0, without: int | None = None) -> list[int]:
    """Random tokens."""
    tokens = np.random.default_rng(seed).integers(3, VOCAB, size)
    return [int(token) for token in np.where(tokens == without, 2, tokens)]
