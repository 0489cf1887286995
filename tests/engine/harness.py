"""Tiny random models and a synchronous engine around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.drafter import Drafter
from engine.intake import Intake
from engine.loop import EngineLoop
from engine.models.config import ModelConfig
from engine.models.decoder import FusedDecoder
from engine.outputs import EngineObserver, NullObserver, OutputDelta
from engine.pages import PagePool
from engine.params import SamplingParams
from engine.request import Request
from engine.torch_executor import TorchExecutor
from engine.worker import Worker
from scheduler.admission import Limits
from scheduler.policy import parse_policy

VOCAB = 64


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


@dataclass
class Output:
    """What one choice produced."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None
    reason: Any = None
    error: str | None = None

    def take(self, delta: OutputDelta) -> None:
        assert self.finish is None, "output after the end"
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
        policy: str = "off",
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
            parse_policy(policy),
            Limits(token_budget, max_sequences),
            observer or NullObserver(),
            **arguments,
        )
        self.worker = Worker(self.executor, drafter)
        self.outputs: dict[str, list[Output]] = {}
        self.steps = 0

    def add(self, name: str, prompt: Sequence[int], **params: Any) -> None:
        salt = params.pop("cache_salt", "")
        cap = params.pop("speculative_tokens", None)
        request = Request(name, list(prompt), SamplingParams(**params), salt, cap)
        self.loop.add(request)
        self.outputs[name] = [Output() for _ in range(request.params.n)]

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

    def texts(self) -> dict[str, list[list[int]]]:
        return {name: [output.tokens for output in outputs] for name, outputs in self.outputs.items()}
