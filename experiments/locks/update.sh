#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Rewrites the .txt locks of this folder: everything that experiments/env.sh installs, with hashes.
#
#   bash experiments/locks/update.sh              all of them (minutes, needs the package index); locked packages keep
#                                                 their versions where possible
#   bash experiments/locks/update.sh --upgrade    the same, with the newest version of everything
#   bash experiments/locks/update.sh 0.31.0       only what this vLLM needs; the others keep what they have
#
# To add a version of vLLM, add a line to versions.in. lock.py describes the content of the files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
tools=../../.venvs/tools/bin
[[ -x $tools/uv ]] || { echo "found no $tools/uv; run experiments/env.sh once, which installs it." >&2; exit 2; }
if [[ ${1:-} != [0-9]* ]]; then
    echo "tools" >&2
    "$tools/uv" pip compile --quiet --generate-hashes --no-annotate --no-header --python-version 3.11 \
        --python-platform x86_64-manylinux_2_28 "$@" tools.in --output-file tools.txt >/dev/null
fi
if [[ ${1:-} != [0-9]* ]]; then
    for asked in stack-*.in; do
        echo "${asked%.in}" >&2
        "$tools/uv" pip compile --quiet --generate-hashes --no-annotate --no-header --universal --python-version 3.10 \
            "$@" "$asked" --output-file "${asked%.in}.txt" >/dev/null
    done
    # Beside the packages of a vLLM, which are locked already.
    for asked in overlay-*.in; do
        echo "${asked%.in}" >&2
        "$tools/uv" pip compile --quiet --generate-hashes --no-annotate --no-header --universal --python-version 3.10 \
            --no-deps "$@" "$asked" --output-file "${asked%.in}.txt" >/dev/null
    done
fi
"$tools/python" lock.py "$tools/uv" "$@"
for version in $(sed -n 's/^\([0-9][^ ]*\) .*cpu=.*/\1/p' versions.in); do
    [[ ${1:-} != [0-9]* || $1 == "$version" ]] || continue
    PATH=$tools:$PATH "$tools/python" ../common/vllm_python.py --digest "$version" >"vllm-$version-python.sha256"
done
[[ ${1:-} != [0-9]* ]] || exit 0
bash pythons.sh "$@"
