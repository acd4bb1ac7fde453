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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyorch import children, system
from pyorch.errors import SparqError
from pyorch.ggml import BY_NAME
from pyorch.models import convert_env
from pyorch.models.gguf_file import GGUFFile, read_gguf
from pyorch.models.new_file import check_space, check_target, new_file
from pyorch.progress import Progress, Say
from pyorch.text import human_bytes, printable

# bytes per weight
OUTTYPES = {"auto": 2.0} | {
    name: BY_NAME[name].bytes_per_element for name in ("f16", "bf16", "f32", "q8_0")
}
# The files of a model that are downloaded and that the converter may see: no .py and no .bin.
# README.md has the licence and the name.
FILES: tuple[str, ...] = ("model*.safetensors", "*.json", "*.jinja", "README.md")
FILES += ("tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt")
ADAPTER = "adapter_config.json"  # in the folder of one
_MAX_CONFIG = 64 << 20  # tokenizer.json of a large vocabulary: 35 MB
_SLACK = 64 << 20  # the vocabulary, norms that stay f32, padding
_AGAIN = "the download may be incomplete: compare it with the source, or download it again"


@dataclass(frozen=True)
class Checkpoint:
    """A folder that can be converted."""

    folder: Path
    name: str  # the converter derives the model's name from it
    architectures: tuple[str, ...]
    n_weights: int
    n_bytes: int  # the size of the shards


def read_checkpoint(folder: Path, name: str = "") -> Checkpoint:
    """Look at a folder with `config.json` and safetensors. No weights are read.

    Raises:
        SparqError: something is missing or damaged; the hint says what to do.
        OSError: a file cannot be read.
    """
    if not folder.is_dir():
        what = "not a folder" if folder.exists() else "no such folder"
        raise SparqError(
            f"{folder}: {what}",
            "it takes a folder with config.json and safetensors, or hf:org/repo",
        )
    if (folder / ADAPTER).is_file() and not any(folder.glob("model*.safetensors")):
        raise is_adapter(str(folder), _read_json(folder / ADAPTER))
    if not (folder / "config.json").is_file():
        hint = "is it the folder of a model in the format of transformers?"
        if (folder / "params.json").is_file():
            hint = "this is the original format of its authors: take the one for transformers"
        raise SparqError(f"{folder}: no config.json in it", hint)
    config = _read_json(folder / "config.json")
    shards = _shards(folder)
    tensors: dict[str, int] = {}
    for shard in shards:
        for tensor, n in _read_header(shard).items():
            if tensor in tensors:
                raise SparqError(f"{shard}: tensor {tensor!r} is in another shard too", _AGAIN)
            tensors[tensor] = n
    lacking = _indexed(folder).keys() - tensors.keys()
    if lacking:
        raise SparqError(
            f"{folder}: tensor {min(lacking)!r} is in the index, but in no shard", _AGAIN
        )
    text = config.get("text_config")
    found = [*_names(config), *(_names(text) if isinstance(text, dict) else ())]
    if not found:
        raise SparqError(
            f"{folder}/config.json names no architecture", "is it the config.json of a model?"
        )
    n_bytes = sum(s.stat().st_size for s in shards)
    name = printable(name or folder.resolve().name)
    return Checkpoint(folder, name, tuple(found), sum(tensors.values()), n_bytes)


def is_adapter(where: str, config: dict[str, Any]) -> SparqError:
    """The error for a LoRA adapter, whose configuration names the model that it changes."""
    base = str(config.get("base_model_name_or_path") or "its base model")
    return SparqError(
        f"{where}: an adapter of {base}, not a model",
        f"merge it into {base} (peft's merge_and_unload) and convert that; or make a GGUF adapter"
        " with llama.cpp's convert_lora_to_gguf.py, for sparq-cpp serve ... -- --lora FILE",
    )


def _names(config: dict[str, Any]) -> list[str]:
    value = config.get("architectures")
    return [str(v) for v in value] if isinstance(value, list) else []


def _read_json(file: Path) -> dict[str, Any]:
    if file.stat().st_size > _MAX_CONFIG:
        raise SparqError(
            f"{file}: {human_bytes(file.stat().st_size)} is too large for such a file", _AGAIN
        )
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as e:
        raise SparqError(f"{file}: not JSON: {e}", _AGAIN) from None
    if not isinstance(value, dict):
        raise SparqError(f"{file}: not a JSON object but a {type(value).__name__}", _AGAIN)
    return value


def _indexed(folder: Path) -> dict[str, str]:
    """Tensor -> shard, from the index of a model in several shards; {} without an index."""
    file = folder / "model.safetensors.index.json"
    if not file.exists():
        return {}
    names = _read_json(file).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(v, str) for v in names.values()):
        raise SparqError(f"{file}: it has no weight_map", _AGAIN)
    for name in set(names.values()):
        if Path(name).name != name or not name.isprintable():
            raise SparqError(f"{file}: refused: {name!r} leads out of the folder")
    return names


def _shards(folder: Path) -> list[Path]:
    """The weight files that the converter would take, including all that the index names."""
    named = set(_indexed(folder).values())
    lacking = sorted(n for n in named if not (folder / n).is_file())
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise SparqError(f"{folder}: {lacking[0]} is missing{more}", _AGAIN)
    shards = sorted(folder.glob("model*.safetensors"))
    if not shards:
        hint = "is it the folder of a model in the format of transformers?"
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
            hint = "PyTorch's .bin files can run code, so they are not read: ask the authors"
            hint += " for safetensors, or save it again with transformers"
        elif any(folder.glob("*.gguf")):
            hint = "there is a GGUF file in it, which needs no conversion"
        raise SparqError(f"{folder}: no model*.safetensors in it", hint)
    return shards


