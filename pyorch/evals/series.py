"""The scores of a method on the examples of a task, and the files that hold them.

`run` writes one line per example and method, and before them one that says how many each method
was asked for. `pack` turns these into one line per method, with all scores but without the answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pyorch.attention.cost import per_token
from pyorch.attention.spec import BOUNDS
from pyorch.errors import SparqError
from pyorch.evals import find, stats, tasks
from pyorch.measure import records
from pyorch.measure.records import Record
from pyorch.models import cards
from pyorch.policies import Method, is_sparse, recorded


@dataclass(frozen=True)
class Series:
    """A method in a setting. Example numbers[i] has scores[i], about[i] and more[name][i], which is
    a number or one number per layer. Only examples of the same number are the same.

    case, env  of the setting, see `run`
    version    of the evaluation that measured it
    asked      how many examples were asked for, of which some may be missing
    meaning    of the method for the model, as text: a calibrated one has the settings it stood for.
               "" if its records do not say so
    seconds    of a decoded token, as the median of each example; NaN if it has no meaning
    """

    setting: str
    case: Mapping[str, Any]
    env: Mapping[str, Any]
    version: int
    method: Method
    numbers: np.ndarray
    asked: int
    scores: np.ndarray
    seconds: np.ndarray
    counters: Mapping[str, int]
    about: Sequence[Mapping[str, Any]]
    more: Mapping[str, np.ndarray] = field(default_factory=dict)
    meaning: str = ""

    @property
    def task(self) -> str:
        return str(self.case["task"])

    @property
    def texts(self) -> list[int] | None:
        """The number of each example's text, where several may ask about one."""
        if all("stretch" in a for a in self.about):
            return stats.overlapping([a["stretch"] for a in self.about])
        if all("text" in a for a in self.about):
            return [a["text"] for a in self.about]
        return None

    @property
    def missing(self) -> int:
        """How many of the examples that were asked for have no score yet."""
        return max(self.asked, int(self.numbers[-1]) + 1) - len(self.numbers)

    @property
    def old(self) -> bool:
        """Whether an earlier version of the evaluation measured it."""
        return records.is_old({"bench": bench_of(self.task), "version": self.version})

    def common(self, other: Series) -> tuple[Series, Series]:
        """This one and another of the same setting, with the examples that both have."""
        _, mine, theirs = np.intersect1d(self.numbers, other.numbers, return_indices=True)
        return self.only(mine), other.only(theirs)

    def only(self, places: np.ndarray) -> Series:
        """The series with some of its examples."""
        return replace(
            self,
            numbers=self.numbers[places],
            scores=self.scores[places],
            about=[self.about[i] for i in places],
            more={name: values[places] for name, values in self.more.items()},
        )

    @property
    def model(self) -> str:
        """The model for people: its file, after the title of the card that knows its content."""
        name, card = str(self.case["model"]["name"]), cards.of_hash(self.case["model"]["hash"])
        return f"{card.title} ({name})" if card else name

    @property
    def token_bytes(self) -> tuple[float, float]:
        """The bytes of K, V and a method's additions to them that a token read in all layers, and
        those that all of K and V would have taken; NaN if not counted."""
        return per_token(self.counters) if self.counters.get("steps") else (math.nan, math.nan)

    @property
    def tokens_per_s(self) -> float:
        """The speed of the median example."""
        known = self.seconds[~np.isnan(self.seconds)]
        return 1 / float(np.median(known)) if len(known) else float("nan")

    def refuse_idle(self) -> None:
        """Refuse to report a sparse method if nothing ran sparse.

        Raises:
            SparqError: nothing did.
        """
        if is_sparse(self.method) and self.counters.get("calls_sparse", 0) == 0:
            raise SparqError(
                f"{self.task}, {self.method}: no attention call ran sparse; not reported",
                f"{BOUNDS} in the setting lets it run at any length; "
                "`sparq-cpp explain` says why attention stays dense",
            )


def bench_of(task: str) -> str:
    """The name of a task's measurement, which has a version."""
    return f"eval {task}"


def make(
    header: Record, method: Method, recs: Sequence[Record], asked: int | None = None
) -> Series:
    """The series of a setting and a method. `recs` are in the order of the examples; `asked` is how
    many examples were asked for, by default as many."""
    counters: dict[str, int] = {}
    for rec in recs:
        for name, value in rec["counters"].items():
            counters[name] = counters.get(name, 0) + value
    names = recs[0]["more"]
    return Series(
        setting=header["key"],
        case=header["case"],
        env=header["env"],
        version=header.get("version", 0),
        method=method,
        numbers=np.array([r["i"] for r in recs], int),
        asked=len(recs) if asked is None else asked,
        scores=np.array([r["score"] for r in recs], float),
        seconds=np.array([r["seconds"] for r in recs], float),
        counters=counters,
        about=[r["about"] for r in recs],
        more={name: np.array([r["more"][name] for r in recs], float) for name in names},
        meaning=recs[0].get("meaning", ""),
    )


