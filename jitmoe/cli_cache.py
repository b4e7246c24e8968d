"""`jitmoe cache`: what lies in the disk cache of kernels, and its way to other machines."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="The disk cache of compiled kernels.", no_args_is_help=True)


@app.command()
def info() -> None:
    """Where the cache is and how much it holds."""
    from jitmoe.jit import store

    found = store.info()
    writable = "writable" if found.is_writable else "not writable: kernels stay in memory"
    typer.echo(f"directory  {found.directory or 'none, HOME is not set'} ({writable})")
    for pack in found.packs:
        typer.echo(f"pack       {pack} (read only)")
    typer.echo(f"kernels    {found.num_entries}, {found.num_bytes:,} bytes")


@app.command(name="list")
def list_() -> None:
    """Every kernel: when it was built, its bytes, what it is for."""
    from jitmoe.jit import store

    for entry in store.entries():
        typer.echo(_entry_line(entry))


def _entry_line(entry) -> str:
    if entry.problem:
        what = f"DAMAGED: {entry.problem}"
    else:
        plan = entry.facts.get("plan", {})
        wanted = ("bucket", "hidden", "intermediate", "num_experts", "top_k")
        sizes = " ".join(f"{name}={plan[name]}" for name in wanted if name in plan)
        what = f"{entry.facts.get('arch', '')} {sizes}"
    created = datetime.fromtimestamp(entry.created).isoformat(" ", "minutes")
    return f"{entry.name}  {created}  {entry.num_bytes:>9,} bytes  {what}"


@app.command()
def verify() -> None:
    """Read every kernel against its checksum; exit 1 if one is damaged. Use repairs damage."""
    from jitmoe.jit import store

    damaged = store.verify()
    for entry in damaged:
        typer.echo(f"{entry.path}: {entry.problem}")
    typer.echo(f"{store.info().num_entries - len(damaged)} kernels whole, {len(damaged)} damaged")
    if damaged:
        raise typer.Exit(1)


@app.command()
def clear(
    older_than: Annotated[float, typer.Option(min=0, help="Keep kernels younger, in days.")] = 0.0,
) -> None:
    """Remove the kernels of the writable directory; packs stay."""
    from jitmoe.jit import store

    typer.echo(f"{store.clear(older_than * 86_400)} kernels removed")


@app.command()
def export(file: Annotated[Path, typer.Argument(help="The archive to write (.tar.gz).")]) -> None:
    """Pack every kernel into one archive, for machines that should compile nothing."""
    from jitmoe.jit import store

    if not file.absolute().parent.is_dir():
        raise ValueError(f"{file} must lie in an existing folder; create {file.parent}")
    typer.echo(f"{store.export(file)} kernels -> {file}")


@app.command(name="import")
def import_(
    file: Annotated[Path, typer.Argument(help="An archive.", exists=True, dir_okay=False)],
) -> None:
    """Add the kernels of an archive. They are code: import only what you would run."""
    from jitmoe.jit import store

    typer.echo(f"{store.import_(file)} kernels <- {file}")
