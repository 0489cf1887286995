"""The engine's step, over real pages and a tiny model, against transformers' own generate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from drafters.ngram import NgramDrafter
from engine.batch import VerificationBatch
from engine.drafter import Drafter
from engine.outputs import NullObserver, StepStats
from engine.params import ParamError
from tests.engine.harness import (
    VOCAB,
    Engine,
    babbler,
    one_thread,  # noqa: F401
    oracle,
    reference,
    tiny,
)

GREEDY: dict[str, Any] = {"temperature": 0.0}
EOS = 1


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def generate(family: str, tokens: list[int], max_tokens: int) -> list[int]:
    """What transformers writes, greedily; the end-of-sequence token included."""
    ids = torch.tensor([tokens])
    text = reference(family).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    return text[0, len(tokens) :].tolist()


PROMPTS = {
    "short": prompt(3),
    "page": prompt(8, 1),
    "long": prompt(45, 2),
    "periodic": prompt(5, 3) * 4,
    "one": [7],
    "twin": prompt(8, 1),
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def wanted(request: pytest.FixtureRequest) -> tuple[str, dict[str, list[int]]]:
    return request.param, {name: generate(request.param, text, 24) for name, text in PROMPTS.items()}


def whole(texts: dict[str, list[int]]) -> list[list[int]]:
    return [PROMPTS[name] + text for name, text in texts.items()]


@pytest.mark.parametrize("policy", ["fixed:1", "fixed:4", "fixed:9"])
@pytest.mark.parametrize("kind", ["ngram", "oracle", "babbler"])
def test_greedy_text_is_that_of_transformers_with_any_drafter(wanted, kind, policy):
    family, texts = wanted
    drafters: dict[str, Drafter] = {
        "ngram": NgramDrafter(1, 3),
        "oracle": oracle(*whole(texts)),
        "babbler": babbler(),
    }
    engine = Engine(tiny(family), drafters[kind], policy, num_pages=128)
    active = [engine.add(name, text, max_tokens=24, **GREEDY) for name, text in PROMPTS.items()]
    engine.run()
    assert {name: tokens for name, [tokens] in engine.texts().items()} == texts
    drafted, accepted = (
        sum(getattr(each.usage, name) for each in active) for name in ("draft_tokens", "accepted_tokens")
    )
    assert drafted > 0, "nothing was verified, so nothing was tested"
    if kind == "oracle":
        assert accepted == drafted
        assert engine.steps < 24
    if kind == "babbler":
        assert accepted < drafted


@pytest.mark.parametrize("token_budget", [6, 64])
@pytest.mark.parametrize("policy", ["off", "fixed:4"])
def test_greedy_text_is_that_of_transformers_in_chunks_and_whole(wanted, policy, token_budget):
    family, texts = wanted
    drafter = NgramDrafter(1, 3) if policy != "off" else None
    engine = Engine(tiny(family), drafter, policy, token_budget=token_budget, max_sequences=6)
    for name, text in PROMPTS.items():
        engine.add(name, text, max_tokens=24, **GREEDY)
    engine.run()
    assert {name: tokens for name, [tokens] in engine.texts().items()} == texts


class Steps(NullObserver):
    """Keeps every step's figures."""

    def __init__(self) -> None:
        object.__setattr__(self, "seen", [])

    def step(self, stats: StepStats) -> None:
        self.seen.append(stats)


