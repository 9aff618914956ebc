# SPDX-License-Identifier: Apache-2.0
"""`python -m hostvmm`: build kvcached on host memory, and show the emulated device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hostvmm.build import build_wheel
from hostvmm.device import HostvmmError, device_info

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)


@app.command()
def build(
    sdist: Annotated[Path, typer.Option(help="kvcached's source archive from the package index.")],
    wheel_dir: Annotated[Path, typer.Option(help="The folder for the wheel.")],
) -> None:
    """Build the unmodified kvcached on host memory for this Python (about half a minute).

    Needs a C++17 compiler, Python's headers, and torch 2.10 or newer (any build) and setuptools in the environment.
    """
    typer.echo(build_wheel(sdist, wheel_dir))


@app.command()
def info(index: Annotated[int, typer.Option(min=0, max=15, help="Index of the emulated device.")] = 0) -> None:
    """Show the size of the emulated device, and how much of it each process uses."""
    try:
        found = device_info(index)
    except HostvmmError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    typer.echo(f"device {index}: {found.capacity_bytes / 2**20:.0f} MiB, {found.free_bytes / 2**20:.0f} MiB free")
    for use in found.processes:
        typer.echo(
            f"pid {use.pid}: {use.created_bytes / 2**20:.0f} MiB created, {use.mapped_bytes / 2**20:.0f} MiB mapped; "
            f"{use.creates} creates, {use.releases} releases, {use.maps} maps, {use.unmaps} unmaps, "
            f"{use.refused_creates} refused"
        )


if __name__ == "__main__":
    app()
