"""The default model, loaded once a session, and a way to run requests on it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.models.locate import cache_folder, locate_model
from engine.outputs import NullObserver
from engine.params import SamplingParams
from engine.request import Request
from scheduler.policies import parse_policy

PROMPTS = (
    "Why is the sky blue?",
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Give me three tips for staying healthy.",
    "Tell me a short story about a fox.",
    "What is 12 times 7? Explain each step.",
    "Write a haiku about the sea.",
    "Translate 'good morning' into Spanish.",
    "List the planets of the solar system.",
    "How do I boil an egg?",
    "A farmer has 17 sheep and buys 5 more. How many has he now?",
    "Write a Python loop that prints the numbers from 1 to 10.",
    "Explain photosynthesis to a child.",
    "What is the opposite of 'ancient'?",
    "Name three animals that can fly.",
    "What does HTTP stand for?",
    "Write one sentence with the word 'lantern'.",
    "If x + 4 = 9, what is x?",
    "Who wrote Romeo and Juliet?",
    "Repeat the word 'echo' five times.",
)


@functools.cache
def folder() -> Path:
    return locate_model(None, cache_folder(), print)


@functools.cache
def parts(kind: str = "float32") -> Any:
    """The engine around torch in fp32, or around the kernels with "bf16" or "gguf" weights."""
    from server.settings import Settings
    from server.wiring import build_parts

    weights: dict[str, Any] = {"quantization": kind} if kind != "float32" else {"dtype": "float32"}
    settings = Settings(
        **weights,
        num_pages=1024,
        max_num_seqs=32,
        threads=1,  # tests run side by side, and threads that wait for a busy core are very slow
        speculative_config={"method": "ngram"},
        verify_policy="fixed:5",  # no test needs what steps cost
    )
    return build_parts(settings, NullObserver(), print)


def chat(prompt: str) -> list[int]:
    return list(parts().tokenizer.apply_chat_template([{"role": "user", "content": prompt}]))


def generate(
    requests: Sequence[tuple[list[int], dict[str, Any]]], policy: str = "off", kind: str = "float32"
) -> list[list[list[int]]]:
    """Token ids of each request's choices; all requests run together."""
    loop, worker = parts(kind).loop, parts(kind).worker
    loop.speculation.policy = parse_policy(policy)
    outputs: dict[str, list[list[int]]] = {}
    for index, (prompt, params) in enumerate(requests):
        # A salt of its own, so that every text is computed and none is found in the cache.
        name = f"{policy}-{index}"
        active = loop.add(Request(name, prompt, SamplingParams(**params), f"{id(requests)}-{name}"))
        outputs[name] = [[] for _ in active.sequences]
    while loop.has_work:
        batch = loop.begin()
        if batch is not None:
            for active, delta in loop.commit(batch, worker.run(batch)):
                outputs[active.request.request_id][delta.index] += delta.token_ids
    loop.pool.check()
    assert loop.pool.available == loop.pool.num_pages
    return list(outputs.values())


def logits_after(tokens: list[int]) -> Any:
    """The model's logits [V] for the token after these, from one plain forward."""
    import numpy as np

    from engine.batch import BatchItem, VerificationBatch
    from engine.sampling import SamplingState

    loop, worker = parts().loop, parts().worker
    size = loop.pool.page_size
    pages = loop.pool.allocate(-(-len(tokens) // size))
    state = SamplingState(SamplingParams(), loop.intake.vocab_size, frozenset())
    history = np.asarray(tokens, dtype=np.int32)
    item = BatchItem(-1, history, 0, len(tokens), np.asarray(pages, dtype=np.int32), True, state, 1, 0)
    try:
        return worker.executor.forward(VerificationBatch((item,))).logits[0]
    finally:
        loop.pool.release(pages)
