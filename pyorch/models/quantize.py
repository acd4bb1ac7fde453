"""Quantise a GGUF model with llama.cpp's own quantiser.

The quantiser is a function of the library that cannot be interrupted and ends the process on some
damaged inputs. So it runs in a child process (this module as a program), which reports as JSON
lines on stdout; this side shows progress, interrupts, and renames the finished file. The program
`llama-quantize` is not used: it would take compiling 55 more files, half as many again as the
library has.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pyorch import children, native, system
from pyorch.errors import SparqError, nearest
from pyorch.models.gguf_file import read_gguf
from pyorch.models.imatrix import read_imatrix
from pyorch.models.new_file import check_space, check_target, new_file
from pyorch.progress import Progress

_STEP = re.compile(r"\[ *(\d+)/ *(\d+)\] ")
_SLACK = 64 << 20  # metadata and padding, which the library's estimate leaves out


@dataclass(frozen=True)
class Result:
    """The result of quantising a model. Sizes are the bytes of whole files."""

    path: Path
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    fallbacks: tuple[str, ...]  # tensors that got a different type, in the library's words


@dataclass(frozen=True)
class _Job:
    """The job of the child process. Without a target it only plans."""

    source: str
    type: int
    imatrix: str | None
    n_threads: int
    allow_requantize: bool
    target: str | None = None


def types() -> dict[str, int]:
    """The library's types by name, such as Q4_K_M, with their numbers; {} before the first build.

    Read from the text of the bindings: a list for `--help` must not start a build.
    """
    from pyorch.native import build

    file = build.bindings() / "llama_cpp" / "llama_cpp.py"
    if not file.is_file():
        return {}
    found = re.findall(
        r"^LLAMA_FTYPE_(?:MOSTLY|ALL)_(\w+) = (\d+)$", file.read_text("utf-8"), re.MULTILINE
    )
    return {name: int(number) for name, number in found}


def quantize(
    source: Path,
    target: Path,
    type_name: str,
    *,
    imatrix: Path | None = None,
    n_threads: int = 1,
    force: bool = False,
    allow_requantize: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Write the model `source` (the first part of a split model) to `target` in another type.

    Args:
        type_name: a key of `types`, in upper or lower case.
        imatrix: importance matrix of llama-imatrix, as GGUF or in its older format.
        force: replace `target` if it exists.
        allow_requantize: accept a quantised model, which loses more than the original would.
        progress: called with (tensors done, total).

    Raises:
        SparqError: the arguments are wrong, the model is damaged, there is no space, or the library
            refuses. `target` is then unchanged.
    """
    native.lib_dir()  # refuses if nothing is built: the types come with the library
    known = types()
    if type_name.upper() not in known:
        raise nearest("--type", type_name.upper(), tuple(known))
    before = read_gguf(source)
    check_target(target, force)
    if target.exists() and any(os.path.samefile(target, p) for p in before.parts):
        raise SparqError(f"{target}: is the model itself", "give another name", 2)
    if imatrix is not None:
        read_imatrix(imatrix)  # reports a fault before anything is written
    job = _Job(
        str(source),
        known[type_name.upper()],
        str(imatrix) if imatrix else None,
        n_threads,
        allow_requantize,
    )
    plan = _run(job, None)
    check_space(target.absolute().parent, plan["n_bytes"] + _SLACK, str(target))
    with new_file(target, force) as (partial, lock):
        done = _run(replace(job, target=str(partial)), progress, lock)
        if progress is not None:
            progress(len(before.tensors), len(before.tensors))
        after = read_gguf(partial)
        if len(after.tensors) != len(before.tensors):
            raise SparqError(f"{target}: the library wrote {len(after.tensors)} tensors", "a bug")
    weights = sum(math.prod(t.shape) for t in after.tensors)
    return Result(
        target,
        before.n_bytes,
        after.n_bytes,
        8 * sum(t.n_bytes for t in after.tensors) / max(weights, 1),
        tuple(done["fallbacks"]),
    )


