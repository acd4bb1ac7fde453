"""`sparq-cpp bench`: tokens and prompts, or attention by itself, beside stock llama.cpp."""

from __future__ import annotations

import re
from dataclasses import replace

import click

from pyorch.cli.bench import attention_time, measurement, speed
from pyorch.cli.bench.comparison import SpeedOptions
from pyorch.cli.bench.measurement import RecordOptions
from pyorch.cli.groups import given_on_command_line, takes
from pyorch.cli.terminal import note, note_if_busy
from pyorch.errors import SparqError
from pyorch.measure.turns import FLOATS

SYNTHETIC = {"like", "n_layer", "quant"}  # options that a model replaces


# of llama-bench's options
KNOWN = "-m -p -n -d -ctk -ctv -t -fa -ngl -nkvo -ts -r -o --numa --rpc"


class Bench(click.Command):
    """Refuses other options of llama-bench by name: click would read -pg as a -p with the value
    `g`, and -b as a slip of the pen."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        names = {"-h", "--help"} | {x for p in self.params for x in (*p.opts, *p.secondary_opts)}
        for word in args:
            if re.fullmatch("--?[a-zA-Z][a-z-]*", word) and word not in names:
                hint = f"it has {KNOWN} of llama-bench's; sparq-cpp build --tools makes that one"
                raise SparqError(f"bench has no option {word}", hint, exit_code=2)
        return super().parse_args(ctx, args)


@click.command(cls=Bench)
@takes(options=SpeedOptions, to=RecordOptions)
@click.option("--attn-only", is_flag=True, help="Time attention alone.")
def command(options: SpeedOptions, to: RecordOptions, attn_only: bool) -> None:
    """Measure speed beside stock llama.cpp, with llama-bench's names of options.

    Stock and ours alternate. A list is 4096,16384; ranges are 1-4, 1024-4096+1024 and
    4096-131072*2. Records are JSON lines, and a run skips what is recorded already, so an
    interrupted one continues where it stopped.

    The command fails if our dense attention differs from stock's, or if a sparse row did not run
    sparse.
    """
    line = given_on_command_line(click.get_current_context().params)
    of = attention_time.MEASUREMENT if attn_only else speed.MEASUREMENT
    # an option of the line displaces a variable that excludes it
    if "ratio" in line and "attn" not in line:
        options = replace(options, attn=())
    if line & SYNTHETIC and "models" not in line:
        options = replace(options, models=[])
    if options.attn:
        hint = "-a has all settings, and may be given several times"
        _refuse(line & {"ratio"}, "cannot be combined with -a", hint)
    if attn_only:
        hint = "--like chooses the heads, -d the positions, -r the turns of five tokens"
        known = {p.name for p in measurement.command(of).params} | {"attn_only"}
        _refuse(line - known, "has no meaning with --attn-only", hint)
    elif options.models:
        hint = "--like, --layers and --quant make a synthetic model, which stands in for -m"
        _refuse(line & SYNTHETIC, "has no meaning with --model", hint)
    if options.rpc.workers or not options.models:
        hint = "-m MODEL.gguf, and no --rpc"
        _refuse(line & {"text"}, "needs a model that reads it on this machine", hint)
    note_if_busy()
    quantised = [t for t in options.type_v if t not in FLOATS]
    if quantised and len(options.stock) > 1:
        why = "llama.cpp quantises V only with flash attention"
        note(f"note: no stock -fa 0 beside -ctv {','.join(quantised)}: {why}", "yellow")
    measurement.run(of, options, to)


def _refuse(names: set[str], why: str, hint: str) -> None:
    for param in click.get_current_context().command.params:
        if param.name in names:
            raise SparqError(f"{max(param.opts, key=len)} {why}", hint, exit_code=2)
