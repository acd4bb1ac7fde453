"""`sparq-cpp eval`: several methods on the same examples; `eval plot`, `table` and `pack`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyorch.attention import line
from pyorch.attention.spec import AttentionSpec
from pyorch.cli import options as opt
from pyorch.cli.bench import several, update_marked
from pyorch.errors import SparqError
from pyorch.progress import progress_bar

if TYPE_CHECKING:
    from pyorch.evals.task import Task
    from pyorch.policies import Method

METHODS = ("off", "sparq,ratio=1/8")


class _Group(click.Group):
    """Tasks stand where a subcommand would: what is not one of these is `run`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(
            ctx, args if args[:1] and args[0] in self.commands else ["run", *args]
        )


@click.group(cls=_Group)
def command() -> None:
    """Measure quality."""


@command.command("run")
@click.argument("names", metavar="[TASK]...", nargs=-1)
@click.option("--list", "listed", is_flag=True, help="List the tasks and what each needs.")
@click.option(
    "--model",
    "-m",
    envvar="SPARQ_MODEL",
    metavar="FILE|SPEC",
    help="GGUF model: a file, a card's name or hf:org/repo.",
)
@opt.yes_option
@opt.renamed("--attention", "-a SPEC")
@opt.renamed("--method", "-a SPEC")
@click.option(
    *opt.SPEC_OPTION,
    "methods",
    multiple=True,
    metavar="SPEC",
    help=f"A method; several are compared with the first.  [default: {' '.join(METHODS)}]",
)
@several("--ratio", of=opt.Ratio(), text="Run each sparse method at each of these ratios: 1/2,1/8.")
@click.option("--exact", is_flag=True, help="Keep the ratio at any length: adds min_ctx=0,min_k=1.")
@click.option(
    "-n", type=opt.Number(int, 1), default=100, show_default=True, help="Examples per task."
)
@click.option(
    "--ctx", type=opt.SOME_POSITIONS, default=2048, show_default=True, help="Positions per example."
)
@click.option(
    "--seed",
    type=opt.Number(int, 0),
    default=1,
    show_default=True,
    help="Seed of the examples.",
)
@click.option("--threads", "-t", type=opt.THREADS, help="Number of threads.  [default: all cores]")
@opt.rope_options
@opt.gpu_option
@opt.cache_options
@opt.numa_option
@click.option(
    "--text",
    multiple=True,
    metavar="FILE|DIR",
    help="Books for haystacks and passages.  [default: the demo document]",
)
@click.option(
    "--data",
    multiple=True,
    metavar="[TASK=]FILE",
    help="Read JSON, JSON lines or parquet instead of a download.",
)
@click.option("--chat", is_flag=True, help="Put prompts through the model's chat template.")
@click.option(
    "--confusion",
    type=opt.Number(int, 0, 63),
    default=7,
    help="Confusion contexts of squad.  [default: 7]",
)
@several(
    "--lengths",
    of=opt.SOME_POSITIONS,
    text="Lengths of needle, in positions.  [default: 8 up to --ctx]",
)
@click.option(
    "--depths",
    type=opt.Number(int, 1),
    default=11,
    help="Number of depths of needle.  [default: 11]",
)
@click.option("--out", metavar="DIR", help="Folder of the records.  [default: sparq-eval/MODEL]")
@click.option("--force", is_flag=True, help="Measure again what is recorded already.")
@click.option(
    "--output",
    "-o",
    type=opt.Name("md", "csv", "json"),
    default="md",
    help="Format of the tables.  [default: md]",
)
def run(**options: Any) -> None:
    """Measure what sparse attention costs in quality, task by task.

    Without TASK, all tasks run that need no download. All methods see the same examples and answer
    by real decode steps after a dense prefill. Every answer is recorded at once, and the same
    command continues an interrupted run.

    \b
      sparq-cpp eval --list
      sparq-cpp eval repetition needle -m M -a off -a sparq -a topk --ratio 1/2,1/8
      sparq-cpp eval plot DIR      draw score against bytes and speed, and heatmaps of needles
      sparq-cpp eval table DIR     print the table again
      sparq-cpp eval pack DIR TO   keep one line per method
    """
    from pyorch import evals

    if options["listed"]:
        _list(evals.find(options["names"]) if options["names"] else list(evals.tasks().values()))
        return
    tasks = evals.find(options["names"])
    if not options["model"]:
        raise SparqError("no model", "-m FILE, a card's name, or hf:org/repo", exit_code=2)

    from pyorch import native, paths
    from pyorch.evals import run as evaluate
    from pyorch.evals import table, texts
    from pyorch.models.geometry import geometry
    from pyorch.models.gguf_file import read_gguf

    model = opt.model_path(options["model"], options["yes"])
    books = [Path(t) for t in options["text"]] or [paths.data("models") / "demo" / "document.txt"]
    folder = Path(options["out"] or Path("sparq-eval") / model.stem)
    plan = evaluate.Plan(
        model=model,
        tasks=tasks,
        methods=_methods(options),
        n=options["n"],
        setup={
            "ctx": options["ctx"],
            "seed": options["seed"],
            "texts": texts.read_texts(books),
            "chat": options["chat"],
            "confusion": options["confusion"],
            "lengths": options["lengths"],
            "depths": options["depths"],
        },
        data=_data(options["data"], tasks),
        n_threads=options["threads"],
        n_gpu_layers=options["n_gpu_layers"],
        type_k=options["cache_type_k"],
        type_v=options["cache_type_v"],
        numa=options["numa"] or "",
        rope=opt.rope_from(options),
    )
    native.built()
    opt.note_if_busy()
    opt.note_if_beyond(options["ctx"], geometry(read_gguf(model)).n_ctx_train)
    with progress_bar("making the examples") as making, progress_bar("eval") as progress:
        found = evaluate.run(plan, folder, making, progress, force=options["force"])
    print(table.FORMATS[options["output"]](found))
    opt.note(f"records: {folder}", "dim")


