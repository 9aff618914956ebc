# SPDX-License-Identifier: Apache-2.0
"""Every error this package raises on purpose. Each carries four sentences: what was found, what was expected, what
would have happened, what to do.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence


class Refused(Exception):
    """Something was stopped on purpose.

    Args:
        found: what was found, with numbers and names.
        expected: what would have been accepted.
        consequence: what would have happened, or what does not happen because of the refusal.
        remedy: what the operator can do.

    The four are attributes, survive pickling (vLLM sends errors between its processes) and make up ``str(error)``.
    """

    def __init__(self, *, found: str, expected: str, consequence: str, remedy: str) -> None:
        self.found = found
        self.expected = expected
        self.consequence = consequence
        self.remedy = remedy
        super().__init__(found, expected, consequence, remedy)

    def __str__(self) -> str:
        return (
            f"\n  found:       {self.found}"
            f"\n  expected:    {self.expected}"
            f"\n  consequence: {self.consequence}"
            f"\n  remedy:      {self.remedy}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        # Exception.__reduce__ would call cls(*args), which the keyword-only signature rejects in the receiving process.
        words = {name: getattr(self, name) for name in ("found", "expected", "consequence", "remedy")}
        return functools.partial(type(self), **words), ()

    @property
    def line(self) -> str:
        """The error text in one line, for tables and logs."""
        return f"found {self.found}; expected {self.expected}. {self.consequence} {self.remedy}"


class ContractChanged(Refused):
    """A vLLM or kvcached callable is not the one a patch was written for."""


class UnsupportedVersion(Refused):
    """The installed vLLM or kvcached is outside the tested versions."""


class MissingDependency(Refused):
    """Something that the connector cannot work without is not installed."""


class SettingsError(Refused):
    """An environment variable or a kv_connector_extra_config key has an unusable value."""


class LayoutRefused(Refused):
    """This package cannot describe the layout of the KV memory exactly."""


class MemoryRefused(Refused):
    """A transport does not follow the pages of the KV memory, or it is not known whether it does."""


class Unproved(MemoryRefused):
    """The test of whether transports follow the pages of the KV memory could not be completed."""


class NameRefused(Refused):
    """An engine has no unique kvcached name, or a worker does not use its engine's name."""


class StartRefused(Refused):
    """All refusals of this process, raised where vLLM constructs the connector."""

    @classmethod
    def of(cls, connector: str, causes: Sequence[tuple[str, Refused]]) -> StartRefused:
        """Combine ``causes``, pairs of (name of what was refused, refusal), which must not be empty."""
        if len(causes) == 1:
            name, cause = causes[0]
            return cls(
                found=f"[{name}] {cause.found}",
                expected=cause.expected,
                consequence=f"{connector} is not constructed. {cause.consequence}",
                remedy=cause.remedy,
            )
        numbered = list(enumerate(causes, start=1))
        return cls(
            found="".join(f"\n    {n}. [{name}] {cause.found}" for n, (name, cause) in numbered),
            expected="".join(f"\n    {n}. {cause.expected}" for n, (_, cause) in numbered),
            consequence=f"{connector} is not constructed."
            + "".join(f"\n    {n}. {cause.consequence}" for n, (_, cause) in numbered),
            remedy="".join(f"\n    {n}. {cause.remedy}" for n, (_, cause) in numbered),
        )


def not_importable(found: str, cause: Exception) -> Refused:
    """The refusal for a part of this package that cannot be loaded: without its patches no connector may start."""
    refusal = Refused(
        found=f"{found}: {type(cause).__name__}: {cause}",
        expected="the package and its dependencies to be importable",
        consequence="NixlConnector is not started without its patches.",
        remedy="Install kvcached-nixl in this environment again, or unset ENABLE_KVCACHED.",
    )
    refusal.__cause__ = cause
    return refusal
