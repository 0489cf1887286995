"""How many pages are affordable."""

from __future__ import annotations

from engine.cuda.memory import Usage, pages_for


def test_pages_are_what_weights_steps_and_graphs_leave():
    usage = Usage(total=1000, others=50, rest=300, peak=400)
    assert pages_for(usage, 0.9, 10) == (900 - 50 - 300 - 2 * 100) // 10
    assert pages_for(usage, 0.5, 10) == 0
    assert pages_for(usage, 1.0, 7) == 450 // 7
