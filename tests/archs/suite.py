"""What the suite of all architectures measures; test_archs.py says what must hold.

A model of each architecture is made by llama.cpp's own test (generate.cpp) and run by both
libraries (run.py). `python suite.py` writes the table of docs/architectures.md for the present pin;
SPARQ_LLAMA_PIN=VERSION is another one.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "e2e"))

from llama import python_environment  # noqa: E402

from pyorch import native, paths  # noqa: E402
from pyorch.native import probe, source  # noqa: E402

PAGE = paths.REPOSITORY / "docs" / "architectures.md"
PINS = [pin.version for pin in source.pins()]
_PARTS = ("common", "ggml", "include", "src", "tests", "vendor")


def build_generator(folder: Path) -> None:
    """Compile `folder/generate` of the present pin; its library is the stock one."""
    pin = source.read_pin()
    where, library = source.locate(pin), native.built(stock=True)
    source.unpack(where, pin.folder, tree := folder / "llama.cpp", only=_PARTS)
    test = tree / "tests" / "test-llama-archs.cpp"
    argv = [*shlex.split(probe.need_compiler().cxx), "-std=c++17", "-O1", f'-DTEST_SOURCE="{test}"']
    argv += [f"-I{tree / part}" for part in ("tests", "include", "src", "common", "vendor")]
    argv += [f"-I{tree / 'ggml' / 'include'}", str(HERE / "generate.cpp")]
    argv += ["-o", str(folder / "generate"), f"-L{library}", f"-Wl,-rpath,{library}"]
    argv += ["-lllama", "-lggml", "-lggml-base"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def architectures(generator: Path) -> dict[str, str]:
    """The names that this pin knows, each with "" or why there is no model of it."""
    done = subprocess.run([generator], capture_output=True, text=True, check=True)
    return dict(line.split("\t") for line in done.stdout.splitlines())


@dataclass(frozen=True)
class Outcome:
    """What one library gave for one model: logits of each case, and facts of it (run.py)."""

    logits: Mapping[str, np.ndarray]
    facts: Mapping[str, Any]

    def refused(self, case: str) -> str:
        """Why the library refuses a case; "" if it does not."""
        return str(self.facts[case].get("refused", ""))

    def info(self, case: str) -> Mapping[str, Any]:
        """What our library says after a case."""
        return self.facts[case]["info"]

    @property
    def reasons(self) -> list[str]:
        """Why there is no sparse attention, or not in all layers, each reason once."""
        if why := self.refused("sparse"):
            return [why]
        info = self.info("sparse")
        found = [info["reason"], *(layer["reason"] for layer in info["layers"])]
        return [x for x in dict.fromkeys(found) if x]

    @property
    def n_sparse(self) -> int:
        """How many calls of attention were sparse."""
        if self.refused("sparse"):
            return 0
        return int(self.info("sparse")["counters"]["calls_sparse"])


def make(generator: Path, name: str, folder: Path) -> Path:
    """The model of an architecture, in that folder."""
    subprocess.run([generator, folder, name], capture_output=True, check=True)
    return folder / f"{name}.gguf"


def run(model: Path, *cases: str, stock: bool = False) -> Outcome:
    """These cases of a model, or all, on one library."""
    out = model.with_suffix(".stock.npz" if stock else ".npz")
    argv = [sys.executable, str(HERE / "run.py"), str(model), str(out), *cases]
    env = python_environment(stock, OMP_WAIT_POLICY="passive")
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(out) as found:
        facts = json.loads(str(found["facts"]))
        assert facts.pop("ours") != stock  # two libraries, not one with itself
        return Outcome({k: found[k] for k in found if k != "facts"}, facts)


# ---- the page ----


def cell(ours: Outcome) -> str:
    """What the table says of an architecture."""
    said = ", ".join(ours.reasons)
    if not ours.n_sparse:
        return f"dense: {said}"
    return f"sparse, but for: {said}" if said else "sparse"


@functools.cache
def table() -> dict[str, dict[str, str]]:
    """Architecture -> pin -> what the page says of it; a pin that does not know it is missing."""
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("|")]
    head, _, *rows = [[x.strip() for x in line.strip("|").split("|")] for line in lines]
    outcomes: dict[str, dict[str, str]] = {}
    for *cells, names in rows:
        for name in names.split(", "):
            outcomes[name] = {pin: x for pin, x in zip(head, cells, strict=False) if x}
    return outcomes


def written(rows: Mapping[str, Mapping[str, str]]) -> str:
    """The page with this table in place of its own: a line for each outcome."""
    by_outcome: dict[tuple[str, ...], list[str]] = {}
    for name, row in sorted(rows.items()):
        by_outcome.setdefault(tuple(row.get(pin, "") for pin in PINS), []).append(name)
    lines: list[Sequence[str]] = [[*PINS, "architectures"], ["---"] * (1 + len(PINS))]
    lines += [(*outcome, ", ".join(names)) for outcome, names in sorted(by_outcome.items())]
    shown = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return re.sub(r"(?m)(^\|.*\n)+", lambda _: shown, PAGE.read_text("utf-8"), count=1)


def main() -> None:
    pin, rows = source.read_pin().version, {name: dict(row) for name, row in table().items()}
    with tempfile.TemporaryDirectory() as temp:
        build_generator(Path(temp))
        for name, why in architectures(generator := Path(temp) / "generate").items():
            row = rows.setdefault(name, {})
            row[pin] = f"not made: {why}"
            if not why:
                row[pin] = cell(run(make(generator, name, Path(temp)), "sparse"))
            print(f"{name}: {row[pin]}", file=sys.stderr)
            for file in Path(temp).glob(f"{name}.*"):
                file.unlink()
    PAGE.write_text(written(rows), "utf-8")


if __name__ == "__main__":
    main()
