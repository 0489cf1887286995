"""Log probabilities of the prompt: the model's own, whatever was cached, drafted, chunked or preempted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.outputs import NullObserver, StepStats
from engine.params import ParamError
from scheduler.admission import Limits
from tests.engine.harness import (
    VOCAB,
    Engine,
    Output,
    babbler,
    one_thread,  # noqa: F401
    reference,
    tiny,
)

TOP = 3


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def check(output: Output, tokens: list[int], top: int = TOP) -> None:
    """Against a forward pass of transformers over the whole prompt."""
    with torch.no_grad():
        logits = reference()(torch.tensor([tokens])).logits[0]
    logp = torch.log_softmax(logits.double(), -1)[:-1]
    assert [score.token_id for score in output.prompt_logprobs] == tokens[1:]
    for score, row in zip(output.prompt_logprobs, logp, strict=True):
        own = float(row[score.token_id])
        assert score.logprob == pytest.approx(own, abs=1e-4)
        assert 1 + int((row > own + 1e-4).sum()) <= score.rank <= int((row > own - 1e-4).sum())
        best = torch.topk(row, top)
        assert [token for token, _ in score.top] == best.indices.tolist()
        assert [value for _, value in score.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("budget", [4, 7, 64])
@pytest.mark.parametrize("policy", ["off", "fixed:3"])
@pytest.mark.parametrize("length", [1, 2, 8, 33])
def test_in_chunks_and_whole_with_drafts_and_without(budget: int, policy: str, length: int) -> None:
    tokens = prompt(length)
    engine = Engine(tiny(), babbler(), policy, token_budget=budget, max_sequences=4)
    engine.add("runner", prompt(5, 3), max_tokens=30, temperature=0.0, ignore_eos=True)
    for _ in range(3):
        engine.step()
    engine.add("a", tokens, max_tokens=6, prompt_logprobs=TOP, seed=1)
    engine.run()
    check(engine.outputs["a"][0], tokens)


def test_scoring_does_not_change_what_is_generated() -> None:
    texts = []
    for scored in (None, 0, TOP):
        engine = Engine(tiny(), token_budget=7)
        engine.add("a", prompt(20), max_tokens=12, seed=5, prompt_logprobs=scored)
        engine.run()
        texts.append(engine.outputs["a"][0].tokens)
    assert texts[0] == texts[1] == texts[2]


def test_cached_pages_are_computed_again_and_no_others_lose_them() -> None:
    tokens = prompt(30)
    engine = Engine(tiny())
    engine.add("warm", tokens, max_tokens=2, temperature=0.0)
    engine.run()
    scored = engine.add("scored", tokens, max_tokens=2, temperature=0.0, prompt_logprobs=TOP)
    plain = engine.add("plain", tokens, max_tokens=2, temperature=0.0)
    engine.run()
    check(engine.outputs["scored"][0], tokens)
    assert scored.usage.cached_tokens == 0
    assert plain.usage.cached_tokens == 28
    assert engine.outputs["plain"][0].prompt_logprobs == []


def test_the_choices_of_a_request_share_one_scoring() -> None:
    tokens = prompt(21)
    engine = Engine(tiny(), token_budget=8, max_sequences=8)
    engine.add("a", tokens, max_tokens=3, n=3, seed=1, prompt_logprobs=TOP)
    rows = 0
    while engine.loop.has_work:
        batch = engine.loop.begin()
        assert batch is not None
        rows += sum(item.scored for item in batch.items)
        engine.take(engine.loop.commit(batch, engine.worker.run(batch)))
    assert rows == len(tokens) - 1
    for output in engine.outputs["a"]:
        check(output, tokens)


def test_a_preempted_prompt_is_scored_once_and_whole() -> None:
    tokens = prompt(40)
    engine = Engine(tiny(), num_pages=24, token_budget=6, max_sequences=4)
    active = engine.add("a", tokens, max_tokens=4, seed=1, prompt_logprobs=TOP)
    engine.step()
    engine.step()
    (sequence,) = active.sequences
    assert 0 < sequence.scored < len(tokens) - 1
    engine.loop._preempt(sequence)
    engine.run()
    assert active.preemptions == 1
    check(engine.outputs["a"][0], tokens)


def test_few_rows_a_step_however_large_the_budget() -> None:
    engine = Engine(tiny(), token_budget=64, num_pages=128)
    engine.loop.limits = replace(engine.loop.limits, scored_rows=5)
    for i in range(3):
        engine.add(f"{i}", prompt(30, i), max_tokens=2, prompt_logprobs=TOP, seed=i)
    engine.add("plain", prompt(50, 9), max_tokens=2, seed=1)
    most = 0
    while engine.loop.has_work:
        batch = engine.loop.begin()
        assert batch is not None
        most = max(most, sum(item.scored for item in batch.items))
        engine.take(engine.loop.commit(batch, engine.worker.run(batch)))
    assert most == 5
    for i in range(3):
        check(engine.outputs[f"{i}"][0], prompt(30, i))


@pytest.mark.parametrize("scored", [None, TOP])
@pytest.mark.parametrize("length", [1, 2, 19, 128])
@pytest.mark.parametrize("n", [1, 2])
def test_nothing_is_generated_if_nothing_is_wanted(scored: int | None, length: int, n: int) -> None:
    """Also for a prompt that fills the context to its last token."""
    tokens = prompt(length)
    engine = Engine(tiny(), babbler(), "fixed:3", token_budget=16, max_sequences=4)
    active = engine.add("a", tokens, max_tokens=0, prompt_logprobs=scored, n=n)
    engine.run()
    for output in engine.outputs["a"]:
        assert (output.text, output.tokens, output.finish, output.reason) == ("", [], "length", None)
        if scored is not None:
            check(output, tokens)
    assert active.usage.completion_tokens == active.usage.draft_tokens == 0
    assert active.first_token is None


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_prompt_with_broken_logits_fails_alone(max_tokens: int) -> None:
    class Broken:
        """NaN in the rows of one sequence, in the middle of its prompt."""

        def __init__(self, executor: Any) -> None:
            self.inner = executor

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def forward(self, batch: Any, layers: Any = ()) -> Any:
            output = self.inner.forward(batch, layers)
            row = 0
            for item in batch.items:
                if item.sequence == 0 and item.start <= 6 < item.start + item.scored:
                    output.logits[row + 6 - item.start] = torch.nan
                row += item.logit_rows
            return output

    engine = Engine(tiny(), token_budget=8, wrap=Broken)
    engine.add("bad", prompt(20), max_tokens=max_tokens, prompt_logprobs=0)
    engine.add("good", prompt(20, 1), max_tokens=4, prompt_logprobs=TOP, seed=1)
    engine.run()
    (bad,), (good,) = engine.outputs["bad"], engine.outputs["good"]
    assert bad.finish == "error"
    assert "not finite" in (bad.error or "")
    check(good, prompt(20, 1))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (64,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (5,), "bad_words": ((5,),)}, "allowed_token_ids"),
        ({"allowed_token_ids": (1,), "min_tokens": 1}, "allowed_token_ids"),
        ({"bad_words": ((),)}, "bad_words"),
        ({"bad_words": ((3, 64),)}, "bad_words"),
    ],
)
def test_what_cannot_be_done_is_refused(fields: dict[str, Any], param: str) -> None:
    engine = Engine(tiny())
    with pytest.raises(ParamError) as caught:
        engine.add("a", prompt(4), **({"max_tokens": 5} | fields))
    assert caught.value.param == param


class Corrupted(NullObserver):
    count = 0

    def step(self, stats: StepStats) -> None:
        self.count += stats.corrupted


def test_a_phrase_that_leaves_nothing_ends_its_own_request() -> None:
    observer = Corrupted()
    engine = Engine(tiny(), observer=observer)
    engine.add("a", prompt(4), max_tokens=5, allowed_token_ids=(7,), bad_words=((7, 7),), ignore_eos=True)
    engine.add("b", prompt(4), max_tokens=5, allowed_token_ids=(7,), ignore_eos=True)
    engine.run()
    assert engine.outputs["a"][0].finish == "error"
    assert "leaves no token" in (engine.outputs["a"][0].error or "")
    assert engine.outputs["b"][0].tokens == [7] * 5
    assert observer.count == 0  # the model is well


def test_lower_priorities_go_first_and_are_preempted_last() -> None:
    engine = Engine(tiny(), max_sequences=1)
    order: list[str] = []
    engine.add("first", prompt(4), max_tokens=6, ignore_eos=True)
    engine.step()
    for name, priority in (("late", 5), ("usual", 0), ("usual too", 0), ("urgent", -(2**40))):
        engine.add(name, prompt(4), max_tokens=2, ignore_eos=True, priority=priority)
    while engine.loop.has_work:
        engine.step()
        order += [name for name, (each,) in engine.outputs.items() if each.finish and name not in order]
    assert order == ["first", "urgent", "usual", "usual too", "late"]

    engine = Engine(tiny(), num_pages=16, token_budget=16, max_sequences=2, max_model_len=48)
    engine.loop.limits = Limits(16, 2)
    low = engine.add("low", prompt(12, 1), max_tokens=30, ignore_eos=True, priority=1, seed=1)
    high = engine.add("high", prompt(12, 2), max_tokens=30, ignore_eos=True, seed=2)
    engine.run()
    assert low.preemptions > 0
    assert high.preemptions == 0
