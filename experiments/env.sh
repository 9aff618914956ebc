#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail

usage() {
    cat <<'END'
usage: bash experiments/env.sh [VLLM_VERSION]                            (default: KVCACHED_NIXL_VLLM, or 0.28.0)
       bash experiments/env.sh --remove VLLM_VERSION... | --unused

Creates or refreshes .venvs/vllm-VERSION with that vLLM, NIXL, kvcached, this package and experiments/hostvmm in
editable mode, and the test tools; `vllm serve` works in it. If nvidia-smi finds a GPU: vLLM's CUDA build, and kvcached
built for CUDA. Otherwise: vLLM's CPU build, and the same kvcached built over host memory.

Everything is pinned with hashes in experiments/locks/. Idempotent: a second call has nothing to do and returns at once.
The last line on standard output is the environment's folder; all other output goes to standard error:

    venv=$(bash experiments/env.sh 0.28.0 | tail -n 1)
    "$venv/bin/vllm" serve MODEL

vLLM 0.33.0 has no CPU build: without a GPU, its Python files are put over the CPU build of 0.32.0.

--remove deletes the environments of those versions; with --unused, of all versions that have no lock. No process may be
running from them. Downloads stay in uv's cache; `.venvs/tools/bin/uv cache clean` empties it.

The first of CPython 3.11, 3.12, 3.13 and 3.10 that is installed is used; KVCACHED_NIXL_PYTHON=3.12 names another one.
An environment keeps its Python until a call names another one.

needs: Linux on x86-64, one of these Pythons with its headers, a C++ compiler, and disk space (the amount is printed
       before the download; packages that are in uv's cache on the same file system, such as another environment's
       torch, take no further space). With a GPU: the CUDA toolkit, for its headers and libcudart, in CUDA_HOME, next
       to nvcc, or in /usr/local/cuda.
       A folder of wheels in PIP_FIND_LINKS is used; a CPU wheel of torch in it saves several GB.
exit status: 0 ready, or removed; 2 something is missing (see the message for what to do);
             else a step failed (see its output).
END
}

say() { printf '%s\n' "$*" >&2; }
refuse() { # FOUND EXPECTED CONSEQUENCE REMEDY
    say "experiments/env.sh: found $1; expected $2. $3. $4."
    exit 2
}

case ${1:-} in
-h | --help) usage; exit 0 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
source experiments/common/find_python.sh
locks=$root/experiments/locks
tools=$root/.venvs/tools
known=" $(sed -n 's/^\([0-9][^ ]*\) .*/\1/p' "$locks/versions.in" | tr '\n' ' ')"

