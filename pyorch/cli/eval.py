"""`sparq-cpp eval`: several methods on the same examples; `eval plot`, `table` and `pack`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyorch import paths
from pyorch.attention import line
from pyorch.attention.spec import BOUNDS, EXACT, AttentionSpec
from pyorch.cli import options as opt
from pyorch.cli.groups import given_on_command_line, option, several, takes
from pyorch.cli.loading import placement, prepare, session_options
from pyorch.cli.terminal import note, note_if_beyond, note_if_busy
from pyorch.cli.types import SOME_POSITIONS, THREADS, File, NumberOr, Ratio
from pyorch.errors import SparqError
from pyorch.models.geometry import geometry
from pyorch.progress import progress_bar, say

if TYPE_CHECKING:
    from pyorch.engine import Document
    from pyorch.evals.task import Task
    from pyorch.policies import Method

METHODS = ("off", "sparq")


class _Group(click.Group):
    """Takes names of tasks in place of a subcommand: anything but a subcommand means `run`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(
            ctx, args if args[:1] and args[0] in self.commands else ["run", *args]
        )


@click.group(cls=_Group)
def command() -> None:
    """Measure quality."""


@dataclass(frozen=True)
class MethodOptions:
    """The model, and the methods that are compared on it."""

    listed: bool = option("--list", is_flag=True, help="List the tasks and what each needs.")
    model: str | None = opt.model_option(required=False)
    yes: bool = opt.yes_option()
    methods: tuple[str, ...] = option(
        *opt.SPEC_OPTION,
        multiple=True,
        metavar="SPEC",
        help=f"A method; several are compared with the first.  [default: {' '.join(METHODS)}]",
    )
    ratio: list[float] = several(
        "--ratio", of=Ratio(), text="Ratios of the methods that name none: 1/2,1/8.  [default: 1/8]"
    )
    exact: bool = option(
        "--exact", is_flag=True, help=f"Keep the ratio at any length: adds {BOUNDS}."
    )
    n: int = option("-n", type=click.IntRange(1), default=100, help="Examples per task.")
    ctx: int = option("--ctx", type=SOME_POSITIONS, default=2048, help="Positions per example.")
    seed: int = option("--seed", type=click.IntRange(0), default=1, help="Seed of the examples.")
    threads: int | None = option(
        "--threads", "-t", type=THREADS, help="Number of threads.  [default: one per core]"
    )


@dataclass(frozen=True)
class ExampleOptions:
    """The settings that the tasks' examples are made from."""

    text: tuple[str, ...] = option(
        "--text",
        type=File(),
        multiple=True,
        metavar="FILE|DIR",
        help="Books for haystacks and passages.  [default: the demo document]",
    )
    document: str | None = option(
        "--document",
        type=File(),
        help="Ask about what `sparq-cpp read` has read, in place of --text: repetition and"
        " answers_repetition do.",
    )
    data: tuple[str, ...] = option(
        "--data",
        type=File(),
        multiple=True,
        metavar="[TASK=]FILE",
        help="Read JSON, JSON lines or parquet instead of a download.",
    )
    chat: bool = option(
        "--chat", is_flag=True, help="Put prompts through the model's chat template."
    )
    confusion: int | str = option(
        "--confusion",
        type=NumberOr("fit", 0),
        default=7,
        metavar="N|fit",
        help="Confusion contexts of squad; fit takes as many as fit --ctx.  [default: 7]",
    )
    questions: int = option(
        "--questions",
        type=click.IntRange(1),
        default=1,
        help="Questions of squad and repetition about one text.  [default: 1]",
    )
    lengths: list[int] = several(
        "--lengths",
        of=SOME_POSITIONS,
        text="Lengths of needle, in positions.  [default: 8 up to --ctx]",
    )
    depths: int = option(
        "--depths",
        type=click.IntRange(1),
        default=11,
        help="Number of depths of needle.  [default: 11]",
    )


