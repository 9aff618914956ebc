#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What only a GPU can show, the most important first, each step with a limit and a result of its own: a short run says
# something, too.
set -uo pipefail

usage() {
    cat <<'END'
usage: bash tests/gpu/in_order.sh [STEP...], with the environment's bin/ first in PATH

  staged   byte equivalence, staged on the device, pull and push, beside one stock instance        10 minutes
  bfloat16 the same as a whole: bfloat16 with FlashAttention, then float32                         20 minutes
  rate     copies through slabs of 64 MiB to 2 GiB: GB/s, and what they take from a step            5 minutes
  cost     staged against direct: first token, memory, copies, beside stock P/D                    10 minutes
  shared   two models on one device, with real kernels                                             10 minutes
  sleep    sleep levels 1 and 2, wake-up, and hand-overs around them                               10 minutes
  doctor   which transports follow kvcached's pages, and their rates; must end                      5 minutes
  rest     everything else in tests/gpu                                                            30 minutes

All of them by default. Prints one line for each when it has ended.
exit status: 0 all passed; 1 one failed or ran out of time; 2 no such step
END
}

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
vllm=$(python -c 'import importlib.metadata as m; print(m.version("vllm").partition("+")[0])') || exit 2
pytest=(python -m pytest -q -W default)
step() { # NAME -> runs it
    case $1 in
    staged) timeout 600 python -m experiments byte_equivalence --vllm "$vllm" --quick --only "staged" ;;
    bfloat16) timeout 1200 python -m experiments byte_equivalence --vllm "$vllm" --only "staged" ;;
    rate) timeout 300 "${pytest[@]}" tests/gpu/test_slab_rate.py ;;
    cost) timeout 600 python -m experiments bench memory_path --vllm "$vllm" --quick ;;
    shared) timeout 600 python -m experiments shared_device --vllm "$vllm" --quick ;;
    sleep) timeout 600 "${pytest[@]}" tests/gpu/test_sleep.py ;;
    doctor) timeout 300 python -m kvcached_nixl doctor ;;
    rest) timeout 1800 "${pytest[@]}" tests/gpu --deselect tests/gpu/test_sleep.py --deselect tests/gpu/test_slab_rate.py -k "not staged" ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
    esac
}

failed=0
for name in "${@:-}"; do
    for one in ${name:-staged bfloat16 rate cost shared sleep doctor rest}; do
        begun=$SECONDS
        step "$one"
        status=$?
        [[ $status == 0 ]] || failed=1
        echo "=== $one, vLLM $vllm: exit status $status after $((SECONDS - begun)) s (124: out of time)"
    done
done
exit $failed
