#!/usr/bin/env bash
# Makes the Python environment in which `make serve` and `make test` run (the Docker image makes its own).
#
#   deploy/make_env.sh [runtime|dev|all]
#     runtime  what serving needs, and the project itself, editable (the default)
#     dev      the same, and what testing and linting need
#     all      the same, and what tests of deployment drive: Ray, a browser, checkers of manifests
#
# Read from the environment:
#   VENV     where to make it (default: .venv)
#   PYTHON   a Python 3.11 or newer (default: the first one found)
#   TORCH    default  the CPU build from PyTorch's own index where that answers, else whatever pip finds
#            cpu      the CPU build or a failure
#            cuda     the build on PyPI: on Linux the one with CUDA, several GB
#
# When nothing has changed since the last run, it ends after some milliseconds. A run that was cut off
# leaves a mark behind, and the next one starts afresh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

level=${1:-runtime}
venv=${VENV:-.venv}
torch=${TORCH:-default}
cpu_index=https://download.pytorch.org/whl/cpu
lock=requirements/lock.txt
tools="requirements/tools.txt requirements/ray.txt"
stamp=$venv/.stamp
making=$venv/.making

say() { printf 'env: %3d s: %s\n' "$SECONDS" "$*"; }
die() { printf 'env: %s\n' "$*" >&2; exit 1; }

case $level in runtime | dev | all) ;; *) die "'$level' is none of runtime, dev, all" ;; esac
case $torch in default | cpu | cuda) ;; *) die "TORCH=$torch is none of default, cpu, cuda" ;; esac

# The directory is part of the key: an environment that was copied along with its clone is not usable. So are
# the kernels' sources: after a pull, those built before may no longer fit the Python beside them.
key=$({ pwd; echo "$torch"; cat pyproject.toml "$lock" setup.py engine/native/src/*; } | cksum)
# shellcheck disable=SC2086  # one word a file
tools_key=$(cat $tools | cksum)

finished() {
  local had_level had_key had_tools
  { read -r had_level && read -r had_key && read -r had_tools; } 2>/dev/null <"$stamp" || return 1
  [ "$had_key" = "$key" ] || return 1
  case $had_level:$level in
    all:all) [ "$had_tools" = "$tools_key" ]; return ;;
    "$level:$level" | dev:runtime | all:*) return 0 ;;
    *) return 1 ;;
  esac
}

# Only one run at a time; the mark holds its process id.
claim() {
  local owner told=
  mkdir -p "$venv"
  until (set -o noclobber && echo $$ >"$making") 2>/dev/null; do
    owner=$(cat "$making" 2>/dev/null || true)
    if [ -n "$owner" ] && kill -0 "$owner" 2>/dev/null; then
      [ -n "$told" ] || say "process $owner is making $venv: waiting for it"
      told=yes
      sleep 1
    else
      say "the run before this one was cut off: starting afresh"
      rm -rf "$venv"
      mkdir -p "$venv"
    fi
  done
}

usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    usable "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.11 or newer with its venv module"
    echo "$PYTHON"
    return 0
  fi
  for candidate in python3.11 python3.12 python3.13 python3 python; do
    if usable "$candidate"; then
      echo "$candidate"
      return 0
    fi
  done
  die "found no Python 3.11 or newer with its venv module (Debian: python3-venv);" \
    "name one with PYTHON=/path/to/it"
}

# True for an environment in this very place whose pip runs; one that was moved or half made is not.
healthy() {
  local where
  usable "$venv/bin/python" || return 1
  where=$("$venv/bin/pip" --version 2>/dev/null | sed -n 's/^pip .* from \(.*\)\/lib\/.*/\1/p')
  [ -n "$where" ] && [ "$where" -ef "$venv" ]
}

# Most modules of the big packages are never imported, so making their byte code is left to load_once.
pip_install() {
  local quiet=-qq
  if [ -t 1 ]; then quiet=--progress-bar=on; fi
  "$venv/bin/pip" install --disable-pip-version-check --no-input "$quiet" --no-compile "$@"
}

# The requirement lines of pyproject.toml: for building and for serving, and those of the extras named.
requirements() {
  "$venv/bin/python" - "$@" <<'PY'
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    settings = tomllib.load(file)
project = settings["project"]
print(*settings["build-system"]["requires"], *project["dependencies"], sep="\n")
for extra in sys.argv[1:]:
    print(*project["optional-dependencies"][extra], sep="\n")
PY
}

# Answers within some seconds, also where looking up a name hangs.
cpu_index_answers() {
  "$venv/bin/python" - "$cpu_index/torch/" <<'PY'
import os
import sys
import threading
import urllib.request

answered = threading.Event()


def ask() -> None:
    try:
        urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="HEAD"), timeout=3).close()
    except Exception:
        return
    answered.set()


