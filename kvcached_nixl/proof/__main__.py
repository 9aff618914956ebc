# SPDX-License-Identifier: Apache-2.0
"""The prover process, which `find.find` starts. Operators use ``python -m kvcached_nixl doctor`` instead.

Standard input: a `Question` as JSON. Last line of standard output: the result (`Said`) as JSON. Exit status 1: the
transports that could be chosen are unknown; the reason is on standard error.
"""

from __future__ import annotations

import sys

import msgspec

from kvcached_nixl.proof.member import MemberAnswer
from kvcached_nixl.proof.prover import prove_lanes
from kvcached_nixl.proof.result import Question


def main() -> int:
    question = msgspec.json.decode(sys.stdin.read(), type=Question)
    # Imported once for all forked members. The import touches no device.
    import nixl._api  # noqa: F401

    try:
        said = prove_lanes(question)
    except MemberAnswer as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{msgspec.json.encode(said).decode()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
