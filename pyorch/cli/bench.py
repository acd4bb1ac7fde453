"""`sparq-cpp bench`: measurements, each one command that writes records and prints a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pyorch.cli import options as opt
from pyorch.errors import SparqError


class Numbers(click.ParamType):
    """4096,16384 -> [4096, 16384]."""

    name = "list"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        if isinstance(value, list):
            return value
        number = opt.Number(int, 1)
        return [number.convert(part.strip(), param, ctx) for part in str(value).split(",")]


out_option = click.option(
    "--out",
    metavar="DIR",
    help="Where the records are.  [default: bench/results/<kind of machine>]",
)
readme_option = click.option(
    "--update-readme", metavar="FILE", help="Put the table between this file's marks for it."
)
force_option = click.option("--force", is_flag=True, help="Measure again what is there already.")


@click.group()
def command() -> None:
    """Measure. Records are JSON lines; a run leaves out what is recorded already."""


@command.command("attn")
@click.option("--like", multiple=True, metavar="NAME", help="[default: llama2-7b and llama3-8b]")
@click.option("--positions", "-S", type=Numbers(), default="4096,16384,32768", show_default=True)
@click.option("--threads", "-t", type=Numbers(), help="One or several.  [default: all cores]")
@click.option("--spec", multiple=True, help="What of ours.  [default: dense, SparQ and top-k]")
@click.option("--samples", type=opt.Number(int, 1), default=30, show_default=True)
@click.option("--layers", type=opt.Number(int, 1), help="Layers of the model.")
@out_option
@force_option
@readme_option
@opt.json_option
def attn(**options: Any) -> None:
    """Attention time per token, stock beside ours in turns, and the roofline of their bytes.

    Fails when our dense attention differs from stock's, or when a sparse row did not run sparse.
    """
    from pyorch.bench import attention
    from pyorch.engine import usable_cores

    plan = attention.Plan(
        like=options["like"] or attention.LIKE,
        positions=options["positions"],
        threads=options["threads"] or [usable_cores()],
        specs=options["spec"] or attention.SPECS,
        n_samples=options["samples"],
        n_layer=options["layers"],
    )
    opt.note_if_busy()
    file = _file(options, "attention.jsonl")
    with opt.progress_bar("attention") as progress:
        found = attention.run(plan, file, progress, force=options["force"])
    _print(found, attention.markdown(found), file, options, attention.summary(found))


@command.command("prefill")
@click.option("--like", metavar="NAME", default="llama3-8b", show_default=True)
@click.option("--tokens", "-n", type=opt.Number(int, 1024), default=2048, show_default=True)
@click.option("--threads", "-t", type=opt.Number(int, 1), help="[default: all cores]")
@click.option("--spec", default="sparq,ratio=1/8", show_default=True)
@click.option("--samples", type=opt.Number(int, 1), default=20, show_default=True)
@out_option
@force_option
@readme_option
@opt.json_option
def prefill(**options: Any) -> None:
    """Prefill time with sparse attention off and on: one layer of a model's own shape, in turns."""
    from pyorch.bench import prefill as bench
    from pyorch.engine import usable_cores

    opt.note_if_busy()
    file = _file(options, "prefill.jsonl")
    with opt.progress_bar("prefill") as progress:
        found = bench.run(
            options["like"],
            options["tokens"],
            options["threads"] or usable_cores(),
            options["spec"],
            options["samples"],
            file,
            progress,
            force=options["force"],
        )
    _print(found, bench.markdown(found), file, options)


@command.command("passages")
@click.option("--model", "-m", metavar="FILE", help="GGUF model.  [default: the demo model]")
@click.option(
    "--text",
    multiple=True,
    metavar="FILE|DIR",
    help="Books the model has not seen.  [default: the demo document]",
)
@click.option("--passages", "n", type=opt.Number(int, 1), default=100, show_default=True)
@click.option(
    "--context", type=opt.Number(int, 64), default=2000, show_default=True, help="Tokens."
)
@click.option("--cue", type=opt.Number(int, 1), default=20, show_default=True, help="Tokens.")
@click.option(
    "--chars", type=opt.Number(int, 1), default=300, show_default=True, help="Where counting ends."
)
@click.option("--spec", multiple=True, help="What to compare.  [default: dense, SparQ, top-k]")
@click.option("--threads", "-t", type=opt.Number(int, 1), default=1, show_default=True)
@click.option("--seed", type=opt.Number(int, 0), default=1, show_default=True)
@out_option
@force_option
@readme_option
@opt.json_option
def passages(**options: Any) -> None:
    """How far a model recites passages of its context, dense beside sparse.

    Fails when nothing of a sparse row ran sparse.
    """
    from pyorch import paths
    from pyorch.bench import passages as bench

    demo = paths.data("models") / "demo"
    file = _file(options, "passages.jsonl")
    with opt.progress_bar("passages") as progress:
        found = bench.run(
            Path(options["model"] or demo / "demo.gguf"),
            [Path(t) for t in options["text"]] or [demo / "document.txt"],
            file,
            progress,
            n_passages=options["n"],
            n_context=options["context"],
            n_cue=options["cue"],
            max_chars=options["chars"],
            specs=options["spec"] or bench.SPECS,
            n_threads=options["threads"],
            seed=options["seed"],
            force=options["force"],
        )
    _print(found, bench.markdown(found), file, options)


def _file(options: dict[str, Any], name: str) -> Path:
    from pyorch.bench import records

    return (Path(options["out"]) if options["out"] else records.default_folder()) / name


def _print(
    found: list[Any], table: str, file: Path, options: dict[str, Any], summary: str = ""
) -> None:
    """The table on stdout and beside the records; the summary, if there is one, into a README."""
    file.with_suffix(".md").write_text(table + "\n", "utf-8")
    if options["as_json"]:
        opt.print_json({"records": found, "file": str(file)})
    else:
        print(table)
    if options["update_readme"]:
        update_marked(Path(options["update_readme"]), file.stem, summary or table)
    opt.note(f"records: {file}", "dim")


def update_marked(file: Path, name: str, text: str) -> None:
    """Replace what is between `<!-- name -->` and `<!-- /name -->` in a file.

    Raises:
        SparqError: the file has no such marks, or cannot be read or written.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    try:
        old = file.read_text("utf-8")
        before, found, rest = old.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found and found_end):
            raise SparqError(f"{file}: no {begin} ... {end} to put the table in")
        file.write_text(f"{before}{begin}\n{text}\n{end}{after}", "utf-8")
    except OSError as e:
        raise SparqError(f"{file}: {e.strerror or e}") from None