if [[ ${1:-} == --remove ]]; then
    shift
    doomed=("$@")
    [[ $# -gt 0 ]] || refuse "no version after --remove" "versions, or --unused" "Nothing was removed" "Name the versions"
    if [[ $* == --unused ]]; then
        doomed=()
        for place in "$root"/.venvs/vllm-*/; do
            place=${place%/}
            place=${place##*/vllm-}
            [[ $place == "*" || $known == *" $place "* ]] || doomed+=("$place")
        done
    fi
    for version in "${doomed[@]}"; do
        [[ $version =~ ^[0-9][0-9A-Za-z.]*$ && -d $root/.venvs/vllm-$version ]] || refuse "no $root/.venvs/vllm-$version" \
            "an environment" "Nothing more was removed" "Name an existing environment"
        exec 9>"$root/.venvs/.lock-$version"
        flock 9
        rm -rf "$root/.venvs/vllm-$version" "$root/.venvs/.lock-$version"
        say "removed $root/.venvs/vllm-$version"
    done
    exit 0
fi

# -------------------------------------------------------------------------------------------- properties of the machine
version=${1:-${KVCACHED_NIXL_VLLM:-0.28.0}}
version=${version##* }
venv=$root/.venvs/vllm-$version
python=$venv/bin/python
[[ $known == *" $version "* ]] || refuse "vLLM version $version" "one of:${known% }" "There is no lock for other versions" \
    "Add a line to experiments/locks/versions.in and run experiments/locks/update.sh"
least=$(sed -n "s/^${version//./\\.} .*python>=\([0-9.]*\).*/\1/p" "$locks/versions.in")
# The vLLM whose CPU build is installed, if this one has none.
base_vllm=$(sed -n "s/^${version//./\\.} .*cpu=\([0-9.]*\).*/\1/p" "$locks/versions.in")

pythons=(3.11 3.12 3.13 3.10)
if [[ $least == 3.11 ]]; then pythons=(3.11 3.12 3.13); fi
asked_python=${KVCACHED_NIXL_PYTHON:-}
[[ -z $asked_python || " ${pythons[*]} " == *" $asked_python "* ]] || refuse "KVCACHED_NIXL_PYTHON=$asked_python" \
    "one of: ${pythons[*]}" "There are no locks for other Pythons" "Name one of these, or none"
# The Python of the environment, if it still runs.
own_python=
if [[ -x $python ]]; then own_python=$(sed -n 's/^version_info *= *\([0-9]*\.[0-9]*\).*/\1/p' "$venv/pyvenv.cfg" 2>/dev/null || true); fi
if [[ -n $own_python && -n $asked_python && $own_python != "$asked_python" ]]; then own_python=; fi
if [[ -n $own_python ]] && ! "$python" -c '' 2>/dev/null; then own_python=; fi
base=
python_version=$own_python
if [[ -z $python_version ]]; then
    python_version=none
    for one in ${asked_python:-"${pythons[@]}"}; do
        if base=$(find_python "$one"); then python_version=$one && break; fi
    done
fi

# uv does not read pip's configuration, so pass it the folders of wheels: from PIP_FIND_LINKS or pip's global.find-links.
find_links=${PIP_FIND_LINKS:-$(python3 -m pip config get global.find-links 2>/dev/null || true)}
uv_options=(--no-deps)
for place in $find_links; do uv_options+=(--find-links "$place"); done

kind=cpu
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then kind=cuda base_vllm=; fi
built=${base_vllm:-$version}
torch=$(sed -n "s/^${built//./\\.} *\([0-9]*\.[0-9]*\)\..*/torch-\1/p" "$locks/versions.in")

# A CPU build of torch is less than a quarter of the size, but it is available only from a folder of wheels.
offers_cpu_torch() {
    local wheel place
    # The lock has the hash of the wheel for this Python alone.
    [[ $kind == cpu && $python_version == 3.11 && -f $locks/$torch-cpu-wheel.txt ]] || return 1
    wheel=$(sed -n 's/^torch==\([^ ]*\).*/torch-\1-cp311-/p' "$locks/$torch-cpu-wheel.txt")
    for place in $find_links; do
        if compgen -G "$place/$wheel*.whl" >/dev/null; then return 0; fi
    done
    return 1
}
# With a torch that is not built for CUDA, NIXL loads whichever of its builds is installed: one is enough.
torch_lock=$locks/$torch.txt
unpacked_mb=([0]=6800)
if offers_cpu_torch; then
    torch_lock=$locks/$torch-cpu-wheel.txt
    unpacked_mb[0]=1500
    uv_options+=(--excludes "$locks/cpu-wheel-excludes.in")
fi
used_locks=("$torch_lock" "$locks/$torch-common.txt" "$locks/$torch-$kind.txt" "$locks/vllm-$version-$kind.txt")
if [[ $kind == cpu ]]; then unpacked_mb+=(600 100 800); else unpacked_mb+=(600 2000 4200); fi

digest() { cat "$@" | sha256sum | cut -d' ' -f1; }
hostvmm=experiments/hostvmm
# Only the inputs of the compiled build: the run-time part of hostvmm is used from the source tree.
kvcached_inputs=("$locks/kvcached.txt" "$torch_lock")
if [[ $kind == cpu ]]; then
    while read -r file; do kvcached_inputs+=("$file"); done < <(find $hostvmm/hostvmm/native -type f | LC_ALL=C sort)
    kvcached_inputs+=($hostvmm/hostvmm/build.py)
fi
inputs=("${used_locks[@]}" experiments/common/vllm_metadata.py)
if [[ -n $base_vllm ]]; then inputs+=("$locks/vllm-$version-python.sha256" experiments/common/vllm_python.py); fi
want_packages="packages $kind $python_version $(digest "${inputs[@]}")"
# kvcached for a GPU is compiled against the installed torch, so it is rebuilt when torch changes.
wanted_kvcached() {
    local torch=
    if [[ $kind == cuda ]]; then
        torch=" $({ cat "$venv"/lib/python3.*/site-packages/torch-*.dist-info/RECORD 2>/dev/null || true; } | sha256sum)"
    fi
    printf 'kvcached %s %s %s%s' "$kind" "$python_version" "$(digest "${kvcached_inputs[@]}")" "${torch%% -}"
}
want_kvcached=$(wanted_kvcached)
want_project="project $python_version $(digest pyproject.toml kvcached_nixl/*.pth $hostvmm/{pyproject.toml,hostvmm.pth}) $root"
stamps=$venv/.kvcached-nixl
is_current() { [[ -f $stamps/$1 && $(<"$stamps/$1") == "$2" ]]; }

if is_current packages "$want_packages" && is_current kvcached "$want_kvcached" && is_current project "$want_project"; then
    printf '%s\n' "$venv"
    exit 0
fi

mkdir -p "$root/.venvs"
printf '*\n' >"$root/.venvs/.gitignore"
exec 9>"$root/.venvs/.lock-$version"
flock --nonblock 9 || { say "another call is creating $venv; waiting for it"; flock 9; }

# -------------------------------------------------------------------------------- refuse before anything is downloaded
[[ $(uname -sm) == "Linux x86_64" ]] || refuse "$(uname -sm)" "Linux x86_64" "The locks have wheels for that platform only" \
    "Use such a machine"
[[ $python_version != none ]] || refuse "no CPython ${asked_python:-"$(IFS=,; echo "${pythons[*]}")"} on PATH" \
    "one of them: the locks are for these" "No environment can be made" \
    "Install one (Debian 13: apt-get install python3.13-dev python3.13-venv; Ubuntu 24.04: the same with 3.12)"
[[ -n $base ]] || base=$(find_python "$python_version") || base=$python
headers=$("$base" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[[ -f $headers/Python.h ]] || refuse "no $headers/Python.h" "the headers of $base" "kvcached cannot be compiled" \
    "Install them (Debian, Ubuntu: apt-get install python$python_version-dev)"
"$base" -c 'import ensurepip, venv' 2>/dev/null || refuse "$base without venv and ensurepip" "both" \
    "No environment can be made" "Install them (Debian, Ubuntu: apt-get install python$python_version-venv)"
compiler=
for candidate in ${CXX:-c++ g++ clang++}; do
    if command -v "$candidate" >/dev/null; then compiler=$candidate && break; fi
done
[[ -n $compiler ]] || refuse "no C++ compiler (tried ${CXX:-c++ g++ clang++})" "one that supports C++17" \
    "kvcached cannot be compiled" "Install one (Debian, Ubuntu: apt-get install g++) or set CXX"

# The same search that torch does when it builds an extension.
cuda_home=${CUDA_HOME:-${CUDA_PATH:-}}
if [[ $kind == cuda && -z $cuda_home ]]; then
    cuda_home=/usr/local/cuda
    if nvcc=$(command -v nvcc); then cuda_home=${nvcc%/bin/nvcc}; fi
fi
[[ $kind == cpu || -f $cuda_home/include/cuda.h ]] || refuse "no $cuda_home/include/cuda.h" "CUDA's toolkit" \
    "kvcached cannot be compiled for this GPU" "Install it (its headers and libcudart), or set CUDA_HOME to its folder"

uv=$tools/bin/uv
# Whether all packages of a lock are in uv's cache and can be linked from it: these take no disk space.
is_cached() { # LOCK
    local place=(--target "$root/.venvs/.none") cache
    [[ -x $uv && ${UV_LINK_MODE:-hardlink} == hardlink ]] || return 1
    cache=$("$uv" cache dir)
    [[ -d $cache && $(df --output=target "$cache" | tail -n 1) == "$(df --output=target "$root/.venvs" | tail -n 1)" ]] || return 1
    if [[ -x $python ]]; then place=(--python "$python"); fi
    "$uv" pip install --dry-run --offline "${place[@]}" "${uv_options[@]}" --require-hashes -r "$1" >"$asked" 2>&1 &&
        ! grep -q '^Would download' "$asked"
}
if ! is_current packages "$want_packages"; then
    asked=$(mktemp)
    needed_mb=500 # for compiled files
    for each in "${!used_locks[@]}"; do
        is_cached "${used_locks[each]}" || needed_mb=$((needed_mb + unpacked_mb[each]))
    done
    rm -f "$asked"
    free_mb=$(df --output=avail -m "$root/.venvs" | tail -n 1 | tr -d ' ')
    ((free_mb >= needed_mb)) || refuse "$free_mb MB free for $root/.venvs" "$needed_mb MB" \
        "The installation would stop halfway" "Free some space, or name a folder with a CPU wheel of torch in PIP_FIND_LINKS"
    say "$venv takes up to $needed_mb MB of disk; $free_mb are free"
fi

# --------------------------------------------------------------------------------------------------------------- install
started=$SECONDS
step() { say "$(printf '%5d s  ' $((SECONDS - started)))$*"; }

want_tools=$(digest "$locks/tools.txt")
if [[ ! -f $tools/.stamp || $(<"$tools/.stamp") != "$want_tools" ]]; then
    (
        flock 8
        [[ -f $tools/.stamp && $(<"$tools/.stamp") == "$want_tools" ]] && exit 0
        step "fetching uv"
        "$base" -m venv --clear "$tools" >&2
        "$tools/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$locks/tools.txt" >&2
        printf '%s' "$want_tools" >"$tools/.stamp"
    ) 8>"$root/.venvs/.lock-tools"
fi
# Bytecode is compiled here, on all cores: with PYTHONDONTWRITEBYTECODE, each process would compile vLLM and torch again.
install() { "$uv" pip install "${quiet[@]}" --python "$python" --compile-bytecode "${uv_options[@]}" "$@" >&2; }
quiet=(--quiet)
[[ -t 2 ]] && quiet=()

if [[ -z $own_python ]]; then
    step "creating $venv with $base"
    rm -rf "$venv" # uv clears only what is still a virtual environment
    "$uv" venv --quiet --no-python-downloads --python "$base" "$venv" >&2
fi
mkdir -p "$stamps"

if ! is_current packages "$want_packages"; then
    rm -f "$stamps/packages"
    step "installing vLLM $built for ${kind^^}, torch, NIXL and other packages (minutes)"
    install --require-hashes "${used_locks[@]/#/--requirements=}"
    if [[ -n $base_vllm ]]; then
        step "vLLM $version has no CPU build: putting its Python files over that of $base_vllm"
        PATH=$tools/bin:$PATH "$python" experiments/common/vllm_python.py "$version" >&2
    fi
    if [[ $kind == cpu ]]; then "$python" experiments/common/vllm_metadata.py "$version"; fi
    printf '%s' "$want_packages" >"$stamps/packages"
fi

if ! is_current project "$want_project"; then
    step "installing this package and hostvmm in editable mode"
    install --no-build-isolation --editable "$root" --editable "$root/$hostvmm"
    printf '%s' "$want_project" >"$stamps/project"
fi

want_kvcached=$(wanted_kvcached)
if ! is_current kvcached "$want_kvcached"; then
    rm -f "$stamps/kvcached"
    if [[ $kind == cuda ]]; then
        step "building kvcached for CUDA (a minute)"
        # By default, uv reuses a cached build whatever torch it was built with, and skips a version that is installed.
        CUDA_HOME=$cuda_home LIBRARY_PATH=$cuda_home/lib64/stubs${LIBRARY_PATH:+:$LIBRARY_PATH} \
            install --no-cache --reinstall-package kvcached --no-build-isolation --require-hashes -r "$locks/kvcached.txt"
    else
        step "fetching kvcached's source"
        fetched=$(mktemp -d)
        trap 'rm -rf "$fetched"' EXIT
        archive=$("$tools/bin/python" experiments/common/fetch_sdist.py "$locks/kvcached.txt" "$fetched")
        step "building kvcached on host memory (half a minute)"
        env -u PYTHONPATH -u PYTHONHOME "$python" -s -m hostvmm build --sdist "$archive" --wheel-dir "$fetched" \
            >"$fetched/log" 2>&1 || {
            cat "$fetched/log" >&2
            exit 1
        }
        install --no-cache --reinstall-package kvcached "$fetched"/kvcached-*.whl
    fi
    printf '%s' "$want_kvcached" >"$stamps/kvcached"
fi

# Dependencies are not resolved (--no-deps), so only this check finds a lock that is wrong.
"$python" -c 'import vllm, nixl, msgspec, wrapt, kvcached.vmm_ops' >&2 || {
    status=$?
    rm -f "$stamps"/* # otherwise the next call would find nothing to do
    refuse "an environment whose packages do not import (status $status)" \
        "vllm, nixl, msgspec, wrapt and kvcached.vmm_ops to import" "No server would start" "Remove $venv and run this again"
}
step "ready"
printf '%s\n' "$venv"
