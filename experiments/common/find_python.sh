# SPDX-License-Identifier: Apache-2.0
# Sourced by experiments/env.sh, tests/run.sh and tests/pythons.sh.

find_python() { # VERSION -> prints the path of that CPython; status 1 if none is installed
    local candidate found
    # pyenv has a shim for each version on PATH, and the shim of a version that is not selected fails.
    for candidate in "python$1" python3 "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/"$1".*/bin/"python$1"; do
        found=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2], sys.executable)' 2>/dev/null) || continue
        if [[ ${found%% *} == "$1" ]]; then printf '%s\n' "${found#* }" && return 0; fi
    done
    return 1
}
