"""What policies are told of waiting blocks, and the draft plan, in the engine's loop."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from engine.batch import DraftBlock, Verdict
from engine.draft_plan import DraftPlan
from engine.lookup_plan import LookupPlan
from engine.outputs import NullObserver
from engine.params import SamplingParams
from engine.speculation import Slots, Speculation, Step
from engine.survival import Likeness, Survival, regime
from scheduler.adaptive import Algorithm1, Lagged, LookAhead, Threshold
from scheduler.calibration import Calibration
from scheduler.curve import Curve
from scheduler.policy import Fixed
from scheduler.throughput import Throughput
from tests.engine.harness import Engine, babbler, oracle, tiny

CHEAP = [(1, 1.0), (200, 1.01)]  # rows cost nothing
DEAR = [(1, 1.0), (200, 200.0)]  # a row costs what a step costs
DRAFT = [(1, 0.01), (64, 0.02)]
ADAPTIVE = [LookAhead(), Algorithm1(), Lagged(), Threshold()]


def planned(policy, verify=CHEAP, draft=DRAFT, gamma: int = 4) -> Speculation:
    """With costs that stay what they are, whatever this machine takes."""
    return Speculation(policy, gamma, Throughput(Curve(verify), Curve(draft), weight=0.0))


class Sure:
    """Gives another drafter's blocks a confidence, the same at every position."""

    def __init__(self, drafter, logit: float) -> None:
        self.drafter, self.logit = drafter, logit
        self.name, self.feature_layers, self.identity = "sure", (), ""
        self.asked: list[int] = []

    def observe(self, batch, features, verdicts) -> None:
        self.drafter.observe(batch, features, verdicts)

    def draft(self, requests):
        self.asked += [request.slots for request in requests]
        blocks = self.drafter.draft(requests)
        return [b and replace(b, confidence=(self.logit,) * len(b)) for b in blocks]


def run(drafter, policy, count: int = 6, seen: list | None = None, **how) -> Engine:
    """`seen` gets the figures of every step."""

    class Steps(NullObserver):
        def step(self, stats) -> None:
            if seen is not None:
                seen.append(stats)

    engine = Engine(tiny(), drafter, policy, observer=Steps(), num_pages=200)
    for index in range(count):
        engine.add(str(index), prompt(index), max_tokens=40, ignore_eos=True, **how)
    engine.run()
    return engine


def prompt(index: int) -> list[int]:
    return [3 + index, 5, 7] * 3


def knowing():
    """A drafter that knows the greedy texts."""
    outputs = run(None, "off", temperature=0.0).outputs
    return oracle(*(prompt(index) + outputs[str(index)][0].tokens for index in range(6)))


@pytest.mark.parametrize("verify", [CHEAP, DEAR], ids=["cheap", "dear"])
@pytest.mark.parametrize("policy", ADAPTIVE, ids=lambda policy: policy.name)
def test_greedy_and_seeded_texts_are_those_without(policy, verify):
    for how in ({"temperature": 0.0}, {"seed": 3}):
        wanted = run(None, "off", **how).texts()
        assert run(babbler(3), planned(policy, verify), **how).texts() == wanted
        assert run(Sure(babbler(3), 1.0), planned(policy, verify), **how).texts() == wanted


def lengths(seen: list) -> list[int]:
    return [length for step in seen for length in step.verified]


def test_sure_drafts_are_verified_where_rows_are_cheap_and_not_where_they_are_dear():
    cheap, dear = [], []
    run(Sure(knowing(), 4.0), planned(LookAhead()), seen=cheap, temperature=0.0)
    assert np.mean(lengths(cheap)[6:]) > 2.5
    run(Sure(knowing(), 4.0), planned(LookAhead(), DEAR), seen=dear, temperature=0.0)
    assert np.mean(lengths(dear)) < 0.2


