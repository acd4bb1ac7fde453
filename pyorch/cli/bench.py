"""`sparq-cpp bench`: measurements, each one command that writes records and prints a table."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.cli import options as opt
from pyorch.cli.groups import given_on_command_line, option, several, takes
from pyorch.cli.loading import model_path
from pyorch.cli.terminal import confirm, note, note_if_beyond, note_if_busy
from pyorch.cli.types import LAYERS, THREADS, File, Files, Name, Number, Numbers, Ratio
from pyorch.errors import SparqError
from pyorch.ggml import CACHE_TYPES
from pyorch.models.geometry import geometry
from pyorch.models.gguf_file import read_gguf
from pyorch.models.synth import QUANTS
from pyorch.progress import progress_bar
from pyorch.text import human_bytes

if TYPE_CHECKING:
    from pyorch.bench.plan import SpeedPlan

CACHE_TYPE = Name(*CACHE_TYPES)
# as in llama-bench; with `auto` stock is measured both ways
FLASH_ATTN = {
    **dict.fromkeys(("0", "off", "disabled", "false"), (False,)),
    **dict.fromkeys(("1", "on", "enabled", "true"), (True,)),
    **dict.fromkeys(("auto", "-1"), (False, True)),
}
SYNTHETIC = {"like", "layers", "quant"}  # options that a model replaces
ROPE_AND_RPC = {f.name for of in (opt.RopeOptions, opt.RpcOptions) for f in fields(of)}
# what attention by itself does not take
NOT_ATTN_ONLY = {"models", "quant", "n_prompt", "n_gen", "flash_attn", "n_gpu_layers", "text"}
NOT_ATTN_ONLY |= {"no_repack", "kv_offload", *ROPE_AND_RPC}


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
        "--layers",
        type=LAYERS,
        help="Layers of the synthetic model.  [default: as many as fit]",
    )
    quant: str = option(
        "--quant",
        type=Name(*QUANTS),
        default="q8_0",
        show_default=True,
        help="Weights of the synthetic model.",
    )
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
        text="Positions in the cache before.  [default: 4096; with --attn-only 4096,16384,32768]",
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
    repetitions: int = option(
        "-r",
        "--repetitions",
        type=Number(int, 1),
        default=5,
        show_default=True,
        help="Repeat each test this many times.",
    )
    output: str = option(
        "-o",
        "--output",
        type=Name("md", "summary", "csv", "json", "jsonl"),
        default="md",
        show_default=True,
        help="Format of the table.",
    )
    ratio: list[float] = several(
        "--ratio", of=Ratio(), default="1/8", text="Shares of dense attention's bytes to read."
    )
    attn: tuple[str, ...] = option(
        *opt.SPEC_OPTION,
        multiple=True,
        metavar="SPEC",
        help="All settings of attention as one line, in place of --ratio.",
    )
    numa: str | None = opt.numa_option()
    rope: opt.RopeOptions = field(default_factory=opt.RopeOptions)
    n_gpu_layers: int | None = opt.gpu_option()
    kv_offload: bool | None = opt.kv_option("in any case")
    rpc: opt.RpcOptions = field(default_factory=opt.RpcOptions)
    no_repack: bool = opt.repack_option()
    text: str | None = option(
        "--text",
        type=File(),
        metavar="FILE",
        help="A book, of which -d tokens are read in place of random K and V.",
    )
    attn_only: bool = option("--attn-only", is_flag=True, help="Time attention alone.")
    out: str | None = option(
        "--out",
        type=File(),
        metavar="DIR",
        help="Folder of the records.  [default: bench/results in a clone, else the user's data]",
    )
    force: bool = option("--force", is_flag=True, help="Measure again what is recorded already.")

    @property
    def stock_flash_attn(self) -> list[bool]:
        return list(dict.fromkeys(fa for name in self.flash_attn for fa in FLASH_ATTN[name]))

    @property
    def specs(self) -> list[AttentionSpec]:
        """The settings of ours: `-a`, or SparQ's at each ratio."""
        if self.attn:
            return [parse_spec(line) for line in self.attn]
        return [AttentionSpec("sparq", ratio=ratio) for ratio in self.ratio]

    def file(self, name: str) -> Path:
        """The file of the records."""
        from pyorch.bench import records

        return (Path(self.out) if self.out else records.default_folder()) / name

    def plan(self) -> SpeedPlan:
        """The plan of a run that times whole tokens; its models are downloaded."""
        from pyorch import native
        from pyorch.bench.plan import SpeedPlan
        from pyorch.evals.texts import read_texts

        return SpeedPlan(
            models=[model_path(m, self.yes, native.check_compiler) for m in self.models],
            like=self.like or ["llama2-7b"],
            n_layer=self.layers,
            quant=self.quant,
            n_prompt=self.n_prompt,
            n_gen=self.n_gen,
            n_depth=self.n_depth or [4096],
            threads=self.threads,
            type_k=self.cache_type_k,
            type_v=self.cache_type_v,
            flash_attn=self.stock_flash_attn,
            specs=self.specs,
            repetitions=self.repetitions,
            text=read_texts([Path(self.text)])[0] if self.text else "",
            repack=not self.no_repack,
            numa=self.numa or "",
            n_gpu_layers=self.n_gpu_layers,
            kv_offload=self.kv_offload is not False,
            workers=self.rpc.allowed(),
            tensor_split=self.rpc.tensor_split,
            rope=str(self.rope.settings() or ""),
        )


