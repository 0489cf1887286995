"""How a CUDA executor gets its pages and graphs, on fakes; and from a folder to texts."""

from __future__ import annotations

import pytest
import torch

from drafters.device_blocks import DeviceDraftBlocks
from engine.cuda.flashinfer import FlashInferBackend, FlashInferMissing
from engine.cuda.memory import Usage
from engine.cuda.sdpa import SdpaBackend
from engine.laps import HostLaps
from engine.models.weights import load_tensors
from engine.native.loader import supported
from engine.outputs import NullObserver
from engine.params import SamplingParams
from engine.request import Request
from engine.worker import Worker
from server import executors
from server.settings import Settings
from server.wiring import build_parts
from tests.drafters.test_device_blocks import Pair
from tests.drafters.test_loading import draft  # noqa: F401  (a fixture)
from tests.engine import real
from tests.engine.cuda.fake_flashinfer import fake_wrapper
from tests.engine.cuda.fake_stream import FakeStream
from tests.engine.cuda.tape import TapeGraphs

pytestmark = pytest.mark.skipif(
    not supported(), reason="the draft model's reference lives beside the kernels"
)


@pytest.fixture
def pair(monkeypatch) -> Pair:
    monkeypatch.setattr(executors.torch.cuda, "is_available", lambda: True)
    return Pair(window=16)


def fitted(pair: Pair, lines: list[str] | None = None, **settings) -> int | None:
    worker = Worker(pair.device.executor, pair.drafter(), pair.device.verification)
    config = pair.decoder.config
    chosen = Settings(max_num_seqs=3, max_num_batched_tokens=20, **settings)
    gamma = pair.gamma
    return executors.fit(worker, chosen, config, gamma, gamma, (lines if lines is not None else []).append)


def test_so_many_pages_as_were_asked_for(pair):
    assert fitted(pair, num_pages=7) == 7 * 16
    assert pair.device.executor.num_pages == pair.blocks.pool.pages == 7
    assert pair.device.executor.row_buckets[-1] == 3 * (1 + pair.gamma)
    assert pair.device.executor._recorded.feature_layers == (0, 1, 2)
    assert pair.blocks._sizes == (1, 2, 3)


def test_memory_for_the_kv_cache_is_shared_by_target_and_drafter(pair):
    page = pair.device.executor.pool.page_bytes + pair.blocks.pool.page_bytes
    fitted(pair, kv_cache_memory=9.5 * page / 2**30)
    assert pair.device.executor.num_pages == pair.blocks.pool.pages == 9


def test_pages_follow_from_a_rehearsal_of_the_largest_steps(pair, monkeypatch):
    page = pair.device.executor.pool.page_bytes + pair.blocks.pool.page_bytes
    rehearsed = []

    def measured(device, rehearse):
        plain = pair.device.executor.forward
        monkeypatch.setattr(
            pair.device.executor,
            "forward",
            lambda batch, layers=(): rehearsed.append(batch.rows) or plain(batch, layers),
        )
        rehearse()
        return Usage(total=100 * page, others=0, rest=30 * page, peak=35 * page)

    monkeypatch.setattr(executors, "measured", measured)
    lines: list[str] = []
    fitted(pair, lines, gpu_memory_utilization=0.5)
    assert pair.device.executor.num_pages == 50 - 30 - 2 * 5
    assert rehearsed == [20, 18, 3]
    assert "GiB for it" in lines[0]
    with pytest.raises(executors.BadSettings, match=r"--gpu-memory-utilization 0.3 leaves no memory"):
        fitted(pair, gpu_memory_utilization=0.3)


def test_a_sequence_must_fit(pair):
    with pytest.raises(executors.BadSettings, match="needs 8 pages, but the KV cache has 7"):
        fitted(pair, num_pages=7, max_model_len=128)


def test_other_executors_are_as_large_as_they_were_made(pair):
    worker = Worker(object(), None)  # type: ignore[arg-type]
    assert executors.fit(worker, Settings(), pair.decoder.config, 0, 0, print) is None


@pytest.mark.parametrize("reason", ["float32", "heads", "missing"])
def test_where_flashinfer_cannot_be_used_that_is_said(pair, monkeypatch, reason):
    def missing(stream):
        raise FlashInferMissing("FlashInfer is not usable here")

    monkeypatch.setattr(executors, "FlashInferBackend", missing)
    if reason != "heads":
        monkeypatch.setattr(executors, "_HEAD_DIMS", (pair.decoder.config.head_dim,))
    lines: list[str] = []
    dtype = torch.float32 if reason == "float32" else torch.bfloat16
    made = executors._attention(FakeStream(), pair.decoder.config, dtype, lines.append)
    assert isinstance(made, SdpaBackend)
    wanted = {"float32": "float32", "heads": "heads of 32", "missing": "not usable"}[reason]
    assert wanted in lines[0]
    assert "slow" in lines[0]


@pytest.mark.model
@pytest.mark.long
def test_from_a_folder_to_the_torch_executors_texts(monkeypatch, draft):  # noqa: F811
    """Everything that a server does to get ready, with the default model and a draft model."""
    stream, graphs = FakeStream(), TapeGraphs()
    attention = FlashInferBackend(stream, fake_wrapper(stream), workspace=16)
    monkeypatch.setattr(executors, "CudaStream", lambda: stream)
    monkeypatch.setattr(executors, "CudaGraphs", lambda device: graphs)
    monkeypatch.setattr(executors, "CudaLaps", HostLaps)
    monkeypatch.setattr(executors, "_attention", lambda *arguments: attention)
    monkeypatch.setattr(executors.torch.cuda, "is_available", lambda: True)
    found = {}
    for executor in ("cuda", "torch"):
        settings = Settings(
            speculative_config={"method": "dspark", "model": str(draft), "num_speculative_tokens": 2},
            executor=executor,
            verify_policy="fixed:2",
            dtype="float32",
            num_pages=60,
            max_num_seqs=1,
            max_model_len=512,
            threads=1,
        )
        parts = build_parts(settings, NullObserver(), lambda line: None)
        if executor == "cuda":
            assert isinstance(executors._device_blocks(parts.worker.drafter), DeviceDraftBlocks)
        texts = {}
        for name, how in (("greedy", {"temperature": 0.0}), ("seeded", {"seed": 5, "top_p": 0.9})):
            prompt = real.chat(real.PROMPTS[0])
            parts.loop.add(Request(name, prompt, SamplingParams(max_tokens=6, ignore_eos=True, **how)))
            texts[name] = []
        while parts.loop.has_work:
            batch = parts.loop.begin()
            for active, delta in parts.loop.commit(batch, parts.worker.run(batch)):
                texts[active.request.request_id] += delta.token_ids
        found[executor] = texts
    assert found["cuda"] == found["torch"]
    assert graphs.replayed > 4


@pytest.mark.model
def test_weights_are_read_to_a_device():
    names = {name for name, tensor in load_tensors(real.folder(), torch.device("cpu"))}
    assert "model.embed_tokens.weight" in names
