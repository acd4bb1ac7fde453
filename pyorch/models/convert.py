"""Convert a checkpoint of safetensors to GGUF with the converter of the pinned llama.cpp.

The input is checked before the converter sees it: the shards are present and complete, and the
architecture is known. Python code and pickles in the model's folder are not passed on.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyorch import children, system
from pyorch.errors import SparqError
from pyorch.ggml import BY_NAME
from pyorch.models import convert_env
from pyorch.models.gguf_file import GGUFFile, read_gguf
from pyorch.models.new_file import check_space, check_target, new_file
from pyorch.progress import Progress, silent
from pyorch.text import printable

# bytes per weight
OUTTYPES = {"auto": 2.0} | {
    name: BY_NAME[name].bytes_per_element for name in ("f16", "bf16", "f32", "q8_0")
}
# The files of a model that are downloaded and that the converter may see: no .py and no .bin.
# README.md has the licence and the name.
FILES: tuple[str, ...] = ("model*.safetensors", "*.json", "*.jinja", "README.md")
FILES += ("tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt")
_SLACK = 64 << 20  # the vocabulary, norms that stay f32, padding
_AGAIN = "the download may be incomplete: compare it with the source, or download it again"
_FORMAT = (
    "a model of transformers is needed, with config.json and model*.safetensors: PyTorch's .bin"
    " files can run code, and an adapter must be merged into its model first"
)


@dataclass(frozen=True)
class Checkpoint:
    """A folder that can be converted."""

    folder: Path
    name: str  # the converter derives the model's name from it
    architectures: tuple[str, ...]
    n_weights: int


def read_checkpoint(folder: Path, name: str = "") -> Checkpoint:
    """Look at a folder with `config.json` and safetensors. No weights are read.

    Raises:
        SparqError: something is missing or damaged; the hint says what to do.
        OSError: a file cannot be read.
    """
    config, index = folder / "config.json", folder / "model.safetensors.index.json"
    shards = sorted(folder.glob("model*.safetensors"))
    if not config.is_file() or not shards:
        lacking = "model*.safetensors" if config.is_file() else "config.json"
        raise SparqError(f"{folder}: no {lacking} in it", _FORMAT)
    tensors: dict[str, int] = {}
    for shard in shards:
        tensors |= _sizes(shard)
    indexed = _read_json(index).get("weight_map") if index.exists() else {}
    if not isinstance(indexed, dict):
        raise SparqError(f"{index}: it has no weight_map", _AGAIN)
    for tensor in sorted(indexed.keys() - tensors.keys()):
        raise SparqError(f"{folder}: {tensor!r}, of {indexed[tensor]!r}, is in no shard", _AGAIN)
    about = _read_json(config)
    text = about.get("text_config")
    architectures = [*_names(about), *(_names(text) if isinstance(text, dict) else ())]
    if not architectures:
        raise SparqError(f"{config} names no architecture", "is it the config.json of a model?")
    name = printable(name or folder.resolve().name)
    return Checkpoint(folder, name, tuple(architectures), sum(tensors.values()))


def _names(config: dict[str, Any]) -> list[str]:
    value = config.get("architectures")
    return [str(v) for v in value] if isinstance(value, list) else []


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as e:
        raise SparqError(f"{file}: not JSON: {e}", _AGAIN) from None
    if not isinstance(value, dict):
        raise SparqError(f"{file}: not a JSON object but a {type(value).__name__}", _AGAIN)
    return value


def _sizes(shard: Path) -> dict[str, int]:
    """Tensor -> number of elements, of one safetensors file whose header fits its size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(shard, framework="numpy") as file:
            names = file.keys()
            return {name: math.prod(file.get_slice(name).get_shape()) for name in names}
    except SafetensorError as e:
        raise SparqError(f"{shard}: damaged: {e} ({shard.stat().st_size} bytes)", _AGAIN) from None


def convert(
    checkpoint: Checkpoint,
    target: Path,
    outtype: str = "auto",
    *,
    python: Sequence[str],
    scripts: Path,
    force: bool = False,
    progress: Progress = silent,
    check: Callable[[GGUFFile], None] = silent,
) -> GGUFFile:
    """Write the model of a checkpoint to `target` as GGUF.

    Args:
        outtype: a key of `OUTTYPES`; auto keeps f16 or bf16 and turns f32 into f16.
        python, scripts: from `convert_env`.
        force: replace `target` if it exists.
        progress: called with (per cent written, 100).
        check: raises if what was written cannot be used: the converter compares no config.json with
            the weights.

    Raises:
        SparqError: no space, or the converter or the check refuses. `target` is then unchanged.
    """
    check_target(target, force)
    needed = int(checkpoint.n_weights * OUTTYPES[outtype]) + _SLACK
    check_space(target.absolute().parent, needed, str(target))
    with new_file(target, force) as (partial, lock), tempfile.TemporaryDirectory() as temp:
        # links to those files that the converter may see
        (folder := Path(temp) / (checkpoint.name or "model")).mkdir()
        for file in (f for pattern in FILES for f in checkpoint.folder.glob(pattern)):
            if file.is_file():
                (folder / file.name).symlink_to(file.absolute())
        # the converter would fill in {} in a name
        name = partial.with_name(partial.name.replace("{", "{{").replace("}", "}}"))
        argv = [*python, str(scripts / convert_env.SCRIPT), str(folder)]
        argv += ["--outfile", str(name), "--outtype", outtype]
        _run(checkpoint, argv, Path(temp), lock, progress)
        written = read_gguf(partial)
        try:
            check(written)
        except SparqError as e:
            message = e.message.replace(str(partial), str(checkpoint.folder))
            raise SparqError(message, "does its config.json fit its weights?") from None
        return written


def _run(
    checkpoint: Checkpoint, argv: list[str], temp: Path, lock: int, progress: Progress
) -> None:
    """Run the converter; its progress bar is passed on to `progress`."""
    lines: deque[str] = deque(maxlen=400)
    done = 0
    with children.running(
        children.bound(argv),
        env=convert_env.environment(temp / "hub"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        **system.inherit(lock),
        start_new_session=True,  # Ctrl-C reaches only us, so that the converter prints no traceback
    ) as child:
        for line in children.lines(child.stderr):
            if match := re.match(r"Writing: +(\d+)%", line):
                done = int(match[1])
            elif line.strip():
                lines.append(line)
            progress(done, 100)  # other lines count too: they show that it is alive
        code = child.wait()
    if not code:
        return
    text = "\n".join(lines)
    if "No space left" in text or "Disk quota" in text or "File too large" in text:
        raise SparqError(
            f"{checkpoint.folder}: the disk is full; nothing was kept", "free some disk space"
        )
    died = f"it {children.ended(code)}" if system.died(code) else ""
    reason = died or children.reason(children.Done(argv, code, "", text))
    raise SparqError(
        f"{checkpoint.folder}: the converter failed: {reason[:300]}", "is the model complete?"
    )


def check_architecture(checkpoint: Checkpoint) -> None:
    """Refuse an architecture that the converter does not know, before anything big is downloaded.

    Raises:
        SparqError: the architecture is not in the converter's table.
    """
    if not set(checkpoint.architectures) & convert_env.architectures():
        raise SparqError(
            f"{checkpoint.folder}: the pinned llama.cpp cannot convert "
            f"{checkpoint.architectures[0]}",
            "look for a GGUF of it on the hub; a newer llama.cpp may know it",
        )