# ---- bench ----


@click.command()
@takes(wanted=Wanted)
@click.pass_context
def command(ctx: click.Context, wanted: Wanted) -> None:
    """Measure speed beside stock llama.cpp, with llama-bench's options.

    Stock and ours alternate. A list is 4096,16384; ranges are 1-4, 1024-4096+1024 and
    4096-131072*2. Records are JSON lines, and a run skips what is recorded already, so an
    interrupted one continues where it stopped.

    The command fails if our dense attention differs from stock's, or if a sparse row did not run
    sparse.
    """
    from pyorch.engine import usable_cores

    given = given_on_command_line(ctx.params)
    if "ratio" in given and "attn" not in given:
        wanted = replace(wanted, attn=())
    if given & SYNTHETIC and "models" not in given:
        wanted = replace(wanted, models=[])
    if wanted.attn:
        hint = "-a has all settings, and may be given several times"
        _refuse(ctx, given & {"ratio"}, "cannot be combined with -a", hint)
    if wanted.rpc.workers or not wanted.models:
        hint = "-m MODEL.gguf, and no --rpc"
        _refuse(ctx, given & {"text"}, "needs a model that reads it on this machine", hint)
    if wanted.models and not wanted.attn_only:
        hint = "--like, --layers and --quant make a synthetic model, which stands in for -m"
        _refuse(ctx, given & SYNTHETIC, "has no meaning with --model", hint)
    wanted = replace(wanted, threads=wanted.threads or [usable_cores()])
    note_if_busy()
    _note_left_out(wanted)
    if wanted.attn_only:
        hint = "--like chooses the heads, -d the positions, -r the turns of five tokens"
        _refuse(ctx, given & NOT_ATTN_ONLY, "has no meaning with --attn-only", hint)
        default = click.core.ParameterSource.DEFAULT
        chosen = any(ctx.get_parameter_source(x) is not default for x in ("ratio", "attn"))
        _attention(wanted, wanted.specs if chosen else None)
    else:
        _speed(wanted)


def _speed(wanted: Wanted) -> None:
    from pyorch.bench import output, records, speed
    from pyorch.bench.plan import room_for
    from pyorch.engine.settings import context_size

    rope, plan = wanted.rope.settings(), wanted.plan()
    most = room_for(max(plan.n_depth), max(*plan.n_prompt, *plan.n_gen))
    for model in plan.models:
        geo = geometry(read_gguf(model))
        note_if_beyond(context_size(geo, most, rope), geo.n_ctx_train)
    file = wanted.file("speed.jsonl")
    _agree_to_write(plan, wanted.yes)
    with progress_bar("bench") as progress:
        found = speed.run(plan, file, progress, force=wanted.force)
    _keep(file, output.markdown(records.latest(records.load_all(file))))
    own = {"md": output.markdown, "summary": output.summary}.get(wanted.output)
    print(own(found) if own else output.FORMATS[wanted.output](output.rows(found), found))
    note(f"records: {file}", "dim")


def _attention(wanted: Wanted, specs: list[AttentionSpec] | None) -> None:
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
    file = wanted.file("attention.jsonl")
    with progress_bar("attention") as progress:
        found = attention.run(plan, file, progress, force=wanted.force)
    _keep(file, attention_table.markdown(records.latest(records.load_all(file))))
    own = {"md": attention_table.markdown, "summary": attention_table.summary}.get(wanted.output)
    print(own(found) if own else output.FORMATS[wanted.output](attention_table.rows(found), found))
    note(f"records: {file}", "dim")


def _keep(file: Path, table: str) -> None:
    """Write the table of all records beside them; stdout has only the current run's."""
    file.with_suffix(".md").write_text(table + "\n", "utf-8")


def _refuse(ctx: click.Context, names: Collection[str], why: str, hint: str) -> None:
    for param in ctx.command.params:
        if param.name in names:
            raise SparqError(f"{max(param.opts, key=len)} {why}", hint, exit_code=2)


def _agree_to_write(plan: SpeedPlan, yes: bool) -> None:
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


def _note_left_out(wanted: Wanted) -> None:
    """Say which rows of stock cannot exist."""
    from pyorch.bench.turns import FLOATS

    quantised = [t for t in wanted.cache_type_v if t not in FLOATS]
    if quantised and set(wanted.stock_flash_attn) == {False, True}:
        why = "llama.cpp quantises V only with flash attention"
        note(f"note: no stock -fa 0 beside -ctv {','.join(quantised)}: {why}", "yellow")
