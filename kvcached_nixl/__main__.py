# SPDX-License-Identifier: Apache-2.0
"""``python -m kvcached_nixl``: report whether a server could start in this environment."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

from kvcached_nixl import install, status
from kvcached_nixl.cli import report
from kvcached_nixl.cli.report import Report
from kvcached_nixl.errors import MissingDependency, Refused
from kvcached_nixl.settings import SERVER_LOGGER, ActivationGate
from kvcached_nixl.version import __version__
from kvcached_nixl.vllm.adapter.versions import found_version, import_vllm

_DESCRIPTION = """\
Shows the versions of vLLM, kvcached, NIXL and torch in this environment, and the state of each patch
of kvcached_nixl. Shows where the side channel of a server in this environment would listen, and the address that peers
would get.

It imports vLLM and applies the patches in its own process, as a server with ENABLE_KVCACHED=true
would, so the server would get the same result. Nothing outside this process is changed.
"""
_DOCTOR = """\
Tests through NIXL whether a memory registration stays correct when kvcached unmaps and maps pages. Each
transport that UCX could choose on this host is tested alone, in separate processes, with a few MiB. A
server runs the same test before it offers a handshake; this command runs it before the first deployment.
"""
_PREFILL = """\
With --prefill it tests nothing of that. It asks each prefill server once, at each address of its name, for the KV of
four tokens, as a decode server with {"prefill": [URL, ...]} would, and asks its side channel for a handshake. It says
what each has answered, and whether decode could use it: run it where decode will run. Prefill's --api-key is read from
KVCACHED_NIXL_PREFILL_API_KEY, or from a file. What is asked for is not fetched, so each server keeps a few blocks until
their lease ends.
"""
_DOCTOR_EPILOG = """\
example:
  python -m kvcached_nixl doctor --prefill http://prefill-0:8001 http://prefill-1:8001

exit status:
  0  kvcached's pages may be registered: every transport that could be chosen follows them
     --prefill: every server would serve
  1  they may not be registered and KV would be staged, or the test failed. The output says why
     --prefill: a server would not serve, and the output says why
  2  wrong usage
"""
_EPILOG = """\
exit status:
  0  a server with a NIXL connector would start
  1  something would be refused; each refusal says what was found, what was expected,
     what would have happened and what to do
  2  wrong usage
"""


def main(arguments: Sequence[str] | None = None) -> int:
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:  # closed by whoever has started this
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
            os.dup2(getattr(sys, name).fileno(), number)
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads on, as `head`. Python would flush, and fail, again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvcached-nixl",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON, for programs")
    parser.add_argument("--version", action="version", version=f"kvcached_nixl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="{doctor}")
    _add_doctor(commands.add_parser)
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        if options.prefill and (options.backend or options.peer or options.rank or options.device):
            parser.error("--backend, --peer, --rank and --device do not go with --prefill, which tests no transport")
        if options.prefill_api_key_file is not None and not options.prefill:
            parser.error("--prefill-api-key-file needs --prefill")
        return _ask(options) if options.prefill else _doctor(options)

    # The report goes to standard output. Without this it would be in the log as well.
    logging.getLogger(SERVER_LOGGER).disabled = True
    gate = report.gate()
    os.environ["ENABLE_KVCACHED"] = "true"
    with _only_ours_on_standard_output():
        found = report.with_activation(_take_stock())
    if options.json:
        print(json.dumps({**report.to_json(found), "gate": gate}, indent=2))
    else:
        found = dataclasses.replace(found, gate=gate)
        print(report.render(found, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
        if gate == ActivationGate.KVCACHED_OFF.value:
            print(f"\nThis package is {gate}. The above is what ENABLE_KVCACHED=true would give.")
    return 1 if found.refused else 0


def _add_doctor(add: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add(
        "doctor",
        usage="%(prog)s [options] | %(prog)s --prefill URL [URL ...] [--prefill-api-key-file FILE] [--json]",
        help="test whether NIXL can use kvcached's pages on this host; --prefill: ask prefill servers as decode would",
        description=f"{_DOCTOR}\n{_PREFILL}",
        epilog=_DOCTOR_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Without a default: --json may stand before "doctor".
    parser.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print the result as JSON, for programs"
    )
    parser.add_argument(
        "--backend", action="append", help="NIXL backend, as in kv_connector_extra_config (default UCX)"
    )
    parser.add_argument(
        "--peer", type=_address, metavar="HOST:PORT", help="side channel of a running engine to read from"
    )
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="rank of that engine (default 0)")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="device index (default 0)")
    parser.add_argument("--prefill", nargs="+", metavar="URL", help="prefill servers to ask instead, as decode would")
    parser.add_argument("--prefill-api-key-file", metavar="FILE", help="with --prefill: a file with their --api-key")


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected HOST:PORT, with a port of 1 to 65535")
    return host.strip("[]"), int(port)


def _ask(options: argparse.Namespace) -> int:
    try:
        from kvcached_nixl.cli import ask

        found = ask.examine(options.prefill, options.prefill_api_key_file)
    except ImportError as error:
        print(f"doctor: {error}. Run it where vLLM is installed.", file=sys.stderr)
        return 1
    except Refused as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(ask.to_json(found), indent=2) if options.json else ask.render(found))
    return 1 if any(one.why_not for one in found) else 0


def _doctor(options: argparse.Namespace) -> int:
    os.environ["ENABLE_KVCACHED"] = "true"
    print("testing each transport, which takes some seconds ...", file=sys.stderr)
    try:
        with _only_ours_on_standard_output():
            install()
            from kvcached_nixl.cli import doctor

            peer = None if options.peer is None else (*options.peer, options.rank)
            found = doctor.examine(tuple(options.backend or ("UCX",)), options.device, peer)
    except (ImportError, Refused, OSError, ValueError) as error:
        where = ". Run it where vLLM, kvcached and NIXL are installed." if isinstance(error, ImportError) else ""
        print(error if isinstance(error, Refused) else f"doctor: {error}{where}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(doctor.to_json(found), indent=2))
    else:
        print(doctor.render(found, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return 0 if found.proof.is_direct else 1


@contextlib.contextmanager
def _only_ours_on_standard_output() -> Iterator[None]:
    """Redirect what vLLM and NIXL print to standard error: programs parse our report on standard output."""
    ours = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(ours, 1)
        os.close(ours)


def _take_stock() -> Report:
    """Install, import what a server would import, and decide every patch."""
    registry = install()
    if registry is not None and found_version("vllm") is not None:
        print("importing vLLM, which takes some seconds ...", file=sys.stderr)
        try:
            import_vllm()
        except Exception as error:  # noqa: BLE001 - recorded as a refusal, which the report shows
            refusal = MissingDependency(
                found=f"import vllm fails: {type(error).__name__}: {error}",
                expected="a vLLM that can be imported",
                consequence="No server can start.",
                remedy="Repair the installation of vLLM.",
            )
            registry.refuse("vLLM", refusal)
        else:
            registry.complete()
            return report.with_side_channel(status())
    return status()


if __name__ == "__main__":
    sys.exit(main())
