"""`sparq-cpp report`: measurements of one machine as one page."""

from __future__ import annotations

from pathlib import Path

import click

from pyorch.cli.terminal import note
from pyorch.cli.types import File
from pyorch.errors import SparqError


@click.command()
@click.option(
    "--out",
    type=File(),
    metavar="FILE",
    default="report.html",
    show_default=True,
    help="The file to write.",
)
@click.option(
    "--results",
    type=File(),
    metavar="DIR",
    help="Folder of the records of one machine.  [default: where `bench` keeps them]",
)
@click.option(
    "--figures",
    type=File(),
    metavar="DIR",
    help="Folder of the pictures.  [default: bench/figures in a clone]",
)
def command(out: str, results: str | None, figures: str | None) -> None:
    """Write figures and tables as one HTML page that opens without a network.

    The tables are those that `bench` has written beside its records. `sparq-cpp eval table DIR`
    prints one: as eval.md in the same folder it is on the page, too. The figures are a clone's, or
    those that `sparq-cpp eval plot DIR` has drawn, with --figures DIR.
    """
    from pyorch import paths
    from pyorch.bench import records, report
    from pyorch.models.new_file import new_file

    for name in filter(None, (results, figures)):
        if not Path(name).is_dir():
            raise SparqError(f"{name}: no such folder", "sparq-cpp bench --out, make figures")
    text = report.page(
        Path(results) if results else records.default_folder(),
        Path(figures) if figures else paths.results() / "figures",
    )
    with new_file(Path(out), force=True) as (partial, _):
        partial.write_text(text, "utf-8")
    note(f"{out}: {len(text) / 1e6:.1f} MB")
