"""Results as JSON lines: each line is a case with its samples and its environment.

A record is written as soon as it is measured, and a later run leaves out recorded cases. Its
`key` is made from the case, the library that ran it, and the version of the measurement, so a
changed kernel is measured again, and so is everything by a changed measurement.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field, fields
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from pyorch import __version__, paths, system
from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.errors import SparqError

SCHEMA = 1
# The versions of the measurements. Whoever changes what one measures, or how, raises its number:
# its records are then measured again, and those before are shown as old. What is not named has
# version 1; "eval NAME" is the version of a single task, which counts in place of that of all.
# 2: memory is read by numpy; of gpu_attention: times are differences of two graphs
VERSIONS = {"eval": 1, "speed": 2, "attention": 2, "gpu_attention": 2}
Record = dict[str, Any]


Machine = dict[str, Any]
Environment = dict[str, Any]
Result = dict[str, Any]  # the part of a record beside its case
Kind = TypeVar("Kind")


def default_folder() -> Path:
    """The folder for the records of this kind of machine."""
    return paths.results() / "results" / machine_name()


def machine_name() -> str:
    """The name of this kind of machine, not of the machine: `amd-epyc-2-cores`."""
    m = machine()
    name = re.sub(r"\((r|tm)\)|@.*|\b(cpu|processor)\b", "", m["cpu"].lower())
    name = f"{m.get('gpu', '')} {name} {m['cores']} cores".lower()
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


@cache
def machine() -> Machine:
    """The kind of machine that a record is of, with its first GPU; nothing names the machine
    itself."""
    from pyorch import native
    from pyorch.native import probe

    gpu: Machine = {}
    for first in native.gpus()[:1]:
        gpu = {"gpu": first.name, "gpu_gib": round(first.memory / 2**30, 1)}
        gpu |= {"backend": first.backend}
    return {
        "cpu": probe.cpu()[0],
        "cores": probe.cores(),
        "memory_gib": round(probe.memory() / 2**30, 1),
        "arch": platform.machine(),
        "system": platform.system(),
        **gpu,
    }


def kind_of(env: Environment) -> list[Any]:
    """What two machines of a kind have in common."""
    return [env["machine"].get(x) for x in ("cpu", "cores", "gpu")]


def environment(libraries: Mapping[str, Path]) -> Environment:
    """Everything outside the case that a number depends on.

    Args:
        libraries: name -> folder of a built library, as `native.lib_dir` returns it.
    """
    stamps = {name: json.loads((p / "stamp.json").read_text()) for name, p in libraries.items()}
    first = next(iter(stamps.values()))
    return {
        "machine": machine(),
        "version": __version__,
        "stamps": {name: s["stamp"] for name, s in stamps.items()},
        "pin": first["pin"],
        "isa": first["isa"],
        "compiler": first["inputs"]["compiler"],
        **_commit(),
    }


def _commit() -> dict[str, Any]:
    """The commit, and whether the code was changed since; "" outside of a checkout."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(paths.REPOSITORY), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with suppress(OSError, subprocess.CalledProcessError):
        if Path(git("rev-parse", "--show-toplevel")).resolve() == paths.REPOSITORY:
            code = ("pyorch", "ggml_ops", "patches", "bench", ":!bench/results", ":!bench/figures")
            changed = git("status", "--porcelain", "--", *code)
            return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    return {"commit": "", "dirty": False}  # not a checkout, or installed within another one


def version_of(bench: str) -> int:
    """The version of a measurement's method, from 1; a record without one has version 0."""
    return VERSIONS.get(bench) or VERSIONS.get(bench.split()[0], 1)


def is_old(rec: Mapping[str, Any]) -> bool:
    """Whether a record, or a setting of `eval`, is of an earlier version of its measurement."""
    return int(rec.get("version", 0)) < version_of(rec.get("bench", "eval"))


def about(recs: Sequence[Record]) -> str:
    """The machine of the first record, and the days and commits of all."""
    machine, isa = recs[0]["env"]["machine"], ", ".join(recs[0]["env"].get("isa", ()))
    days = sorted(r["time"][:10] for r in recs)
    taken = " to ".join(dict.fromkeys((days[0], days[-1])))
    commits = dict.fromkeys(
        r["env"]["commit"][:9] + " and changes" * r["env"]["dirty"] for r in recs
    )
    return ", ".join((f"{machine['cpu']}, {machine['cores']} cores ({isa})", taken, *commits))


def about_old(recs: Sequence[Record]) -> str:
    """A sentence on how many of the records are old, or nothing."""
    n = sum(map(is_old, recs))
    return f" Of an earlier version of the measurement: {n} of {len(recs)}." if n else ""