def test_a_long_prompt_never_stalls_running_streams():
    steps = Steps()
    engine = Engine(tiny(), token_budget=12, max_sequences=6, observer=steps, num_pages=128)
    runners = [f"runner {i}" for i in range(4)]
    for i, name in enumerate(runners):
        engine.add(name, prompt(3, i), max_tokens=40, ignore_eos=True, **GREEDY)
    engine.step()
    engine.step()
    before = {name: len(engine.outputs[name][0].tokens) for name in runners}
    engine.add("long", prompt(100, 9), max_tokens=2, **GREEDY)
    taken = 0
    while not engine.outputs["long"][0].tokens:
        engine.step()
        taken += 1
        for name in runners:
            assert len(engine.outputs[name][0].tokens) == before[name] + taken
    assert taken == -(-100 // 8), "what the runners left went to the long prompt"
    assert all(stats.rows <= 12 for stats in steps.seen)
    engine.run()


def test_drafts_get_only_the_rows_that_anchors_and_prefills_leave():
    texts = [prompt(4, i) + ignoring_eos(prompt(4, i), 40) for i in range(4)]
    engine = Engine(tiny(), oracle(*texts), "fixed:4", token_budget=10, max_sequences=6, num_pages=128)
    for i in range(4):
        engine.add(f"{i}", prompt(4, i), max_tokens=40, ignore_eos=True, **GREEDY)
    while any(sequence.pending > 1 for sequence in (*engine.loop.running, *engine.loop.waiting)):
        engine.step()
    long = engine.add("long", prompt(50, 9), max_tokens=2, ignore_eos=True, **GREEDY).sequences[0]
    verified = []  # drafts in each step, while the prompt is computed and afterwards
    while engine.loop.has_work:
        batch = engine.loop.begin()
        assert batch is not None
        assert batch.rows <= 10
        if not long.generated and long.pending > 6:  # more than the runners leave
            assert sum(item.verify for item in batch.items) == 0
        else:
            verified.append(sum(item.verify for item in batch.items))
        engine.take(engine.loop.commit(batch, engine.worker.run(batch)))
    assert 6 in verified, "four anchors and six drafts"


# ---- prefix cache


def test_a_repeated_prompt_is_found_and_its_text_is_the_same():
    engine = Engine(tiny())
    text = prompt(19)
    first = engine.add("first", text, max_tokens=10, **GREEDY)
    engine.run()
    second = engine.add("second", text, max_tokens=10, **GREEDY)
    engine.step()
    assert engine.outputs["second"][0].tokens, "one step was enough for the last three tokens"
    engine.run()
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 16)
    assert engine.outputs["first"][0].tokens == engine.outputs["second"][0].tokens
    assert second.usage.prompt_tokens == 19


def test_a_prompt_of_whole_pages_computes_its_last_one_again():
    engine = Engine(tiny())
    text = prompt(16)
    for name, cached in (("first", 0), ("second", 12)):
        assert engine.add(name, text, max_tokens=10, **GREEDY).usage.cached_tokens == 0
        active = engine.loop.requests[name]
        engine.run()
        assert active.usage.cached_tokens == cached
    assert engine.outputs["first"][0].tokens == engine.outputs["second"][0].tokens


def test_a_prefix_is_shared_while_its_first_user_still_runs():
    engine = Engine(tiny())
    text = prompt(17)
    engine.add("first", text, max_tokens=20, ignore_eos=True, **GREEDY)
    engine.step()
    held = engine.held_pages()
    second = engine.add("second", [*text[:16], 5, 6], max_tokens=4, ignore_eos=True, **GREEDY)
    engine.step()
    assert second.usage.cached_tokens == 16
    assert engine.held_pages() == held + 1
    engine.run()
    alone = Engine(tiny())
    alone.add("second", [*text[:16], 5, 6], max_tokens=4, ignore_eos=True, **GREEDY)
    alone.run()
    assert engine.texts()["second"] == alone.texts()["second"]


def test_salts_keep_cached_pages_apart():
    engine = Engine(tiny())
    text = prompt(19)
    cached = []
    for name, salt in (("a", "mine"), ("b", "yours"), ("c", ""), ("d", "mine")):
        active = engine.add(name, text, max_tokens=4, cache_salt=salt, **GREEDY)
        engine.run()
        cached.append(active.usage.cached_tokens)
    assert cached == [0, 0, 0, 16]


def test_without_prefix_caching_nothing_is_found_between_requests():
    engine = Engine(tiny(), prefix_caching=False)
    text = prompt(19)
    for name in ("a", "b"):
        active = engine.add(name, text, max_tokens=4, **GREEDY)
        engine.run()
        assert active.usage.cached_tokens == 0
    assert engine.texts()["a"] == engine.texts()["b"]


