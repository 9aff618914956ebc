#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes the .txt locks of this folder anew: everything that experiments/env.sh installs, each file with its hashes.
#
#   bash experiments/locks/update.sh              all of them (minutes, needs the package index); what is locked stays at
#                                                 its version wherever that still fits
#   bash experiments/locks/update.sh --upgrade    the same, with the newest version of everything
#
# A new version of vLLM is a new line in versions.in. What the files hold is said in lock.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
tools=../../.venvs/tools/bin
[[ -x $tools/uv ]] || { echo "found no $tools/uv; run experiments/env.sh once, it makes that." >&2; exit 2; }
echo "tools" >&2
"$tools/uv" pip compile --quiet --generate-hashes --no-annotate --no-header --python-version 3.11 \
    --python-platform x86_64-manylinux_2_28 "$@" tools.in --output-file tools.txt >/dev/null
"$tools/python" lock.py "$tools/uv" "$@"
bash pythons.sh "$@"
