from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from loadtest.compare import NotComparable, compare, load, main


def run(tpot: float, through: float, seed: int = 1) -> dict[str, Any]:
    rng = random.Random(seed)
    columns = ["name", "kind", "outcome", "ttft", "tpot", "e2e", "measured"]
    rows = [
        ["x", "load", "ok", rng.uniform(0.1, 0.2), rng.gauss(tpot, tpot / 10), 1.0, True] for _ in range(200)
    ]
    rows.append(["x", "load", "ok", 9.0, 9.0, 9.0, False])
    parts = [rng.gauss(through, 1.0) for _ in range(10)]
    return {
        "kind": "run",
        "throughput": {"output_tokens_per_second_parts": parts},
        "records": {"columns": columns, "rows": rows},
        "slo": {"limits": "ttft:150", "attempted": 200, "good": 100},
    }


def test_two_runs() -> None:
    rows = {name: ratio for name, _, _, ratio in compare(run(0.05, 100), run(0.04, 120, 2))}
    assert rows["TPOT p50, ms"].value == pytest.approx(0.8, rel=0.03)
    assert rows["TPOT mean, ms"].clear
    assert not rows["TTFT mean, ms"].clear
    assert rows["output tokens/s"].clear
    assert rows["within ttft:150"].value == 1.0


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(NotComparable):
        compare(run(1, 1), {"kind": "sweep"})
    sweeps = [{"kind": "sweep", "unit": unit, "slo": None, "points": {}} for unit in ("users", "requests/s")]
    with pytest.raises(NotComparable, match="users"):
        compare(*sweeps)
    file = tmp_path / "x.json"
    file.write_text("[]")
    with pytest.raises(NotComparable, match="no result"):
        load(str(file))
    assert main([str(file), str(tmp_path / "none.json")]) == 2
    file.write_text(json.dumps(run(0.1, 5)))
    with pytest.raises(NotComparable, match="no configuration"):
        load(f"{file}:off")
