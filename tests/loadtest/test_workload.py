from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from loadtest.flags import add_shared_flags
from loadtest.lengths import Lengths
from loadtest.options import UsageError, fresh_to_the_cache, read_slo, read_workload
from loadtest.prompts import Prompt, PromptMix, read_prompts
from loadtest.run_command import _parser, plan_load
from loadtest.workload import Sessions, Workload


@pytest.mark.parametrize(
    ("text", "middle"),
    [("64", 64), ("uniform:10,30", 20), ("normal:100,10", 100), ("lognormal:50,0.5", 50)],
)
def test_lengths(text: str, middle: float) -> None:
    rng, lengths = random.Random(1), Lengths.parse(text)
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert median(drawn) == pytest.approx(middle, rel=0.05)
    assert min(drawn) >= 1
    assert Lengths.parse(str(lengths)) == lengths


@pytest.mark.parametrize(
    "text", ["", "0", "x", "uniform:5", "uniform:9,3", "normal:1,-1", "poisson:3,4", "nan"]
)
def test_bad_lengths(text: str) -> None:
    with pytest.raises(ValueError, match="no length"):
        Lengths.parse(text)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines), "utf-8")
    return path


def test_prompt_files(tmp_path: Path) -> None:
    file = write(
        tmp_path / "own.jsonl",
        {"prompt": "a\u2028a", "domain": "math"},  # a line break to Python, not to JSON
        {"prompt": ["b", "c"]},
        {"prompt": "b", "turns": ["b", "d"]},
        {"prompt": [1, 2]},
    )
    assert read_prompts(file) == [
        Prompt("math", ("a\u2028a",)),
        Prompt("own", ("b", "c")),
        Prompt("own", ("b", "d")),
        Prompt("own", (), (1, 2)),
    ]


@pytest.mark.parametrize("line", [{}, {"prompt": 3}, {"prompt": []}, {"prompt": ["a", 1]}, [1]])
def test_bad_prompts_are_refused_by_line(tmp_path: Path, line: Any) -> None:
    with pytest.raises(ValueError, match=r"own.jsonl:2"):
        read_prompts(write(tmp_path / "own.jsonl", {"prompt": "a"}, line))


def test_a_mix_draws_domains_by_weight_and_every_prompt_before_one_again() -> None:
    prompts = [Prompt(domain, (f"{domain} {place}",)) for domain in "abc" for place in range(10)]
    mix = PromptMix(prompts, {"a": 3.0, "b": 1.0}, random.Random(2))
    drawn = [mix.draw() for _ in range(4000)]
    counts = Counter(prompt.domain for prompt in drawn)
    assert set(counts) == {"a", "b"}
    assert counts["a"] / counts["b"] == pytest.approx(3.0, rel=0.1)
    of_b = [prompt.turns for prompt in drawn if prompt.domain == "b"]
    assert len(set(of_b[:10])) == 10
    with pytest.raises(ValueError, match="no prompts of z"):
        PromptMix(prompts, {"z": 1.0}, random.Random(2))


def test_shared_prefixes_are_few_and_cancelled_ones_as_many_as_asked() -> None:
    sessions = Sessions(Workload(shared_prefixes=3, prefix_tokens=40, cancel_share=0.25), "s")
    rngs = [sessions.rng() for _ in range(400)]
    systems = {sessions.system(rng) for rng in rngs}
    assert len(systems) == 3
    assert {len(str(system).split()) for system in systems} == {40}
    cuts = [sessions.cancel_after(rng, {"max_tokens": 10}) for rng in rngs]
    assert fmean(cut is not None for cut in cuts) == pytest.approx(0.25, abs=0.06)
    assert {cut for cut in cuts if cut} <= set(range(1, 10))


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_shared_flags(parser)
    return parser.parse_args(list(words))


def test_flags_become_a_workload(tmp_path: Path) -> None:
    write(tmp_path / "eval_x.jsonl", {"prompt": "a", "domain": "math"}, {"prompt": "b", "domain": "code"})
    work = read_workload(
        parsed(
            *("--data", str(tmp_path), "--mix", "math=2", "--temperature", "0.5", "--top-k", "3"),
            *("--body", '{"stop": ["."]}', "--think", "1,2", "--output-tokens", "uniform:2,4"),
        )
    )
    assert work.body == {"temperature": 0.5, "top_k": 3, "stop": ["."]}
    assert work.weights == {"math": 2.0}
    assert (work.think, work.output_tokens) == ((1.0, 2.0), Lengths("uniform", 2, 4))
    salted, other = (fresh_to_the_cache(work, "salt", "") for _ in range(2))
    assert salted.body["cache_salt"] != other.body["cache_salt"]
    assert fresh_to_the_cache(work, "text", "").opening != fresh_to_the_cache(work, "text", "").opening
    assert fresh_to_the_cache(work, "keep", "") == work


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--mix", "math=1"], "--mix"),
        (["--mix", "math"], "--mix"),
        (["--think", "3,1"], "--think"),
        (["--cancel-share", "2"], "--cancel-share"),
        (["--turns", "0"], "--turns"),
        (["--data", "/nowhere"], "--data"),
        (["--fail-on-slo"], "--fail-on-slo"),
        (["--slo", "x:1"], "--slo"),
    ],
)
def test_flags_that_make_no_sense_are_named(words: list[str], flag: str) -> None:
    read = read_slo if "slo" in flag else read_workload
    with pytest.raises(UsageError, match=flag):
        read(parsed(*words))


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--users", "2", "--rate", "1"], "--rate"),
        (["--users", "0"], "--users"),
        (["--rate-to", "3"], "--rate-to"),
        (["--run-time", "5", "--warmup", "5"], "--run-time"),
        (["--processes", "0"], "--processes"),
    ],
)
def test_loads_that_make_no_sense_are_named(words: list[str], flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        plan_load(_parser().parse_args(["http://x", *words]))
