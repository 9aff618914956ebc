# SPDX-License-Identifier: Apache-2.0
"""Faults of engines in the mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.mesh.members import Member
    from experiments.mesh.mesh import Mesh

AWAY_ROUNDS = (10, 60)


@dataclass(frozen=True)
class Address:
    """The engine id, host and port under which peers reach an engine."""

    engine_id: str
    host: str
    port: int


class Troubles:
    """See the module. ``role``: ``prefill`` or ``decode``."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def one(self) -> None:
        """Inflict a random fault on a random engine, unless it is the only reachable one of its role."""
        kinds: dict[str, Callable[[str, Member], None]] = {
            "restarted": self.restart,
            "restarted at another port": self.move,
            "replaced by another engine": self.replace,
            "ended, and back later": self.leave,
            "vanished without a word, and back later": self.vanish,
            "lost a connection": self.cut,
        }
        role = self._mesh.draw.choice(list(self._mesh.roles))
        living = [one for one in self._mesh.roles[role] if one not in self._mesh.frozen]
        if len(living) < 2:
            return
        kind = self._mesh.draw.choice(list(kinds))
        self._mesh.done[kind] += 1
        kinds[kind](role, self._mesh.draw.choice(living))

    def restart(self, role: str, member: Member) -> None:
        self._mesh.roles[role].append(self._mesh.start(self._mesh.end(member)))

    def move(self, role: str, member: Member) -> None:
        address = self._mesh.end(member)
        self._mesh.roles[role].append(
            self._mesh.start(Address(address.engine_id, address.host, 5600 + next(self._mesh.numbers) % 50_000))
        )

    def replace(self, role: str, member: Member) -> None:
        address = self._mesh.end(member)
        self._mesh.roles[role].append(
            self._mesh.start(Address(f"{role}-new-{next(self._mesh.numbers)}", address.host, address.port))
        )

    def leave(self, role: str, member: Member) -> None:
        address = self._mesh.end(member)
        back = self._mesh.round + self._mesh.draw.randint(*AWAY_ROUNDS)
        self._mesh.later.append((back, lambda: self._mesh.roles[role].append(self._mesh.start(address))))

    def vanish(self, role: str, member: Member) -> None:
        """The engine cannot be reached. After a while its host is back and refuses traffic of earlier connections."""
        self._mesh.network.vanish(member.agent)
        self._mesh.frozen.add(member)
        member.troubles += 1
        back = self._mesh.round + self._mesh.draw.randint(*AWAY_ROUNDS)
        self._mesh.later.append((back, lambda: self.restart(role, member)))

    def cut(self, role: str, member: Member) -> None:
        other = "decode" if role == "prefill" else "prefill"
        far = self._mesh.draw.choice(self._mesh.roles[other])
        for one, two in ((member, far), (far, member)):
            self._mesh.network.agents[one.agent].lose(two.agent)
            one.troubles += 1
        self._mesh.cuts.add((member, far) if role == "prefill" else (far, member))
