# SPDX-License-Identifier: Apache-2.0
"""``python -m kvcached_nixl``: report whether a server could start in this environment."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvcached_nixl import install, status
from kvcached_nixl.cli import report
from kvcached_nixl.cli.optional_command import OptionalCommand
from kvcached_nixl.cli.report import Report
from kvcached_nixl.cli.top import options as top_options
from kvcached_nixl.compat.versions import found_version, import_vllm
from kvcached_nixl.errors import MissingDependency, Refused
from kvcached_nixl.settings import SERVER_LOGGER, ActivationGate, read_gate
from kvcached_nixl.version import __version__

if TYPE_CHECKING:
    from kvcached_nixl.proxy.options import Options as ProxyOptions

_DESCRIPTION = """\
Shows the versions of vLLM, kvcached, NIXL and torch in this environment, and the state of each patch
of kvcached_nixl. Shows where the side channel of a server in this environment would listen, and the address that peers
would get.

It imports vLLM and applies the patches in its own process, as a server with ENABLE_KVCACHED=true
would, so the server would get the same result. Nothing outside this process is changed.

kvcached does not accept every model runner with every vLLM, and newer vLLM versions choose the runner by the model.
With --model, the report shows vLLM's own choice for that model, with all other options at their defaults.
"""
_DOCTOR = """\
Tests through NIXL whether a memory registration stays correct when kvcached unmaps and maps pages. Each
transport that UCX could choose on this host is tested alone, in separate processes, with a few MiB. A
server runs the same test before it offers a handshake; this command runs it before the first deployment.
"""
_DEPLOY = """\
With --deploy it tests nothing. It reads the environment, the server's command line (behind --) and this host's limits,
and says what is wrong for a server that is to be started here: role, settings, addresses, ports, folders, limits,
versions. It needs no GPU and takes a second. In a pod or a container, run it where the server will run.
"""
_DOCTOR_EPILOG = """\
example:
  python -m kvcached_nixl doctor --deploy -- vllm serve MODEL --kv-transfer-config '{"kv_connector": ...}'

exit status:
  0  kvcached's pages may be registered: every transport that could be chosen follows them
  1  they may not be registered and KV would be staged, or the test failed. The output says why
     --deploy: 0, nothing is wrong (there may be advice); 1, something is
  2  wrong usage
"""
_PROXY = """\
A router for X prefill and Y decode servers: OpenAI's completions and chat completions, pull and push. It needs
neither vLLM nor a GPU. It learns from prefill's own responses where prefill is reached, and whether it pulls or pushes.

