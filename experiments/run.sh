#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: run.sh EXPERIMENT [ARGUMENT...]   sets up the vLLM given with --vllm, then runs the experiment in it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
experiment=$1
shift

version=${KVCACHED_NIXL_VLLM:-0.28.0}
version=${version##* }
previous=
for argument in "$@"; do
    case "$argument" in
    -h | --help) exec python3 -m experiments "$experiment" --help ;;
    --vllm=*) version=${argument#--vllm=} ;;
    esac
    if [[ $previous == --vllm ]]; then version=$argument; fi
    previous=$argument
done

environment=$(bash experiments/env.sh "$version" | tail -n 1) || {
    echo "experiments/env.sh $version failed; $experiment was not run. See its message above for what to do." >&2
    exit 2
}
exec "$environment/bin/python" -m experiments "$experiment" "$@"