def test_what_does_not_pay_is_not_drafted_but_probed():
    drafter, seen = Sure(babbler(1), -4.0), []
    speculation = planned(LookAhead(), [(1, 1.0), (200, 1.0 + 199 * 0.05)])
    speculation.survival._mean["greedy"][:] = [0.02] * 4  # known to be bad
    run(drafter, speculation, count=3, seen=seen, temperature=0.0)
    drafted = [step for step in seen if any(step.slots)]
    assert 0 < len(drafted) < len(seen) / 8  # now and then all the same
    assert set(drafter.asked) <= {1, 2}  # 1 at the end of a text
    assert all(sum(slots > 0 for slots in step.slots) == 1 for step in drafted)
    assert {step.undrafted for step in seen if step.slots and not any(step.slots)} == {"does_not_pay"}


def test_probes_cost_half_a_hundredth_of_the_time():
    """Whatever a row costs and however many sequences there are."""
    for row, count in ((0.05, 1), (0.5, 4), (0.05, 16)):
        throughput = Throughput(Curve([(1, 1.0), (400, 1.0 + 399 * row)]), Curve([(1, 0.3), (64, 0.4)]))
        plan, texts = DraftPlan(4), [Plain() for _ in range(count)]
        probes, time = 0, 0.0
        for _ in range(4000):
            slots = plan.slots(texts, np.full((count, 4), 1e-3), throughput, [4] * count, 100)
            probes += sum(slots) > 0
            time += float(throughput.planned(count, 0, 0.0)[0])
            for text in texts:
                text.round += 1
        price = float(throughput.planned(count, 2, 0.0)[2] - throughput.planned(count, 0, 0.0)[0])
        assert 0.0035 < probes * price / time <= 0.00505
        assert max(text.round - text.drafted_round for text in texts) < 4000 / probes * count * 1.5 + 1


@dataclass
class Plain:
    """What the draft plan looks at of a sequence."""

    round: int = 1
    drafted_round: int = 0
    length: int = 0


def test_what_did_not_pay_is_not_weighed_again_at_once():
    throughput, texts = Throughput(Curve(DEAR), Curve(DRAFT)), [Plain(), Plain()]
    plan = DraftPlan(4)
    assert not plan.rests(2)
    assert plan.slots(texts, np.full((2, 4), 1e-3), throughput, [4] * 2, 100) == [0, 0]
    assert not plan.rests(3)  # another number of sequences is another question
    for steps in (2, 4, 8, 16, 16):  # ever more rarely, while nothing is new
        assert [plan.rests(2) for _ in range(steps + 2)] == [True] * steps + [False] * 2
        assert not any(plan.slots(texts, np.full((2, 4), 1e-3), throughput, [4] * 2, 0))
    plan = DraftPlan(4)
    assert any(plan.slots(texts, np.full((2, 4), 0.99), Throughput(Curve(CHEAP), Curve(DRAFT)), [4] * 2, 100))
    assert not plan.rests(2)


@pytest.mark.parametrize(("verify", "share"), [(CHEAP, 1.0), (DEAR, 0.2)], ids=["cheap", "dear"])
def test_what_brings_nothing_is_looked_up_now_and_then(verify, share):
    class LookedUp:
        name, feature_layers, identity, asked = "looked up", (), "", 0

        def observe(self, batch, features, verdicts) -> None:
            pass

        def draft(self, requests):
            self.asked += 1
            return [DraftBlock((3, 4), chances=(0.5, 0.5)) for _ in requests]

    class Punctual(Speculation):
        """Every step takes what was foreseen."""

        def observe(self, batch, result, texts):
            forecast = super().observe(batch, result, texts)
            self.foreseen = forecast.seconds
            return forecast

        def spent(self, seconds, worker_seconds) -> None:
            super().spent(self.foreseen, self.foreseen)

    drafter, seen = LookedUp(), []
    throughput = Throughput(Curve(verify), Curve(DRAFT), weight=0.0)
    run(drafter, Punctual(LookAhead(), 0, throughput, lookup=2), seen=seen, temperature=0.0)
    steps = len(seen)
    assert any(lengths(seen)) == (verify is CHEAP)
    assert drafter.asked == pytest.approx(share * steps, abs=2)  # it takes some steps to see