Keys come from the environment: KVCACHED_NIXL_API_KEY (clients must send it), KVCACHED_NIXL_ADMIN_KEY (/instances
requires it; without it /instances answers on --admin-socket only), KVCACHED_NIXL_UPSTREAM_KEY (sent to servers in
place of the client's key).
"""
_PROXY_EPILOG = """\
example:
  kvcached-nixl proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

exit status: 0 after SIGTERM or SIGINT, when requests in flight have ended; 1 it could not start; 2 wrong usage
"""
_DUMB = ("dumb", "unknown")
_TOP = """\
Shows routers, engines, hand-overs and memory in a terminal. It reads /metrics over HTTP and nothing else, so it runs
wherever the servers can be reached, and it sends no key. A router's servers are asked under the names that the router
has for them, by http; give their own URLs beside it where that is not right.
"""
_TOP_EPILOG = """\
example:
  kvcached-nixl top http://127.0.0.1:8000
  kvcached-nixl top --once http://127.0.0.1:8100 https://[2001:db8::1]:8443/base

exit status:
  0  every server answered, with --once; otherwise, it was ended by q, Ctrl-C or SIGTERM
  1  --once: a server did not answer. Or what top needs is not installed
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
    """Print the report, or run doctor, proxy or top. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="kvcached-nixl",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON, for programs")
    parser.add_argument("--model", help="show which model runner vLLM uses for it: a folder or a name; no download")
    parser.add_argument("--version", action="version", version=f"kvcached_nixl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="{doctor,proxy,top}")
    _add_doctor(commands.add_parser)
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Not by argparse: what follows "--" is another program's command line, with flags of the same names.
    serves = given[given.index("--") + 1 :] if "--" in given else []
    given = given[: len(given) - len(serves)]
    for optional in _OPTIONAL:
        optional.add_to(commands.add_parser, is_asked=optional.name in given)
    options = parser.parse_args([one for one in given if one != "--"])
    if options.command != "doctor" and serves:
        parser.error("-- is for doctor --deploy, followed by a server's command line")
    if options.command == "doctor":
        wrong_usage = _misused(options, serves)
        if wrong_usage:
            parser.error(wrong_usage)
        return _deploy(options, serves) if options.deploy else _doctor(options)
    for optional in _OPTIONAL:
        if options.command == optional.name:
            return optional.run(options)

    # The report goes to standard output. Without this it would be in the log as well.
    logging.getLogger(SERVER_LOGGER).disabled = True
    gate = _gate()
    os.environ["ENABLE_KVCACHED"] = "true"
    if gate == ActivationGate.PACKAGE_OFF.value:
        del os.environ["KVCACHED_NIXL"]
    with _only_ours_on_standard_output():
        found = _take_stock(options.model)
    if options.json:
        print(json.dumps({**report.to_json(found), "gate": gate}, indent=2))
    else:
        found = dataclasses.replace(found, gate=gate)
        print(report.render(found, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
        if gate != ActivationGate.ON.value:
            print(f"\nThis package is {gate}. The above is what ENABLE_KVCACHED=true would give.")
    return 1 if found.refused else 0


def _add_doctor(add: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add(
        "doctor",
        usage="%(prog)s [options] | %(prog)s --deploy [--kv-transfer-config JSON] [--json] [-- COMMAND ...]",
        help="test whether NIXL can use kvcached's pages on this host; --deploy: examine a server's environment",
        description=f"{_DOCTOR}\n{_DEPLOY}",
        epilog=_DOCTOR_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")
    parser.add_argument(
        "--backend", action="append", help="NIXL backend, as in kv_connector_extra_config (default UCX)"
    )
    parser.add_argument(
        "--peer", type=_address, metavar="HOST:PORT", help="side channel of a running engine to read from"
    )
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="rank of that engine (default 0)")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="device index (default 0)")
    parser.add_argument("--deploy", action="store_true", help="examine environment, command line and limits instead")
    parser.add_argument(
        "--kv-transfer-config", metavar="JSON", help="with --deploy: of the server, where its command line is not given"
    )


def _add_proxy_arguments(parser: argparse.ArgumentParser) -> None:
    # The report runs without msgspec, too.
    from kvcached_nixl.proxy.options import add_arguments

    add_arguments(parser)


def _read_proxy(found: argparse.Namespace) -> ProxyOptions:
    from kvcached_nixl.proxy.options import from_arguments

    return from_arguments(found, os.environ)


def _load_proxy() -> Callable[[ProxyOptions], int]:
    from kvcached_nixl.proxy.command import run

    return run


def _read_top(found: argparse.Namespace) -> top_options.Options:
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM") not in _DUMB
    return top_options.from_arguments(found, is_terminal=is_terminal)


def _load_top() -> Callable[[top_options.Options], int]:
    from kvcached_nixl.cli.top.command import run

    return run


_OPTIONAL: tuple[OptionalCommand[Any], ...] = (
    OptionalCommand(
        "top",
        "engines, routers, hand-overs and memory, live in a terminal",
        _TOP,
        _TOP_EPILOG,
        top_options.add_arguments,
        _read_top,
        _load_top,
        unusable_status=2,
    ),
    OptionalCommand(
        "proxy",
        "a router for prefill and decode servers",
        _PROXY,
        _PROXY_EPILOG,
        _add_proxy_arguments,
        _read_proxy,
        _load_proxy,
        unusable_status=1,
    ),
)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected HOST:PORT, with a port of 1 to 65535")
    return host.strip("[]"), int(port)


def _misused(options: argparse.Namespace, serves: Sequence[str]) -> str:
    """What is wrong about the options of doctor; "" if nothing is."""
    tests = options.backend or options.peer or options.rank or options.device
    if options.deploy and tests:
        return "--backend, --peer, --rank and --device do not go with --deploy, which tests no transport"
    if not options.deploy and (serves or options.kv_transfer_config is not None):
        return "a server's command line and --kv-transfer-config need --deploy"
    return ""


def _deploy(options: argparse.Namespace, serves: Sequence[str]) -> int:
    """Examine environment, command line and host. Returns the exit status."""
    from kvcached_nixl.cli.deploy import examine

    found = examine.examine(os.environ, options.kv_transfer_config, serves)
    if options.json:
        print(json.dumps(examine.to_json(found), indent=2))
    else:
        print(examine.render(found, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return 1 if found.is_wrong else 0


def _doctor(options: argparse.Namespace) -> int:
    """Run the doctor on this host. Returns the exit status."""
    os.environ["ENABLE_KVCACHED"] = "true"
    print("testing each transport, which takes some seconds ...", file=sys.stderr)
    try:
        with _only_ours_on_standard_output():
            install()
            from kvcached_nixl.cli import doctor

            peer = None if options.peer is None else (*options.peer, options.rank)
            found = doctor.examine(tuple(options.backend or ("UCX",)), options.device, peer)
    except ImportError as error:
        print(f"doctor: {error}. Run it where vLLM, kvcached and NIXL are installed.", file=sys.stderr)
        return 1
    except Refused as error:
        print(error, file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(doctor.to_json(found), indent=2))
    else:
        print(doctor.render(found, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return 0 if found.is_direct else 1


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


def _gate() -> str:
    try:
        return read_gate(os.environ).value
    except Refused as error:
        return f"unclear: {error.found}"


def _take_stock(model: str | None) -> Report:
    """Install, import what a server would import, decide every patch, and ask vLLM for its runner of ``model``."""
    if model is not None:
        # vLLM reads these at import. A report must not download a model.
        os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    installation = install()
    if installation is not None and found_version("vllm") is not None:
        print("importing vLLM, which takes some seconds ...", file=sys.stderr)
        try:
            import_vllm()
        except Exception as error:  # noqa: BLE001 - recorded as a refusal, which the report shows
            installation.registry.refuse("vLLM", _cannot_import(error))
        else:
            installation.registry.complete()
            found = report.with_side_channel(status())
            return found if model is None else report.asked(found, model)
    return status()


def _cannot_import(cause: Exception) -> Refused:
    return MissingDependency(
        found=f"import vllm fails: {type(cause).__name__}: {cause}",
        expected="a vLLM that can be imported",
        consequence="No server can start.",
        remedy="Repair the installation of vLLM.",
    )


if __name__ == "__main__":
    sys.exit(main())