def _run(job: _Job, progress: Progress | None, *locks: int) -> dict[str, Any]:
    """Do one job in a child process. The child ends with us, because its stdout is then closed."""
    argv = children.python("pyorch.models.quantize", json.dumps(asdict(job)))
    with (
        tempfile.TemporaryFile() as said,
        children.running(
            argv, stdout=subprocess.PIPE, stderr=said, **system.given(*locks)
        ) as child,
    ):
        for line in children.lines(child.stdout):
            answer: dict[str, Any] = json.loads(line)
            if "step" in answer:
                if progress is not None:
                    progress(*answer["step"])
                continue
            child.wait()
            if "error" in answer:
                raise _explained(job, answer["error"], answer.get("hint", ""))
            return answer
        code = child.wait()
        said.seek(0)
        text = said.read().decode("utf-8", errors="replace").strip()
    if code == system.KILLED:
        raise SparqError("the quantiser was killed: out of memory?", "free some memory")
    reason = next((s for s in text.splitlines() if s), "")
    if code < 0 and code != -signal.SIGABRT or not reason:  # abort() comes after its reason
        reason = f"it {children.ended(code)}"
    raise SparqError(
        f"{job.source}: llama.cpp's quantiser ended: {reason}", "is the model damaged?"
    )


def _explained(job: _Job, reason: str, hint: str) -> SparqError:
    if "requantizing" in reason:
        hint = "quantise from the f16 or bf16 model; --allow-requantize does it anyway"
    elif "mportance matrix" in reason or "requires an imatrix" in reason:
        hint = "make one with llama-imatrix and give it as --imatrix FILE"
    elif "invalid output file type" in reason:
        reason, hint = "the library cannot quantise to this type", "sparq-cpp quantize --help"
    elif "iostream error" in reason or "basic_ios" in reason:
        reason = "cannot write all of it: the disk is full?"
        hint = "free some disk space; nothing was kept"
    return SparqError(f"{job.source}: {reason}", hint)


# ---- the child ----


def _work(job: _Job) -> dict[str, Any]:
    """Quantise in this process. Returns the answer to send."""
    lib: Any = native.load()
    lib = getattr(lib, "llama_cpp", lib)
    lines: list[str] = []
    line = ""

    def on_log(level: int, raw: bytes, _: object) -> None:
        nonlocal line
        text = raw.decode("utf-8", errors="replace")
        if job.target and (match := _STEP.match(text)):
            try:
                send({"step": [int(match[1]) - 1, int(match[2])]})
            except BaseException:  # the parent is gone; no exception can pass through C
                os._exit(1)
        line += text
        if line.endswith("\n"):
            lines.append(line.strip())
            line = ""

    callback = lib.llama_log_callback(on_log)
    lib.llama_log_set(callback, None)
    params = lib.llama_model_quantize_default_params()
    params.nthread, params.ftype = job.n_threads, job.type
    params.allow_requantize = job.allow_requantize
    params.dry_run = job.target is None
    weights = read_imatrix(Path(job.imatrix)) if job.imatrix else {}
    if weights:
        data = (lib.llama_model_imatrix_data * (len(weights) + 1))()  # the last one stays NULL
        for entry, (name, values) in zip(data, weights.items(), strict=False):
            entry.name, entry.size = name.encode(), values.size
            entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        params.imatrix = data
    source, target = os.fsencode(job.source), os.fsencode(job.target or "unused")
    failed = lib.llama_model_quantize(source, target, ctypes.byref(params))
    lines.append(line)
    text = "\n".join(lines)
    needs = "will require an imatrix" in text or "requires an imatrix" in text
    if failed or (needs and not weights):
        found = re.findall(r"failed to quantize: (.*)", text)
        return {"error": found[-1] if found else "this type requires an importance matrix"}
    size = re.search(r"quant size += +([\d.]+) MiB", text)
    return {
        "n_bytes": int(float(size[1]) * (1 << 20)) if size else 0,
        "fallbacks": [s for s in lines if "falling back to" in s],
    }


def send(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    try:
        send(_work(_Job(**json.loads(sys.argv[1]))))
    except SparqError as e:
        send({"error": e.message, "hint": e.hint})
