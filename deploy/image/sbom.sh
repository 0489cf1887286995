#!/usr/bin/env bash
# Writes the software bill of materials of an environment (default: .venv), CycloneDX JSON, to standard output:
#
#   deploy/image/sbom.sh >sbom.json
#   deploy/image/sbom.sh requirements/image-cpu.txt >sbom.json     # of what the image holds, with hashes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source=${1:-.venv}

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
python3 -m venv "$tools"
"$tools/bin/pip" install -q --disable-pip-version-check cyclonedx-bom==7.5.0
form=(--pyproject pyproject.toml --output-format JSON --spec-version 1.6 --output-reproducible)
if [ -f "$source" ]; then
  "$tools/bin/cyclonedx-py" requirements "${form[@]}" "$source"
else
  "$tools/bin/cyclonedx-py" environment "${form[@]}" "$source/bin/python"
fi
