"""`sparq-cpp bench`: measurements, each one command that writes records and prints a table."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyorch.attention.spec import BUDGETS, SHADOWS, AttentionSpec
from pyorch.cli import options as opt
from pyorch.errors import SparqError
from pyorch.ggml import CACHE_TYPES
from pyorch.progress import progress_bar

if TYPE_CHECKING:
    from pyorch.bench.speed import Plan

QUANTS = ("q8_0", "q4_k_m", "f16")
CACHE_TYPE = opt.Name(*CACHE_TYPES)
# as llama-bench has them; `auto` leaves the choice to stock, which is measured both ways
FLASH_ATTN = {
    **dict.fromkeys(("0", "off", "disabled", "false"), (False,)),
    **dict.fromkeys(("1", "on", "enabled", "true"), (True,)),
    **dict.fromkeys(("auto", "-1"), (False, True)),
}
COMBINED = ("attn_method", "ratio", "attn_shadow", "budget")  # options, in place of -a
_MARKS = "--update-readme takes a file with such marks"
MOST = 1000  # values of a range
SYNTHETIC = {"like", "layers", "quant"}  # options, in place of a model


class Several(click.ParamType):
    """A comma list; an option given several times adds to it."""

    def __init__(self, one: click.ParamType, name: str) -> None:
        self.one, self.name = one, name

    def convert(self, value: Any, param: Any, ctx: Any) -> list[Any]:
        if isinstance(value, list):
            return value
        return [self.one.convert(part.strip(), param, ctx) for part in str(value).split(",")]


class Numbers(click.ParamType):
    """Whole numbers as llama-bench takes them: 0,512  1-4  1024-4096+1024  4096-131072*2."""

    name = "list"
    _part = re.compile(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?")

    def __init__(self, low: int = 0, high: float = float("inf")) -> None:
        self.low, self.high = low, high

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        if isinstance(value, list):
            return value
        return [n for part in str(value).split(",") for n in self._numbers(part.strip(), param)]

    def _numbers(self, part: str, param: Any) -> list[int]:
        option = max(param.opts, key=len) if param else "value"
        match = self._part.fullmatch(part)
        if match is None:
            raise SparqError(
                f"{option} {part!r} is no number or range",
                "512, first-last, first-last+step or first-last*mult",
                exit_code=2,
            )
        number = opt.Number(int, self.low, self.high)
        first = number.convert(match[1], param, None)
        last = number.convert(match[2] or match[1], param, None)
        if last < first:
            raise SparqError(f"{option} {part!r} ends before it begins", exit_code=2)
        step, out = int(match[4] or 1), [first]
        while (following := out[-1] * step if match[3] == "*" else out[-1] + step) <= last:
            if following <= out[-1]:
                raise SparqError(f"{option} {part!r}: the range has no end", exit_code=2)
            if len(out) == MOST:
                hint = "a larger step: first-last+step or first-last*mult"
                raise SparqError(f"{option} {part!r} is more than {MOST} values", hint, exit_code=2)
            out.append(following)
        return out


def _joined(ctx: Any, param: Any, values: Any) -> list[Any]:
    """The lists of an option that was given several times, as one."""
    return [x for value in values for x in value]


def several(*names: str, of: click.ParamType, default: str = "", text: str = "") -> Any:
    """An option that takes a comma list, and may be given several times."""
    kind = of if isinstance(of, Numbers) else Several(of, "list")
    shown = f"{text}  [default: {default}]" if default else text
    return click.option(
        *names,
        type=kind,
        multiple=True,
        default=(default,) if default else (),
        callback=_joined,
        help=shown,
    )


out_option = click.option(
    "--out",
    metavar="DIR",
    help="Folder of the records.  [default: bench/results in a clone, else the user's data]",
)
readme_option = click.option(
    "--update-readme", metavar="FILE", help="Put the table between the marks in this file."
)
spec_option = partial(click.option, *opt.SPEC_OPTION, multiple=True, metavar="SPEC")
renamed_options = (
    *(opt.renamed(old, "-a SPEC") for old in ("--attention", "--spec")),
    opt.renamed("--method", "--attn-method"),
    opt.renamed("--shadow-type", "--attn-shadow"),
)
force_option = click.option("--force", is_flag=True, help="Measure again what is recorded already.")


@click.group(invoke_without_command=True)
@click.option(
    "--model",
    "-m",
    "models",
    multiple=True,
    metavar="FILE|SPEC",
    help="GGUF models, as in `sparq-cpp pull`.",
)
@opt.yes_option
@click.option(
    "--like",
    multiple=True,
    metavar="NAME",
    help="Time a synthetic model of this shape.  [default: llama2-7b]",
)
@click.option(
    "--layers", type=opt.LAYERS, help="Layers of the synthetic model.  [default: as many as fit]"
)
@click.option(
    "--quant",
    type=opt.Name(*QUANTS),
    default="q8_0",
    show_default=True,
    help="Weights of the synthetic model.",
)
@several("-p", "--n-prompt", of=Numbers(), default="0", text="Time prompts of this many tokens.")
@several("-n", "--n-gen", of=Numbers(), default="16", text="Time this many decoded tokens.")
@several(
    "-d",
    "--n-depth",
    of=Numbers(),
    text="Positions in the cache before each test.  [default: 4096]",
)
@several(
    "-t",
    "--threads",
    of=Numbers(1, opt.THREADS.high),
    text="Number of threads.  [default: all cores]",
)
@several("-ctk", "--cache-type-k", of=CACHE_TYPE, default="f16", text="Type of K in the cache.")
@several("-ctv", "--cache-type-v", of=CACHE_TYPE, default="f16", text="Type of V in the cache.")
@several(
    "-fa",
    "--flash-attn",
    of=opt.Name(*FLASH_ATTN),
    default="0,1",
    text="Flash attention of stock: 0, 1 or auto, which is both.",
)
@click.option(
    "-r",
    "--repetitions",
    type=opt.Number(int, 1),
    default=5,
    show_default=True,
    help="Repeat each test this many times.",
)
@click.option(
    "-o",
    "--output",
    type=opt.Name("md", "csv", "json", "jsonl", "sql"),
    default="md",
    show_default=True,
    help="Format of the table.",
)
@several(
    "--attn-method",
    of=opt.Name("sparq", "topk", "dense"),
    default="sparq",
    text="Methods to compare with stock.",
)
@several(
    "--ratio", of=opt.Ratio(), default="1/8", text="Shares of dense attention's bytes to read."
)
@several("--attn-shadow", of=opt.Name(*SHADOWS), text="Types of the transposed K.")
@several("--budget", of=opt.Name(*BUDGETS), text="Spreads of the bytes over the layers.")
@spec_option(help="All settings of attention as one line, in place of the four options above.")
@opt.group(*renamed_options)
@opt.numa_option
@opt.rope_options
@opt.gpu_option
@click.option(
    "--prefill", is_flag=True, help="Fill the cache with a real prompt instead of random K and V."
)
@click.option("--attn-only", is_flag=True, help="Time attention alone.")
@out_option
@force_option
@readme_option
@click.pass_context
def command(ctx: click.Context, **options: Any) -> None:
    """Measure speed beside stock llama.cpp, with llama-bench's options.

    Stock and ours alternate. A list is 4096,16384; ranges are 1-4, 1024-4096+1024 and
    4096-131072*2. Records are JSON lines, and a run skips what is recorded already, so an
    interrupted one continues where it stopped.

    The command fails if our dense attention differs from stock's, or if a sparse row did not run
    sparse.
    """
    from pyorch.engine import usable_cores

    given = _given(ctx)
    if ctx.invoked_subcommand is not None:
        _refuse(ctx, given, f"stands before {ctx.invoked_subcommand}", "put it behind")
        return
    if options["attn"]:
        hint = "-a has all settings, and may be given several times"
        _refuse(ctx, given & set(COMBINED), "has no place beside -a", hint)
    if not options["attn_only"]:
        _refuse_two_models(ctx, given, options["models"])
    options["threads"] = options["threads"] or [usable_cores()]
    opt.note_if_busy()
    _note_left_out(options)
    if options["attn_only"]:
        _attention(ctx, given, options)
    else:
        _speed(options)


def _specs(options: dict[str, Any]) -> list[str]:
    """The settings of ours: `-a`, or all combinations of the four options, each once."""
    if options["attn"]:
        return list(options["attn"])
    every = product(*(options[name] or [None] for name in COMBINED))
    return list(dict.fromkeys(str(_combined(*values)) for values in every))


def _combined(method: str, ratio: float, shadow: str | None, budget: str | None) -> AttentionSpec:
    """Dense attention has no ratio, and only SparQ a transposed K: what a method does not have is
    left out, so that a list of several methods may stand beside it."""
    if method == "dense":
        return AttentionSpec("dense")
    spec = AttentionSpec(method, ratio=ratio, budget=budget or "uniform")
    return replace(spec, shadow=shadow) if shadow and spec.method == "sparq" else spec


def _speed(options: dict[str, Any]) -> None:
    from pyorch.bench import output, records, speed
    from pyorch.models.geometry import geometry
    from pyorch.models.gguf_file import read_gguf

    plan = speed.Plan(
        models=[opt.model_path(p, options["yes"]) for m in options["models"] for p in m.split(",")],
        like=options["like"] or ["llama2-7b"],
        n_layer=options["layers"],
        quant=options["quant"],
        n_prompt=options["n_prompt"],
        n_gen=options["n_gen"],
        n_depth=options["n_depth"] or [4096],
        threads=options["threads"],
        type_k=options["cache_type_k"],
        type_v=options["cache_type_v"],
        flash_attn=_flash_attn(options),
        specs=_specs(options),
        repetitions=options["repetitions"],
        prefill=options["prefill"],
        numa=options["numa"] or "",
        n_gpu_layers=options["n_gpu_layers"],
        rope=str(opt.rope_from(options) or ""),
    )
    for model in plan.models:
        most = max(plan.n_depth) + max(*plan.n_prompt, *plan.n_gen)
        opt.note_if_beyond(most, geometry(read_gguf(model)).n_ctx_train)
    file = _file(options, "speed.jsonl")
    _agree_to_write(plan, options["yes"])
    with progress_bar("bench") as progress:
        found = speed.run(plan, file, progress, force=options["force"])
    _keep(file, output.markdown(records.latest(records.load_all(file))))
    table = output.markdown(found)
    _print(found, table, file, options, output.summary(found), rows=speed.rows(found))


def _given(ctx: click.Context) -> set[str]:
    """The options that do not have their default."""
    default = click.core.ParameterSource.DEFAULT
    return {name for name in ctx.params if ctx.get_parameter_source(name) is not default}


def _refuse(ctx: click.Context, names: set[str], why: str, hint: str) -> None:
    for param in ctx.command.params:
        if param.name in names:
            raise SparqError(f"{max(param.opts, key=len)} {why}", hint, exit_code=2)


def _refuse_two_models(ctx: click.Context, given: set[str], model: Any) -> None:
    if model:
        hint = "--like, --layers and --quant make a synthetic model, which stands in for -m"
        _refuse(ctx, given & SYNTHETIC, "has no meaning with --model", hint)


def _flash_attn(options: dict[str, Any]) -> list[bool]:
    return list(dict.fromkeys(fa for name in options["flash_attn"] for fa in FLASH_ATTN[name]))


def _note_left_out(options: dict[str, Any]) -> None:
    """Say which rows of stock there cannot be."""
    from pyorch.bench.turns import FLOATS

    quantised = [t for t in options["cache_type_v"] if t not in FLOATS]
    if quantised and set(_flash_attn(options)) == {False, True}:
        why = "llama.cpp quantises V only with flash attention"
        opt.note(f"note: no stock -fa 0 beside -ctv {','.join(quantised)}: {why}", "yellow")


def _attention(ctx: click.Context, given: set[str], options: dict[str, Any]) -> None:
    from pyorch.bench import attention, records

    foreign = {"models", "quant", "n_prompt", "n_gen", "flash_attn", "n_gpu_layers", "prefill"}
    foreign |= {name for name in options if name.startswith(("rope_", "yarn_"))}
    hint = "--like chooses the heads, -d the positions, -r the turns of five tokens"
    _refuse(ctx, given & foreign, "has no meaning with --attn-only", hint)
    ours = given & {*COMBINED, "attn"}
    plan = attention.Plan(
        like=options["like"] or attention.LIKE,
        positions=options["n_depth"] or attention.POSITIONS,
        threads=options["threads"],
        specs=_specs(options) if ours else attention.SPECS,
        n_samples=options["repetitions"] * attention.TURN,
        n_layer=options["layers"],
        type_k=options["cache_type_k"],
        type_v=options["cache_type_v"],
        numa=options["numa"] or "",
    )
    file = _file(options, "attention.jsonl")
    with progress_bar("attention") as progress:
        found = attention.run(plan, file, progress, force=options["force"])
    _keep(file, attention.markdown(records.latest(records.load_all(file))))
    _print(
        found,
        attention.markdown(found),
        file,
        options,
        attention.summary(found),
        rows=attention.flat(found),
    )


@command.command("growth")
@click.option("--model", "-m", metavar="FILE|SPEC", help="Time this model instead of --like.")
@opt.yes_option
@click.option(
    "--like",
    metavar="NAME",
    default="llama2-7b",
    show_default=True,
    help="Time a synthetic model of this shape.",
)
@click.option(
    "--layers",
    type=opt.LAYERS,
    default=2,
    show_default=True,
    help="Layers of the synthetic model.",
)
@click.option(
    "--quant",
    type=opt.Name(*QUANTS),
    default="q8_0",
    show_default=True,
    help="Weights of the synthetic model.",
)
@several("-d", "--n-depth", of=Numbers(), default="4096-65536*2", text="Positions to measure at.")
@click.option("--threads", "-t", type=opt.THREADS, help="Number of threads.  [default: all cores]")
@spec_option(
    default=["sparq,ratio=1/8"], show_default=True, help="All settings of attention as one line."
)
@opt.group(*renamed_options[:2])
@click.option(
    "-n",
    "--n-gen",
    type=opt.Number(int, 1),
    default=20,
    show_default=True,
    help="Time this many decoded tokens at each depth.",
)
@click.option(
    "-r",
    "--repetitions",
    type=opt.Number(int, 1),
    default=5,
    show_default=True,
    help="Measure all depths this many times.",
)
@opt.numa_option
@out_option
@force_option
@readme_option
@opt.json_option
@click.pass_context
def growth(ctx: click.Context, **options: Any) -> None:
    """Measure how token time grows with the positions.

    The command also times tokens below min_ctx and after a restored state.
    """
    _refuse_two_models(ctx, _given(ctx), options["model"])
    from pyorch.bench import growth as bench
    from pyorch.bench import records
    from pyorch.bench.speed import Plan
    from pyorch.engine import usable_cores

    opt.note_if_busy()
    file = _file(options, "growth.jsonl")
    plan = Plan(
        models=[opt.model_file(options)] if options["model"] else [],
        like=[options["like"]],
        n_layer=options["layers"],
        quant=options["quant"],
        n_gen=[options["n_gen"]],
        n_depth=options["n_depth"],
        threads=[options["threads"] or usable_cores()],
        specs=options["attn"],
        repetitions=options["repetitions"],
        numa=options["numa"] or "",
    )
    _agree_to_write(plan, options["yes"])
    with progress_bar("growth") as progress:
        found, sealing = bench.run(plan, file, progress, force=options["force"])
    table = bench.markdown(found, sealing)
    deeper = bench.depths(records.load_all(file)) - bench.depths(found)
    if deeper and file.with_suffix(".md").exists():  # lines through fewer points say less
        md = file.with_suffix(".md")
        opt.note(f"note: {md} stays as it is: there are records of -d {max(deeper)}, too", "yellow")
    else:
        _keep(file, table)
    _print(found + sealing, table, file, options)


def _agree_to_write(plan: Plan, yes: bool) -> None:
    """Ask before gigabytes of synthetic weights are written.

    Raises:
        SparqError: there is nobody to ask, and no --yes.
    """
    from pyorch.text import human_bytes

    if todo := plan.to_write():
        names = ", ".join(f"{path.name} ({human_bytes(n)})" for path, n in todo.items())
        what = f"{names} with random weights in {next(iter(todo)).parent}"
        hint = "write it with --yes, or measure a model of yours: -m FILE"
        question = f"Write {what}? They stay there until `sparq-cpp models rm synthetic`."
        opt.confirm(question, yes, f"the benchmark would write {what}", hint)


def _file(options: dict[str, Any], name: str) -> Path:
    """Of the records. A README without marks for the table is refused, before anything runs."""
    from pyorch.bench import records

    file = (Path(options["out"]) if options["out"] else records.default_folder()) / name
    if options["update_readme"]:
        _around(Path(options["update_readme"]), file.stem)
    return file


def _keep(file: Path, table: str) -> None:
    """Beside the records: all of them, not only what was asked for now."""
    file.with_suffix(".md").write_text(table + "\n", "utf-8")


def _print(
    found: list[Any],
    table: str,
    file: Path,
    options: dict[str, Any],
    summary: str = "",
    rows: list[dict[str, Any]] | None = None,
) -> None:
    """The table on stdout; the summary, if there is one, into a README."""
    from pyorch.bench import output

    form = output.FORMATS.get(options.get("output", "md"))
    if options.get("as_json"):
        opt.print_json({"records": found, "file": str(file)})
    else:
        print(form(rows, found) if form and rows else table)
    if options["update_readme"]:
        update_marked(Path(options["update_readme"]), file.stem, summary or table)
    opt.note(f"records: {file}", "dim")


def update_marked(file: Path, name: str, text: str) -> None:
    """Replace what is between `<!-- name -->` and `<!-- /name -->` in a file.

    Raises:
        SparqError: the file has no such marks, or cannot be read or written.
    """
    from pyorch.models.new_file import new_file

    before, after = _around(file, name)
    try:
        with new_file(file, force=True) as (partial, _):
            partial.write_text(f"{before}\n{text}\n{after}", "utf-8")
    except OSError as e:
        raise SparqError(f"{file}: {e.strerror or e}", _MARKS) from None


def _around(file: Path, name: str) -> tuple[str, str]:
    """The text up to the first mark, and from the second on; see `update_marked`."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    try:
        before, found, rest = file.read_text("utf-8").partition(begin)
    except OSError as e:
        raise SparqError(f"{file}: {e.strerror or e}", _MARKS) from None
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        hint = "put both lines where the table shall be"
        raise SparqError(f"{file}: no {begin} ... {end} to put the table in", hint)
    return before + begin, end + after
