"""From what the operator calls a model to a local folder that holds it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.models.default_model import GGUF_SHA256, MEMBER, ModelNotFound, fetch_default_gguf
from engine.models.gguf_convert import CONVERTER_VERSION, convert_gguf, file_sha256, partial_prefix
from engine.models.unsupported import UnsupportedModel

__all__ = ["ModelNotFound", "cache_folder", "locate_draft_model", "locate_model"]

Progress = Callable[[str], None]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_HUB_FILES = [
    "*.json",
    "*.safetensors",
    "*.jinja",
    "tokenizer.model",
    "*.tiktoken",
    "vocab.txt",
    "merges.txt",
]
_HUB_IGNORED = ["*/*", "consolidated*", "*.bin", "*.pt", "*.pth"]
_DEFAULT_NEEDS = 850 << 20  # bytes: the package, the GGUF file in it and the converted weights
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


def cache_folder(chosen: str | None = None) -> Path:
    """Where fetched and converted models are kept: `chosen`, else $DSPARK_CACHE, else ~/.cache/dspark."""
    configured = chosen or os.environ.get("DSPARK_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "dspark"


def locate_model(spec: str | None, cache_dir: Path, progress: Progress) -> Path:
    """A folder with config.json, safetensors and a tokenizer for `spec`; `progress` gets lines for the log.

    `spec` is None or "default" (the default model, fetched once), a model folder, a .gguf file (converted
    once, cached by content), or a hub id, `name` or `org/name` (fetched once). Code that comes with a model
    is never run, and pickled weights are never read. Any number of processes may do this at once.

    Raises ModelNotFound when there is no such model or it cannot be fetched, UnsupportedModel for a format
    that is not read, CorruptModel for damaged files, OSError for a full or unwritable disk.
    """
    if spec is None or spec == "default":
        return _default_model(cache_dir, progress)
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        return _check_folder(path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UnsupportedModel(f"{path}: only .gguf files and model folders with safetensors are read")
        return _converted(path, cache_dir, progress)
    if not _HUB_ID.fullmatch(spec) or ".." in spec or spec.lower().endswith((".gguf", ".safetensors")):
        raise ModelNotFound(f"{spec!r} is neither an existing folder or .gguf file nor a hub id (`org/name`)")
    return _from_hub(spec, cache_dir, progress)


def locate_draft_model(spec: str, cache_dir: Path, progress: Progress) -> Path:
    """A folder with config.json and safetensors for a draft model: one that is here, or a hub id's.

    Raises as `locate_model` does.
    """
    path = Path(spec).expanduser()
    return _check_folder(path) if path.exists() else locate_model(spec, cache_dir, progress)


def _check_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        hint = "".join(f"; give the path of {file.name} itself" for file in sorted(folder.glob("*.gguf"))[:1])
        raise ModelNotFound(f"{folder} has no config.json{hint}")
    if not any(folder.glob("*.safetensors")):
        pickled = [file for suffix in ("*.bin", "*.pt", "*.pth") for file in folder.glob(suffix)]
        if pickled:
            raise UnsupportedModel(
                f"{folder} has only pickled weights ({pickled[0].name}), which can run code when they are "
                "read; only safetensors and GGUF are supported"
            )
        raise ModelNotFound(f"{folder} has no *.safetensors file")
    return folder


def _default_model(cache_dir: Path, progress: Progress) -> Path:
    stem = Path(MEMBER).stem
    target = _cache_entry(cache_dir, stem, GGUF_SHA256)
    if target.is_dir():
        return target
    with _alone(target, progress):
        if target.is_dir():
            return target
        free = shutil.disk_usage(target.parent).free
        if free < _DEFAULT_NEEDS:
            needed = f"{_DEFAULT_NEEDS >> 20} MiB are needed, {free >> 20} MiB are free"
            raise OSError(errno.ENOSPC, needed)
        # The prefix lets the next start clear this away too, should this one be killed.
        scratch = target.parent / f"{partial_prefix(target)}fetch"
        scratch.mkdir()
        try:
            gguf = fetch_default_gguf(scratch, progress)
            return convert_gguf(gguf, target, sha256=GGUF_SHA256, keep_source=True, progress=progress)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _converted(gguf: Path, cache_dir: Path, progress: Progress) -> Path:
    progress(f"reading {gguf.name}")
    sha256 = file_sha256(gguf)
    target = _cache_entry(cache_dir, gguf.stem, sha256)
    if target.is_dir():
        return target
    with _alone(target, progress):
        if target.is_dir():
            return target
        return convert_gguf(gguf, target, sha256=sha256, progress=progress)


def _cache_entry(cache_dir: Path, stem: str, sha256: str) -> Path:
    readable = re.sub(r"[^\w.-]", "_", stem)[:80]
    return cache_dir / "models" / f"{readable}-{sha256[:16]}-v{CONVERTER_VERSION}"


@contextlib.contextmanager
def _alone(target: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock of the cache entry `target`, cleared of what an interrupted process left there.

    The kernel drops the lock when its holder dies, so a killed process blocks nobody. An OSError says
    in the end what was to be kept where.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / f".{target.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress(f"waiting for another process that prepares {target.name}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            for left in target.parent.glob(partial_prefix(target) + "*"):
                shutil.rmtree(left, ignore_errors=True)
            yield
    except ModelNotFound:
        raise
    except OSError as error:
        raise _unkept(target.name, target.parent, error) from error


def _unkept(what: str, folder: Path, error: OSError, variable: str = "DSPARK_CACHE") -> OSError:
    reason = error.strerror or str(error)
    remedy = f"make room there, or set {variable} to another folder"
    return OSError(error.errno or errno.EIO, f"{what} cannot be kept in {folder}: {reason}; {remedy}")


def _from_hub(spec: str, cache_dir: Path, progress: Progress) -> Path:
    import huggingface_hub

    # A machine with a hub cache of its own keeps using it; otherwise one folder holds all that was fetched.
    shared = os.environ.get("HF_HUB_CACHE") or os.environ.get("HF_HOME")
    progress(f"fetching {spec} from the hub, unless it is cached")
    try:
        folder = huggingface_hub.snapshot_download(
            spec,
            cache_dir=None if shared else cache_dir / "hub",
            allow_patterns=_HUB_FILES,
            ignore_patterns=_HUB_IGNORED,
        )
    except Exception as error:  # the client raises errors of its own, of its HTTP library and of the system
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            if shared:
                raise _unkept(spec, Path(shared), error, "HF_HOME") from error
            raise _unkept(spec, cache_dir / "hub", error) from error
        reason = " ".join(str(error).split())[:400]
        raise ModelNotFound(
            f"{spec!r} is no local folder or file, and it could not be fetched from the hub "
            f"({type(error).__name__}: {reason})"
        ) from error
    return _check_folder(Path(folder))
