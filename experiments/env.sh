#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail

usage() {
    cat <<'END'
usage: bash experiments/env.sh [VLLM_VERSION]                            (default: KVCACHED_NIXL_VLLM, or 0.28.0)
       bash experiments/env.sh --remove VLLM_VERSION... | --unused

Creates or refreshes .venvs/vllm-VERSION: that vLLM, NIXL, kvcached and this package in editable mode, with the tools of
the tests. Where nvidia-smi finds a GPU: vLLM's CUDA build, and kvcached built for CUDA. Elsewhere: vLLM's CPU build, and
the same kvcached built over host memory. In it, `vllm serve` works.

Everything is pinned with hashes in experiments/locks/. A second call finds nothing to do and returns at once.
The last line on standard output is the environment's folder; all else goes to standard error:

    venv=$(bash experiments/env.sh 0.28.0 | tail -n 1)
    "$venv/bin/vllm" serve MODEL

--remove deletes the environments of those versions, or with --unused of all versions that no lock names. Nothing may be
running from them. What was downloaded stays in the cache of uv; `.venvs/tools/bin/uv cache clean` empties that.

needs: Linux on x86-64, python3.11 with its headers, a C++ compiler, disk space (it says how much before downloading;
       what uv's cache holds on the same file system, as where another environment has the same torch, takes none).
       With a GPU: CUDA's toolkit, for its headers and libcudart, in CUDA_HOME, beside nvcc or in /usr/local/cuda.
       A folder of wheels in PIP_FIND_LINKS is used; a CPU wheel of torch in it saves several GB.
exit status: 0 ready, or removed; 2 something is missing (what, and what to do, is said); else a step failed (its output is above).
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
locks=$root/experiments/locks
tools=$root/.venvs/tools
known=" $(sed -n 's/^\([0-9][^ ]*\) .*/\1/p' "$locks/versions.in" | tr '\n' ' ')"

if [[ ${1:-} == --remove ]]; then
    shift
    doomed=("$@")
    [[ $# -gt 0 ]] || refuse "no version after --remove" "versions, or --unused" "Nothing was removed" "Name them"
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
            "an environment" "Nothing more was removed" "Name one that is there"
        exec 9>"$root/.venvs/.lock-$version"
        flock 9
        rm -rf "$root/.venvs/vllm-$version" "$root/.venvs/.lock-$version"
        say "removed $root/.venvs/vllm-$version"
    done
    exit 0
fi

# ------------------------------------------------------------------------------------------------ what this machine has
version=${1:-${KVCACHED_NIXL_VLLM:-0.28.0}}
version=${version##* }
venv=$root/.venvs/vllm-$version
python=$venv/bin/python
[[ $known == *" $version "* ]] || refuse "vLLM version $version" "one of:${known% }" "There is no lock for another" \
    "Add a line to experiments/locks/versions.in and run experiments/locks/update.sh"
torch=$(sed -n "s/^${version//./\\.} *\([0-9]*\.[0-9]*\)\..*/torch-\1/p" "$locks/versions.in")

# pip reads its configuration, uv does not: hand it the folders of wheels, in both ways they can be given.
find_links=${PIP_FIND_LINKS:-$(python3 -m pip config get global.find-links 2>/dev/null || true)}
uv_options=(--no-deps)
for place in $find_links; do uv_options+=(--find-links "$place"); done

kind=cpu
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then kind=cuda; fi

# A CPU build of torch is no quarter of the size, but only a folder of wheels may have it.
offers_cpu_torch() {
    local wheel place
    [[ $kind == cpu && -f $locks/$torch-cpu-wheel.txt ]] || return 1
    wheel=$(sed -n 's/^torch==\([^ ]*\).*/torch-\1-cp311-/p' "$locks/$torch-cpu-wheel.txt")
    for place in $find_links; do
        if compgen -G "$place/$wheel*.whl" >/dev/null; then return 0; fi
    done
    return 1
}
# A torch that is not built for CUDA makes NIXL load whichever of its builds is there: one is enough.
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
sources_of_kvcached() {
    find kvcached_nixl/hostvmm -type f -not -name '*.pyc' -not -name README.md | LC_ALL=C sort
}
# Only what goes into the compiled build: the run-time half of hostvmm is used from the source tree.
kvcached_inputs=("$locks/kvcached.txt" "$torch_lock")
if [[ $kind == cpu ]]; then
    while read -r file; do kvcached_inputs+=("$file"); done < <(sources_of_kvcached | grep -E '/native/|/build(_backend)?\.py$')
fi
want_packages="packages $kind $(digest "${used_locks[@]}" experiments/common/vllm_metadata.py)"
# kvcached for a GPU is compiled against the installed torch, so it is built again when that changes.
wanted_kvcached() {
    local torch=
    if [[ $kind == cuda ]]; then
        torch=" $({ cat "$venv"/lib/python3.11/site-packages/torch-*.dist-info/RECORD 2>/dev/null || true; } | sha256sum)"
    fi
    printf 'kvcached %s %s%s' "$kind" "$(digest "${kvcached_inputs[@]}")" "${torch%% -}"
}
want_kvcached=$(wanted_kvcached)
want_project="project $(digest pyproject.toml kvcached_nixl/*.pth) $root"
stamps=$venv/.kvcached-nixl
is_current() { [[ -f $stamps/$1 && $(<"$stamps/$1") == "$2" ]]; }

if is_current packages "$want_packages" && is_current kvcached "$want_kvcached" && is_current project "$want_project"; then
    printf '%s\n' "$venv"
    exit 0
fi

mkdir -p "$root/.venvs"
printf '*\n' >"$root/.venvs/.gitignore"
exec 9>"$root/.venvs/.lock-$version"
flock --nonblock 9 || { say "another call is making $venv; waiting for it"; flock 9; }

# ------------------------------------------------------------------------------------- refuse before anything is fetched
[[ $(uname -sm) == "Linux x86_64" ]] || refuse "$(uname -sm)" "Linux x86_64" "The locks hold wheels for that only" \
    "Use such a machine"
base=$(command -v python3.11) || refuse "no python3.11 on PATH" "CPython 3.11, which the locks are made for" \
    "No environment can be made" "Install it (Debian, Ubuntu: apt-get install python3.11-dev python3.11-venv)"
headers=$("$base" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[[ -f $headers/Python.h ]] || refuse "no $headers/Python.h" "Python's headers" "kvcached cannot be compiled" \
    "Install them (Debian, Ubuntu: apt-get install python3.11-dev)"
compiler=
for candidate in ${CXX:-c++ g++ clang++}; do
    if command -v "$candidate" >/dev/null; then compiler=$candidate && break; fi
done
[[ -n $compiler ]] || refuse "no C++ compiler (tried ${CXX:-c++ g++ clang++})" "one that knows C++17" \
    "kvcached cannot be compiled" "Install one (Debian, Ubuntu: apt-get install g++) or set CXX"

# As torch looks for it when an extension is built.
cuda_home=${CUDA_HOME:-${CUDA_PATH:-}}
if [[ $kind == cuda && -z $cuda_home ]]; then
    cuda_home=/usr/local/cuda
    if nvcc=$(command -v nvcc); then cuda_home=${nvcc%/bin/nvcc}; fi
fi
[[ $kind == cpu || -f $cuda_home/include/cuda.h ]] || refuse "no $cuda_home/include/cuda.h" "CUDA's toolkit" \
    "kvcached cannot be compiled for this GPU" "Install it (its headers and libcudart), or set CUDA_HOME to where it is"

uv=$tools/bin/uv
# uv links files from its cache where it can; what it need not download takes no disk.
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
    needed_mb=500 # what is compiled here
    for each in "${!used_locks[@]}"; do
        is_cached "${used_locks[each]}" || needed_mb=$((needed_mb + unpacked_mb[each]))
    done
    rm -f "$asked"
    free_mb=$(df --output=avail -m "$root/.venvs" | tail -n 1 | tr -d ' ')
    ((free_mb >= needed_mb)) || refuse "$free_mb MB free for $root/.venvs" "$needed_mb MB" \
        "The installation would end half done" "Free some, or give PIP_FIND_LINKS a folder with a CPU wheel of torch"
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
# Compiled here, on all cores at once: where PYTHONDONTWRITEBYTECODE is set, each process would compile vLLM and torch anew.
install() { "$uv" pip install "${quiet[@]}" --python "$python" --compile-bytecode "${uv_options[@]}" "$@" >&2; }
quiet=(--quiet)
[[ -t 2 ]] && quiet=()

[[ -x $python ]] || { step "making $venv" && "$uv" venv --quiet --no-python-downloads --python "$base" "$venv" >&2; }
mkdir -p "$stamps"

if ! is_current packages "$want_packages"; then
    rm -f "$stamps/packages"
    step "installing vLLM $version for ${kind^^}, torch, NIXL and the rest (minutes)"
    install --require-hashes "${used_locks[@]/#/--requirements=}"
    if [[ $kind == cpu ]]; then "$python" experiments/common/vllm_metadata.py "$version"; fi
    printf '%s' "$want_packages" >"$stamps/packages"
fi

want_kvcached=$(wanted_kvcached)
if ! is_current kvcached "$want_kvcached"; then
    rm -f "$stamps/kvcached"
    if [[ $kind == cuda ]]; then
        step "building kvcached for CUDA (a minute)"
        # uv keeps what it has built, whichever torch that was built with, and leaves a version that is installed as it is.
        CUDA_HOME=$cuda_home LIBRARY_PATH=$cuda_home/lib64/stubs${LIBRARY_PATH:+:$LIBRARY_PATH} \
            install --no-cache --reinstall-package kvcached --no-build-isolation --require-hashes -r "$locks/kvcached.txt"
    else
        step "fetching kvcached's source"
        fetched=$(mktemp -d)
        trap 'rm -rf "$fetched"' EXIT
        archive=$("$tools/bin/python" experiments/common/fetch_sdist.py "$locks/kvcached.txt" "$fetched")
        step "building kvcached on host memory (half a minute)"
        UV=$uv "$python" -m kvcached_nixl.hostvmm build --sdist "$archive" --python "$python" >&2
    fi
    printf '%s' "$want_kvcached" >"$stamps/kvcached"
fi

if ! is_current project "$want_project"; then
    step "installing this package in editable mode"
    install --no-build-isolation --editable "$root"
    printf '%s' "$want_project" >"$stamps/project"
fi

# With no deps resolved, this is what would notice a lock that has gone wrong.
"$python" -c 'import vllm, nixl, msgspec, wrapt, kvcached.vmm_ops' >&2 || {
    status=$?
    rm -f "$stamps"/* # or the next call would find nothing to do
    refuse "an environment whose packages do not import (status $status)" \
        "vllm, nixl, msgspec, wrapt and kvcached.vmm_ops to import" "No server would start" "Remove $venv and run this again"
}
step "ready"
printf '%s\n' "$venv"
