"""bench/kv_memory.py: what it refuses, and its table."""

from __future__ import annotations

import sys
from pathlib import Path

from click.testing import CliRunner

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import kv_memory

from pyorch import engine
from pyorch.bench import records
from pyorch.errors import SparqError


def test_a_document_that_is_copied_is_refused(model: Path, tmp_path: Path) -> None:
    """Nothing is measured of a cache that is too small for pages of a file."""
    with engine.load(model, attention="sparq") as s:
        engine.read_document(s, tmp_path / "d.kv", engine.Reading("d", "a" * 1500, "plain"))
    args = ["-m", str(model), "--document", str(tmp_path / "d.kv"), "--out", str(tmp_path)]
    result = CliRunner().invoke(kv_memory.command, args)
    assert isinstance(result.exception, SparqError)
    assert "the document is not mapped" in str(result.exception)
    assert not records.load_all(tmp_path / kv_memory.FILE)


def test_the_table() -> None:
    case = {
        "model": "m",
        "document": 1,
        "n_tokens": 32000,
        "spec": "sparq,ratio=1/8",
        "share": 0.25,
        "n_gen": 3,
        "n_threads": 2,
        "n_rounds": 2,
    }
    sample = {"first_s": 1.0, "read": 1 << 20, "system": 3 << 20, "found": 0.75, "held": 1}
    samples = [{**sample, "tokens_s": x, "n_bytes": 4 << 30} for x in ([0.1, 0.2], [0.3])]
    rec = {"case": case, "samples": samples, "model_name": "M", "env": {"machine": {"cpu": "C"}}}
    row = kv_memory.table([rec]).splitlines()[-1]
    cells = [x.strip() for x in row.strip("|").split("|")]
    assert cells[:4] == ["`sparq,ratio=1/8`", "1/4", "1.00", "200.0"]
    assert cells[5:] == ["1 MiB", "3 MiB", "75.0 %"]
