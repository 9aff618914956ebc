#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes the .txt locks of this folder anew from its .in files. Everything that experiments/env.sh installs is in them,
# each file with its hashes.
#
#   bash experiments/locks/update.sh            all of them (minutes, needs the package index)
#   bash experiments/locks/update.sh WORD       only those whose name holds WORD
#
# Per vLLM version: -cpu.txt (without torch), -torch.txt (torch alone), -torch-libraries.txt (what a torch built for
# CUDA loads even where there is no GPU), -torch-cpu-wheel.txt (a CPU build of torch, where PIP_FIND_LINKS has one),
# -cuda.txt (everything, for machines with a GPU).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
word=${1:-}
uv=../../.venvs/tools/bin/uv
[[ -x $uv ]] || { echo "found no $uv; run experiments/env.sh once, it makes that." >&2; exit 2; }

# torchvision, torchaudio and torchcodec exist for CUDA only and break "import transformers" on a CPU machine; text
# models do not need them.
overrides=$(mktemp)
trap 'rm -f "$overrides"' EXIT
compile() { # OUTPUT INPUT...
    local output=$1
    shift
    [[ $output == *"$word"* ]] || return 0
    echo "$output" >&2
    "$uv" pip compile --quiet --generate-hashes --no-annotate --no-header --python-version 3.11 \
        --python-platform x86_64-manylinux_2_28 --override "$overrides" "$@" --output-file "$output" >/dev/null
}

: >"$overrides"
compile tools.txt tools.in
compile dev.txt common.in

for input in vllm-*-cpu.in; do
    name=${input%-cpu.in}
    printf '%s ; python_version < "3"\n' torchvision torchaudio torchcodec >"$overrides"
    cat "$name-torch.in" >>"$overrides"
    compile "$name-cpu.txt" "$input" common.in
    # torch and what comes with its CUDA build are installed from locks of their own.
    if [[ $name-cpu.txt == *"$word"* ]]; then
        python3 split_torch.py "$name"
    fi
    : >"$overrides"
    compile "$name-cuda.txt" "$name-cuda.in" common.in
done

[[ pythons-lowest != *"$word"* ]] || bash pythons.sh

# kvcached is a source archive that needs torch to tell its own requirements, so it is pinned by hand: its
# requirements (numpy, posix-ipc, wrapt) are in common.in.
echo "kvcached.txt is kept by hand" >&2
