"""The numbers that are published follow from the committed records: the marked ones of the
documents, the tables beside the records and the CSVs of the figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import draw, numbers
from bench.users import prompt_time, serving
from pyorch import table as tables
from pyorch.cli.bench import attention_time, measurement, speed
from pyorch.evals import figures, series, table
from pyorch.measure import records

ROOT = Path(__file__).parents[1]
EPYC = ROOT / "bench" / "results" / "amd-epyc-2-cores"
H100 = ROOT / "bench" / "results" / "nvidia-h100-intel-xeon-16-cores"


@pytest.mark.parametrize("file", numbers.documents(), ids=lambda f: f.name)
def test_make_numbers_changes_nothing(file: Path) -> None:
    text = file.read_text("utf-8")
    new, wrong, _ = numbers.fill(text)
    assert wrong == []
    assert new == text, "`make numbers` fills the marks"


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., Path]:
    """Writes the records of a server as they would be now, with changes; returns their folder."""

    def written(machine: str = "m", **changes: Any) -> Path:
        for rec in records.load_all(EPYC / serving.FILE):
            rec |= {"version": changes.get("version", records.version_of("serving"))}
            rec["env"] |= {"dirty": changes.get("dirty", False)}
            records.append(tmp_path / machine / serving.FILE, rec)
        return tmp_path

    return written


def test_a_mark_is_filled_in_its_own_form(results: Callable[..., Path]) -> None:
    mark = "a <!--{}:serving;1/8;tokens_per_s*-->{}<!--/-->".format
    filled, wrong, history = numbers.fill(mark("history", "0 (1,000.00 to 5.0 %)"), results())
    assert (filled, wrong, history) == (mark("n", "94 (92.51 to 94.5 %)"), [], [])
    table = "<!--n:serving||=|tokens_per_s;speedup-->\n| a | b | c |\n| - | - | - |\n{}<!--/-->"
    rows = "| 9 | ours, exact | {} |\n| 9 | | {} |\n| 9 | llama.cpp `-fa 1` | cannot |\n".format
    filled, wrong, _ = numbers.fill(table.format(rows("0 (0.00x)", "0.0, 0")), results())
    assert (filled, wrong) == (table.format(rows("74 (1.52x)", "73.8, 2")), [])


@pytest.mark.parametrize(
    ("mark", "changes"),
    [
        ("<!--n:serving;1/8;speedup-->2<!--/-->", {"version": 0}),
        ("<!--n:serving;1/8;speedup-->2<!--/-->", {"dirty": True}),
        ("<!--n:missing;1/8;speedup-->2<!--/-->", {}),
        ("<!--history:missing;1/8;speedup-->2<!--/-->", {}),
        ("<!--n:serving;1/16;speedup-->2<!--/-->", {}),
        ("<!--n:serving;speedup-->2<!--/-->", {}),
        ("<!--n:serving;1/8;speedup-->2 and 3<!--/-->", {}),
        ("<!--n:serving;1/8;slowdown-->2<!--/-->", {}),
        ("<!--n:serving;1/8;speedup-->2", {}),
        ("A\n<!--n:serving;1/8;speedup-->2<!--/-->", {}),
    ],
)
def test_a_mark_without_a_record_that_counts_is_refused(
    mark: str, changes: dict[str, Any], results: Callable[..., Path]
) -> None:
    """The last two would not be shown as text: a comment ends, and begins no line."""
    text, wrong, _ = numbers.fill(f"It is {mark}", results(**changes))
    assert len(wrong) == 1 and text == f"It is {mark}"


def test_records_of_two_machines_need_its_name(results: Callable[..., Path]) -> None:
    results("intel-2-cores")
    folder = results("intel-4-cores")
    for name, n_wrong in (("serving", 1), ("intel-4*/serving", 0)):
        assert len(numbers.fill(f"a <!--n:{name};1/8;speedup-->2<!--/-->", folder)[1]) == n_wrong


# the tables that are made from the records beside them
TABLES: dict[str, Callable[[], str]] = {
    **{
        name: lambda name=name: table.of_folder(
            EPYC / name, lambda f: table.markdown(series.read_folder(f))
        )
        for name in ("eval", "eval-real", "eval-floor", "eval-prompts", "ablations")
    },
    **{
        name: lambda name=name, made=made: made(
            records.latest(records.load_all(EPYC / f"{name}.jsonl"))
        )
        for made, names in (
            (speed.markdown, "speed token_rate/speed geometries/speed long/speed"),
            (attention_time.markdown, "attention"),
            (prompt_time.table, "long/prompt_time ik_llama/prompt_time"),
        )
        for name in names.split()
    },
    **{
        of.name: lambda of=of: measurement.whole_table(of, EPYC)
        for of in (prompt_time.MEASUREMENT, serving.MEASUREMENT)
    },
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_beside_records_is_made_from_them(name: str) -> None:
    assert (EPYC / f"{name}.md").read_text("utf-8") == TABLES[name]() + "\n"


def needles() -> list[dict[str, Any]]:
    """Those that `sparq-cpp eval plot` draws."""
    groups = series.by_setting(series.read_folder(EPYC / "eval", ["needle"]))
    return figures.needle_rows(groups[-1])


@pytest.mark.parametrize("name", [*draw.FIGURES, "eval_needle"])
def test_the_numbers_of_a_figure_are_those_of_the_records(name: str) -> None:
    folder = H100 if "gpu" in name else EPYC
    rows = needles() if name == "eval_needle" else draw.figure(name).data(folder)
    short = [{k: f"{v:.6g}" if isinstance(v, float) else v for k, v in r.items()} for r in rows]
    kept = (ROOT / "bench" / "figures" / f"{name}.csv").read_text("utf-8")
    assert kept == tables.as_csv(short) + "\n", "`make figures` draws it again"
