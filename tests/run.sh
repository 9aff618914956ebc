#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail

usage() {
    cat <<'END'
usage: bash tests/run.sh              fast tests with one vLLM, both transfer directions, real servers: 6 minutes
       bash tests/run.sh --all        every test with every supported vLLM: hours
       bash tests/run.sh --turn [N]   what CI runs for the N-th commit: the tiers that need no vLLM, the fast subset of
                                      contract and equivalence with two vLLMs, and as many of the other tests as fit
                                      into an hour, chosen by N. What would end after 70 minutes is not begun
       bash tests/run.sh TIER...      these tiers in full, with one vLLM

Creates the environments that it needs. Before it downloads, experiments/env.sh prints how much disk they take.

  lint         ruff and mypy
  unit         one module at a time; needs nothing else
  coverage     unit and the fast subset of flow again: at least 92 % of lines and branches
  flow         whole requests in one process, with injected faults
  repo         checks of the repository itself: imports between packages, tables in the README
  install      every way and order of activating the package, each in a separate process
  gpu          tests that need a GPU; skipped with a reason elsewhere
  pythons      tests that need no vLLM, on Python 3.10, 3.12, 3.13 and 3.14 and with the lowest supported dependencies
  contract     what the package assumes about vLLM, kvcached and NIXL; uses real NIXL agents; kvcached on host memory
  e2e          real servers
  stacks       other projects' stacks with real engines; the manifests and the Containerfile of docs/deploy
  equivalence  real servers, the quick byte-equivalence run

KVCACHED_NIXL_VLLM="0.28.0" chooses the vLLM. With TIER it may list several: "0.26.0 0.28.0". The default is the newest
vLLM that every tier was run with. --all and --turn ignore it.
exit status: 0 all tests passed; 1 a test failed; 2 the set-up failed
END
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
read -r -a versions <<<"${KVCACHED_NIXL_VLLM:-}"
plan() { python3 tests/plan.py "$@" || exit 2; }
case ${1:-} in
-h | --help) usage; exit 0 ;;
--all) planned=$(plan all) ;;
--turn)
    number=${2:-$(git rev-list --count HEAD 2>/dev/null || true)}
    [[ $number =~ ^[0-9]+$ ]] || {
        echo "tests/run.sh: found ${2:-no git history}; expected a number behind --turn, as in --turn 5." \
            "Nothing was run." >&2
        exit 2
    }
    # In a shallow clone rev-list counts too few commits, so every commit would get the same turn.
    if [[ -z ${2:-} && $(git rev-parse --is-shallow-repository) == true ]]; then
        number=$((16#$(git rev-parse HEAD | cut -c1-7)))
    fi
    pythons=(3.11 3.12 3.11 3.13)
    one=${pythons[number % 4]}
    source experiments/common/find_python.sh
    if [[ -z ${KVCACHED_NIXL_PYTHON:-} ]] && find_python "$one" >/dev/null; then export KVCACHED_NIXL_PYTHON=$one; fi
    echo "turn $number, Python ${KVCACHED_NIXL_PYTHON:-that is there}"
    planned=$(plan turn --number "$number")
    ;;
-*)
    echo "tests/run.sh: found '$1'; expected --all, --turn or names of tiers. Nothing was run. See --help." >&2
    exit 2
    ;;
*) planned=$(plan "${@:-newcomer}" "${versions[@]/#/--vllm=}") ;;
esac

declare -A environments=()
environment() { # VERSION -> sets $venv
    if [[ -z ${environments[$1]:-} ]]; then
        environments[$1]=$(bash experiments/env.sh "$1" | tail -n 1) || {
            echo "tests/run.sh: experiments/env.sh $1 failed. Nothing was run with it. See its message above." >&2
            exit 2
        }
    fi
    venv=${environments[$1]}
}

# CI ends a run after 90 minutes, and then counts it as failed.
TURN_MINUTES=70
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

measure() { # VENV -> coverage of lines and branches by the unit tier and the fast subset of flow
    local COVERAGE_FILE=$reports/branches
    export COVERAGE_FILE
    "$1/bin/python" -m coverage run -m pytest -q -m "not long" --junitxml="$reports/coverage.xml" tests/unit tests/flow &&
        "$1/bin/python" -m coverage report --skip-covered --fail-under=92
}

late=()
while read -r -u 3 what version size estimate; do
    [[ $what != '#' ]] || continue
    if [[ ${1:-} == --turn ]] && ((SECONDS / 60 + estimate > TURN_MINUTES)); then
        late+=("$what $version $size")
        continue
    fi
    environment "$version"
    name="$what, vLLM $version"
    [[ $size == whole ]] || name+=", brief"
    case $what in
    lint)
        run "ruff" "$venv/bin/ruff" check --quiet kvcached_nixl tests experiments upstream
        run "ruff format" "$venv/bin/ruff" format --check --quiet kvcached_nixl tests experiments upstream
        run "mypy" "$venv/bin/mypy" --no-error-summary kvcached_nixl experiments/hostvmm/hostvmm
        run "mypy, tests" "$venv/bin/mypy" --config-file tests/mypy.ini --no-error-summary tests experiments
        ;;
    pythons) run "$what" bash tests/pythons.sh ;;
    coverage)
        ran_pytest=1
        run "$what" measure "$venv"
        ;;
    equivalence)
        length=--brief
        [[ $size == brief ]] || length=--quick
        run "$name" bash experiments/byte_equivalence/run.sh "$length" --vllm "$version"
        ;;
    equivalence/V2)
        arms=(--quick --only "runner V2")
        [[ $size == whole ]] || arms=(--brief) # with such a vLLM every server uses model runner V2
        run "$name" bash experiments/byte_equivalence/run.sh "${arms[@]}" --vllm "$version"
        ;;
    *)
        options=(-q --junitxml="$reports/${what//\//-}-$version.xml")
        [[ $size == whole ]] || options+=(-m "not long")
        [[ $what != contract ]] || options+=(experiments/hostvmm/tests)
        # A warning fails the test, except in the tiers that import vLLM, torch and NIXL, which warn by themselves.
        [[ ! $what =~ ^(contract|e2e|gpu|stacks) ]] || options+=(-W default)
        ran_pytest=1
        run "$name" "$venv/bin/python" -m pytest "${options[@]}" "tests/$what"
        ;;
    esac
done 3<<<"$planned"

printf '\n'
[[ $# -gt 0 ]] || echo "not run: slow tests, install, e2e, stacks, other vLLM versions, other Pythons (--all runs them)"
if grep -q '^#' <<<"$planned"; then
    echo "not run in this turn:"
    sed -n 's/^#/   /p' <<<"$planned"
fi
if [[ ${#late[@]} -gt 0 ]]; then
    echo "planned, but not begun, since this machine is slower than tests/plan.py estimates:"
    printf '    %s\n' "${late[@]}"
fi
# One tier may be skipped completely (gpu), but a run in which every test was skipped must not pass.
if [[ $ran_pytest -eq 1 ]]; then
    "$venv/bin/python" tests/totals.py "$reports" || [[ "$*" == gpu ]] || failed+=("no test was run")
fi
if [[ ${#failed[@]} -gt 0 ]]; then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
echo "all passed, in $((SECONDS / 60)) minutes"
