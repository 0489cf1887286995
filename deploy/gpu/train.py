"""`make gpu-train`: a drafter on one GPU in ten minutes, from a model and prompts to a checkpoint.

    python -m deploy.gpu.train pack PIECES --data DIR    where the model is: what has to travel, in pieces
    python -m deploy.gpu.train run PIECES... --out OUT   on the GPU: torch, transformers and this repository
    python -m deploy.gpu.train join OUT DRAFT            back home: the draft model from the pieces of OUT

`run` answers the prompts that have no answer yet, trains on all answers with features computed on the way,
and writes everything of use to OUT again every two minutes, the weights in pieces of 15 MiB. No network.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deploy.gpu.answer import answer
from deploy.gpu.parcel import join, split, unpack
from drafters.config import spaced_layers
from drafters.target_tensors import TargetTensors
from drafters.training.corpus import Corpus
from drafters.training.live import LiveFeatures
from drafters.training.recipe import Recipe
from drafters.training.trainer import Trainer
from engine.models.config import ModelConfig

_PIECE, _RETURNED = 24 << 20, 15 << 20  # this repository travels with every piece, 64 MiB in all
_SHARE = 0.4  # of the time may go into answers
#: how often answers are sampled at which temperature
_HEATS, _SHARES = (0.0, 0.3, 0.7, 1.0), (0.15, 0.15, 0.35, 0.35)
RECIPE = Recipe(texts=32, anchors=32, least_slots=3, learning_rate=2e-3, ema=0.9995, amp=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        options.do(options)
    except (OSError, ValueError) as error:
        print(f"gpu-train: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    pack = commands.add_parser("pack")
    pack.set_defaults(do=_pack)
    pack.add_argument("pieces", type=Path)
    pack.add_argument(
        "--data", type=Path, required=True, help="folder with train_mix_24k.jsonl and smollm2-answers/"
    )
    pack.add_argument(
        "--answers", type=Path, nargs="*", default=[], help="more answers (.npz) that exist already"
    )
    pack.add_argument("--model", help="the target (default: the default model)")
    run = commands.add_parser("run")
    run.set_defaults(do=_run)
    run.add_argument("pieces", type=Path, nargs="+")
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--work", type=Path, default=Path("build/gpu-train"))
    run.add_argument("--minutes", type=float, default=9.0, help="all in all")
    run.add_argument("--device", default="cuda")
    run.add_argument("--save-every", type=float, default=120.0, metavar="SECONDS")
    run.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    run.add_argument("--recipe", default="{}", help="JSON of what differs from this script's recipe")
    back = commands.add_parser("join")
    back.set_defaults(do=_join)
    back.add_argument("out", type=Path)
    back.add_argument("draft", type=Path)
    return parser


# ---- before


def _pack(options: argparse.Namespace) -> None:
    from engine.models.blocks import load_blocks
    from engine.models.locate import cache_folder, locate_model
    from engine.tokenizer import Tokenizer

    folder = locate_model(options.model, cache_folder(), print)
    next(load_blocks(folder))  # makes the file
    tokenizer = Tokenizer.from_folder(folder)
    stop = ModelConfig.from_folder(folder).eos_token_ids | {tokenizer.eos_token_id}
    known = [options.data / "smollm2-answers" / "answers.npz", *options.answers]
    done = {str(name) for file in known for name in np.load(file)["id"]}
    prompts = []
    for line in (options.data / "train_mix_24k.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if str(entry["id"]) not in done:
            ids = tokenizer.apply_chat_template([{"role": "user", "content": entry["prompt"]}])
            if len(ids) <= 384:
                prompts.append((ids, str(entry["id"]), str(entry["domain"])))
    pack(options.pieces, folder / "blocks.bin", folder / "config.json", prompts, known, sorted(stop - {None}))


def pack(
    pieces: Path,
    blocks: Path,
    config: Path,
    prompts: Sequence[tuple[Sequence[int], str, str]],
    answers: Sequence[Path],
    stop: Sequence[int],
) -> None:
    """Into folders pieces/0, pieces/1, ...: the model's blocks, and beside the last of them all the rest.

    prompts: (token ids, id, domain) of each.
    """
    for number, file in enumerate(split(blocks.read_bytes(), pieces, "blocks", _PIECE)):
        last = pieces / str(number)
        last.mkdir(exist_ok=True)
        file.replace(last / file.name)
    shutil.copy(config, last / "config.json")
    for number, file in enumerate(answers):
        shutil.copy(file, last / f"answers-{number}.npz")
    np.savez_compressed(
        last / "prompts.npz",
        ids=np.concatenate([np.array(ids, np.int32) for ids, *_ in prompts]),
        length=np.array([len(ids) for ids, *_ in prompts], np.int32),
        id=np.array([name for _, name, _ in prompts]),
        domain=np.array([domain for *_, domain in prompts]),
        stop=np.array(stop, np.int32),
    )
    for folder in sorted(pieces.iterdir()):
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{folder}: {size / (1 << 20):.1f} MiB")


# ---- on the GPU


def _run(options: argparse.Namespace) -> None:
    begun = time.monotonic()
    end = begun + 60 * options.minutes
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")  # TF32
    work, rest = options.work, next(p for p in options.pieces if (p / "prompts.npz").exists())
    model, answers = work / "model", work / "answers"
    answers.mkdir(parents=True, exist_ok=True)
    if not (model / "config.json").exists():
        (work / "blocks.bin").write_bytes(join(options.pieces, "blocks"))
        unpack(work / "blocks.bin", rest / "config.json", model)
    for file in rest.glob("answers-*.npz"):
        shutil.copy(file, answers / file.name)
    if not (answers / "fresh.npz").exists():
        deadline = begun + _SHARE * 60 * options.minutes
        _regenerate(model, rest / "prompts.npz", answers / "fresh.npz", device, options.max_tokens, deadline)
    options.out.mkdir(parents=True, exist_ok=True)
    shutil.copy(answers / "fresh.npz", options.out / "answers.npz")
    _train(model, answers, options, device, end)
    print(f"{time.monotonic() - begun:.0f} s in all", flush=True)


def _regenerate(
    folder: Path, source: Path, output: Path, device: torch.device, max_tokens: int, deadline: float
) -> None:
    from transformers import AutoModelForCausalLM

    arrays = np.load(source)
    prompts = np.split(arrays["ids"], np.cumsum(arrays["length"])[:-1])
    heats = np.random.default_rng(0).choice(_HEATS, len(prompts), p=_SHARES)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).to(device).eval()
    texts = answer(
        model,
        prompts,
        heats,
        max_tokens=max_tokens,
        stop=arrays["stop"].tolist(),
        seed=1,
        deadline=deadline,
        progress=lambda line: print(line, flush=True),
    )
    chosen = sorted(texts)
    np.savez_compressed(
        output,
        ids=np.concatenate([np.concatenate((prompts[i], texts[i])) for i in chosen]).astype(np.uint32),
        length=np.array([len(prompts[i]) + len(texts[i]) for i in chosen], np.int32),
        prompt_length=np.array([len(prompts[i]) for i in chosen], np.int32),
        temperature=heats[chosen].astype(np.float32),
        id=arrays["id"][chosen],
        domain=arrays["domain"][chosen],
    )


def _train(
    folder: Path, answers: Path, options: argparse.Namespace, device: torch.device, end: float
) -> None:
    corpus, config = Corpus.load(answers), ModelConfig.from_folder(folder)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    source = LiveFeatures(folder, corpus, spaced_layers(config.num_layers, 3), device, dtype)
    borrowed = TargetTensors.load(folder, config)
    show = lambda line: print(line, flush=True)  # noqa: E731
    run = options.work / "run"
    if (run / "state.pt").exists():
        recipe = Recipe.load(run / "recipe.json")  # go on
    else:
        recipe = replace(RECIPE, **json.loads(options.recipe))
        trial = replace(recipe, steps=1000, warm_start=False, target_start=False)
        recipe = replace(
            recipe, steps=_steps(options.work / "trial", trial, corpus, source, borrowed, device, end)
        )
    show(f"{len(corpus)} answers, {recipe.steps} steps")
    trainer = Trainer(run, recipe, corpus, source, borrowed, show, device)
    while trainer.step < recipe.steps and time.monotonic() < end:
        trainer.run(1e9, min(options.save_every, end - time.monotonic()))
        _hand_over(run, options.out)
    _hand_over(run, options.out)


def _steps(
    folder: Path, recipe: Recipe, corpus: Corpus, source: Any, borrowed: Any, device: torch.device, end: float
) -> int:
    """How many steps fit into what is left, from a few that are thrown away."""
    trainer = Trainer(folder, recipe, corpus, source, borrowed, lambda line: None, device)
    for _ in range(5):
        trainer.train_step()
    begun = time.monotonic()
    for _ in range(10):
        trainer.train_step()
    return max(10, int(0.9 * (end - time.monotonic()) / ((time.monotonic() - begun) / 10)))


def _hand_over(run: Path, out: Path) -> None:
    """What is worth keeping of a run: at most eight files with the answers, the weights in small ones."""
    split((run / "draft" / "model.safetensors").read_bytes(), out, "draft", _RETURNED)
    shutil.copy(run / "draft" / "config.json", out / "config.json")
    for name in ("recipe.json", "metrics.csv", "curve.png"):
        if (run / name).exists():
            shutil.copy(run / name, out / name)


# ---- after


def _join(options: argparse.Namespace) -> None:
    options.draft.mkdir(parents=True, exist_ok=True)
    (options.draft / "model.safetensors").write_bytes(join([options.out], "draft"))
    for name in ("config.json", "recipe.json", "metrics.csv", "curve.png"):
        if (options.out / name).exists():
            shutil.copy(options.out / name, options.draft / name)


if __name__ == "__main__":
    sys.exit(main())
