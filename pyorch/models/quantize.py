"""Quantise a GGUF model with llama.cpp's own program, `llama-quantize`."""

from __future__ import annotations

import math
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pyorch import children, native, system
from pyorch.errors import SparqError, nearest
from pyorch.models.gguf_file import read_gguf
from pyorch.models.new_file import check_target, new_file
from pyorch.progress import Progress, silent

TOOL = "llama-quantize"
_DISK_FULL = re.compile("iostream error|basic_ios|No space left|File too large")
# what llama-quantize says -> what to do about it
_HINTS = {
    "requantizing": "quantise from the f16 or bf16 model; --allow-requantize does it anyway",
    "imatrix": "make one with llama-imatrix and give it as --imatrix FILE",
    "importance matrix": "make one with llama-imatrix and give it as --imatrix FILE",
}


@dataclass(frozen=True)
class Result:
    """The result of quantising a model. Sizes are the bytes of whole files."""

    path: Path
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    fallbacks: tuple[str, ...]  # tensors that got a different type, in the program's words
    unweighted: tuple[str, ...]  # tensors of layers that the importance matrix lacks


def types(program: Path) -> list[str]:
    """The names of the types that `llama-quantize` knows, such as Q4_K_M."""
    done = children.run([program, "--help"])
    return re.findall(r"^ *(?:\d+ +or)? +(\w+) +: ", done.stdout, re.MULTILINE)


def quantize(
    source: Path,
    target: Path,
    type_name: str,
    *,
    imatrix: Path | None = None,
    n_threads: int = 1,
    force: bool = False,
    allow_requantize: bool = False,
    progress: Progress = silent,
) -> Result:
    """Write the model `source` (the first part of a split model) to `target` in another type.

    Args:
        type_name: one of `types`, in upper or lower case.
        imatrix: importance matrix of llama-imatrix, as GGUF or in its older format.
        force: replace `target` if it exists.
        allow_requantize: accept a quantised model, which loses more than the original would.
        progress: called with (tensors done, total).

    Raises:
        SparqError: the arguments are wrong, the model is damaged, the disk is full, or the program
            refuses. `target` is then unchanged.
    """
    program = native.lib_dir(tools=(TOOL,)) / system.program(TOOL)
    known = types(program)
    if type_name.upper() not in known:
        raise nearest("--type", type_name.upper(), known)
    before = read_gguf(source)
    check_target(target, force)
    if target.exists() and any(os.path.samefile(target, p) for p in before.parts):
        raise SparqError(f"{target}: is the model itself", "give another name", 2)
    options = ["--allow-requantize"] * allow_requantize
    if imatrix is not None:
        options += ["--imatrix", str(imatrix.absolute())]
    with new_file(target, force) as (partial, lock):
        argv: list[str | Path] = [program, *options, source.absolute(), partial.absolute()]
        messages = _run([*argv, type_name.upper(), str(n_threads)], source, progress, lock)
        lacking = re.findall(r"did not find weights for (blk\S+)", "\n".join(messages))
        if lacking and not any(re.match(r"\[.*\] blk.* converting", line) for line in messages):
            hint = "it is of another model, or has other names than llama.cpp's"
            raise SparqError(f"{imatrix}: has no weights for the layers of {source}", hint)
        progress(len(before.tensors), len(before.tensors))
        after = read_gguf(partial)
        if len(after.tensors) != len(before.tensors):
            raise SparqError(f"{target}: {TOOL} wrote {len(after.tensors)} tensors", "a bug")
    weights = sum(math.prod(t.shape) for t in after.tensors)
    return Result(
        target,
        before.n_bytes,
        after.n_bytes,
        8 * sum(t.n_bytes for t in after.tensors) / max(weights, 1),
        tuple(line for line in messages if "falling back to" in line),
        tuple(lacking),
    )


def _run(argv: children.Argv, source: Path, progress: Progress, lock: int) -> list[str]:
    """Run the program. Returns the lines that it wrote."""
    lines = []
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with children.running(children.bound(argv), **system.inherit(lock), **output) as child:
        for line in children.lines(child.stdout):
            if match := re.match(r"\[ *(\d+)/ *(\d+)\] ", line):
                progress(int(match[1]) - 1, int(match[2]))
            lines.append(line.strip())
        code = child.wait()
    if code:
        raise _failure(source, code, "\n".join(lines))
    return lines


def _failure(source: Path, code: int, text: str) -> SparqError:
    """The error of a run that failed, in one line."""
    if _DISK_FULL.search(text):
        return SparqError(f"{source}: the disk is full; nothing was kept", "free some disk space")
    reasons = re.findall(r"failed to quantize: (.*)|(?:load_\w*imatrix): (.*)|(.*ASSERT.*)", text)
    reason = "".join(reasons[-1]) if reasons else f"it {children.ended(code)}"
    hints = [hint for words, hint in _HINTS.items() if words in reason]
    hint = hints[0] if hints else "is the model damaged?"
    return SparqError(f"{source}: {TOOL} failed: {reason}", hint)
