"""`dspark export`: a draft model as other engines read it, with the target's embedding and head inside.

DeepSpec's dialect (Qwen3DSparkModel: config.json, safetensors, no prefix). A reduced draft vocabulary, which
that dialect lacks, is written as the speculators format has it: the head's rows of those tokens,
`draft_vocab_size`, and `d2t` as offsets. A window is written as Qwen3's sliding attention.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from drafters.checkpoint import load_tensors, write
from drafters.config import DraftConfig
from drafters.target_tensors import TargetTensors
from engine.models.config import ModelConfig

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    from engine.models.locate import cache_folder, locate_model

    options = _parser().parse_args(argv)
    try:
        target = locate_model(options.model, cache_folder(options.cache_dir), _tell)
        export(Path(options.draft), target, Path(options.output_dir))
    except (OSError, ValueError) as error:
        print(f"dspark export: {error}", file=sys.stderr)
        return 1
    print(f"wrote {options.output_dir}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dspark export", description=__doc__, allow_abbrev=False)
    parser.add_argument("draft", metavar="DIR", help="the draft model")
    parser.add_argument("--model", metavar="MODEL", help="its target (default: the default model)")
    parser.add_argument("--cache-dir", metavar="DIR", help="where fetched models are kept")
    parser.add_argument("--output-dir", required=True, metavar="DIR")
    return parser


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


def export(folder: Path, target_folder: Path, output: Path) -> None:
    """Write the draft model of `folder` for other engines, in bf16. Raises ValueError for a chain drafter."""
    config, tensors = load_tensors(folder)
    if config.family != "block":
        raise ValueError(f"{folder} holds a {config.family} model; only block drafters have a common dialect")
    target = TargetTensors.load(target_folder, ModelConfig.from_folder(target_folder))
    ids = tensors.get("d2t")
    tensors.setdefault("embed_tokens.weight", target.embedding)
    tensors.setdefault("lm_head.weight", target.head if ids is None else target.head[ids])
    write(output, config, {name: _stored(value) for name, value in tensors.items()})
    _as_others_read_it(output / "config.json", config, target_folder)
    for name in _TOKENIZER:
        if (target_folder / name).exists():
            shutil.copy(target_folder / name, output / name)


def _stored(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16).contiguous() if value.is_floating_point() else value


def _as_others_read_it(path: Path, config: DraftConfig, target_folder: Path) -> None:
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw["dtype"] = "bfloat16"
    if config.window is not None:
        raw["use_sliding_window"], raw["sliding_window"] = True, config.window
        raw["layer_types"] = ["sliding_attention"] * config.layers.num_layers
    target = json.loads((target_folder / "config.json").read_text(encoding="utf-8"))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        raw[name] = target.get(name)
    path.write_text(
        json.dumps({k: v for k, v in raw.items() if v is not None}, indent=2) + "\n", encoding="utf-8"
    )
