"""What all figures share: records in, a picture and its numbers out, all in one style.

`draw.py` lists the figures and has the command.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyorch import paths
from pyorch.attention.spec import AttentionSpec, ratio_text
from pyorch.bench import records
from pyorch.bench.pictures import (  # noqa: F401  the figures have them from here
    OURS,
    OURS_2,
    OURS_3,
    PAPER,
    STOCK,
    STOCK_2,
    Names,
    Row,
    decades,
    panels,
    positions_axis,
    write,
    x_ticks,
)
from pyorch.errors import SparqError

HERE = Path(__file__).parent
FIGURES = HERE / "figures"


@dataclass(frozen=True)
class Figure:
    """A picture, NAME.svg, with its numbers, NAME.csv."""

    name: str
    title: str
    caption: str
    needs: str  # the command that measures its data
    file: str  # the file of the records
    data: Callable[[Path], list[Row]]  # from the folder of the records
    draw: Callable[[Sequence[Row]], Any]  # a matplotlib figure


class NoRecords(SparqError):
    """The data of a figure have not been measured on this machine."""


# ---- records ----


# the last row counts, however long it was measured
_OF_A_RUN = {"n_gen", "repetitions", "n_samples", "seed", "calibration", "n_embd"}


def rows_of(folder: Path, name: str, rows: Callable[[Sequence[Any]], Sequence[Row]]) -> list[Row]:
    """The rows that ran as they say, of all runs with a stock row; the last one of each case."""
    last: dict[str, Row] = {}
    for run in records.by_run(records.load_all(folder / name)):
        recs = list(run.values())
        if any(rec["case"]["library"] == "stock" for rec in recs):
            for rec, row in zip(recs, rows(recs), strict=True):
                case = {k: v for k, v in rec["case"].items() if k not in _OF_A_RUN}
                if not row.get("below_min_ctx"):  # it ran dense, whatever its name
                    last[str(sorted(case.items()))] = row
    return list(last.values())


def need(rows: Sequence[Any], what: str, command: str) -> None:
    """Refuse to draw nothing.

    Raises:
        NoRecords: there are no rows.
    """
    if not rows:
        raise NoRecords(f"no records of {what}", f"first: {command}")


def caption(figure: Figure, folder: Path) -> str:
    """The caption of a figure, with the machine of the last record and how many are old."""
    recs = [r for r in records.load_all(folder / figure.file) if "env" in r]
    m = recs[-1]["env"]["machine"]
    about = f"{figure.caption} {m['cpu']}, {m['cores']} cores."
    return about + records.about_old(recs)


def default_folder() -> Path:
    """The records of this kind of machine, or else of the machine with the most records."""
    own = records.default_folder()
    if own.is_dir():
        return own
    others = sorted(
        (p for p in own.parent.glob("*/") if any(p.glob("*.jsonl"))),
        key=lambda p: sum(f.stat().st_size for f in p.glob("*.jsonl")),
    )
    return others[-1] if others else own


def name_of(library: str, flash_attn: bool, spec: AttentionSpec) -> str:
    """The name of a line: `SparQ 1/8 q4` for `sparq,ratio=1/8,shadow=q4`."""
    if library == "stock":
        return f"stock -fa {int(flash_attn)}"
    if not spec.sparse:
        return f"our {spec}"
    usual = AttentionSpec(
        spec.method, ratio=spec.ratio, shadow=spec.shadow, gpu_min_mb=spec.gpu_min_mb
    )
    if spec.ratio is None or spec != usual:
        return str(spec)
    shadow = f" {spec.shadow}" if spec.method == "sparq" else ""
    return f"{dict(sparq='SparQ', topk='top-k')[spec.method]} {ratio_text(spec.ratio)}{shadow}"


def colours(names: Sequence[str]) -> dict[str, str]:
    """The colours of lines by name; they are the same in every figure."""
    fixed = {"stock -fa 0": STOCK, "stock -fa 1": STOCK_2, "our dense": OURS_3}
    by_type = {"q4": OURS, "f16": OURS_2, "q8": OURS_3}
    return {n: fixed.get(n) or by_type.get(n.rpartition(" ")[2], PAPER) for n in names}


def make(figure: Figure, folder: Path, out: Path) -> None:
    """Draw one figure from the records in `folder`.

    Raises:
        NoRecords: its records are missing.
        SparqError: matplotlib is missing.
    """
    rows = figure.data(folder)
    try:
        picture = figure.draw(rows)
    except ModuleNotFoundError as e:
        raise SparqError(f"{e.name} is not installed", paths.install_command("figures")) from None
    about = {"Title": figure.title, "Description": caption(figure, folder)}
    write(picture, rows, figure.name, about, out)
