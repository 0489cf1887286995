"""Cost curves: between, at and past their points; what live steps do to them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler.curve import _NOISE, Curve
from scheduler.throughput import Throughput

POINTS = [(1, 10.0), (4, 12.0), (8, 20.0), (16, 36.0)]


def test_between_points_the_cost_is_interpolated_and_goes_on_past_the_last():
    curve = Curve(POINTS)
    assert curve.at([1, 2.5, 4, 6, 16, 20]).tolist() == [10.0, 11.0, 12.0, 16.0, 36.0, 44.0]
    assert curve.at([0.5]).tolist() == [10.0]


def test_where_execution_pads_the_next_point_counts():
    curve = Curve(POINTS, staircase=True)
    assert curve.at([1, 2, 4, 5, 8, 9, 16]).tolist() == [10.0, 12.0, 12.0, 20.0, 20.0, 36.0, 36.0]
    assert curve.at([18]).tolist() == [40.0]


def test_more_is_never_cheaper_whatever_noise_said():
    curve = Curve([(1, 10.0), (2, 9.0), (3, 11.0)])
    assert curve.at([1, 1.5, 2, 3]).tolist() == [9.0, 9.0, 9.0, 11.0]


@pytest.mark.parametrize(
    ("points", "word"),
    [
        ([], "point"),
        ([(2, 1.0), (2, 2.0)], "rise"),
        ([(1, float("nan"))], "finite"),
        ([(1, -1.0)], "negative"),
    ],
)
def test_what_cannot_be_a_cost_is_refused(points, word):
    with pytest.raises(ValueError, match=word):
        Curve(points)


@given(st.floats(1, 40), st.floats(0.5, 3.0), st.booleans())
@example(8.0, 3.0, False)
@settings(max_examples=100, deadline=None)
def test_a_machine_that_changed_is_noticed(size, factor, staircase):
    curve = Curve(POINTS, staircase)
    truth = factor * float(curve.at([size])[0])
    for _ in range(600):
        curve.refresh(size, truth, 0.1)
    # What one size alone has become is taken for noise up to so much of it.
    assert float(curve.at([size])[0]) == pytest.approx(truth, rel=1.0 - 1.0 / _NOISE + 0.02)
    assert (np.diff(curve.seconds) >= 0).all()


def test_a_profile_from_a_busy_moment_is_outgrown_by_drafts_too():
    """Both halves took twice as long when they were measured; a probe now and then must not be needed."""
    model = Throughput(Curve([(1, 0.02), (8, 0.04)]), Curve([(1, 0.006), (7, 0.008)]))
    for _ in range(1000):
        model.observe(1, 0.0, forward_seconds=0.01)
    assert model.draft.at([1, 7]) == pytest.approx([0.003, 0.004], rel=0.3)
    for _ in range(10):
        model.observe_draft(2, 0.003)
    assert model.draft.at([2])[0] == pytest.approx(0.003, rel=0.1)


def test_a_stall_is_forgotten_at_every_size():
    curve = Curve([(1, 0.020), (2, 0.0205), (8, 0.0235)])
    before = curve.at([1, 2, 4, 8])
    curve.refresh(1, 10.0, 0.05)
    assert (curve.at([1, 2, 4, 8]) < 1.1 * before).all()
    for _ in range(3000):
        curve.refresh(1, 0.020, 0.05)
    assert curve.at([1, 2, 4, 8]) == pytest.approx(before, rel=0.02)


def test_noise_does_not_ratchet():
    curve, rng = Curve([(1, 0.010), (2, 0.011), (4, 0.012), (8, 0.020)]), np.random.default_rng(0)
    for size, truth in ((1, 0.010), (8, 0.020)):
        for _ in range(3000):
            curve.refresh(size, truth * rng.lognormal(-0.02, 0.2), 0.05)
    assert curve.at([1, 2, 4, 8]) == pytest.approx([0.010, 0.011, 0.012, 0.020], rel=0.1)


def test_a_step_is_rows_context_and_draft():
    model = Throughput(Curve(POINTS), Curve([(1, 2.0), (2, 3.0)]), per_context=0.01, context=100)
    assert model.seconds(4, 2, 300, 2).tolist() == [12.0 + 2.0 + 3.0, 14.0 + 2.0 + 3.0, 16.0 + 2.0 + 3.0]
    assert model.seconds(4, 0, 100, 0).tolist() == [12.0]


def test_live_steps_refresh_each_half_by_itself():
    model = Throughput(Curve(POINTS), Curve([(1, 2.0), (2, 3.0)]), per_context=0.01, context=100, weight=0.5)
    model.observe(4, 300, forward_seconds=18.0)
    # 16 without its context instead of 12: a fifth of a third more everywhere, then half of the rest here
    assert model.verify.at([4])[0] == pytest.approx(12.8 + 0.5 * 3.2)
    assert model.verify.at([16])[0] == pytest.approx(36.0 * 12.8 / 12.0)
    model.observe_draft(1, 4.0)
    # The common factor of the step before, then the same again for the draft's own.
    before = 2.0 * 12.8 / 12.0
    common = before * (1.0 + 0.2 * (4.0 / before - 1.0))
    assert model.draft.at([1])[0] == pytest.approx(common + 0.5 * (4.0 - common), rel=1e-3)
    known = model.draft.at([1])[0]
    model.observe_draft(0, 99.0)
    assert model.draft.at([1])[0] == known


def test_what_drafts_cost_beside_their_rows_is_told_from_what_every_step_costs():
    model = Throughput(Curve(POINTS), Curve([(1, 2.0), (2, 3.0)]))
    for step in range(4000):
        drafts, emitted = (0, 4) if step % 2 else (3, 6)
        # 2 ms in every step, 0.1 ms a token; where drafts are decided on 0.7 ms more, and 0.4 ms of deciding
        model.observe_rest(drafts, emitted, 1e-4 * emitted + 4e-4 * (drafts > 0), 2e-3 + 7e-4 * (drafts > 0))
    assert model.per_token == pytest.approx(1e-4, rel=0.01)
    assert model.overhead == pytest.approx(2e-3, rel=0.05)
    assert model.for_drafts == pytest.approx(1.1e-3, rel=0.3)  # a little less: it fades in between
    plain, one, two = model.seconds(4, 2, 0, 0).tolist()
    assert two - one == pytest.approx(2.0)
    assert one - plain == pytest.approx(2.0 + model.for_drafts)
    assert model.step(6, 2, 0, 0) == pytest.approx(two)
    assert model.step(6, 0, 0, 0) == pytest.approx(two - model.for_drafts)
    # A prompt's deciding tells nothing, and steps that were held up little.
    model.observe_rest(0, 0, 99.0, 5.0)
    model.observe_rest(0, 1, 5.0, 2e-3)
    model.observe_rest(3, 6, 5.0, 5.0)
    assert model.per_token == pytest.approx(1e-4, rel=0.06)
    assert model.overhead < 2.4e-3
    assert model.for_drafts < 1.5e-3


def test_a_cost_of_drafts_that_keeps_them_from_being_made_is_forgotten():
    """A lone stream that always drafts cannot tell it from what every step costs."""
    model = Throughput(Curve(POINTS), Curve([(1, 2.0), (2, 3.0)]))
    for _ in range(500):
        model.observe_rest(3, 3, 3e-4, 5e-3)
    assert model.for_drafts == pytest.approx(2.5e-3, rel=0.05)
    for _ in range(10_000):
        model.observe_rest(0, 1, 1e-4, 4e-3)
    assert model.overhead == pytest.approx(4e-3, rel=0.01)
    assert model.for_drafts < 1e-4
    for step in range(2000):  # one in fifty is enough to find out again
        model.observe_rest(*((0, 1, 1e-4, 4e-3) if step % 50 else (2, 2, 2e-4, 4.6e-3)))
    assert model.for_drafts == pytest.approx(6e-4, rel=0.2)
    for _ in range(100):  # shorter than ever: never below nothing
        model.observe_rest(3, 3, 0.0, 0.0)
    assert model.overhead >= 0.0
    assert model.for_drafts >= 0.0


def test_a_plan_pays_for_what_it_drafts():
    model = Throughput(Curve(POINTS), Curve([(1, 2.0), (2, 3.0)]), overhead=0.5)
    assert model.planned(4, 2, 0).tolist() == [12.5, 14.0 + 2.0 + 0.5, 16.0 + 3.0 + 0.5]


def test_a_curve_with_noise_in_it_comes_back_the_same():
    curve = Curve([(1, 10.0), (2, 14.0), (4, 15.0), (8, 30.0), (16, 31.0)])
    curve.refresh(4, 20.0, 0.3)
    again = Curve(curve.to_list())
    assert again.at([1, 2, 3, 4, 8, 16]) == pytest.approx(curve.at([1, 2, 3, 4, 8, 16]))


def test_small_dents_are_noise_and_large_ones_stay():
    curve = Curve([(1, 10.0), (2, 10.9), (3, 11.0), (4, 12.0)])
    assert (np.diff(curve.seconds, 2) >= -1e-9).all()
    jump = Curve([(1, 10.0), (2, 20.0), (3, 20.5), (4, 21.0)])
    assert jump.at([2])[0] > 17.0


def test_a_profile_comes_back_from_a_file_and_must_reach_far_enough():
    model = Throughput(Curve(POINTS, True), Curve([(1, 2.0)]), 0.01, 100, 0.2, 0.3, 0.1)
    again = Throughput.from_dict(model.to_dict())
    assert again.to_dict() == model.to_dict()
    again.check(16)
    with pytest.raises(ValueError, match="ends at 16 rows"):
        again.check(17)


@pytest.mark.parametrize("staircase", [False, True])
def test_a_few_sizes_cost_in_plain_numbers_what_they_do_in_arrays(staircase):
    model = Throughput(
        Curve([*POINTS, (32, 100.0)], staircase), Curve([(2, 2.0), (5, 3.0)]),
        0.01, 100, 0.2, 0.3, 0.1,
    )  # fmt: skip
    for rows in range(1, 40):
        wanted = model.seconds(rows, 9, 300, 3)
        assert model.few_seconds(rows, 9, 300, 3) == pytest.approx(wanted.tolist(), rel=1e-12)
        assert model.few_planned(rows, 9, 300) == pytest.approx(
            model.planned(rows, 9, 300).tolist(), rel=1e-12
        )
        assert model.verify.one(rows) == pytest.approx(float(model.verify.at([rows])[0]), rel=1e-12)


def test_a_step_with_drafts_that_was_held_up_says_little():
    model = Throughput(Curve(POINTS), Curve([(1, 2.0)]))
    for step in range(2000):
        model.observe_rest(*((0, 1, 1e-4, 4e-3) if step % 10 else (2, 2, 2e-4, 4.6e-3)))
    before = model.for_drafts
    assert before == pytest.approx(6e-4, rel=0.1)
    model.observe_rest(2, 2, 2e-4, 0.05)
    assert model.for_drafts - before < 2.5e-4
