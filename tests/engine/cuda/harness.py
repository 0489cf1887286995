"""The CUDA executor on the CPU: fake kernels, a stand-in for graphs, and an engine around them."""

from __future__ import annotations

import functools
from typing import Any

import torch

from engine.cuda.executor import CudaExecutor
from engine.cuda.flashinfer import FlashInferBackend
from engine.cuda.sdpa import SdpaBackend
from engine.cuda.verification import DeviceVerification
from engine.models.config import ModelConfig
from engine.models.decoder import FusedDecoder
from engine.worker import Worker
from tests.engine.cuda.fake_flashinfer import fake_wrapper
from tests.engine.cuda.fake_stream import FakeStream
from tests.engine.cuda.tape import TapeGraphs
from tests.engine.harness import Engine, hf_model, reference

POSITIONS = 128


@functools.cache
def bounded(family: str = "llama", dtype: torch.dtype = torch.float64, **changes: Any) -> FusedDecoder:
    """`harness.tiny`'s model, or one of other settings, made for a fixed number of positions."""
    model = hf_model(family, dtype=dtype, num_hidden_layers=2, **changes) if changes else reference(family)
    config = ModelConfig.from_dict(model.config.to_dict())
    return FusedDecoder(config, model.state_dict().items(), dtype, max_positions=POSITIONS)


class Device:
    """A CUDA executor whose every assumption is checked. `attention`: "flashinfer" or "sdpa"."""

    def __init__(
        self, model: FusedDecoder, num_pages: int = 64, page_size: int = 4, attention: str = "flashinfer"
    ) -> None:
        self.stream, self.graphs = FakeStream(), TapeGraphs()
        self.wrapper = fake_wrapper(self.stream)
        backend = (
            FlashInferBackend(self.stream, self.wrapper, workspace=16)
            if attention == "flashinfer"
            else SdpaBackend()
        )
        self.executor = CudaExecutor(model, num_pages, self.stream, backend, self.graphs, page_size)
        self.verification = DeviceVerification(self.stream)

    def engine(self, drafter: Any = None, policy: str = "off", capture: int = 0, **settings: Any) -> Engine:
        """A synchronous engine on it; graphs for up to `capture` rows."""
        executor = self.executor
        if capture:
            executor.capture(capture, 16, drafter.feature_layers if drafter else ())
        engine = Engine(
            executor.model,
            drafter,
            policy,
            num_pages=executor.num_pages,
            page_size=executor.page_size,
            wrap=lambda _: executor,
            **settings,
        )
        engine.worker = Worker(executor, drafter, self.verification)
        return engine
