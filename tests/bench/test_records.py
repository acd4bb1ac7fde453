"""Records of measurements."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pyorch import native
from pyorch.cli.bench import measurement
from pyorch.errors import SparqError
from pyorch.measure import records


def make(n: int, stamp: str = "s") -> records.Record:
    return records.record("b", {"n": n}, stamp, samples_ns=[n, 2], env={"machine": {}})


def test_records_round_trip_and_the_last_of_a_key_wins(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "r.jsonl"
    first, again, other = make(1), make(1), make(2)
    again["samples_ns"] = [7]
    assert len({first["key"], other["key"], make(1, "t")["key"]}) == 3
    for rec in (first, other, again):
        records.append(file, rec)
    assert records.load(file) == {again["key"]: again, other["key"]: other}
    assert records.load(tmp_path / "none.jsonl") == {}


def test_another_version_of_a_measurement_measures_again_and_older_ones_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = make(1)
    unversioned = {k: v for k, v in first.items() if k != "version"}
    assert first["version"] == 1 and not records.is_old(first) and records.is_old(unversioned)
    assert records.key("b", {"n": 1}, "s", 0) != first["key"]
    monkeypatch.setitem(records.VERSIONS, "b", 2)
    again = make(1)
    assert again["key"] != first["key"] and records.is_old(first) and not records.is_old(again)
    assert records.about_old([again]) == ""
    assert records.about_old([first, again]).endswith("earlier version of the measurement: 1 of 2.")
    # a task of `eval` may have a version of its own
    assert records.version_of("eval needle") == records.VERSIONS["eval"]
    monkeypatch.setitem(records.VERSIONS, "eval needle", 7)
    assert (records.version_of("eval needle"), records.version_of("eval squad")) == (7, 1)


def test_records_go_on_after_an_interrupted_write(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    records.append(file, make(1))
    whole = file.read_text()
    file.write_text(whole + whole[:30])
    assert list(records.load(file)) == [make(1)["key"]]
    records.append(file, make(2))
    file.write_text(file.read_text().rstrip())  # as an editor may leave it
    records.append(file, make(3))
    assert [rec["case"]["n"] for rec in records.load_all(file)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x93NUMPY\xff", "is not a file of records"),
        (b'{"schema":1,"be\n{"schema":1}\n', "line 1 is not a record"),
        (b'{"schema":0,"key":"x"}\n', "schema 0"),
        (b"[1,2]\n", "line 1 is not a record"),
        (b"5", "line 1 is not a record"),
        (b'{"schema":1}\n', "line 1 is not a record"),
    ],
)
def test_what_is_no_record_is_told(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "r.jsonl"
    file.write_bytes(content)
    with pytest.raises(SparqError, match=message) as e:
        records.load(file)
    assert e.value.hint


def test_the_commit_is_that_of_our_own_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of one that a copy without .git lies in."""
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)  # in a hook they name the repository of whoever runs the tests
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)

    def git(*args: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *args], check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "-m", "x")
    monkeypatch.setattr(records.paths, "REPOSITORY", tmp_path.resolve())
    assert len(records._commit()["commit"]) == 40
    for name, dirty in (("bench/results/b.jsonl", False), ("bench/b.py", True)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
        assert records._commit()["dirty"] == dirty, name
    copy = tmp_path / "copy"
    copy.mkdir()
    monkeypatch.setattr(records.paths, "REPOSITORY", copy.resolve())
    assert records._commit() == {"commit": "", "dirty": False}


@dataclass(frozen=True)
class Case:
    n: int
    library: str = "sparq"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[records.Record]]:
    """Measures groups of cases, whose sample is how many were measured before."""
    env = {"stamps": {"sparq": "s"}, "machine": {"cpu": "A"}}
    monkeypatch.setattr(native, "built", lambda stock=False: Path())
    monkeypatch.setattr(records, "environment", lambda libraries: env)
    n_measured = 0

    def measure(_: object, group: Sequence[Case], __: object) -> list[records.Result]:
        nonlocal n_measured
        n_measured += 1
        return [{"samples_ns": [n_measured]}]

    made = measurement.Measurement("b", None, Case, lambda _: [], measure, str)

    def of(file: Path, *sizes: int, force: bool = False, cpu: str = "A") -> list[records.Record]:
        env["machine"] = {"cpu": cpu}
        groups = [[Case(n)] for n in sizes]
        recs, n_failed = measurement.measured(made, None, groups, file, force=force)
        assert not n_failed
        return recs

    return of


def test_what_cannot_be_kept_is_not_measured(run: Callable[..., Any]) -> None:
    with pytest.raises(SparqError, match="/dev/null/r: ") as e:
        run(Path("/dev/null/r"), 512, force=True)
    assert "--out" in e.value.hint


def test_a_group_is_measured_once(run: Callable[..., Any], tmp_path: Path) -> None:
    """`-d 4096,4096`, or types of K that are named twice; another run measures what lacks."""
    file = tmp_path / "r.jsonl"
    assert [rec["samples_ns"] for rec in run(file, 512, 1024, 512)] == [[1], [2]]
    assert [rec["samples_ns"] for rec in run(file, 2048, 512)] == [[3], [1]]
    assert [rec["samples_ns"] for rec in run(file, 512, 512, force=True)] == [[4]]
    assert [rec["samples_ns"] for rec in run(file, 512)] == [[4]], "the last counts"
    assert [rec["samples_ns"] for rec in run(file, 512, cpu="B")] == [[5]], "another machine"


@pytest.mark.usefixtures("native_lib_dir")
def test_environment_says_what_ran_and_names_no_host() -> None:
    env = records.environment({"sparq": native.lib_dir()})
    assert env["stamps"]["sparq"] == native.lib_dir().name.rsplit("-", 1)[1]
    assert env["pin"].startswith("llama-cpp-python")
    assert set(env["machine"]) == {"cpu", "cores", "memory_gib", "arch", "system"}
    assert records.machine_name().endswith("-cores")
