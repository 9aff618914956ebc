#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail

usage() {
    cat <<'END'
usage: bash tests/run.sh              of every tier what does not take long, one vLLM, both directions: 15 minutes
       bash tests/run.sh --all        everything, with every supported vLLM: hours
       bash tests/run.sh --turn [N]   what CI runs for the N-th commit: the tiers that need no vLLM, each vLLM that servers
                                      are tested with in brief, and of the rest as much as fits into an hour
       bash tests/run.sh TIER...      these tiers, whole, with one vLLM

Sets up what it needs (experiments/env.sh says how much disk that takes before it downloads).

  lint         ruff and mypy
  unit         one module at a time, nothing else needed
  flow         whole requests in one process, with injected faults
  repo         the repository about itself: layering, tables in the README
  install      every door and order of activation, each in a process of its own
  gpu          what only a GPU can show; skipped with its reason elsewhere
  pythons      what needs no vLLM on Python 3.10, 3.12 and 3.13, and on the lowest versions of what it requires
  contract     what is assumed of vLLM, kvcached and NIXL; real NIXL agents
  e2e          real servers
  equivalence  real servers, the quick byte-equivalence run

KVCACHED_NIXL_VLLM="0.19.1 0.28.0" chooses the vLLM, or several for tiers that are named; else it is the newest that all of
them were run with. --all and --turn choose by themselves.
exit status: 0 all passed; 1 a test failed; 2 the set-up failed
END
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
read -r -a versions <<<"${KVCACHED_NIXL_VLLM:-}"
plan() { python3 tests/plan.py "$@" || exit 2; }
case ${1:-} in
-h | --help) usage; exit 0 ;;
--all) planned=$(plan all) ;;
--turn)
    number=${2:-$(git rev-list --count HEAD)}
    # Of a shallow clone every commit would be the first.
    if [[ -z ${2:-} && $(git rev-parse --is-shallow-repository) == true ]]; then
        number=$((16#$(git rev-parse HEAD | cut -c1-7)))
    fi
    echo "turn $number"
    planned=$(plan turn --number "$number")
    ;;
-*) echo "tests/run.sh: found '$1'; expected --all, --turn or tiers. Nothing was run; --help explains." >&2; exit 2 ;;
*) planned=$(plan "${@:-newcomer}" "${versions[@]/#/--vllm=}") ;;
esac

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
trap 'rm -rf "$reports"' EXIT
ran_pytest=0
failed=()
run() { # NAME COMMAND...
    local name=$1 begun=$SECONDS
    shift
    printf '\n=== %s\n' "$name"
    if "$@"; then
        printf '=== %s: passed in %d s\n' "$name" $((SECONDS - begun))
    else
        printf '=== %s: FAILED after %d s\n' "$name" $((SECONDS - begun))
        failed+=("$name")
    fi
}

while read -r -u 3 what version size; do
    [[ $what != '#' ]] || continue
    environment "$version"
    name="$what, vLLM $version"
    [[ $size == whole ]] || name+=", brief"
    case $what in
    lint)
        run "ruff" "$venv/bin/ruff" check --quiet kvcached_nixl tests experiments
        run "ruff format" "$venv/bin/ruff" format --check --quiet kvcached_nixl tests experiments
        run "mypy" "$venv/bin/mypy" --no-error-summary kvcached_nixl
        ;;
    pythons) run "$what" bash tests/pythons.sh ;;
    equivalence)
        length=--brief
        [[ $size == brief ]] || length=--quick
        run "$name" bash experiments/byte_equivalence/run.sh "$length" --vllm "$version"
        ;;
    equivalence/V2)
        arms=(--quick --arm "runner V2")
        [[ $size == whole ]] || arms=(--brief) # every server has that runner
        run "$name" bash experiments/byte_equivalence/run.sh "${arms[@]}" --vllm "$version"
        ;;
    *)
        options=(-q --junitxml="$reports/${what//\//-}-$version.xml")
        [[ $size == whole ]] || options+=(-m "not long")
        # A warning of ours is an error; tiers that import vLLM, torch and NIXL cannot answer for theirs.
        [[ ! $what =~ ^(contract|e2e|gpu) ]] || options+=(-W default)
        ran_pytest=1
        run "$name" "$venv/bin/python" -m pytest "${options[@]}" "tests/$what"
        ;;
    esac
done 3<<<"$planned"

printf '\n'
[[ $# -gt 0 ]] || echo "left out: what takes long, most of e2e, other vLLM, other Pythons (--all)"
if grep -q '^#' <<<"$planned"; then
    echo "not run this time:"
    sed -n 's/^#/   /p' <<<"$planned"
fi
# A tier may be skipped as a whole (gpu); a run in which everything was skipped has shown nothing.
if [[ $ran_pytest -eq 1 ]]; then
    "$venv/bin/python" tests/totals.py "$reports" || [[ "$*" == gpu ]] || failed+=("no test was run")
fi
if [[ ${#failed[@]} -gt 0 ]]; then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
echo "all passed, in $((SECONDS / 60)) minutes"
