"""Puts an engine together from settings: model, executor, pages, drafter, policy, loop."""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafters.hybrid import HybridDrafter
from drafters.loading import load_drafter
from drafters.ngram import NgramDrafter
from drafters.shipped import shipped_drafter
from engine.async_engine import AsyncEngine
from engine.drafter import Drafter
from engine.executor import Executor
from engine.intake import Intake
from engine.loop import EngineLoop
from engine.machine import usable_cores
from engine.models.config import ModelConfig
from engine.models.locate import cache_folder, locate_draft_model, locate_model
from engine.outputs import EngineObserver
from engine.pages import PagePool
from engine.speculation import Speculation
from engine.tokenizer import Tokenizer
from engine.worker import Worker
from scheduler.admission import Limits
from scheduler.calibration import CALIBRATION_FILE, Calibration, Regime
from scheduler.policies import parse_policy
from scheduler.policy import Fixed
from scheduler.throughput import Throughput
from server.executors import (
    PAGE_SIZE,
    build_executor,
    build_pair,
    build_worker,
    fit,
    token_budget,
)
from server.executors import BadSettings as BadSettings
from server.profiles import throughput
from server.self_check import PROMPT, self_check
from server.settings import DEFAULT_MODEL, Settings
from server.speculative_config import LOOKUP_TOKENS, SpeculativeConfig

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Parts:
    """A complete engine without its asyncio door."""

    loop: EngineLoop
    worker: Worker
    tokenizer: Tokenizer
    info: dict[str, Any]
    #: of the draft model, if there is one
    draft_folder: Path | None
    #: measures what steps cost, or (not fresh) reads what was measured before
    profile: Callable[[bool], Throughput]


def build_engine(settings: Settings, observer: EngineObserver, progress: Progress) -> AsyncEngine:
    """The server's engine. Raises ModelNotFound, UnsupportedModel, CorruptModel or BadSettings."""
    parts = build_parts(settings, observer, progress)
    if settings.speculative_config.model is not None and parts.draft_folder is not None:
        ids = list(parts.tokenizer.encode(PROMPT))
        parts.info["self_check"] = self_check(parts.loop, parts.worker, ids)
    return AsyncEngine(
        parts.loop,
        parts.worker,
        parts.tokenizer,
        max_queued=settings.max_num_queued_reqs,
        max_wait=settings.max_queue_wait,
        info=parts.info,
    )


def build_parts(settings: Settings, observer: EngineObserver, progress: Progress) -> Parts:
    """Load the model and put loop and worker around it."""
    begun = time.perf_counter()
    threads = settings.threads or usable_cores()
    torch.set_num_threads(threads)
    cache = cache_folder(settings.cache_dir)
    settings = _with_draft_folder(settings, cache, progress)
    folder = locate_model(settings.model, cache, progress)
    config = ModelConfig.from_folder(folder)
    progress(f"loading {folder.name}")
    tokenizer_folder = locate_model(settings.tokenizer, cache, progress) if settings.tokenizer else folder
    tokenizer = Tokenizer.from_folder(tokenizer_folder, settings.chat_template_text)
    executor, max_model_len = build_executor(settings, config, folder, progress)
    drafter, policy_name = _speculation(settings, executor, folder, max_model_len)
    worker = build_worker(executor, drafter)
    gamma, lookup = _block_sizes(settings.speculative_config, drafter)
    max_model_len = fit(worker, settings, config, gamma, max(gamma, lookup), progress) or max_model_len
    pool = PagePool(executor.num_pages, PAGE_SIZE)
    intake = Intake(
        config.vocab_size,
        max_model_len,
        config.eos_token_ids | ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()),
        _padded(tokenizer.token_bytes, config.vocab_size),
        tokenizer.special_ids,
        max_logprobs=settings.max_logprobs,
        prefix_caching=settings.enable_prefix_caching,
        page_salt=drafter.identity if drafter else "",
        seed=settings.seed,
    )
    budget = token_budget(settings, config)
    limits = Limits(budget, settings.max_num_seqs)
    policy = parse_policy(policy_name)
    draft_folder = _draft_model(settings.speculative_config, folder) if gamma else None
    speculation = Speculation(
        policy,
        gamma,
        calibrations=_calibrations(draft_folder, int(getattr(drafter, "gamma", 0))),
        lookup=lookup,
        online_calibration=settings.online_calibration,
    )
    loop = EngineLoop(pool, intake, speculation, limits, observer)
    identity = {
        "model": folder.name,
        "drafter": drafter.identity if drafter else "",
        **executor.describe(),
        "threads": threads,
        "version": importlib.metadata.version("dspark-server"),
    }

    def profile(fresh: bool = False) -> Throughput:
        sizes = gamma, max(gamma, lookup), config.vocab_size, budget, settings.max_num_seqs
        return throughput(worker, identity, *sizes, cache, progress, fresh)

    if not isinstance(policy, Fixed):
        speculation.throughput = profile()
    info = {
        "model": settings.model or DEFAULT_MODEL,
        "architecture": config.architecture,
        **executor.describe(),
        "drafter": drafter.name if drafter else "none",
        "verify_policy": policy_name,
        "page_size": PAGE_SIZE,
        "pages": executor.num_pages,
        "kv_tokens": executor.num_pages * PAGE_SIZE,
        "max_model_len": max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": budget,
        "prefix_caching": settings.enable_prefix_caching,
        "torch_version": importlib.metadata.version("torch"),
        "load_seconds": round(time.perf_counter() - begun, 2),
    }
    return Parts(loop, worker, tokenizer, info, draft_folder, profile)


