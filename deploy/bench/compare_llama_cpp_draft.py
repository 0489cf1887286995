"""A draft model of ours in llama.cpp's server beside our own: acceptance and speed at one stream.

    .venv/bin/python -m deploy.bench.compare_llama_cpp_draft [--draft DIR] [--tokens 7] [--json FILE]

Exports the draft model (default: the shipped one), converts it with llama.cpp's own script, and lets both
servers answer the same chat prompts greedily over HTTP, each with the draft model and without, taking turns.
Acceptance is accepted / drafted tokens, as each server counts them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from deploy.bench.llama_cpp import build, source
from drafters.export import export
from drafters.shipped import shipped_drafter
from engine.models.gguf_convert import source_gguf
from engine.models.locate import cache_folder, locate_model
from server.bench_prompts import PROMPTS

_PORT = 18080


def main() -> int:
    options = _parser().parse_args()
    cache = Path(options.cache).expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    target = locate_model(None, cache_folder(), print)
    gguf = source_gguf(target)
    assert gguf is not None, "the default model comes as a GGUF file"
    draft = Path(options.draft) if options.draft else shipped_drafter(target)
    assert draft is not None, "no draft model is shipped: --draft"
    tools = Path(options.llama_bin) if options.llama_bin else build(cache, ["llama-server"])
    tree = Path(options.llama_source) if options.llama_source else source(cache)
    converted = _convert(draft, target, tree, cache)
    commands = _commands(tools, gguf, converted, draft, options)
    best: dict[str, dict[str, float]] = {}
    for _ in range(options.rounds):
        for name, command in commands.items():
            with _server(command) as address:
                found = _measure(address, options.max_tokens)
            if name not in best or found["tokens_per_second"] > best[name]["tokens_per_second"]:
                best[name] = found
    for name, found in best.items():
        print(f"{name:<22} {found['tokens_per_second']:7.1f} tokens/s   acceptance {found['acceptance']:.3f}")
    if options.json:
        Path(options.json).write_text(json.dumps(best, indent=1) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draft", metavar="DIR")
    parser.add_argument("--tokens", type=int, default=7, help="drafted a round")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--llama-bin", metavar="DIR", help="folder with llama-server")
    parser.add_argument("--llama-source", metavar="DIR", help="with convert_hf_to_gguf.py")
    parser.add_argument("--cache", default="~/.cache/dspark/compare", metavar="DIR")
    parser.add_argument("--json", metavar="FILE")
    return parser


def _convert(draft: Path, target: Path, tree: Path, cache: Path) -> Path:
    folder, file, extra = cache / "exported", cache / "draft.gguf", cache / "python"
    export(draft, target, folder)
    if not extra.exists():  # the script imports it, whatever the tokenizer
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", extra, "sentencepiece"]
        subprocess.run(pip, check=True)
    command = [sys.executable, tree / "convert_hf_to_gguf.py", folder, "--outtype", "bf16"]
    environment = os.environ | {"PYTHONPATH": str(extra)}
    subprocess.run([*command, "--target-model-dir", target, "--outfile", file], check=True, env=environment)
    return file


def _commands(tools: Path, gguf: Path, converted: Path, draft: Path, options: Any) -> dict[str, list[Any]]:
    threads = str(options.threads)
    theirs = [
        tools / "llama-server",
        "-m",
        gguf,
        "--port",
        str(_PORT),
        "-t",
        threads,
        "-c",
        "4096",
        "-np",
        "1",
    ]
    theirs += ["--jinja"]
    with_draft = ["-md", converted, "--spec-type", "draft-dspark", "--spec-draft-n-max", str(options.tokens)]
    ours = [Path(sys.executable).parent / "dspark", "serve", "--port", str(_PORT), "--threads", threads]
    config = {"method": "dspark", "model": str(draft), "num_speculative_tokens": options.tokens}
    return {
        "llama.cpp, off": theirs,
        "llama.cpp, DSpark": [*theirs, *with_draft],
        "dspark, off": [*ours, "--verify-policy", "off"],
        "dspark, DSpark": [*ours, "--speculative-config", json.dumps(config)],
    }


@contextmanager
def _server(command: list[Any]) -> Iterator[str]:
    address = f"http://127.0.0.1:{_PORT}"
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(map(str, command))} ended with {process.returncode}")
            try:
                if httpx.get(f"{address}/v1/models").status_code == 200 and _ready(address):
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=60)


def _ready(address: str) -> bool:
    """Ours says so at /ready, llama.cpp at /health."""
    return any(httpx.get(f"{address}/{path}").status_code == 200 for path in ("ready", "health"))


def _measure(address: str, max_tokens: int) -> dict[str, float]:
    tokens = drafted = accepted = 0
    seconds = 0.0
    with httpx.Client(timeout=600) as client:
        for prompt in PROMPTS:
            body = {
                "model": "SmolLM2-135M-Instruct",
                "messages": [{"role": "user", "content": prompt}],
                "temperature": 0,
                "max_tokens": max_tokens,
            }
            begun = time.perf_counter()
            answer = client.post(f"{address}/v1/chat/completions", json=body).raise_for_status().json()
            seconds += time.perf_counter() - begun
            tokens += answer["usage"]["completion_tokens"]
            timings = answer.get("timings", {})
            drafted += timings.get("draft_n", 0)
            accepted += timings.get("draft_n_accepted", 0)
        if not drafted:
            drafted, accepted = _counted(client.get(f"{address}/metrics").text)
    return {"tokens_per_second": tokens / seconds, "acceptance": accepted / max(1, drafted)}


def _counted(metrics: str) -> tuple[int, int]:
    """Draft tokens verified and accepted, from our own /metrics."""
    values = {"draft_tokens_total": 0.0, "accepted_tokens_total": 0.0}
    for line in metrics.splitlines():
        for name in values:
            if line.startswith(f"dspark:spec_decode_num_{name}"):
                values[name] += float(line.rsplit(" ", 1)[1])
    return int(values["draft_tokens_total"]), int(values["accepted_tokens_total"])


if __name__ == "__main__":
    sys.exit(main())
