"""What the commands of `bench` share: options, the agreement to write models, and the outputs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyorch.cli.groups import option, renamed
from pyorch.cli.readme import around, update_marked
from pyorch.cli.terminal import confirm, note
from pyorch.cli.types import File, Name, Number
from pyorch.errors import SparqError
from pyorch.models.synth import QUANTS
from pyorch.text import human_bytes

if TYPE_CHECKING:
    from pyorch.bench.plan import SpeedPlan

SYNTHETIC = {"like", "layers", "quant"}  # options that a model replaces
RENAMED_SPEC = [renamed(old, "-a SPEC") for old in ("--attention", "--spec")]


def quant_option() -> Any:
    return option(
        "--quant",
        type=Name(*QUANTS),
        default="q8_0",
        show_default=True,
        help="Weights of the synthetic model.",
    )


def repetitions_option(text: str) -> Any:
    return option(
        "-r", "--repetitions", type=Number(int, 1), default=5, show_default=True, help=text
    )


@dataclass(frozen=True)
class Writing:
    """The outputs: the folder of the records, and the table."""

    out: str | None = option(
        "--out",
        type=File(),
        metavar="DIR",
        help="Folder of the records.  [default: bench/results in a clone, else the user's data]",
    )
    force: bool = option("--force", is_flag=True, help="Measure again what is recorded already.")
    update_readme: str | None = option(
        "--update-readme",
        type=File(),
        metavar="FILE",
        help="Put the table between the marks in this file.",
    )

    def file(self, name: str) -> Path:
        """The file of the records. A README without marks for the table is refused here, before
        anything runs."""
        from pyorch.bench import records

        file = (Path(self.out) if self.out else records.default_folder()) / name
        if self.update_readme:
            around(Path(self.update_readme), file.stem)
        return file

    def told(self, file: Path, table: str) -> None:
        """Say where the records are, and put the table into a README if requested."""
        if self.update_readme:
            update_marked(Path(self.update_readme), file.stem, table)
        note(f"records: {file}", "dim")


def refuse(ctx: click.Context, names: Collection[str], why: str, hint: str) -> None:
    for param in ctx.command.params:
        if param.name in names:
            raise SparqError(f"{max(param.opts, key=len)} {why}", hint, exit_code=2)


def refuse_two_models(ctx: click.Context, given: set[str], model: object) -> None:
    if model:
        hint = "--like, --layers and --quant make a synthetic model, which stands in for -m"
        refuse(ctx, given & SYNTHETIC, "has no meaning with --model", hint)


def agree_to_write(plan: SpeedPlan, yes: bool) -> None:
    """Ask before gigabytes of synthetic weights are written.

    Raises:
        SparqError: there is neither a terminal to ask on, nor --yes.
    """
    if todo := plan.to_write():
        names = ", ".join(f"{path.name} ({human_bytes(n)})" for path, n in todo.items())
        what = f"{names} with random weights in {next(iter(todo)).parent}"
        hint = "write it with --yes, or measure a model of yours: -m FILE"
        question = f"Write {what}? They stay there until `sparq-cpp models rm synthetic`."
        confirm(question, yes, f"the benchmark would write {what}", hint)


def keep(file: Path, table: str) -> None:
    """Write the table of all records beside them; stdout has only the current run's."""
    file.with_suffix(".md").write_text(table + "\n", "utf-8")