def read(file: Path) -> list[Series]:
    """All series of a file, in the order in which they began. A method that was calibrated anew in
    between has one for each calibration.

    Raises:
        SparqError: the file is not one of ours.
    """
    headers: dict[str, Record] = {}
    lines: dict[tuple[str, str], dict[int, Record]] = {}
    asked: dict[tuple[str, str], int] = {}
    for rec in records.load_all(file):
        if "case" in rec:
            headers[rec["key"]] = rec
            continue
        if rec.get("setting") not in headers:
            raise SparqError(f"{file}: a record without its setting", "not a file of `eval`?")
        of = str(rec["setting"]), str(rec.get("meaning", rec["method"]))
        if "asked" in rec:
            asked[of] = rec["asked"]
        elif "scores" in rec:
            lines[of] = dict(enumerate(_unpacked(headers[of[0]], rec)))
        else:
            lines.setdefault(of, {})[rec["i"]] = rec
    out = []
    for of, by_number in lines.items():
        recs = [by_number[i] for i in sorted(by_number)]
        out.append(make(headers[of[0]], recorded(recs[0]["method"]), recs, asked.get(of)))
    return out


def _unpacked(header: Record, packed: Record) -> list[Record]:
    """The records of the examples that a packed line holds. The first has the counters of all."""
    return [
        {
            **packed,
            "i": i,
            "score": score,
            "counters": {} if i else packed["counters"],
            "about": header["about"][i],
            "more": {name: values[i] for name, values in packed["more"].items()},
        }
        for i, score in enumerate(packed["scores"])
    ]


def read_folder(folder: Path, names: Sequence[str] = ()) -> list[Series]:
    """All series of a folder, or those of some tasks, in the order of the tasks.

    Raises:
        SparqError: there are none.
    """
    chosen = [t.name for t in find(names)] if names else list(tasks())
    out = [s for name in chosen for s in read(folder / f"{name}.jsonl")]
    if not out:
        raise SparqError(f"no results in {folder}", "run sparq-cpp eval ... --out DIR first")
    return out


def by_setting(series: Iterable[Series]) -> list[list[Series]]:
    """Groups of series that may be compared, each with `off` or `dense` first."""
    groups: dict[str, list[Series]] = {}
    for s in series:
        groups.setdefault(s.setting, []).append(s)
    return [sorted(g, key=lambda s: is_sparse(s.method)) for g in groups.values()]


def pack(series: Sequence[Series], folder: Path) -> list[Path]:
    """Write each task's series to `folder`, one line per method, whose examples are the first ones.

    Raises:
        SparqError: examples are missing, a file exists already, or it cannot be written.
    """
    files = {s.task: folder / f"{s.task}.jsonl" for s in series}
    for s in series:
        if files[s.task].exists():
            raise SparqError(
                f"{files[s.task]} is there already", "remove it, or name another folder"
            )
        if s.missing:
            n = f"{len(s.numbers)} of {len(s.numbers) + s.missing} examples"
            raise SparqError(
                f"{s.task}, {s.method}: {n} are there; not packed",
                "the command that was interrupted continues where it was",
            )
    for group in by_setting(series):
        head = group[0]
        header = {
            "schema": records.SCHEMA,
            "key": head.setting,
            "case": head.case,
            "bench": bench_of(head.task),
            "version": head.version,
            "env": head.env,
            "about": max((s.about for s in group), key=len),
        }
        records.append(files[head.task], header)
        for s in group:
            records.append(files[head.task], _packed(s))
    return list(files.values())


def _packed(s: Series) -> Record:
    meaning = s.meaning or str(s.method)
    return {
        "schema": records.SCHEMA,
        "key": records.key("pack", {"method": meaning}, s.setting),
        "setting": s.setting,
        "method": str(s.method),
        "meaning": meaning,
        "scores": _short(s.scores),
        "more": {name: _short(values) for name, values in s.more.items()},
        "seconds": None if np.isnan(s.tokens_per_s) else round(1 / s.tokens_per_s, 9),
        "counters": dict(s.counters),
    }


def _short(x: np.ndarray) -> Any:
    """The numbers with six digits; whole ones without a point."""
    if x.ndim:
        return list(map(_short, x))
    return int(x) if float(x).is_integer() else float(f"{x:.6g}")
