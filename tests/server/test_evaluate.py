"""`dspark eval` on the default model: whole blocks, untrimmed rounds, and the files that it writes."""

from __future__ import annotations

import json

import pytest

from server.evaluate import main
from tests.engine import real

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture
def data(tmp_path):
    for name, first in (("one", 0), ("two", 10)):
        lines = [json.dumps({"prompt": text}) for text in real.PROMPTS[first : first + 6]]
        (tmp_path / f"eval_{name}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_the_shipped_drafter_is_judged_in_whole_blocks(data, tmp_path):
    out, picture = tmp_path / "eval.json", tmp_path / "eval.png"
    arguments = ["--data", str(data), "--limit", "4", "--max-tokens", "40", "--threads", "1"]
    arguments += [
        "--num-pages",
        "300",
        "--json",
        str(out),
        "--png",
        str(picture),
        "-sc",
        '{"method": "dspark"}',
    ]
    assert main(arguments) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["benchmark"], row["temperature"]) for row in rows] == [
        (name, heat) for heat in (1.0, 0.0) for name in ("one", "two", "macro average")
    ]
    for row in rows:
        assert row["tau"] > 1.15  # a trained drafter
        assert row["ms_per_token"] > 0
        assert len(row["conditional"]) == 7
    mean = rows[2]
    assert mean["tau"] == pytest.approx((rows[0]["tau"] + rows[1]["tau"]) / 2)
    assert len(mean["reliability"]) == 7
    assert picture.stat().st_size > 10_000


def test_wrong_wishes_are_answered_in_a_line(data, capsys):
    for arguments, words in (
        (["--data", str(data), "--benchmarks", "three"], "no benchmark three"),
        (["--data", "/no/such"], "no eval_"),
        (["--data", str(data), "--verify-policy", "lookahead"], "lookahead trims"),
        (["--data", str(data), "-sc", '{"method": "off"}'], "needs a drafter"),
    ):
        assert main([*arguments, "--num-pages", "100"]) == 1
        assert words in capsys.readouterr().err
