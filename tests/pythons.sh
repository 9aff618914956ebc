#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail

usage() {
    cat <<'END'
usage: bash tests/pythons.sh [--torch] [PYTHON|lowest...]       (default: 3.10 3.12 3.13 3.14 lowest)

Runs the tests that need no vLLM on each supported Python. CI runs those with vLLM on 3.11, 3.12 and 3.13 in turn.

  3.10, 3.12, 3.13, 3.14   .venvs/python-VERSION: this package's wheel and the newest versions of its requirements;
                           tiers unit and install
  lowest                   .venvs/lowest, on the oldest supported Python that is installed: the lower bound of each
                           requirement in pyproject.toml; tiers unit and install

A Python is found as python3.X on PATH, or as a version of pyenv. Versions that were not found are listed at the end.
Without --torch the half of unit that needs torch is skipped. With it, torch is installed for each Python: 1 GB to
download for each and 3 GB for all, 5 GB of disk for each.

Every version is pinned with hashes in experiments/locks/: pythons.txt, pythons-torch.txt, lowest.txt.
needs: Linux on x86-64, one run of experiments/env.sh (it installs uv).
exit status: 0 every run passed; 1 a test failed; 2 the set-up failed, or no Python was found.
END
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
locks=$root/experiments/locks
uv=$root/.venvs/tools/bin/uv
supported=(3.10 3.11 3.12 3.13 3.14)
with_torch=
wanted=()
for argument in "$@"; do
    case $argument in
    -h | --help) usage; exit 0 ;;
    --torch) with_torch=yes ;;
    lowest) wanted+=(lowest) ;;
    *)
        [[ " ${supported[*]} " == *" $argument "* ]] || {
            echo "tests/pythons.sh: found '$argument'; expected --torch, lowest, ${supported[*]}. Nothing was run." >&2
            exit 2
        }
        wanted+=("$argument")
        ;;
    esac
done
[[ ${#wanted[@]} -gt 0 ]] || wanted=(3.10 3.12 3.13 3.14 lowest)
[[ -x $uv ]] || {
    echo "tests/pythons.sh: found no $uv. Nothing was run. Run experiments/env.sh once; it installs uv." >&2
    exit 2
}

source experiments/common/find_python.sh

make() { # NAME BASE LOCK...: create an environment with the wheel and the packages that LOCKs pin -> sets $venv
    local name=$1 base=$2 wheel stamp
    shift 2
    venv=$root/.venvs/$name
    stamp="$("$base" -VV) $(cat "$@" | sha256sum)"
    if [[ ! -f $venv/.stamp || $(<"$venv/.stamp") != "$stamp" ]]; then
        echo "installing $venv" >&2
        "$uv" venv --quiet --clear --no-python-downloads --python "$base" "$venv" || return 1
        "$uv" pip install --quiet --python "$venv" --no-deps --require-hashes "${@/#/--requirement=}" || return 1
        printf '%s' "$stamp" >"$venv/.stamp"
    fi
    wheel=$reports/$name
    "$venv/bin/python" -m hatchling build --target wheel --directory "$wheel" >/dev/null 2>&1 &&
        "$uv" pip install --quiet --python "$venv" --no-deps --reinstall-package kvcached-nixl "$wheel"/*.whl &&
        "$uv" pip check --quiet --python "$venv" &&
        (cd "$reports" && env -u PYTHONPATH "$venv/bin/kvcached-nixl" --help >/dev/null)
}

reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
ran=()
failed=()
missing=()
run() { # NAME BASE TESTS LOCK...
    local name=$1 base=$2 tests=$3
    shift 3
    printf '\n=== %s (%s)\n' "$name" "$("$base" -V)"
    make "$name" "$base" "$@" || { echo "tests/pythons.sh: $root/.venvs/$name could not be created" >&2; exit 2; }
    local begun=$SECONDS
    read -r -a tests <<<"$tests"
    if "$venv/bin/python" -m pytest -q --junitxml="$reports/$name.xml" "${tests[@]}"; then
        ran+=("$name ($("$base" -V)) in $((SECONDS - begun)) s")
    else
        failed+=("$name ($("$base" -V))")
    fi
}

for one in "${wanted[@]}"; do
    if [[ $one != lowest ]]; then
        base=$(find_python "$one") || { missing+=("Python $one"); continue; }
        used=("$locks/pythons.txt" ${with_torch:+"$locks/pythons-torch.txt"})
        run "python-$one" "$base" "tests/unit tests/install" "${used[@]}"
        continue
    fi
    base=
    for version in "${supported[@]}"; do base=$(find_python "$version") && break; done
    [[ -n $base ]] || { missing+=("any supported Python, for the lower bounds"); continue; }
    run lowest "$base" "tests/unit tests/install" "$locks/lowest.txt"
done

printf '\n'
[[ ${#ran[@]} -eq 0 ]] || printf 'passed: %s\n' "${ran[@]}"
[[ ${#missing[@]} -eq 0 ]] || printf 'not run, not found on this machine: %s\n' "${missing[@]}"
[[ ${#failed[@]} -eq 0 ]] || { printf 'failed: %s\n' "${failed[@]}"; exit 1; }
[[ ${#ran[@]} -gt 0 ]] || { echo "tests/pythons.sh: no Python was found. Nothing was run." >&2; exit 2; }
"$venv/bin/python" tests/totals.py "$reports"