def build_comparison(
    settings: Settings, tokens: int, progress: Progress
) -> tuple[Tokenizer, Executor, Executor]:
    """The tokenizer, an fp32 executor in torch, and the one that the settings ask for, for so many tokens."""
    cache = cache_folder(settings.cache_dir)
    folder = locate_model(settings.model, cache, progress)
    config = ModelConfig.from_folder(folder)
    torch.set_num_threads(settings.threads or usable_cores())
    return Tokenizer.from_folder(folder), *build_pair(settings, config, folder, tokens, progress)


def _speculation(
    settings: Settings, executor: Executor, folder: Path, max_model_len: int
) -> tuple[Drafter | None, str]:
    """The drafter and the name of the policy that go together."""
    config, policy = settings.speculative_config, settings.policy
    if config.method == "off" or policy == "off":
        if policy not in (None, "off", "fixed:0"):
            raise BadSettings(f"--verify-policy {policy} needs a drafter, and there is none")
        return None, "off"
    lookup = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    model = _draft_model(config, folder)
    if model is None:
        return lookup, policy or _policy(config, LOOKUP_TOKENS)
    try:
        loaded = load_drafter(model, executor, folder, max_model_len, settings.quantization)
    except (OSError, ValueError) as error:
        raise BadSettings(f"--speculative-config: {error}") from error
    if config.method not in ("auto", "hybrid", loaded.name):
        raise BadSettings(f"--speculative-config: {model} holds a {loaded.name} model")
    drafter: Drafter = HybridDrafter(lookup, loaded) if config.method in ("auto", "hybrid") else loaded
    return drafter, policy or _policy(config, loaded.gamma)


def _policy(config: SpeculativeConfig, most: int) -> str:
    """As far as it pays, unless a number was asked for; `most` is all that are drafted."""
    fixed = config.num_speculative_tokens
    if config.enable_adaptive_verification is False:
        fixed = fixed or most
    return f"fixed:{fixed}" if fixed else "lookahead"


def _block_sizes(config: SpeculativeConfig, drafter: Drafter | None) -> tuple[int, int]:
    """(tokens that a model drafts at most, tokens that are looked up at most)"""
    if drafter is None:
        return 0, 0
    if isinstance(drafter, NgramDrafter):
        return 0, config.num_speculative_tokens or LOOKUP_TOKENS
    gamma = int(getattr(drafter, "gamma", 0))
    gamma = min(gamma, config.num_speculative_tokens or gamma)
    return gamma, gamma if isinstance(drafter, HybridDrafter) else 0


def _calibrations(folder: Path | None, gamma: int) -> dict[Regime, Calibration]:
    """The tables beside a draft model. Raises BadSettings for a file that is none, or of another block."""
    file = folder / CALIBRATION_FILE if folder is not None else None
    if file is None or not file.is_file():
        return {}
    try:
        tables = [Calibration.from_dict(raw) for raw in json.loads(file.read_text(encoding="utf-8"))]
    except ValueError as error:
        raise BadSettings(f"{file}: {error}") from error
    if any(len(table.temperatures) != gamma for table in tables):
        raise BadSettings(f"{file} is for another number of drafts than {gamma}: calibrate again")
    return {table.regime: table for table in tables}


def _with_draft_folder(settings: Settings, cache: Path, progress: Progress) -> Settings:
    """The settings with the folder of the draft model that they name, which may be on the hub."""
    config = settings.speculative_config
    if config.model is None or config.method in ("off", "ngram") or settings.policy == "off":
        return settings
    try:
        folder = locate_draft_model(config.model, cache, progress)
    except (OSError, ValueError) as error:
        raise BadSettings(f"--speculative-config: {error}") from error
    return settings.model_copy(
        update={"speculative_config": config.model_copy(update={"model": str(folder)})}
    )


def _draft_model(config: SpeculativeConfig, folder: Path) -> Path | None:
    """The folder of the draft model that the method needs; None: it needs none."""
    if config.method == "ngram":
        return None
    if config.model is not None:
        return Path(config.model).expanduser()
    shipped = shipped_drafter(folder)
    if shipped is None and config.method != "auto":
        raise BadSettings(
            f'--speculative-config: method {config.method} needs "model", the folder or hub id of a draft '
            "model (none is shipped for this target)"
        )
    return shipped


def _padded(token_bytes: list[bytes], vocab_size: int) -> list[bytes]:
    """Checkpoints often have more rows than the tokenizer has tokens; those rows say nothing."""
    return token_bytes + [b""] * (vocab_size - len(token_bytes))