def test_the_next_turn_finds_what_was_generated():
    engine = Engine(tiny(), NgramDrafter(1, 3), "fixed:4")
    first = prompt(10)
    engine.add("first", first, max_tokens=15, ignore_eos=True, **GREEDY)
    engine.run()
    turn = first + engine.outputs["first"][0].tokens + [5, 6, 7]
    second = engine.add("second", turn, max_tokens=6, **GREEDY)
    engine.run()
    # Of the 25 tokens, the last one was never fed back to the model.
    assert second.usage.cached_tokens == 24
    assert engine.outputs["second"][0].tokens == generate("llama", turn, 6)


# ---- several choices


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_choices_share_the_pages_of_their_prompt(prefix_caching):
    engine = Engine(tiny(), prefix_caching=prefix_caching)
    active = engine.add("a", prompt(18), n=4, seed=3, max_tokens=6, ignore_eos=True)
    engine.step()
    assert len(engine.loop.running) == 1, "the first choice computes the prompt for all"
    assert engine.held_pages() == 5
    engine.step()
    assert len(engine.loop.running) == 4
    assert engine.held_pages() == 4 + 4 * 1, "four pages of prompt, and one for each choice"
    engine.run()
    assert active.usage.prompt_tokens == 18
    assert active.usage.completion_tokens == 24
    assert active.usage.cached_tokens == 0, "what choices share among them is no hit"
    outputs = engine.outputs["a"]
    assert len({tuple(output.tokens) for output in outputs}) > 1
    for choice in range(4):
        assert outputs[choice].finish == "length"
    greedy = Engine(tiny(), prefix_caching=prefix_caching)
    greedy.add("a", prompt(18), n=3, max_tokens=6, **GREEDY)
    greedy.run()
    assert greedy.texts()["a"] == [generate("llama", prompt(18), 6)] * 3


def test_choices_of_a_request_whose_first_one_ended_at_once_still_run():
    engine = Engine(tiny())
    engine.add("a", prompt(9), n=3, max_tokens=1, **GREEDY)
    engine.run()
    assert engine.texts()["a"] == [generate("llama", prompt(9), 1)] * 3


# ---- ends


def test_a_request_may_refuse_speculation():
    text = prompt(4)
    whole_text = text + generate("llama", text, 20)
    engine = Engine(tiny(), oracle(whole_text), "fixed:4", max_sequences=4)
    caps = {"none": 0, "two": 2, "all": None}
    active = {
        name: engine.add(name, text, max_tokens=20, ignore_eos=True, speculative_tokens=cap, **GREEDY)
        for name, cap in caps.items()
    }
    longest = dict.fromkeys(caps, 0)
    while engine.loop.has_work:
        batch = engine.loop.begin()
        assert batch is not None
        for item in batch.items:
            name = engine.loop._owner[item.sequence].request.request_id
            longest[name] = max(longest[name], item.verify)
        engine.take(engine.loop.commit(batch, engine.worker.run(batch)))
    assert longest == {"none": 0, "two": 2, "all": 4}
    assert active["none"].usage.draft_tokens == 0
    assert len({tuple(outputs[0].tokens) for outputs in engine.outputs.values()}) == 1


@pytest.mark.parametrize("policy", ["off", "fixed:4"])
@pytest.mark.parametrize("length", [1, 11, 18, 19])
def test_a_text_ends_where_the_context_does(policy, length):
    text = prompt(length)
    full = text + ignoring_eos(text, 20 - length)
    engine = Engine(tiny(), oracle(full), policy, max_model_len=20, num_pages=5)
    engine.add("a", text, ignore_eos=True, **GREEDY)
    engine.run()
    output = engine.outputs["a"][0]
    assert text + output.tokens == full
    assert output.finish == "length"


