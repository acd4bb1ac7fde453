"""`sparq-cpp quantize`: a GGUF model in fewer bits."""

from __future__ import annotations

from pathlib import Path

import click

from pyorch.cli.loading import find_model
from pyorch.cli.terminal import note
from pyorch.cli.types import THREADS, File
from pyorch.progress import progress_bar


@click.command()
@click.argument("model", type=File(), metavar="IN")
@click.argument("output", type=File(), metavar="OUT")
@click.option(
    "--type",
    "type_name",
    metavar="TYPE",
    default="Q4_K_M",
    help="Type of the weights, such as Q8_0, Q6_K or IQ4_XS: those of llama-quantize.",
)
@click.option("--imatrix", type=File(), help="An importance matrix from llama-imatrix.")
@click.option("--threads", "-t", type=THREADS, help="Number of threads.  [default: one per core]")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option("--allow-requantize", is_flag=True, help="Accept a quantised model; this loses more.")
@click.option("--yes", is_flag=True, help="Download the model without asking.")
def command(
    model: str,
    output: str,
    type_name: str,
    imatrix: str | None,
    threads: int | None,
    force: bool,
    allow_requantize: bool,
    yes: bool,
) -> None:
    """Write the model IN to the file OUT with weights of another type.

    IN is a GGUF file (the first part of a split model) or a model on the hub, named as in
    `sparq-cpp pull`. OUT appears when it is complete.
    """
    from pyorch import native
    from pyorch.engine import usable_cores
    from pyorch.models.new_file import check_target
    from pyorch.models.quantize import TOOL, quantize
    from pyorch.text import human_bytes

    check_target(Path(output), force)
    source = find_model(model, yes, (TOOL,)).path
    native.built(tools=(TOOL,))
    with progress_bar("quantising") as progress:
        result = quantize(
            source,
            Path(output),
            type_name,
            imatrix=Path(imatrix) if imatrix else None,
            n_threads=threads or usable_cores(),
            force=force,
            allow_requantize=allow_requantize,
            progress=progress,
        )
    if result.fallbacks:
        n = len(result.fallbacks)
        note(f"note: another type for {n} tensors: {result.fallbacks[0]}", "yellow")
    if result.unweighted:
        n = len(result.unweighted)
        note(f"note: {imatrix} lacks {n} tensors, such as {result.unweighted[0]}", "yellow")
    sizes = f"{human_bytes(result.bytes_before)} -> {human_bytes(result.bytes_after)}"
    print(f"{result.path}: {sizes}, {result.bits_per_weight:.2f} bits per weight")
