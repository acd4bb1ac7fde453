"""`sparq-cpp convert`: a model of safetensors as GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyorch import system
from pyorch.cli.terminal import confirm, note
from pyorch.cli.types import File
from pyorch.errors import SparqError
from pyorch.models.convert import OUTTYPES
from pyorch.progress import progress_bar, say
from pyorch.text import human_bytes

if TYPE_CHECKING:
    from pyorch.models.gguf_file import GGUFFile


@click.command()
@click.argument("model", type=File(), metavar="DIR|SPEC")
@click.option("--out", type=File(), help="The file to write.  [default: NAME.gguf, here]")
@click.option(
    "--outtype",
    type=click.Choice(OUTTYPES),
    default="auto",
    help="Type of the weights; auto is the 16-bit type that loses least.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("--yes", is_flag=True, help="Download what is needed without asking.")
def command(model: str, out: str | None, outtype: str, force: bool, yes: bool) -> None:
    """Convert a safetensors model to GGUF with llama.cpp's converter.

    DIR is a folder with config.json, a tokenizer and model*.safetensors. SPEC is such a repository
    on the hub, hf:org/repo or hf:org/repo@REVISION. The converter needs torch: the command makes
    an environment for it in the cache, once and after asking. SPARQ_CONVERT_PYTHON may name a
    Python that has torch and transformers instead.
    """
    from pyorch.models import convert, convert_env, pull
    from pyorch.models.new_file import check_target

    if system.IS_WINDOWS:
        raise SparqError("convert does not run on Windows", "convert it under WSL, or pull GGUF", 2)

    def agree(what: str) -> None:
        confirm(f"{what}. Download it?", yes, what, "--yes downloads it, into SPARQ_CACHE")
        if yes:
            say(what)

    spec = None if Path(model).is_dir() else pull.parse_spec(model, original=True)
    if spec is not None and (spec.file or spec.quant):
        raise SparqError(f"{model!r} is GGUF already", f"sparq-cpp pull {model}", exit_code=2)
    name = spec.repo.split("/")[1] if spec else Path(model).resolve().name
    target = Path(out or f"{name}.gguf")
    check_target(target, force)
    folder = Path(model)
    if spec:
        repository = pull.find_files(spec, convert.FILES)
        if not any(f.name.endswith(".safetensors") for f in repository.files):
            hint = "it may have GGUF: sparq-cpp pull"
            raise SparqError(f"{spec.repo}: no safetensors in it", hint)
        if not repository.complete:
            agree(f"{spec.repo}: {human_bytes(repository.missing_bytes)} to download")
        folder = pull.fetch(repository, note).path.parent
    checkpoint = convert.read_checkpoint(folder, name)
    convert.check_architecture(checkpoint)
    python = convert_env.python(agree)
    with progress_bar("converting") as progress:
        file = convert.convert(
            checkpoint,
            target,
            outtype,
            python=python,
            scripts=convert_env.scripts(),
            force=force,
            progress=progress,
            check=_check,
        )
    print(f"{target}: {human_bytes(file.n_bytes)}, {file.arch}, {len(file.tensors)} tensors")


def _check(file: GGUFFile) -> None:
    """Let llama.cpp try the file, if it is built."""
    from pyorch import native
    from pyorch.engine.loading import check_loads

    if native.find() is None:
        note("note: llama.cpp has not tried the file, since the library is not built", "yellow")
    else:
        check_loads(file)