@command.command("run")
@click.argument("names", metavar="[TASK]...", nargs=-1)
@takes(options=MethodOptions)
@opt.load_options
@takes(examples=ExampleOptions)
@click.option(
    "--out", type=File(), metavar="DIR", help="Folder of the records.  [default: sparq-eval/MODEL]"
)
@click.option("--force", is_flag=True, help="Measure again what is recorded already.")
@click.option(
    "--output",
    "-o",
    type=click.Choice(["md", "csv", "json"]),
    default="md",
    help="Format of the tables.  [default: md]",
)
def run(
    names: tuple[str, ...],
    options: MethodOptions,
    load: opt.LoadOptions,
    examples: ExampleOptions,
    out: str | None,
    force: bool,
    output: str,
) -> None:
    """Measure what sparse attention costs in quality, task by task.

    Without TASK, all tasks run that need no download. All methods see the same examples and answer
    by real decode steps, after an exact prompt unless their SPEC says prompt=. Every answer is
    recorded at once, and the same command continues an interrupted run.

    \b
      sparq-cpp eval --list
      sparq-cpp eval repetition needle -m M -a off -a sparq -a topk --ratio 1/2,1/8
      sparq-cpp eval plot DIR      draw score against bytes and speed, and heatmaps of needles
      sparq-cpp eval table DIR     print the table again
      sparq-cpp eval pack DIR TO   keep one line per method
    """
    from pyorch import evals

    if options.listed:
        _list(evals.find(names) if names else list(evals.tasks().values()))
        return
    tasks = evals.find(names)
    name = options.model
    if not name:
        raise SparqError("no model", "-m FILE, a card's name, or hf:org/repo", exit_code=2)

    from pyorch.engine import document_file
    from pyorch.evals import repetition, table
    from pyorch.evals import run as evaluate
    from pyorch.evals.texts import read_texts

    document = _document(examples, tasks)
    # a document brings its room and its types, where none were given
    if document and not given_on_command_line(["ctx"]):
        options = replace(options, ctx=-(-(document.n_tokens + repetition.ROOM) // 64) * 64)
    if document and not given_on_command_line(["cache_type_k", "cache_type_v"]):
        type_k, type_v = document.types
        cache = replace(load.cache, cache_type_k=type_k, cache_type_v=type_v)
        load = replace(load, cache=cache)
    methods = _methods(options)
    books = [Path(t) for t in examples.text] or [paths.data("models") / "demo" / "document.txt"]
    setup: dict[str, object] = {  # of `evals.task.Setup`, without what belongs to a task
        "ctx": options.ctx,
        "seed": options.seed,
        "texts": read_texts(books, options.ctx),
        "chat": examples.chat,
        "confusion": None if examples.confusion == "fit" else examples.confusion,
        "questions": examples.questions,
        "lengths": examples.lengths,
        "depths": examples.depths,
    }
    data = _data(examples.data, tasks)
    session = session_options(None, opt.ContextOptions(options.ctx, options.threads), load)
    file, _ = prepare(name, options.yes, session)
    if document:
        setup["document"], _ = document_file.content(document)
    plan = evaluate.EvalPlan(
        file.path, tasks, methods, options.n, setup, data, session, placement(load), document
    )
    folder = Path(out or Path("sparq-eval") / file.path.stem)
    note_if_busy()
    note_if_beyond(options.ctx, geometry(file).n_ctx_train)
    with (
        progress_bar("making the examples") as making,
        progress_bar("eval", off_terminal=say) as progress,
    ):
        series = evaluate.run(plan, folder, making, progress, force=force)
    print(table.FORMATS[output](series))
    note(f"records: {folder}", "dim")


def _document(examples: ExampleOptions, tasks: Sequence[Task]) -> Document | None:
    """The document that the tasks ask about.

    Raises:
        SparqError: it is damaged, or a task does not ask about documents.
    """
    from pyorch import evals
    from pyorch.engine import document_file

    if not examples.document:
        return None
    for task in tasks:
        if not task.document:
            others = " and ".join(t.name for t in evals.tasks().values() if t.document)
            raise SparqError(f"{task.name} does not ask about a document", f"{others} do", 2)
    return document_file.load(document_file.find(examples.document))


def _methods(options: MethodOptions) -> list[Method]:
    """Returns the methods; one that leaves k or rank to a ratio, and has none in its line, is
    repeated at each ratio.

    Raises:
        SparqError: a method is wrong, or there are ratios and no method takes them.
    """
    from pyorch import policies

    out: list[Method] = []
    unused = bool(options.ratio and given_on_command_line(["ratio"]))
    for text in options.methods or METHODS:
        method = policies.parse(text)
        if options.ratio and method.takes_ratio and not line.has_setting(text, "ratio"):
            out += [method.at_ratio(r) for r in options.ratio]
            unused = False
        else:
            out.append(method)
    if unused:
        what = "--ratio changes nothing: every -a has its own ratio or its own k, or is dense"
        hint = "-a sparq or -a topk takes it"
        raise SparqError(what, hint, exit_code=2)
    if not options.exact:
        return out
    return [  # methods in Python have no bounds
        replace(m, min_ctx=EXACT["min_ctx"], min_k=EXACT["min_k"])
        if isinstance(m, AttentionSpec) and m.sparse
        else m
        for m in out
    ]


def _data(parts: tuple[str, ...], tasks: list[Task]) -> dict[str, Path]:
    """Task -> file. A file without a task's name is for the only task that needs data."""
    names = [t.name for t in tasks if t.data]
    out: dict[str, Path] = {}
    for text in parts:
        name, eq, file = text.partition("=")
        if not eq or name not in names:
            if len(names) != 1 or (eq and not paths.expanded(text).exists()):
                known = ", ".join(names) or "no task here needs data"
                hint = f"--data TASK=FILE: {known}"
                raise SparqError(f"--data {text!r}: for which task?", hint, exit_code=2)
            name, file = names[0], text
        out[name] = paths.expanded(file)
    return out


def _list(tasks: list[Task]) -> None:
    from pyorch.evals.data import HUB

    width = [max(len(getattr(t, f)) for t in tasks) for f in ("name", "about", "metric")]
    for t in tasks:
        cells = [s.ljust(w) for s, w in zip((t.name, t.about, t.metric), width, strict=True)]
        source = ("download, or " * (t.data in HUB) + "--data") if t.data else "generated"
        click.echo("  ".join([*cells, source]))


@command.command("table")
@click.argument("folder", type=File(), metavar="DIR")
@click.argument("names", metavar="[TASK]...", nargs=-1)
@click.option(
    "--output",
    "-o",
    type=click.Choice(["md", "csv", "json"]),
    default="md",
    help="Format of the tables.  [default: md]",
)
def table_command(folder: str, names: tuple[str, ...], output: str) -> None:
    """Print the tables of a folder of records again, or of each folder in it."""
    from pyorch.evals import series, table

    form = table.FORMATS[output]
    print(table.of_folder(Path(folder), lambda f: form(series.read_folder(f, names))))


@command.command("plot")
@click.argument("folder", type=File(), metavar="DIR")
@click.argument("names", metavar="[TASK]...", nargs=-1)
@click.option("--out", type=File(), metavar="DIR", help="Folder of the pictures.  [default: DIR]")
def plot(folder: str, names: tuple[str, ...], out: str | None) -> None:
    """Draw score against bytes and speed for all methods, and heatmaps of needles."""
    from pyorch.evals import figures, series

    for file in figures.draw(series.read_folder(Path(folder), names), Path(out or folder)):
        print(file)


@command.command("pack")
@click.argument("folder", type=File(), metavar="DIR")
@click.argument("to", type=File(), metavar="TO")
def pack(folder: str, to: str) -> None:
    """Keep the scores of a folder without the answers, one line per method."""
    from pyorch.evals import series

    for file in series.pack(series.read_folder(Path(folder)), Path(to)):
        print(file)
