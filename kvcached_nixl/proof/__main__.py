# SPDX-License-Identifier: Apache-2.0
"""The prover, which `find.find` starts. For people there is ``python -m kvcached_nixl doctor``.

Standard input: a `Question` as JSON. Last line of standard output: what was found (`Said`), as JSON. Exit status 1: it
cannot be told what could be chosen; why is on standard error.
"""

from __future__ import annotations

import sys

import msgspec

from kvcached_nixl.hostvmm import activate
from kvcached_nixl.proof.member import Answered
from kvcached_nixl.proof.prover import prove_lanes
from kvcached_nixl.proof.result import Question


def main() -> int:
    question = msgspec.json.decode(sys.stdin.read(), type=Question)
    activate()
    # Once, for all that are forked; none of these touches a device when it is imported.
    import nixl._api  # noqa: F401

    try:
        said = prove_lanes(question)
    except Answered as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{msgspec.json.encode(said).decode()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
