"""`dspark train` and `dspark data`: from answers of the target to a drafter for it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from drafters.training.recipe import Recipe

_MAY_BE_NONE = ("window", "kv_heads", "draft_vocab", "least_slots", "most_texts", "start_from")


def main(argv: Sequence[str]) -> int:
    """Entry point for both commands; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options) or 0)
    except (OSError, ValueError) as error:
        print(f"dspark {argv[0]}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last save", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dspark", allow_abbrev=False)
    commands = parser.add_subparsers(required=True)
    train = commands.add_parser("train", help="train a drafter", description=_train.__doc__)
    train.set_defaults(run=_train)
    _add_common(train)
    train.add_argument("--output-dir", required=True, metavar="DIR", help="what to resume from and save to")
    train.add_argument("--recipe", metavar="FILE", help="recipe.json to start from")
    train.add_argument(
        "--hours", type=float, default=float("inf"), help="stop after so many (default: at the end)"
    )
    train.add_argument(
        "--live", action="store_true", help="compute features as they are needed instead of caching them"
    )
    train.add_argument("--device", default="cpu", help="where the draft model trains (default: cpu)")
    train.add_argument("--save-every", type=float, default=300.0, metavar="SECONDS")
    for field in fields(Recipe):
        train.add_argument(f"--{field.name.replace('_', '-')}", metavar="VALUE", help=argparse.SUPPRESS)

    data = commands.add_parser("data", help="prepare what training needs").add_subparsers(required=True)
    features = data.add_parser("features", help="cache the target's features", description=_features.__doc__)
    features.set_defaults(run=_features)
    _add_common(features)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help="the target (default: the default model)")
    parser.add_argument(
        "--data",
        default=os.environ.get("DSPARK_DATA"),
        metavar="DIR",
        help="folder with smollm2-answers/ (default: DSPARK_DATA)",
    )
    parser.add_argument(
        "--answers", metavar="PATH", help="answers (.npz, or a folder of them) instead of --data's"
    )
    parser.add_argument("--cache-dir", metavar="DIR", help="where fetched models are kept")
    parser.add_argument("--features", metavar="DIR", help="where features are cached")
    from engine.machine import usable_cores

    cores = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    parser.add_argument("--threads", type=int, default=max(1, cores))


def _corpus(options: argparse.Namespace) -> tuple[Any, Path]:
    """The texts, and the folder of the model whose answers they are."""
    import torch

    from drafters.training.corpus import Corpus
    from engine.models.locate import cache_folder, locate_model

    torch.set_num_threads(options.threads)
    answers = options.answers or (options.data and f"{options.data}/smollm2-answers")
    if not answers:
        raise ValueError("say where the answers are: --answers, --data or DSPARK_DATA")
    return Corpus.load(answers), locate_model(options.model, cache_folder(options.cache_dir), print)


def _cached(
    options: argparse.Namespace, corpus: Any, folder: Path, layers: tuple[int, ...]
) -> tuple[Any, Any]:
    """(cache, target)"""
    from drafters.training.features import FeatureCache
    from drafters.training.target import Target

    if options.features is None:
        raise ValueError("say where features are cached: --features")
    target = Target(folder, options.threads, corpus.longest + 1)
    name = f"{folder.name} {target.executor.describe()['dtype']}"
    layers = _layers(layers, target.config)
    return FeatureCache(Path(options.features), corpus, target.config.hidden_size, layers, name), target


def _live(options: argparse.Namespace, corpus: Any, folder: Path, layers: tuple[int, ...]) -> tuple[Any, Any]:
    """(features as they are needed, what the draft model borrows)"""
    import torch

    from drafters.target_tensors import TargetTensors
    from drafters.training.live import LiveFeatures
    from engine.models.config import ModelConfig

    config, device = ModelConfig.from_folder(folder), torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    source = LiveFeatures(folder, corpus, _layers(layers, config), device, dtype)
    return source, TargetTensors.load(folder, config)


def _layers(wanted: tuple[int, ...], config: Any) -> tuple[int, ...]:
    from drafters.config import spaced_layers

    return wanted or spaced_layers(config.num_layers, 3)


def _features(options: argparse.Namespace) -> int:
    """Compute the target's features of all answers, held-out ones first. Resumes where it was stopped."""
    import numpy as np

    corpus, folder = _corpus(options)
    cache, target = _cached(options, corpus, folder, ())
    train, held_out = corpus.split()
    order = np.concatenate([held_out, corpus.shuffled(train)])
    last = 0.0

    def show(done: int, total: int, rate: float) -> None:
        nonlocal last
        if time.monotonic() - last > 10 or done == total:
            last = time.monotonic()
            print(f"{done}/{total} texts, {rate:.0f} tokens/s", flush=True)

    cache.fill(target, order, show)
    return 0


def _train(options: argparse.Namespace) -> int:
    """Train a drafter; under torchrun, on several devices or machines.

    Everything is kept in --output-dir; the same command goes on there.
    """
    import torch

    from drafters.training.memory import keep_memory
    from drafters.training.trainer import Trainer

    keep_memory()
    folder = Path(options.output_dir)
    stored = Recipe.load(folder / "recipe.json") if (folder / "state.pt").exists() else None
    recipe = Recipe.load(Path(options.recipe)) if options.recipe else stored or Recipe()
    given = {f.name: getattr(options, f.name) for f in fields(Recipe) if getattr(options, f.name) is not None}
    recipe = replace(recipe, **{name: _parsed(name, value) for name, value in given.items()})
    if stored is not None and replace(recipe, steps=stored.steps) != stored:
        raise ValueError(
            f"{folder} holds a run by another recipe; only its --steps may change, or take another"
        )
    if options.device == "cuda":
        options.device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(options.device)
        torch.set_float32_matmul_precision("high")  # TF32
    else:
        torch.set_float32_matmul_precision("medium")  # through oneDNN, the faster one on many processors
    corpus, model = _corpus(options)
    features, target = (_live if options.live else _cached)(options, corpus, model, recipe.feature_layers)
    show = (lambda line: print(line, flush=True)) if os.environ.get("RANK", "0") == "0" else _silent
    borrowed = target if options.live else target.tensors
    trainer = Trainer(folder, recipe, corpus, features, borrowed, show, options.device)
    trainer.run(options.save_every, options.hours * 3600)
    return 0


def _silent(line: str) -> None:
    """What processes other than the first have to say."""


def _parsed(name: str, value: str) -> Any:
    """A recipe entry from its text, by the type of its default."""
    default = getattr(Recipe(), name)
    try:
        return _as_like(name, default, value)
    except (ValueError, KeyError):
        raise ValueError(f"--{name.replace('_', '-')}: {value!r} cannot be read") from None


def _as_like(name: str, default: Any, value: str) -> Any:
    if value == "none" and name in _MAY_BE_NONE:
        return None
    if name == "feature_layers":
        return tuple(int(part) for part in value.split(","))
    if isinstance(default, str) or name == "start_from":
        return value
    if isinstance(default, bool):
        return {"true": True, "false": False}[value.lower()]
    return type(default)(value) if default is not None else int(value)
