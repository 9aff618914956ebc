#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail

usage() {
    cat <<'END'
usage: bash tests/run.sh [TIER...]

Sets up what it needs (experiments/env.sh) and runs the tests; without arguments all that this machine can run.

  lint       ruff and mypy                                                            a minute
  unit       one module at a time, nothing else needed                                seconds
  flow       whole requests in one process, with injected faults                      seconds
  repo       the repository about itself: layering, tables in the README              seconds
  install    every door and order of activation, each in a process of its own         minutes
  gpu        what only a GPU can show; skipped with its reason elsewhere
  contract   what is assumed of vLLM, kvcached and NIXL; real NIXL agents             minutes, on each vLLM version
  e2e        real servers, and the quick byte-equivalence run                         minutes, on each vLLM version

KVCACHED_NIXL_VLLM="0.19.1 0.28.0" chooses the versions (both by default). KVCACHED_NIXL_ALL=1 runs what takes minutes with
every version, not with the newest alone.
exit status: 0 all passed; 1 a test failed; 2 the set-up failed
END
}

case ${1:-} in
-h | --help) usage; exit 0 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
known=(lint unit flow repo install gpu contract e2e)
tiers=("$@")
[[ ${#tiers[@]} -gt 0 ]] || tiers=("${known[@]}")
for tier in "${tiers[@]}"; do
    [[ " ${known[*]} " == *" $tier "* ]] || {
        echo "tests/run.sh: found the tier '$tier'; expected one of: ${known[*]}. Nothing was run." >&2
        exit 2
    }
done
read -r -a versions <<<"${KVCACHED_NIXL_VLLM:-0.19.1 0.28.0}"

declare -A environments=()
environment() { # VERSION -> sets $venv
    if [[ -z ${environments[$1]:-} ]]; then
        environments[$1]=$(bash experiments/env.sh "$1" | tail -n 1) || {
            echo "tests/run.sh: experiments/env.sh $1 failed; its message above says what to do." >&2
            exit 2
        }
    fi
    venv=${environments[$1]}
}

reports=$(mktemp -d)
trap 'jobs -p | xargs -r kill; rm -rf "$reports"' EXIT
ran_pytest=0
failed=()
run() { # NAME COMMAND...
    local name=$1
    shift
    printf '\n=== %s\n' "$name"
    local begun=${since:-$SECONDS}
    if "$@"; then
        printf '=== %s: passed in %d s\n' "$name" $((SECONDS - begun))
    else
        printf '=== %s: FAILED after %d s\n' "$name" $((SECONDS - begun))
        failed+=("$name")
    fi
}
pytest() { # VERSION TIER [OPTION...]
    environment "$1"
    ran_pytest=1
    run "$2, vLLM $1" "$venv/bin/python" -m pytest -q --junitxml="$reports/$2-$1.xml" "tests/$2" "${@:3}"
}
follow() { # PID LOG
    tail -n +1 -f --pid="$1" "$2"
    wait "$1"
}
side_by_side() { # TIER [OPTION...]: all versions at once, where each keeps one core busy and nothing is timed
    local version log pids=() since=$SECONDS
    for version in "${versions[@]}"; do
        environment "$version"
        log=$reports/$1-$version.log
        "$venv/bin/python" -m pytest -q --junitxml="${log%.log}.xml" "tests/$1" "${@:2}" >"$log" 2>&1 &
        pids+=($!)
    done
    ran_pytest=1
    for version in "${versions[@]}"; do
        run "$1, vLLM $version" follow "${pids[0]}" "$reports/$1-$version.log"
        pids=("${pids[@]:1}")
    done
}
# A warning of ours is an error; tiers that import vLLM, torch and NIXL cannot answer for theirs.
foreign=(-W default)

for tier in "${tiers[@]}"; do
    case $tier in
    lint)
        environment "${versions[0]}"
        run "ruff" "$venv/bin/ruff" check --quiet kvcached_nixl tests experiments
        run "mypy" "$venv/bin/mypy" --no-error-summary kvcached_nixl
        ;;
    unit | flow | repo) pytest "${versions[0]}" "$tier" ;;
    install) side_by_side install ;;
    contract) for version in "${versions[@]}"; do pytest "$version" contract "${foreign[@]}"; done ;;
    e2e)
        for version in "${versions[@]}"; do
            pytest "$version" e2e "${foreign[@]}"
            run "byte equivalence, quick, vLLM $version" bash experiments/byte_equivalence/run.sh --quick --vllm "$version"
        done
        ;;
    gpu) pytest "${versions[-1]}" gpu "${foreign[@]}" ;;
    esac
done

printf '\n'
# A tier may be skipped as a whole (gpu); a run in which everything was skipped has shown nothing.
if [[ $ran_pytest -eq 1 ]]; then
    "$venv/bin/python" tests/totals.py "$reports" || [[ "${tiers[*]}" == gpu ]] || failed+=("no test was run")
fi
if [[ ${#failed[@]} -gt 0 ]]; then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
echo "all passed: ${tiers[*]} (vLLM ${versions[*]})"
