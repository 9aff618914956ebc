# SPDX-License-Identifier: Apache-2.0
"""`python -m kvcached_nixl.hostvmm`: build kvcached on host memory, and show the emulated device."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .build import build_wheel, install_wheel
from .device import device_info
from .errors import HostvmmError

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)


@app.command()
def build(
    sdist: Annotated[
        Path, typer.Option(help="kvcached's source archive from the package index, or the folder unpacked from it.")
    ],
    python: Annotated[
        Path, typer.Option(help="Python interpreter of the environment to build for and install into.")
    ] = Path(sys.executable),
    wheel_dir: Annotated[Path | None, typer.Option(help="Keep the wheel in this folder and do not install it.")] = None,
) -> None:
    """Build the unmodified kvcached on host memory (about half a minute) and install it.

    Needs a C++17 compiler, Python's headers, and torch 2.10 or newer (any build) and setuptools in the environment.
    Exit status 0: built and installed; 1: refused or failed, with the reason on standard error.
    """
    errors = Console(stderr=True, highlight=False)
    try:
        with tempfile.TemporaryDirectory(prefix="kvcached-hostvmm-wheel-") as folder:
            wheel = build_wheel(
                sdist, python, wheel_dir or Path(folder), lambda line: errors.print(line, markup=False, soft_wrap=True)
            )
            if wheel_dir is None:
                install_wheel(wheel, python)
                typer.echo(f"installed {wheel.name} for {python}")
            else:
                typer.echo(wheel)
    except HostvmmError as error:
        errors.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error


@app.command()
def info(index: Annotated[int, typer.Option(min=0, max=15, help="Index of the emulated device.")] = 0) -> None:
    """Show the size of the emulated device, and how much of it each process uses."""
    try:
        found = device_info(index)
    except HostvmmError as error:
        Console(stderr=True, highlight=False).print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    typer.echo(f"device {index}: {found.capacity_bytes / 2**20:.0f} MiB, {found.free_bytes / 2**20:.0f} MiB free")
    if not found.processes:
        return
    table = Table("pid", "created MiB", "mapped MiB", "creates", "releases", "maps", "unmaps", "refused")
    for use in found.processes:
        counts = (use.creates, use.releases, use.maps, use.unmaps, use.refused_creates)
        sizes = (use.created_bytes, use.mapped_bytes)
        table.add_row(str(use.pid), *(f"{size / 2**20:.0f}" for size in sizes), *map(str, counts))
    Console().print(table)


if __name__ == "__main__":
    app()
