"""The real program with the real model: `dspark serve` in a process of its own, and the official client."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import httpx
import openai
import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]

QUESTION = [{"role": "user", "content": "How many days are in a week?"}]


@pytest.fixture(scope="module")
def server():
    """(process, base url) of a server that is ready."""
    environment = {**os.environ, "DSPARK_SPECULATIVE_CONFIG": '{"method": "ngram"}'}
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "server.cli",
            "serve",
            "--port",
            "0",
            "--max-model-len",
            "1024",
            "--shutdown-timeout",
            "120",
        ],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stderr is not None
    lines = []
    url = None
    for line in process.stderr:
        lines.append(line)
        if match := re.search(r"Ready on (http://\S+)", line):
            url = match[1]
        if "curl" in line:
            break
    assert url is not None, "".join(lines)
    yield process, url
    if process.poll() is None:
        process.kill()
    process.wait()


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server[1] + "/v1", api_key="none")


@pytest.fixture(scope="module")
def model(client):
    models = client.models.list().data
    assert len(models) == 1
    return models[0].id


def test_start_line_and_probes(server):
    _, url = server
    assert httpx.get(url + "/health").status_code == 200
    assert httpx.get(url + "/ready").status_code == 200
    version = httpx.get(url + "/version").json()
    assert "ngram" in str(version)


def test_chat_answers_sensibly_and_the_same_when_streamed(client, model):
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=16)
    assert "7" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens <= 16
    stream = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


def test_completion_with_logprobs_stop_and_choices(client, model):
    greedy = client.completions.create(
        model=model, prompt="One, two, three, four,", temperature=0, max_tokens=12, logprobs=2
    )
    choice = greedy.choices[0]
    assert len(choice.logprobs.tokens) == greedy.usage.completion_tokens
    assert "".join(choice.logprobs.tokens) == choice.text
    stopped = client.completions.create(
        model=model, prompt="One, two, three, four,", temperature=0, max_tokens=12, stop=[","]
    )
    assert stopped.choices[0].text == choice.text.split(",")[0]
    assert stopped.choices[0].finish_reason == "stop"
    pair = client.chat.completions.create(
        model=model, messages=QUESTION, n=2, seed=7, temperature=1, max_tokens=12, logprobs=True
    )
    assert [c.index for c in pair.choices] == [0, 1]
    again = client.chat.completions.create(
        model=model, messages=QUESTION, n=2, seed=7, temperature=1, max_tokens=12
    )
    assert [c.message.content for c in pair.choices] == [c.message.content for c in again.choices]


def test_metrics_tell_of_speculation(client, model, server):
    client.chat.completions.create(
        model=model,
        messages=[
            {"role": "user", "content": "Write a list of twenty lines that all say: I like green tea."}
        ],
        temperature=0,
        max_tokens=48,
    )
    text = httpx.get(server[1] + "/metrics").text
    drafted = re.search(r"^dspark:spec_decode_num_draft_tokens_total\{.*\} ([\d.e+]+)$", text, re.M)
    accepted = re.search(r"^dspark:spec_decode_num_accepted_tokens_total\{.*\} ([\d.e+]+)$", text, re.M)
    assert drafted is not None
    assert accepted is not None
    assert 0 < float(accepted[1]) <= float(drafted[1])


def test_a_client_that_leaves_frees_its_pages(client, model, server):
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Write a very long story."}],
        max_tokens=800,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        text = httpx.get(server[1] + "/metrics").text
        if re.search(r"^dspark:num_requests_running\{.*\} 0(\.0)?$", text, re.M) and re.search(
            r"^dspark:kv_cache_usage_perc\{.*\} 0(\.0)?$", text, re.M
        ):
            return
        time.sleep(0.1)
    pytest.fail("the abandoned request still runs")


def test_sigterm_lets_a_stream_finish_and_exits_with_zero(client, model, server):
    """Last: it ends the server."""
    process, _ = server
    stream = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=40,
        stream=True,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    chunks = iter(stream)
    next(chunks)
    process.send_signal(signal.SIGTERM)
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "length"
    assert process.wait(timeout=30) == 0