def ignoring_eos(text: list[int], count: int) -> list[int]:
    engine = Engine(tiny())
    engine.add("a", text, max_tokens=count, ignore_eos=True, **GREEDY)
    engine.run()
    return engine.outputs["a"][0].tokens


def test_requests_that_could_never_run_are_refused_and_leave_nothing_behind():
    engine = Engine(tiny(), max_model_len=20)
    for text, params, param in (
        (prompt(20), {}, "prompt"),
        ([], {}, "prompt"),
        ([VOCAB], {}, "prompt"),
        ([-1], {}, "prompt"),
        (prompt(10), {"max_tokens": 11}, "max_tokens"),
        (prompt(10), {"temperature": -1.0}, "temperature"),
        (prompt(10), {"speculative_tokens": -1}, "num_speculative_tokens"),
    ):
        with pytest.raises(ParamError) as caught:
            engine.add("bad", text, **params)
        assert caught.value.param == param
    assert not engine.loop.has_work
    engine.check_idle()


@pytest.mark.parametrize("policy", ["off", "fixed:4"])
def test_end_of_sequence_ends_a_text_unless_it_is_ignored_or_too_early(policy):
    text = [3, 14, 15, 9, 26]
    plain = ignoring_eos(text, 20)
    assert len(set(plain[:8])) == 8, "choose another prompt"
    at, eos = 5, plain[5]
    drafter = oracle(text + plain)
    engine = Engine(tiny(), drafter, policy, eos=(eos,))
    engine.add("ends", text, max_tokens=20, **GREEDY)
    engine.add("ignores", text, max_tokens=20, ignore_eos=True, **GREEDY)
    engine.add("later", text, max_tokens=20, min_tokens=at + 3, **GREEDY)
    engine.add("exactly", text, max_tokens=20, min_tokens=at, **GREEDY)
    engine.add("own", text, max_tokens=20, ignore_eos=True, stop_token_ids=(plain[3],), **GREEDY)
    engine.run()
    ends, ignores, later, exactly, own = (
        engine.outputs[name][0] for name in ("ends", "ignores", "later", "exactly", "own")
    )
    assert ends.tokens == exactly.tokens == plain[: at + 1]
    assert (ends.finish, ends.reason) == ("stop", None)
    assert ignores.tokens == plain
    assert ignores.finish == "length"
    assert later.tokens[:at] == plain[:at]
    assert eos not in later.tokens[: at + 3]
    assert len(later.tokens) >= at + 3
    assert own.tokens == plain[:4]
    assert (own.finish, own.reason) == ("stop", plain[3])


# ---- what goes wrong