def test_a_cap_ends_a_block_and_lets_others_have_more():
    throughput = Throughput(Curve(CHEAP), Curve([(1, 0.01), (64, 0.02)]))
    texts = [Plain(), Plain(), Plain()]
    assert DraftPlan(4).slots(texts, np.full((3, 4), 0.9), throughput, [4, 2, 0], 100) == [4, 2, 0]
    assert sum(DraftPlan(4).slots(texts, np.full((3, 4), 0.9), throughput, [4, 4, 4], 5)) == 5
    assert DraftPlan(4).slots(texts, np.full((3, 4), 0.9), throughput, [4, 4, 4], 0) == [0, 0, 0]


def test_drafts_that_are_never_accepted_are_given_up_and_come_back(caplog):
    throughput = Throughput(Curve([(1, 1.0), (200, 40.0)]), Curve([(1, 0.3), (64, 0.4)]))
    plan = DraftPlan(4)
    bad, good = {"greedy": np.full(4, 0.01)}, {"greedy": np.full(4, 0.9).cumprod()}
    for _ in range(511):
        plan.watch(lambda: bad, throughput)
    assert not plan.collapsed
    plan.watch(lambda: bad, throughput)
    assert plan.collapsed
    for _ in range(16):
        plan.watch(lambda: bad | {"rejection": good["greedy"]}, throughput)  # one kind of request is enough
    assert not plan.collapsed
    assert [record.message.split(":")[0].split(",")[0] for record in caplog.records] == [
        "drafts have long not paid",
        "drafts pay again",
    ]


def test_why_nothing_was_drafted():
    def reasons(policy, **how) -> set:
        seen: list = []
        run(Sure(babbler(1), 1.0), policy, count=2, seen=seen, temperature=0.0, **how)
        return {step.undrafted for step in seen if step.slots}

    assert reasons(planned(Fixed(0))) == {"off"}
    assert reasons(planned(LookAhead()), speculative_tokens=0) == {"request"}
    assert reasons(planned(LookAhead(), draft=[(1, 99.0)])) == {"does_not_pay"}
    assert reasons(planned(Fixed(3))) == {None}


def test_a_dear_draft_is_not_drafted_though_rows_are_cheap():
    drafter = Sure(knowing(), 0.5)
    run(drafter, planned(LookAhead(), CHEAP, draft=[(1, 50.0), (64, 60.0)]), count=3, temperature=0.0)
    assert len(drafter.asked) < 3 * 40 / 8


def test_slots_follow_what_was_verified():
    """A chance of a half at every position: later slots pay less and less, and are not drafted."""
    drafter = Sure(babbler(1), 0.0)
    run(drafter, planned(LookAhead(), [(1, 1.0), (200, 35.0)], gamma=8), count=1, temperature=0.0)
    late = drafter.asked[5:]
    assert max(late) < 8


def test_without_confidence_acceptance_is_learnt():
    speculation, seen = planned(LookAhead()), []
    run(knowing(), speculation, seen=seen, temperature=0.0)
    assert min(speculation.survival._acceptance["greedy"].chances(3)) > 0.9
    assert np.mean(lengths(seen)[20:]) > 2.5


def test_calibration_is_by_regime():
    tables = {"greedy": Calibration("greedy", (2.0,)), "rejection": Calibration("rejection", (0.5, 0.5))}
    for params, wanted in (
        (SamplingParams(temperature=0.0), (0.731, 0.881)),
        (SamplingParams(), (0.982, 0.982)),
        (SamplingParams(seed=1), (0.881, 0.881)),
    ):
        engine = Engine(tiny(), None, "off")
        how = {"temperature": params.temperature, "seed": params.seed}
        active = engine.add("a", [3, 4], max_tokens=2, **how)
        text = active.sequences[0]
        text.draft = DraftBlock((1, 2), confidence=(2.0, 2.0))
        text.computed = 1
        found = Survival(4, tables).blocks([text]).chances
        assert found[0] == pytest.approx(wanted, abs=1e-3)


def test_regimes():
    assert regime(SamplingParams(temperature=0.0, seed=1)) == "greedy"
    assert regime(SamplingParams(seed=1)) == "coupled"
    assert regime(SamplingParams()) == "rejection"


