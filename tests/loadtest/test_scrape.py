from __future__ import annotations

import pytest

from loadtest.scrape import Scrape, parse, truth

OURS = """\
# TYPE dspark:generation_tokens counter
dspark:generation_tokens_total{model_name="m"} %d
# TYPE dspark:spec_decode_num_drafts counter
dspark:spec_decode_num_drafts_total{model_name="m"} %d
# TYPE dspark:spec_decode_num_draft_tokens counter
dspark:spec_decode_num_draft_tokens_total{model_name="m"} %d
# TYPE dspark:spec_decode_num_accepted_tokens counter
dspark:spec_decode_num_accepted_tokens_total{model_name="m"} %d
# TYPE dspark:spec_decode_num_accepted_tokens_per_pos counter
dspark:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} %d
dspark:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} %d
# TYPE dspark:verify_length histogram
dspark:verify_length_bucket{le="+Inf",model_name="m"} %d
dspark:verify_length_count{model_name="m"} %d
dspark:verify_length_sum{model_name="m"} %d
# TYPE dspark:num_requests_running gauge
dspark:num_requests_running{model_name="m"} %d
"""


def looks() -> list[Scrape]:
    return [
        parse(OURS % (100, 10, 30, 12, 8, 4, 50, 50, 60, 1), 10.0),
        parse(OURS % (400, 60, 130, 52, 38, 14, 150, 150, 260, 4), 20.0),
        parse(OURS % (900, 90, 200, 90, 60, 30, 250, 250, 400, 2), 30.0),
    ]


def test_figures_of_a_span() -> None:
    out = truth(looks(), 9.0, 21.0)
    assert out is not None
    assert out["generated"] == 300
    assert out["generated_per_second"] == pytest.approx(30.0)
    assert out["acceptance_rate"] == pytest.approx(0.4)
    assert out["accepted_length"] == pytest.approx(1.8)
    assert out["acceptance_by_position"] == pytest.approx([0.6, 0.2])
    assert out["verify_length"] == pytest.approx(2.0)
    assert out["peak_running"] == 4
    assert "preemptions" not in out


def test_too_short_a_span_takes_the_whole_run() -> None:
    out = truth(looks(), 20.1, 20.2)
    assert out is not None
    assert out["generated"] == 800
    assert truth(looks()[:1], 0.0, 50.0) is None


def test_other_servers_names() -> None:
    text = "# TYPE llamacpp:tokens_predicted_total counter\nllamacpp:tokens_predicted_total 7\n"
    text += "llamacpp:requests_processing 2\n"
    assert parse(text, 0.0).values == {"generated": 7.0, "running": 2.0}
    assert parse("", 0.0).values == {}


def test_what_is_no_exposition() -> None:
    with pytest.raises(ValueError):
        parse("<html>{</html>", 0.0)
