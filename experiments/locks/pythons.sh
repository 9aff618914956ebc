#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes the locks of tests/pythons.sh, for all Pythons that pyproject.toml allows; passes options to "uv pip compile".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
compile() {
    ../../.venvs/tools/bin/uv pip compile --quiet --generate-hashes --no-annotate --no-header --universal \
        --python-version 3.10 "$@" >/dev/null
}
project=(--extra dev ../../pyproject.toml)
compile "$@" "${project[@]}" pythons.in --output-file pythons.txt
compile "$@" pythons-torch.in --constraint pythons.txt --output-file pythons-torch.txt
# The lowest allowed version of each direct requirement, and the newest allowed version of their requirements.
compile "$@" "${project[@]}" --resolution lowest-direct --output-file lowest.txt