class Faulty:
    """An executor whose logits are poisoned, or which raises, when told to."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.poisoned: set[int] = set()  # sequence keys
        self.value = float("nan")
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, batch: VerificationBatch, feature_layers: tuple[int, ...] = ()) -> Any:
        if self.broken:
            raise RuntimeError("the device is on fire")
        output = self.inner.forward(batch, feature_layers)
        row = 0
        for item in batch.items:
            if item.sample:
                if item.sequence in self.poisoned:
                    output.logits[row : row + 1 + item.verify, 5] = self.value
                row += 1 + item.verify
        return output


def crowd(engine: Engine, names: Iterable[str]) -> None:
    for i, name in enumerate(names):
        engine.add(name, prompt(9, i), max_tokens=20, ignore_eos=True, seed=i, logprobs=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("after", [0, 4])
@pytest.mark.parametrize("policy", ["off", "fixed:3"])
def test_values_that_are_not_finite_end_their_request_and_no_other(policy, after, value):
    names = ["a", "b", "c", "d"]
    healthy = Engine(tiny())
    crowd(healthy, names)
    healthy.run()

    engine = Engine(tiny(), babbler(), policy, wrap=Faulty)
    crowd(engine, names)
    engine.executor.value = value
    victim = engine.loop.requests["b"].sequences[0]
    for _ in range(after):
        engine.step()
    written = list(engine.outputs["b"][0].tokens)
    engine.executor.poisoned = {victim.key}
    engine.run()
    output = engine.outputs["b"][0]
    assert output.finish == "error"
    assert "not finite" in output.error
    assert output.tokens == written == healthy.outputs["b"][0].tokens[: len(written)]
    for name in "acd":
        assert engine.outputs[name][0].tokens == healthy.outputs[name][0].tokens
        assert engine.outputs[name][0].text == healthy.outputs[name][0].text

    # Nothing that it ever wrote is found again.
    engine.executor.poisoned = set()
    again = engine.add("again", prompt(9, 1) + written, max_tokens=1, **GREEDY)
    engine.run()
    assert again.usage.cached_tokens == 0
    assert engine.outputs["again"][0].finish == "length"


def test_a_fault_in_an_early_chunk_of_a_prompt_does_not_outlive_the_request():
    """It shows only in the last chunk's logits, when the first chunk's pages have been published."""
    engine = Engine(tiny(), token_budget=16)
    text = prompt(30)
    engine.add("a", text, max_tokens=4, **GREEDY)
    engine.step()
    page = engine.loop.running[0].pages[0]
    for values in engine.executor.values:
        values[:, page * 4 : page * 4 + 4] = float("nan")
    engine.run()
    assert engine.outputs["a"][0].finish == "error"
    again = engine.add("again", text, max_tokens=4, **GREEDY)
    engine.run()
    assert again.usage.cached_tokens == 0
    assert engine.outputs["again"][0].tokens == generate("llama", text, 4)


def test_half_of_several_choices_may_fail():
    engine = Engine(tiny(), wrap=Faulty)
    active = engine.add("a", prompt(9), n=3, max_tokens=12, seed=1, ignore_eos=True)
    for _ in range(4):
        engine.step()
    engine.executor.poisoned = {active.sequences[1].key}
    engine.run()
    assert [output.finish for output in engine.outputs["a"]] == ["length", "error", "length"]


@pytest.mark.parametrize("policy", ["off", "fixed:3"])
def test_a_step_that_raises_ends_the_requests_in_it_and_no_other(policy):
    engine = Engine(tiny(), babbler(), policy, wrap=Faulty, max_sequences=2)
    names = ["a", "b", "c", "d"]
    crowd(engine, names)
    for _ in range(4):
        engine.step()
    engine.executor.broken = True
    batch = engine.loop.begin()
    assert len(batch.items) == 2
    with pytest.raises(RuntimeError) as caught:
        engine.worker.run(batch)
    engine.take(engine.loop.fail(batch, str(caught.value)))
    engine.executor.broken = False
    for name in "ab":
        assert engine.outputs[name][0].finish == "error"
        assert engine.outputs[name][0].error == "the device is on fire"
    engine.run()
    healthy = Engine(tiny())
    crowd(healthy, names)
    healthy.run()
    for name in "cd":
        assert engine.texts()[name] == healthy.texts()[name]


def test_logprobs_are_the_models_own_and_the_same_with_speculation():
    results = []
    for drafter, policy in ((None, "off"), (babbler(), "fixed:4")):
        engine = Engine(tiny(), drafter, policy)
        engine.add("a", prompt(9), max_tokens=16, seed=5, temperature=0.7, logprobs=3, logit_bias={4: 5.0})
        engine.run()
        results.append(engine.outputs["a"][0])
    off, on = results
    assert off.tokens == on.tokens
    logits = reference()(torch.tensor([prompt(9) + off.tokens])).logits[0, 8:-1].detach()
    logp = torch.log_softmax(logits, -1)
    for i, (token, one, other) in enumerate(zip(off.tokens, off.logprobs, on.logprobs, strict=True)):
        assert one.token_id == other.token_id == token
        assert one.logprob == pytest.approx(float(logp[i, token]), abs=1e-4)
        assert other.logprob == pytest.approx(one.logprob, abs=1e-9)
        assert [top for top, _ in one.top] == torch.topk(logp[i], 3).indices.tolist()
        assert [top for top, _ in other.top] == [top for top, _ in one.top]
