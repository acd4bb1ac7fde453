"""What a token launches per layer, dense and sparse, from two summaries of kernels by nsys.

bench/gpu/all.sh makes them. The second has the tokens of the first, and sparse ones, whose launches
are the difference.
"""

from __future__ import annotations

import csv
from pathlib import Path

import click
import numpy as np

from pyorch.errors import SparqError
from pyorch.models.synth import shape_like
from pyorch.table import markdown

SPARSE = 72  # tokens with -n 32 -r 1: two turns, each of 3 to warm up, and 33
DENSE = SPARSE + 1  # the one from which the cache is filled
N_LAYER = shape_like("llama2-7b").n_layer
Sums = dict[str, np.ndarray]  # launches and nanoseconds by kernel


def read(file: Path) -> Sums:
    """The table in a file, before which nsys writes other lines.

    Raises:
        SparqError: there is none.
    """
    lines = file.read_text("utf-8").splitlines()
    start = next((i for i, line in enumerate(lines) if "Instances" in line), len(lines))
    columns = "Instances", "Total Time (ns)"
    sums = {
        x["Name"]: np.array([int(x[c]) for c in columns]) for x in csv.DictReader(lines[start:])
    }
    if not sums:
        raise SparqError(f"{file}: nsys saw no kernel", "bench/gpu/all.sh nodes-dense nodes-sparse")
    return sums


def table(dense: Sums, both: Sums) -> str:
    """A row for all kernels, and one for each, the longest first."""
    rows = {}
    for name in both | dense:
        x, y = (sums.get(name, np.zeros(2)) for sums in (dense, both))
        rows[name] = np.r_[x / DENSE, (y - x) / SPARSE] / N_LAYER / (1, 1e3, 1, 1e3)
    rows["all"] = np.sum([*rows.values()], axis=0)
    names = sorted(rows, key=lambda name: -max(rows[name][1::2]))
    cells = ([name, *(f"{x:.2f}" for x in rows[name])] for name in names)
    return markdown(["kernel", "dense: launches", "us", "sparse: launches", "us"], cells)


@click.command(help=str(__doc__).partition("\n")[0])
@click.argument("files", nargs=2, metavar="DENSE BOTH", type=Path)
def command(files: tuple[Path, Path]) -> None:
    print(table(*map(read, files)))