def test_rejection_sampled_texts_keep_their_law_and_deterministic_drafts_are_free():
    """Guarded only where a draft was drawn: q is there and the request is not seeded."""
    speculation = planned(LookAhead())
    engine = Engine(tiny(), None, "off")
    active = engine.add("a", [3, 4], max_tokens=2)
    text = active.sequences[0]
    text.computed = 1
    text.draft = DraftBlock((1, 2))
    assert not speculation.survival.blocks([text]).guarded[0]
    text.draft = DraftBlock((1, 2), q=torch.full((2, 64), 1 / 64))
    assert speculation.survival.blocks([text]).guarded[0]


def test_a_drafts_duration_counts_once_its_blocks_are_decided():
    speculation = planned(LookAhead())
    speculation.throughput.weight = 0.5
    before = speculation.throughput.draft._own[:]
    engine = Engine(tiny(), babbler(1), speculation)
    engine.add("a", [3, 4, 5], max_tokens=3, temperature=0.0, ignore_eos=True)
    batch = engine.loop.begin()
    result = replace(engine.worker.run(batch), draft_time=7.0)
    engine.loop.commit(batch, result)
    assert speculation.throughput.draft._own[:] == before  # whatever the verification says of all sizes
    batch = engine.loop.begin()
    engine.loop.commit(batch, engine.worker.run(batch))
    if result.drafts[0] is not None:
        assert speculation.throughput.draft._own[0] > before[0]


@pytest.mark.parametrize(("rho", "wanted"), [(0.0, 0.0), (0.6, 0.6), (1.0, 1.0)])
def test_how_much_a_block_tells_about_the_next_is_learnt(rho, wanted):
    likeness, rng = Likeness(), np.random.default_rng(0)
    mean, block = np.full(3, 0.5), np.full(3, 0.5)
    for _ in range(3000):
        following = mean + rho * (block - mean) + (1.0 - rho) * rng.normal(0.0, 0.1, 3)
        if rho == 1.0:
            block = mean + rng.normal(0.0, 0.1, 3)
            following = block
        likeness.observe(block, following, mean)
        block = following
    assert likeness.value == pytest.approx(wanted, abs=0.06)


def test_a_new_text_is_expected_to_be_average_and_a_known_one_like_itself():
    speculation = planned(LookAhead())
    survival, engine = speculation.survival, Engine(tiny(), None, "off")
    text = engine.add("a", [3, 4], max_tokens=2, temperature=0.0).sequences[0]
    assert survival.expected([text])[0] == pytest.approx([0.5, 0.25, 0.125, 0.0625])
    survival._remember(text, "greedy", [0.9, 0.9])  # half of what sets it apart is believed at first
    assert survival.expected([text])[0] == pytest.approx([0.7, 0.49, 0.25, 0.12], abs=0.03)


def test_a_confidence_that_is_no_number_promises_nothing_and_breaks_nothing():
    for policy in (Fixed(3), LookAhead(), Threshold(least=1)):
        engine = run(Sure(babbler(2), math.nan), planned(policy), temperature=0.0)
        assert engine.texts() == run(None, "off", temperature=0.0).texts()
        assert not np.isnan(engine.loop.speculation.survival.mean("greedy")).any()
        assert not np.isnan(engine.loop.speculation.survival.running["greedy"].shift).any()


def test_while_a_long_prompt_takes_the_rows_nobody_drafts():
    seen: list = []

    class Steps(NullObserver):
        def step(self, stats) -> None:
            seen.append(stats)

    engine = Engine(
        tiny(), Sure(babbler(1), 4.0), planned(LookAhead()), observer=Steps(), num_pages=200, token_budget=8
    )
    engine.add("short", [3, 4, 5], max_tokens=60, temperature=0.0, ignore_eos=True)
    for _ in range(4):
        engine.step()
    engine.add("long", [5] * 60, max_tokens=2, temperature=0.0)
    engine.run()
    busy = [step for step in seen if step.prefill_rows and step.capacity == 0 and step.sequences == 2]
    assert len(busy) > 5
    assert not any(sum(step.slots) for step in busy[:-1])
    assert any(sum(step.slots) for step in seen)