def key(bench: str, case: Mapping[str, Any], stamp: str, version: int | None = None) -> str:
    """The key of a case: of the present version of `bench`, or of another, where 0 is none."""
    version = version_of(bench) if version is None else version
    parts = [SCHEMA, bench, case, stamp, *[version] * bool(version)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def record(bench: str, case: Mapping[str, Any], stamp: str, **result: Any) -> Record:
    """Make a record. `result` must have `samples_ns` or `samples`, and `env`."""
    if not (result.get("samples_ns") or result.get("samples")) or "env" not in result:
        raise ValueError("a record without samples or env")
    rec = {
        "schema": SCHEMA,
        "bench": bench,
        "version": version_of(bench),
        "key": key(bench, case, stamp),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "case": dict(case),
        **result,
    }
    fresh: Record = json.loads(json.dumps(rec))  # exactly what `load` will return
    return fresh


def append(file: Path, rec: Mapping[str, Any]) -> None:
    """Add a line, which is on disk when this returns. A truncated last line is removed first.

    Raises:
        SparqError: it cannot be written.
    """
    with _opened(file) as f:
        system.lock(f.fileno(), wait=True)  # another run may write to the same file
        f.seek(0)
        text = f.read()
        whole = text.rfind(b"\n") + 1
        try:
            json.loads(text[whole:])
            f.write(b"\n")  # complete except for this
        except ValueError:
            f.truncate(whole)
        f.write(json.dumps(rec, separators=(",", ":")).encode() + b"\n")
        f.flush()
        os.fsync(f.fileno())


def check_writable(file: Path) -> None:
    """Raises:
    SparqError: records cannot be added to the file.
    """
    with _opened(file):
        pass


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab+") as f:
            yield f
    except OSError as e:
        raise SparqError(f"{file}: {e.strerror or e}", "--out takes a folder to write to") from None


def load(file: Path) -> dict[str, Record]:
    """The records of a file by key, the last one of each.

    Raises:
        SparqError: the file was written by another version of this program.
    """
    return {rec["key"]: rec for rec in load_all(file, keyed=True)}


def load_all(file: Path, *, keyed: bool = False) -> list[Record]:
    """All records of a file. A line that an interruption truncated is left out.

    Args:
        keyed: whether each must have a key, as the records of benches do.

    Raises:
        SparqError: the file was written by another version of this program, or by another program.
    """
    try:
        lines = file.read_text("utf-8").splitlines()
    except FileNotFoundError:
        return []
    except UnicodeDecodeError:
        raise SparqError(f"{file} is not a file of records", "move it away") from None
    recs: list[Record] = []
    for i, line in enumerate(lines):
        try:
            rec = json.loads(line)
        except ValueError:
            if i + 1 == len(lines):
                break
            rec = None
        at = f"{file}: line {i + 1}"
        if not isinstance(rec, dict) or (keyed and "key" not in rec):
            raise SparqError(f"{at} is not a record", "remove that line")
        if rec.get("schema") != SCHEMA:
            hint = "keep the old file under another name"
            raise SparqError(f"{at} has schema {rec.get('schema')}, not {SCHEMA}", hint)
        recs.append(rec)
    return recs


def optional(default: Any) -> Any:
    """A field of a case that is recorded only if it is not `default`, so that cases from before the
    field keep their keys."""
    return field(default=default, metadata={"optional": True})


def case_of(case: Any) -> dict[str, Any]:
    """A case in the form of records, in which settings of attention become text. A field may be
    `unrecorded`."""
    values = {f.name: getattr(case, f.name) for f in fields(case)}
    for f in fields(case):
        is_default = f.metadata.get("optional") and values[f.name] == f.default
        if is_default or f.metadata.get("unrecorded"):
            del values[f.name]
    return {k: str(v) if isinstance(v, AttentionSpec) else v for k, v in values.items()}


def read_case(kind: type[Kind], rec: Record) -> Kind:
    """The case of a record, as it was before `case_of`."""
    case = rec["case"]
    spec = {"spec": _spec(case["spec"])} if "spec" in case else {}
    return kind(**case | spec)


_spec = cache(parse_spec)  # thousands of records have the same few


def run_of(rec: Record) -> str:
    """The identity of a run, whose records are taken in turns. Old ones share their bandwidths."""
    return str(rec.get("run") or rec.get("bandwidth_bytes_per_s") or rec["key"])


def by_run(recs: Iterable[Record]) -> list[dict[str, Record]]:
    """The records of each run by key, in order."""
    runs: dict[str, dict[str, Record]] = {}
    for rec in recs:
        runs.setdefault(run_of(rec), {})[rec["key"]] = rec
    return list(runs.values())


def latest(recs: Iterable[Record]) -> list[Record]:
    """The last of the runs with the same cases, whatever library or calibration; each one whole."""

    def case(rec: Record) -> dict[str, Any]:
        return {k: v for k, v in rec["case"].items() if k != "calibration"}

    last = {
        json.dumps([case(rec) for rec in run.values()]): list(run.values()) for run in by_run(recs)
    }
    return [rec for run in last.values() for rec in run]


def spread(samples: Sequence[float]) -> tuple[float, float, float]:
    """The median and the 10th and 90th percentiles."""
    low, mid, high = np.percentile(np.asarray(samples, float), (10, 50, 90))
    return float(mid), float(low), float(high)