def _methods(options: dict[str, Any]) -> list[Method]:
    """Each method; a sparse one whose size is left open at each of the ratios, if there are any."""
    from pyorch import policies
    from pyorch.evals.table import EXACT

    out: list[Method] = []
    for text in options["methods"] or METHODS:
        method = policies.parse(text)
        sized = any(getattr(method, name, None) for name in ("rank", "topk", "k", "k_layers"))
        free = policies.is_sparse(method) and not sized and not line.has_setting(text, "ratio")
        out += [replace(method, ratio=r) for r in options["ratio"]] if free else []
        out += [] if free and options["ratio"] else [method]
    if options["exact"]:
        out = [replace(m, **EXACT) if _has_bounds(m) else m for m in out]
    return out


def _has_bounds(method: Method) -> bool:
    return isinstance(method, AttentionSpec) and method.sparse


def _data(given: tuple[str, ...], tasks: list[Task]) -> dict[str, Path]:
    """Task -> file. A file without a task's name is for the only task that needs data."""
    wanting = [t.name for t in tasks if t.data]
    out: dict[str, Path] = {}
    for text in given:
        name, eq, file = text.partition("=")
        if not eq or name not in wanting:
            if len(wanting) != 1 or (eq and not Path(text).exists()):
                names = ", ".join(wanting) or "no task here needs data"
                raise SparqError(
                    f"--data {text!r}: for which task?", f"--data TASK=FILE: {names}", exit_code=2
                )
            name, file = wanting[0], text
        out[name] = Path(file)
    return out


def _list(tasks: list[Task]) -> None:
    width = [max(len(getattr(t, f)) for t in tasks) for f in ("name", "about", "metric")]
    for t in tasks:
        cells = [s.ljust(w) for s, w in zip((t.name, t.about, t.metric), width, strict=True)]
        click.echo("  ".join([*cells, "download, or --data" if t.data else "generated"]))


@command.command("table")
@click.argument("folder", metavar="DIR")
@click.argument("names", metavar="[TASK]...", nargs=-1)
@click.option(
    "--output",
    "-o",
    type=opt.Name("md", "summary", "csv", "json"),
    default="md",
    help="Format of the tables.  [default: md]",
)
@click.option(
    "--update-readme", metavar="FILE", help="Put the table between the eval marks in this file."
)
def table_command(
    folder: str, names: tuple[str, ...], output: str, update_readme: str | None
) -> None:
    """Print the tables of a folder of records again. `-o summary` puts all tasks in one."""
    from pyorch.evals import series, summary, table

    form = table.FORMATS.get(output, summary.markdown)
    text = form(series.read_folder(Path(folder), names))
    if update_readme:
        update_marked(Path(update_readme), "eval", text)
    print(text)


@command.command("plot")
@click.argument("folder", metavar="DIR")
@click.argument("names", metavar="[TASK]...", nargs=-1)
@click.option("--out", metavar="DIR", help="Folder of the pictures.  [default: DIR]")
@click.option("--png", is_flag=True, help="Write PNG as well as SVG.")
def plot(folder: str, names: tuple[str, ...], out: str | None, png: bool) -> None:
    """Draw score against bytes and speed for all methods, and heatmaps of needles."""
    from pyorch.evals import figures, series

    for file in figures.draw(series.read_folder(Path(folder), names), Path(out or folder), png):
        print(file)


@command.command("pack")
@click.argument("folder", metavar="DIR")
@click.argument("to", metavar="TO")
def pack(folder: str, to: str) -> None:
    """Keep the scores of a folder without the answers, one line per method."""
    from pyorch.evals import series

    for file in series.pack(series.read_folder(Path(folder)), Path(to)):
        print(file)
