"""`sparq-cpp bench`: measurements, each one command that writes records and prints a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path

import click

from pyorch.attention.spec import BUDGETS, SHADOWS, AttentionSpec, parse_spec
from pyorch.cli import bench_growth
from pyorch.cli import bench_shared as shared
from pyorch.cli import options as opt
from pyorch.cli.groups import group, on_the_line, option, renamed, several, takes
from pyorch.cli.loading import model_path
from pyorch.cli.terminal import note, note_if_beyond, note_if_busy
from pyorch.cli.types import LAYERS, THREADS, File, Files, Name, Numbers, Ratio
from pyorch.ggml import CACHE_TYPES
from pyorch.models.geometry import geometry
from pyorch.models.gguf_file import read_gguf
from pyorch.progress import progress_bar

CACHE_TYPE = Name(*CACHE_TYPES)
# as in llama-bench; with `auto` stock is measured both ways
FLASH_ATTN = {
    **dict.fromkeys(("0", "off", "disabled", "false"), (False,)),
    **dict.fromkeys(("1", "on", "enabled", "true"), (True,)),
    **dict.fromkeys(("auto", "-1"), (False, True)),
}
COMBINED = ("attn_method", "ratio", "attn_shadow", "budget")  # options that -a replaces


# ---- options ----


@dataclass(frozen=True)
class Wanted:
    """The measurements of a run: the product of all lists."""

    models: list[str] = several(
        "--model", "-m", of=Files(), text="GGUF models, as in `sparq-cpp pull`."
    )
    yes: bool = opt.yes_option()
    like: tuple[str, ...] = option(
        "--like",
        multiple=True,
        metavar="NAME",
        help="Time a synthetic model of this shape.  [default: llama2-7b]",
    )
    layers: int | None = option(
        "--layers", type=LAYERS, help="Layers of the synthetic model.  [default: as many as fit]"
    )
    quant: str = shared.quant_option()
    n_prompt: list[int] = several(
        "-p", "--n-prompt", of=Numbers(), default="0", text="Time prompts of this many tokens."
    )
    n_gen: list[int] = several(
        "-n", "--n-gen", of=Numbers(), default="16", text="Time this many decoded tokens."
    )
    n_depth: list[int] = several(
        "-d",
        "--n-depth",
        of=Numbers(),
        text="Positions in the cache before each test.  [default: 4096]",
    )
    threads: list[int] = several(
        "-t",
        "--threads",
        of=Numbers(1, THREADS.high),
        text="Number of threads.  [default: all cores]",
    )
    cache_type_k: list[str] = several(
        "-ctk", "--cache-type-k", of=CACHE_TYPE, default="f16", text="Type of K in the cache."
    )
    cache_type_v: list[str] = several(
        "-ctv", "--cache-type-v", of=CACHE_TYPE, default="f16", text="Type of V in the cache."
    )
    flash_attn: list[str] = several(
        "-fa",
        "--flash-attn",
        of=Name(*FLASH_ATTN),
        default="0,1",
        text="Flash attention of stock: 0, 1 or auto, which is both.",
    )
    repetitions: int = shared.repetitions_option("Repeat each test this many times.")
    output: str = option(
        "-o",
        "--output",
        type=Name("md", "csv", "json", "jsonl", "sql"),
        default="md",
        show_default=True,
        help="Format of the table.",
    )
    attn_method: list[str] = several(
        "--attn-method",
        of=Name("sparq", "topk", "dense"),
        default="sparq",
        text="Methods to compare with stock.",
    )
    ratio: list[float] = several(
        "--ratio", of=Ratio(), default="1/8", text="Shares of dense attention's bytes to read."
    )
    attn_shadow: list[str] = several(
        "--attn-shadow", of=Name(*SHADOWS), text="Types of the transposed K."
    )
    budget: list[str] = several(
        "--budget", of=Name(*BUDGETS), text="Spreads of the bytes over the layers."
    )
    attn: tuple[str, ...] = option(
        *opt.SPEC_OPTION,
        multiple=True,
        metavar="SPEC",
        help="All settings of attention as one line, in place of the four options above.",
    )
    numa: str | None = opt.numa_option()
    rope: opt.RopeOptions = field(default_factory=opt.RopeOptions)
    n_gpu_layers: int | None = opt.gpu_option()
    rpc: opt.WorkerOptions = field(default_factory=opt.WorkerOptions)
    no_repack: bool = opt.repack_option()
    text: str | None = option(
        "--text",
        type=File(),
        metavar="FILE",
        help="A book: ours reads -d tokens of it instead of random K and V, and goes on with it.",
    )
    attn_only: bool = option("--attn-only", is_flag=True, help="Time attention alone.")

    @property
    def stock_flash_attn(self) -> list[bool]:
        return list(dict.fromkeys(fa for name in self.flash_attn for fa in FLASH_ATTN[name]))

    @property
    def specs(self) -> list[AttentionSpec]:
        """The settings of ours: `-a`, or all combinations of the four options, each once."""
        if self.attn:
            return [parse_spec(line) for line in self.attn]
        shadows: Sequence[str | None] = self.attn_shadow or (None,)
        budgets: Sequence[str | None] = self.budget or (None,)
        every = product(self.attn_method, self.ratio, shadows, budgets)
        return list(dict.fromkeys(_combined(*values) for values in every))


def _combined(method: str, ratio: float, shadow: str | None, budget: str | None) -> AttentionSpec:
    """Dense attention has no ratio, and only SparQ has a transposed K: options that a method does
    not have are left out, so that they may be combined with a list of methods."""
    if method == "dense":
        return AttentionSpec("dense")
    spec = AttentionSpec(method, ratio=ratio, budget=budget or "uniform")
    return replace(spec, shadow=shadow) if shadow and spec.method == "sparq" else spec


# ---- bench ----


@click.group(invoke_without_command=True)
@takes(wanted=Wanted)
@group(
    *shared.RENAMED_SPEC,
    renamed("--method", "--attn-method"),
    renamed("--shadow-type", "--attn-shadow"),
)
@takes(writing=shared.Writing)
@click.pass_context
def command(ctx: click.Context, wanted: Wanted, writing: shared.Writing) -> None:
    """Measure speed beside stock llama.cpp, with llama-bench's options.

    Stock and ours alternate. A list is 4096,16384; ranges are 1-4, 1024-4096+1024 and
    4096-131072*2. Records are JSON lines, and a run skips what is recorded already, so an
    interrupted one continues where it stopped.

    The command fails if our dense attention differs from stock's, or if a sparse row did not run
    sparse.
    """
    from pyorch.engine import usable_cores

    given = on_the_line(ctx.params)
    if ctx.invoked_subcommand is not None:
        shared.refuse(ctx, given, f"stands before {ctx.invoked_subcommand}", "put it behind")
        return
    if given & set(COMBINED) and "attn" not in given:
        wanted = replace(wanted, attn=())
    if given & shared.SYNTHETIC and "models" not in given:
        wanted = replace(wanted, models=[])
    if wanted.attn:
        hint = "-a has all settings, and may be given several times"
        shared.refuse(ctx, given & set(COMBINED), "cannot be combined with -a", hint)
    if wanted.rpc.workers or not wanted.models:
        hint = "-m MODEL.gguf, and no --rpc"
        shared.refuse(ctx, given & {"text"}, "needs a model that reads it on this machine", hint)
    if not wanted.attn_only:
        shared.refuse_two_models(ctx, given, wanted.models)
    wanted = replace(wanted, threads=wanted.threads or [usable_cores()])
    note_if_busy()
    _note_left_out(wanted)
    if wanted.attn_only:
        _refuse_foreign(ctx, given)
        default = click.core.ParameterSource.DEFAULT
        chosen = any(ctx.get_parameter_source(x) is not default for x in (*COMBINED, "attn"))
        specs = wanted.specs if chosen else None
        _attention(wanted, specs, writing)
    else:
        _speed(wanted, writing)


def _speed(wanted: Wanted, writing: shared.Writing) -> None:
    from pyorch import native
    from pyorch.bench import output, records, speed
    from pyorch.bench.plan import SpeedPlan, room_for
    from pyorch.engine.settings import checked_ctx
    from pyorch.evals.texts import read_texts

    rope = wanted.rope.settings()
    text = read_texts([Path(wanted.text)])[0] if wanted.text else ""
    plan = SpeedPlan(
        models=[model_path(m, wanted.yes, native.check_compiler) for m in wanted.models],
        like=wanted.like or ["llama2-7b"],
        n_layer=wanted.layers,
        quant=wanted.quant,
        n_prompt=wanted.n_prompt,
        n_gen=wanted.n_gen,
        n_depth=wanted.n_depth or [4096],
        threads=wanted.threads,
        type_k=wanted.cache_type_k,
        type_v=wanted.cache_type_v,
        flash_attn=wanted.stock_flash_attn,
        specs=wanted.specs,
        repetitions=wanted.repetitions,
        text=text,
        repack=not wanted.no_repack,
        numa=wanted.numa or "",
        n_gpu_layers=wanted.n_gpu_layers,
        workers=wanted.rpc.allowed(),
        tensor_split=wanted.rpc.tensor_split,
        rope=str(rope or ""),
    )
    most = room_for(max(plan.n_depth), max(*plan.n_prompt, *plan.n_gen))
    for model in plan.models:
        geo = geometry(read_gguf(model))
        note_if_beyond(checked_ctx(geo, most, rope), geo.n_ctx_train)
    file = writing.file("speed.jsonl")
    shared.agree_to_write(plan, wanted.yes)
    with progress_bar("bench") as progress:
        found = speed.run(plan, file, progress, force=writing.force)
    shared.keep(file, output.markdown(records.latest(records.load_all(file))))
    form, table = output.FORMATS.get(wanted.output), output.markdown(found)
    rows = output.rows(found)
    print(form(rows, found) if form and rows else table)
    writing.told(file, output.summary(found) or table)


def _attention(wanted: Wanted, specs: list[AttentionSpec] | None, writing: shared.Writing) -> None:
    """Run `--attn-only`. specs: None takes the module's own."""
    from pyorch.bench import attention, attention_table, output, records

    plan = attention.AttentionPlan(
        like=wanted.like or attention.LIKE,
        positions=wanted.n_depth or attention.POSITIONS,
        threads=wanted.threads,
        specs=attention.SPECS if specs is None else specs,
        n_samples=wanted.repetitions * attention.TURN,
        n_layer=wanted.layers,
        type_k=wanted.cache_type_k,
        type_v=wanted.cache_type_v,
        numa=wanted.numa or "",
    )
    file = writing.file("attention.jsonl")
    with progress_bar("attention") as progress:
        found = attention.run(plan, file, progress, force=writing.force)
    shared.keep(file, attention_table.markdown(records.latest(records.load_all(file))))
    form, table = output.FORMATS.get(wanted.output), attention_table.markdown(found)
    rows = attention_table.flat(found)
    print(form(rows, found) if form and rows else table)
    writing.told(file, attention_table.summary(found) or table)


def _refuse_foreign(ctx: click.Context, given: set[str]) -> None:
    foreign = {
        "models",
        "quant",
        "n_prompt",
        "n_gen",
        "flash_attn",
        "n_gpu_layers",
        "text",
        "no_repack",
    }
    foreign |= {f.name for of in (opt.RopeOptions, opt.WorkerOptions) for f in fields(of)}
    hint = "--like chooses the heads, -d the positions, -r the turns of five tokens"
    shared.refuse(ctx, given & foreign, "has no meaning with --attn-only", hint)


def _note_left_out(wanted: Wanted) -> None:
    """Say which rows of stock cannot exist."""
    from pyorch.bench.turns import FLOATS

    quantised = [t for t in wanted.cache_type_v if t not in FLOATS]
    if quantised and set(wanted.stock_flash_attn) == {False, True}:
        why = "llama.cpp quantises V only with flash attention"
        note(f"note: no stock -fa 0 beside -ctv {','.join(quantised)}: {why}", "yellow")


command.add_command(bench_growth.command)
