"""`sparq-cpp bench`: tokens and prompts, or attention by itself, beside stock llama.cpp."""

from __future__ import annotations

from typing import Any

import click

from pyorch.bench.turns import FLOATS
from pyorch.cli.bench import attention_time, measurement, speed
from pyorch.cli.groups import given_on_command_line
from pyorch.cli.terminal import note, note_if_busy
from pyorch.errors import SparqError

SYNTHETIC = {"like", "n_layer", "quant"}  # options that a model replaces


@click.command()
@measurement.with_options(speed.MEASUREMENT, attention_time.MEASUREMENT)
@click.option("--attn-only", is_flag=True, help="Time attention alone.")
@click.pass_context
def command(ctx: click.Context, /, attn_only: bool, **options: Any) -> None:
    """Measure speed beside stock llama.cpp, with llama-bench's options.

    Stock and ours alternate. A list is 4096,16384; ranges are 1-4, 1024-4096+1024 and
    4096-131072*2. Records are JSON lines, and a run skips what is recorded already, so an
    interrupted one continues where it stopped.

    The command fails if our dense attention differs from stock's, or if a sparse row did not run
    sparse.
    """
    given, line = measurement.Given(**options), given_on_command_line(ctx.params)
    of = attention_time.MEASUREMENT if attn_only else speed.MEASUREMENT
    if "ratio" in line and "attn" not in line:
        given.attn = ()
    if line & SYNTHETIC and "models" not in line:
        given.models = []
    if given.attn:
        hint = "-a has all settings, and may be given several times"
        _refuse(ctx, line & {"ratio"}, "cannot be combined with -a", hint)
    if attn_only:
        hint = "--like chooses the heads, -d the positions, -r the turns of five tokens"
        takes = {p.name for p in measurement.command(of).params} | {"attn_only"}
        _refuse(ctx, line - takes, "has no meaning with --attn-only", hint)
    elif given.models:
        hint = "--like, --layers and --quant make a synthetic model, which stands in for -m"
        _refuse(ctx, line & SYNTHETIC, "has no meaning with --model", hint)
    if given.rpc.workers or not given.models:
        hint = "-m MODEL.gguf, and no --rpc"
        _refuse(ctx, line & {"text"}, "needs a model that reads it on this machine", hint)
    if attn_only:
        default = click.core.ParameterSource.DEFAULT
        if all(ctx.get_parameter_source(x) is default for x in ("ratio", "attn")):
            given.attn = attention_time.SPECS
        given.models = []
        given.like = given.like or attention_time.LIKE_BOTH
        given.n_depth = given.n_depth or attention_time.POSITIONS
    speed.complete(given)
    note_if_busy()
    quantised = [t for t in given.type_v if t not in FLOATS]
    if quantised and set(given.flash_attn) == {False, True}:
        why = "llama.cpp quantises V only with flash attention"
        note(f"note: no stock -fa 0 beside -ctv {','.join(quantised)}: {why}", "yellow")
    measurement.run(of, given)


def _refuse(ctx: click.Context, names: set[str], why: str, hint: str) -> None:
    for param in ctx.command.params:
        if param.name in names:
            raise SparqError(f"{max(param.opts, key=len)} {why}", hint, exit_code=2)
