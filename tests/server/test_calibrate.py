"""`dspark calibrate` on the default model with an untrained draft; look-ahead over a measured profile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.outputs import NullObserver
from engine.params import SamplingParams
from engine.request import Request
from scheduler.calibration import CALIBRATION_FILE, Calibration
from server.calibrate import main
from server.settings import Settings
from server.wiring import BadSettings, build_parts
from tests.drafters.test_loading import draft  # noqa: F401
from tests.engine import real

pytestmark = [pytest.mark.model, pytest.mark.slow]


def speculation(folder: Path) -> str:
    return json.dumps({"method": "dspark", "model": str(folder)})


def test_tables_lie_beside_the_model_and_are_found_there(draft, tmp_path):  # noqa: F811
    for file in draft.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in real.PROMPTS))
    arguments = ["--prompts", str(prompts), "--rounds", "40", "--max-tokens", "24", "--threads", "1"]
    assert main([*arguments, "--num-pages", "200", "-sc", speculation(tmp_path)]) == 0
    raw = json.loads((tmp_path / CALIBRATION_FILE).read_text())
    tables = [Calibration.from_dict(each) for each in raw]
    assert [table.regime for table in tables] == ["greedy", "rejection", "coupled"]
    assert all(len(table.temperatures) == 7 and table.samples >= 15 for table in tables)
    settings = Settings(speculative_config=json.loads(speculation(tmp_path)), num_pages=100, threads=1)
    parts = build_parts(settings, NullObserver(), lambda line: None)
    assert parts.loop.speculation.survival.calibrations == {table.regime: table for table in tables}
    raw[0] |= {"temperatures": [1.0], "shifts": [0.0]}
    (tmp_path / CALIBRATION_FILE).write_text(json.dumps(raw))
    with pytest.raises(BadSettings, match="calibrate again"):
        build_parts(settings, NullObserver(), lambda line: None)


def test_a_trimming_policy_and_a_missing_model_are_refused(draft, tmp_path, capsys):  # noqa: F811
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n')
    arguments = ["--prompts", str(prompts), "--rounds", "5", "--num-pages", "100", "--threads", "1"]
    assert main([*arguments, "-sc", speculation(draft), "--verify-policy", "fixed:2"]) == 1
    assert "--verify-policy" in capsys.readouterr().err
    assert main([*arguments, "-sc", '{"method": "ngram"}']) == 1
    assert "no draft model" in capsys.readouterr().err


def test_look_ahead_serves_the_targets_texts_over_a_profile_that_is_kept(draft, tmp_path):  # noqa: F811
    lines: list[str] = []

    def texts(policy: str | None) -> list[list[int]]:
        config = json.loads(speculation(draft)) if policy else {"method": "off"}
        settings = Settings(
            model=str(real.folder()), speculative_config=config, verify_policy=policy, num_pages=200,
            threads=1, cache_dir=str(tmp_path), max_num_seqs=4, max_num_batched_tokens=32,
        )  # fmt: skip
        parts = build_parts(settings, NullObserver(), lines.append)
        out: dict[str, list[int]] = {}
        for index, prompt in enumerate(real.PROMPTS[:4]):
            how = {"seed": 5} if index % 2 else {"temperature": 0.0}
            parts.loop.add(Request(str(index), real.chat(prompt), SamplingParams(max_tokens=16, **how)))
            out[str(index)] = []
        while parts.loop.has_work:
            batch = parts.loop.begin()
            for active, delta in parts.loop.commit(batch, parts.worker.run(batch)):
                out[active.request.request_id] += delta.token_ids
        return list(out.values())

    plain = texts(None)
    assert texts("lookahead") == plain
    assert lines.count("measuring what steps cost") == 1
    assert texts("lagged") == plain
    assert lines.count("measuring what steps cost") == 1  # read from the cache
    (profile,) = (tmp_path / "profiles").iterdir()
    profile.write_text("{")
    assert texts("threshold") == plain
    assert lines.count("measuring what steps cost") == 2