def test_a_draft_that_ended_the_text_leaves_what_is_behind_it_untried():
    assert Verdict((1, 2, 3), 2).decided(5) == 3  # two accepted, one corrected
    assert Verdict((1, 2), 2, finish="stop").decided(5) == 2
    assert Verdict((1, 2, 3), 2).decided(2) == 2  # all accepted, and the bonus
    assert Verdict((1,), 0).decided(0) == 0


def tries(plan: LookupPlan, gain: float | None, steps: int) -> list[int]:
    """The steps in which it looks up, each of which gains so much (None: finds nothing)."""
    out = []
    for step in range(steps):
        if plan.wanted():
            out.append(step)
            if gain is not None:
                plan.observe(gain)
    return out


def test_lookups_that_are_not_worth_it_rest_for_longer_and_longer_and_come_back_at_once():
    plan = LookupPlan()
    assert len(tries(plan, None, 100)) == 100  # until told otherwise
    rests = np.diff(tries(plan, -0.2, 2000)).tolist()
    assert rests[-1] == 129  # a try, and so many without
    assert [rest for rest in rests if rest > 1] == sorted(rest for rest in rests if rest > 1)
    assert len(rests) < 25
    plan.observe(2.0)
    plan.observe(2.0)
    assert len(tries(plan, None, 100)) == 100


def test_tries_that_find_nothing_or_something_do_not_lengthen_the_rest():
    plan = LookupPlan()
    tries(plan, -0.2, 3)
    assert not plan.wanted()
    assert set(np.diff(tries(plan, None, 500)).tolist()) == {17}
    plan.observe(0.04)  # good, but not enough yet
    assert set(np.diff(tries(plan, None, 500)).tolist()) == {17}


def test_chances_and_decisions_are_the_same_whether_blocks_are_few_or_many(monkeypatch):
    """What waits in plain numbers and in arrays: as calibrated, looked up, counted, and no number at all."""
    tables = {"rejection": Calibration("rejection", (0.5, 2.0), (0.1, -0.2))}
    law = torch.full((3, 64), 1 / 64)
    blocks = [
        DraftBlock((1, 2, 3), q=law, confidence=(0.5, math.nan, 1.0)),
        None,
        DraftBlock((1, 2), chances=(0.9, 0.7)),
        DraftBlock((1, 2, 3)),
        DraftBlock((1,), confidence=(2.0,)),
    ]
    engine = Engine(tiny(), None, "off")
    texts = [engine.add(str(n), [3, 4], max_tokens=9, seed=n % 2 or None).sequences[0] for n in range(5)]
    for text, block in zip(texts, blocks, strict=True):
        text.computed, text.draft = 1, block
    found = []
    for few_candidates in (32, 0):
        monkeypatch.setattr("scheduler.few.FEW", few_candidates)
        throughput = Throughput(Curve(CHEAP), Curve(DRAFT))
        speculation = Speculation(LookAhead(), 4, throughput, tables, online_calibration=True)
        speculation.survival.running["rejection"].shift[:2] = [0.3, 0.1]
        waiting = speculation.survival.blocks(texts)
        assert (waiting.many is None) == bool(few_candidates)
        lengths = speculation.lengths(texts, Step(5, 5, 100), [Slots()] * 5, 0.1)
        plan = speculation.slots(texts, [None, 0, 2, None, None], 100)
        found.append((waiting, lengths, plan))
    (few_blocks, *decided), (many_blocks, *wanted) = found
    assert decided == wanted
    assert sum(decided[0]) > 3
    assert few_blocks.length == many_blocks.length == [3, 0, 2, 3, 1]
    assert (few_blocks.guarded, few_blocks.modelled) == (many_blocks.guarded, many_blocks.modelled)
    for name in ("chances", "alive"):
        for row, other in zip(getattr(few_blocks, name), getattr(many_blocks, name), strict=True):
            assert row == pytest.approx(other, rel=1e-12), name
