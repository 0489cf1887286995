"""Tiny random models, drafters that misbehave on purpose, and a synchronous engine around them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engine.batch import DraftBlock, Verdict, VerificationBatch
from engine.drafter import Drafter, DraftRequest
from engine.draws import draw
from engine.intake import Intake
from engine.loop import EngineLoop
from engine.models.config import ModelConfig
from engine.models.decoder import FusedDecoder
from engine.noise import Purpose, uniforms
from engine.outputs import EngineObserver, NullObserver, OutputDelta
from engine.pages import PagePool
from engine.params import SamplingParams
from engine.request import ActiveRequest, Request
from engine.speculation import Speculation
from engine.torch_executor import TorchExecutor
from engine.worker import Worker
from scheduler.admission import Limits
from scheduler.policies import parse_policy

VOCAB = 64


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """For modules that import it: a second thread only slows such small products down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def hf_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny random transformers model, and the same weights every time."""
    import transformers

    classes = {
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "mistral": ("MistralConfig", "MistralForCausalLM"),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
        "phi3": ("Phi3Config", "Phi3ForCausalLM"),
        "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    }
    config_class, model_class = (getattr(transformers, name) for name in classes[family])
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.4,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "pad_token_id": 0,
        "attn_implementation": "eager",
        **changes,
    }
    torch.manual_seed(seed)
    model = model_class(config_class(**settings)).to(dtype).eval()
    with torch.no_grad():  # norms and biases start at 1 and 0: make them count
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.2 * torch.randn_like(weight))
            elif name.endswith("bias"):
                weight.copy_(0.2 * torch.randn_like(weight))
    return model


def fused(model: Any, dtype: torch.dtype = torch.float32) -> FusedDecoder:
    """The same model on our decoder."""
    config = ModelConfig.from_dict(model.config.to_dict())
    assert config.fused
    return FusedDecoder(config, model.state_dict().items(), dtype)


@functools.cache
def tiny(family: str = "llama", layers: int = 2) -> FusedDecoder:
    """A small fp64 model on our decoder, made once; do not change it."""
    return fused(reference(family, layers), torch.float64)


@functools.cache
def reference(family: str = "llama", layers: int = 2) -> Any:
    """The transformers model that `tiny` was made from."""
    return hf_model(family, dtype=torch.float64, num_hidden_layers=layers)


class GuessDrafter:
    """Proposes what a function of (tokens, slots) says; deterministic, as far as the engine is told."""

    name = "guess"
    feature_layers: tuple[int, ...] = ()
    identity = ""
    gamma = 16

    def __init__(self, guess: Callable[[list[int], int], Sequence[int]]) -> None:
        self.guess = guess

    def observe(
        self, batch: VerificationBatch, features: torch.Tensor | None, verdicts: Sequence[Verdict]
    ) -> None:
        pass

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftBlock | None]:
        blocks = (tuple(self.guess(each.tokens.tolist(), each.slots)) for each in requests)
        return [DraftBlock(block) if block else None for block in blocks]


def oracle(*texts: Sequence[int]) -> GuessDrafter:
    """Knows whole texts, prompt included, and proposes how they go on."""

    def guess(tokens: list[int], slots: int) -> Sequence[int]:
        for text in texts:
            if list(text[: len(tokens)]) == tokens:
                return text[len(tokens) : len(tokens) + slots]
        return ()

    return GuessDrafter(guess)


def babbler(seed: int = 0) -> GuessDrafter:
    """Proposes random tokens, some of them what a text repeats, and blocks of random length."""
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    def guess(tokens: list[int], slots: int) -> Sequence[int]:
        return [tokens[below(len(tokens))] if below(2) else below(VOCAB) for _ in range(below(slots + 1))]

    return GuessDrafter(guess)


class LawDrafter:
    """Draws from a law of its own, a table of logits by previous token [V, V], and reports it as q."""

    name = "law"
    feature_layers: tuple[int, ...] = ()
    identity = ""

    def __init__(self, table: torch.Tensor) -> None:
        self.laws = torch.softmax(table.float(), -1)

    def observe(
        self, batch: VerificationBatch, features: torch.Tensor | None, verdicts: Sequence[Verdict]
    ) -> None:
        pass

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftBlock | None]:
        noise = uniforms(
            torch.tensor([request.state.stream for request in requests]),
            torch.tensor([request.anchor for request in requests]),
            torch.tensor([request.round for request in requests]),
            max(request.slots for request in requests),
            Purpose.DRAFT,
        )
        previous = torch.tensor([int(request.tokens[-1]) for request in requests])
        tokens, rows = [], []
        for slot in range(noise.shape[1]):
            rows.append(self.laws[previous])
            previous = draw(rows[-1], noise[:, slot])
            tokens.append(previous)
        block, q = torch.stack(tokens, 1), torch.stack(rows, 1)
        return [
            DraftBlock(tuple(block[i, : request.slots].tolist()), q[i, : request.slots])
            for i, request in enumerate(requests)
        ]


@dataclass
class Output:
    """What one choice produced."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None
    reason: Any = None
    error: str | None = None
    prompt_logprobs: list[Any] = field(default_factory=list)

    def take(self, delta: OutputDelta) -> None:
        assert self.finish is None, "output after the end"
        assert not (delta.prompt_logprobs and self.tokens), "they come first"
        self.prompt_logprobs += delta.prompt_logprobs
        self.text += delta.text
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish, self.reason, self.error = delta.finish_reason, delta.stop_reason, delta.error