asking = threading.Thread(target=ask, daemon=True)
asking.start()
asking.join(4)
os._exit(0 if answered.is_set() else 1)
PY
}

# PyTorch comes first and alone, since which build it is depends on where it is taken from.
# The build for CPUs carries "+cpu" in its version, but not on macOS, where there is only one build.
install_torch() {
  local wanted=$1 build=$torch cpu=+cpu installed
  [ "$(uname -s)" != Darwin ] || cpu=
  installed=$("$venv/bin/python" -c '
from importlib import metadata
print(*[d.version for d in metadata.distributions(name="torch")])')
  case $build:$installed in
    default:"$wanted"* | cpu:"$wanted$cpu" | cuda:"$wanted")
      say "torch $installed is installed"
      return 0
      ;;
  esac
  if [ "$build" = default ] && cpu_index_answers; then build=cpu; fi
  [ -z "$installed" ] || "$venv/bin/pip" uninstall --disable-pip-version-check -q -y torch
  case $build in
    cpu)
      say "installing torch $wanted for CPUs (about 200 MB)"
      pip_install --no-deps --extra-index-url "$cpu_index" "torch==$wanted$cpu"
      ;;
    cuda)
      say "installing torch $wanted from PyPI (on Linux with CUDA: several GB)"
      pip_install --no-deps "torch===$wanted"
      ;;
    default)
      say "installing torch $wanted from where pip finds it ($cpu_index does not answer)"
      pip_install --no-deps "torch==$wanted"
      ;;
  esac
}

# Shows that the big packages load, and leaves the byte code of what they import.
load_once() {
  local modules='torch, gguf, fastapi, uvicorn, httpx, prometheus_client'
  modules="$modules, transformers.models.auto.tokenization_auto"
  if [ "$level" != runtime ]; then
    modules="$modules, pytest, hypothesis, openai, scipy.stats, transformers.models.llama.modeling_llama"
  fi
  "$venv/bin/python" -c "import $modules" || die "the packages were installed but do not load"
}

if finished; then exit 0; fi
claim
if finished; then # by the run that this one waited for
  rm -f "$making"
  exit 0
fi
# What failed by itself, for want of a network say, may go on where it is; what was cut off may be half written.
cut_off=
trap 'cut_off=yes; exit 130' INT TERM
trap 'status=$?; [ $status -eq 0 ] || [ $status -gt 128 ] || [ -n "$cut_off" ] || rm -f "$making"' EXIT
rm -f "$stamp"
SECONDS=0
unset PYTHONDONTWRITEBYTECODE # what is loaded here shall leave its byte code: later starts take seconds less

if ! healthy; then
  python=$(find_python)
  say "making $venv with $("$python" --version)"
  rm -rf "$venv"
  mkdir -p "$venv"
  echo $$ >"$making"
  "$python" -m venv "$venv"
fi

extras=
if [ "$level" != runtime ]; then extras="test dev"; fi
# shellcheck disable=SC2086  # one word an extra
requirements $extras >"$venv/requirements.txt"
wanted=$(sed -n 's/^torch==//p' "$venv/requirements.txt")
[ -n "$wanted" ] || die "pyproject.toml does not pin torch==VERSION"
install_torch "$wanted"

say "installing the other packages at the versions of $lock"
pip_install -r "$venv/requirements.txt" -c "$lock"

if [ "$level" = all ]; then
  say "installing the tools of ${tools%% *}"
  pip_install -r "${tools%% *}" -c "$lock"
fi

say "installing the project"
pip_install --no-deps --no-build-isolation -e .
say "loading everything once"
load_once

printf '%s\n%s\n%s\n' "$level" "$key" "$tools_key" >"$stamp.new"
mv "$stamp.new" "$stamp"
rm -f "$making"
say "ready"