def _read_header(shard: Path) -> dict[str, int]:
    """Tensor -> number of elements, of one safetensors file whose header fits its size."""
    from safetensors import SafetensorError, safe_open

    with shard.open("rb") as f:
        if f.read(40).startswith(b"version https://git-lfs"):
            raise SparqError(f"{shard}: a pointer of git-lfs, not the file", "git lfs pull")
    try:
        with safe_open(shard, framework="numpy") as file:
            names = file.keys()
            return {name: math.prod(file.get_slice(name).get_shape()) for name in names}
    except SafetensorError as e:
        reason = str(e).removeprefix("Error while deserializing header: ")
        size = shard.stat().st_size
        raise SparqError(f"{shard}: damaged: {reason} ({size} bytes)", _AGAIN) from None


def convert(
    checkpoint: Checkpoint,
    target: Path,
    outtype: str = "auto",
    *,
    python: Sequence[str],
    scripts: Path,
    force: bool = False,
    progress: Progress | None = None,
) -> GGUFFile:
    """Write the model of a checkpoint to `target` as GGUF.

    Args:
        outtype: a key of `OUTTYPES`; auto keeps f16 or bf16 and turns f32 into f16.
        python, scripts: from `convert_env`.
        force: replace `target` if it exists.
        progress: called with (per cent written, 100).

    Raises:
        SparqError: no space, or the converter refuses. `target` is then unchanged.
    """
    check_target(target, force)
    needed = int(checkpoint.n_weights * OUTTYPES[outtype]) + _SLACK
    check_space(target.absolute().parent, needed, str(target))
    with new_file(target, force) as (partial, lock), tempfile.TemporaryDirectory() as temp:
        folder = _stage(checkpoint, Path(temp))
        # the converter would fill in {} in a name
        name = partial.with_name(partial.name.replace("{", "{{").replace("}", "}}"))
        argv = [*python, str(scripts / convert_env.SCRIPT), str(folder)]
        argv += ["--outfile", str(name), "--outtype", outtype]
        _run(checkpoint, argv, Path(temp), lock, progress)
        if partial.stat().st_size == 0:
            raise SparqError(f"{target}: the converter wrote nothing")
        return read_gguf(partial)


def _stage(checkpoint: Checkpoint, temp: Path) -> Path:
    """A folder of links to those files that the converter may see."""
    folder = temp / (checkpoint.name or "model")
    folder.mkdir()
    for pattern in FILES:
        for file in checkpoint.folder.glob(pattern):
            if file.is_file():
                (folder / file.name).symlink_to(file.absolute())
    return folder


def _run(
    checkpoint: Checkpoint, argv: list[str], temp: Path, lock: int, progress: Progress | None
) -> None:
    """Run the converter; its progress bar is passed on to `progress`."""
    lines: deque[str] = deque(maxlen=400)
    done = 0
    with children.running(
        argv,
        env=convert_env.environment(temp / "hub"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        **system.given(lock),
        start_new_session=True,  # Ctrl-C reaches only us, so that the converter prints no traceback
    ) as child:
        for line in children.lines(child.stderr):
            if match := re.match(r"Writing: +(\d+)%", line):
                done = int(match[1])
            elif line.strip():
                lines.append(line)
            if progress is not None:
                progress(done, 100)  # other lines count too: they show that it is alive
        child.wait()
    if child.returncode:
        raise _failure(checkpoint, child.returncode, lines)


def _failure(checkpoint: Checkpoint, code: int, lines: Sequence[str]) -> SparqError:
    """The error of a failed conversion, in one line."""
    text = "\n".join(lines)
    name = str(checkpoint.folder)
    if code == system.KILLED:
        return SparqError(f"{name}: the converter was killed: out of memory?", "free some memory")
    if code < 0:
        return SparqError(f"{name}: the converter {children.ended(code)}")
    if "No space left" in text or "Disk quota" in text or "File too large" in text:
        return SparqError(f"{name}: the disk is full; nothing was kept", "free some disk space")
    if "pre-tokenizer was not recognized" in text:
        return SparqError(
            f"{name}: llama.cpp does not know this model's tokenizer",
            "it recognises tokenizers by what they do to a test text; a changed one is refused",
        )
    if "is not supported" in text:
        return unsupported(checkpoint)
    errors = [s for s in lines if re.match(r"ERROR:|(\w+\.)*\w*(Error|Exception|Exit)\b", s)]
    reason = errors[-1] if errors else lines[-1] if text.strip() else f"exit code {code}"
    if reason == "AssertionError":  # the line of code says more
        asserts = [s.strip() for s in lines if s.strip().startswith("assert ")]
        reason = asserts[-1].partition("  #")[0] if asserts else reason
    reason = re.sub(r"^ERROR:[\w-]+:", "", reason).strip()
    return SparqError(f"{name}: the converter failed: {reason[:300]}", "is the model complete?")


def unsupported(checkpoint: Checkpoint) -> SparqError:
    return SparqError(
        f"{checkpoint.folder}: the pinned llama.cpp cannot convert {checkpoint.architectures[0]}",
        "look for a GGUF of it on the hub; a newer llama.cpp may know it",
    )


def check_architecture(checkpoint: Checkpoint, note: Say) -> None:
    """Refuse an architecture that the converter does not know, before anything big is downloaded.

    Raises:
        SparqError: the architecture is not in the converter's table.
    """
    if not set(checkpoint.architectures) & convert_env.architectures(note):
        raise unsupported(checkpoint)