class Engine:
    """A synchronous engine: add requests, run steps, look at outputs."""

    def __init__(
        self,
        model: Any,
        drafter: Drafter | None = None,
        policy: str | Speculation = "off",
        *,
        num_pages: int = 64,
        page_size: int = 4,
        token_budget: int = 64,
        max_sequences: int = 16,
        max_model_len: int = 128,
        dtype: torch.dtype = torch.float64,
        prefix_caching: bool = True,
        eos: Sequence[int] = (1,),
        token_bytes: Sequence[bytes] | None = None,
        observer: EngineObserver | None = None,
        wrap: Callable[[Any], Any] = lambda executor: executor,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.executor = wrap(TorchExecutor(model, num_pages, page_size, dtype))
        self.pool = PagePool(num_pages, page_size)
        table = token_bytes or [bytes([97 + i % 26]) for i in range(VOCAB)]
        intake = Intake(VOCAB, max_model_len, frozenset(eos), table, prefix_caching=prefix_caching, seed=7)
        arguments = {} if clock is None else {"clock": clock}
        self.loop = EngineLoop(
            self.pool,
            intake,
            policy if isinstance(policy, Speculation) else Speculation(parse_policy(policy)),
            Limits(token_budget, max_sequences),
            observer or NullObserver(),
            **arguments,
        )
        self.worker = Worker(self.executor, drafter)
        self.outputs: dict[str, list[Output]] = {}
        self.steps = 0

    def add(self, name: str, prompt: Sequence[int], **params: Any) -> ActiveRequest:
        salt = params.pop("cache_salt", "")
        cap = params.pop("speculative_tokens", None)
        priority, grammar = params.pop("priority", 0), params.pop("grammar", None)
        request = Request(name, list(prompt), SamplingParams(**params), salt, cap, priority, grammar)
        active = self.loop.add(request)
        self.outputs[name] = [Output() for _ in range(request.params.n)]
        return active

    def take(self, deltas: Any) -> None:
        for active, delta in deltas:
            self.outputs[active.request.request_id][delta.index].take(delta)

    def step(self) -> bool:
        batch = self.loop.begin()
        self.steps += 1
        if batch is None:
            self.take(self.loop.drain_aborted())
            return False
        self.take(self.loop.commit(batch, self.worker.run(batch)))
        return True

    def run(self, limit: int = 10_000) -> None:
        """Until nothing is left to do; then every page must be back."""
        while self.loop.has_work:
            self.step()
            limit -= 1
            assert limit > 0, "the engine does not come to an end"
        self.check_idle()

    def check_idle(self) -> None:
        self.pool.check()
        assert self.pool.available == self.pool.num_pages, self.pool.dump()
        assert not self.loop.requests
        assert not self.loop._owner

    def held_pages(self) -> int:
        return self.pool.num_pages - self.pool.available

    def texts(self) -> dict[str, list[list[int]]]:
        return {name: [output.tokens for output in outputs] for name, outputs in self.outputs.items()}
