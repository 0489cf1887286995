#!/usr/bin/env bash
# Writes requirements/image-cpu.txt and image-cuda.txt: every package of the image at the version of
# requirements/lock.txt, with the hashes that PyPI has for it. Run it after `make lock`.
#
# uv reads metadata only: nothing large is downloaded. Whatever `uv pip compile` takes may follow.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
python3 -m venv "$tools/venv"
"$tools/venv/bin/pip" install -q --disable-pip-version-check uv==0.13.8

# The requirement lines of pyproject.toml: for building, for serving, and of the extras named.
wanted() {
  "$tools/venv/bin/python" - "$@" <<'PY'
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    settings = tomllib.load(file)
extras = settings["project"]["optional-dependencies"]
print(*settings["build-system"]["requires"], *settings["project"]["dependencies"], sep="\n")
for extra in sys.argv[1:]:
    print(*extras[extra], sep="\n")
PY
}

compile() {
  "$tools/venv/bin/uv" pip compile --quiet --generate-hashes --constraints requirements/lock.txt \
    --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-annotate \
    --custom-compile-command deploy/image/lock.sh --output-file "$1" "${@:3}" "$2"
}

# PyTorch itself is installed apart; what it needs of other packages is here.
wanted otel | sed '/^torch==/d' >"$tools/cpu.in"
printf '%s\n' filelock fsspec jinja2 networkx sympy typing-extensions >>"$tools/cpu.in"
compile requirements/image-cpu.txt "$tools/cpu.in" "$@"

wanted otel gpu >"$tools/cuda.in"
compile requirements/image-cuda.txt "$tools/cuda.in" "$@"
