"""The pinned source: fetched whole and true, or not at all."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from pyorch import paths
from pyorch.errors import SparqError
from pyorch.native import source

PIN = source.Pin("sparq-fake", "1.0", "0" * 64, "vendor/llama.cpp", "-", "-")
NAME = "sparq_fake-1.0.tar.gz"
PROJECT = '[build-system]\nrequires = ["not-there"]\nbuild-backend = "scikit_build_core.build"\n'


def sdist(file: Path, members: dict[str, str]) -> Path:
    with tarfile.open(file, "w:gz") as archive:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return file


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPARQ_LLAMA_SOURCE", raising=False)
    return tmp_path / "cache"


def left(cache: Path) -> list[str]:
    """What a download has left, apart from its lock."""
    return [path.name for path in (cache / "sdist").iterdir() if path.name != "lock"]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees nothing but this folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    return folder


def test_download_runs_nothing_of_the_sdist_and_checks_its_sum(cache: Path, index: Path) -> None:
    crash = "raise SystemExit('code of the sdist ran')"
    members = dict.fromkeys(("setup.py", "scikit_build_core/build.py"), crash)
    members["pyproject.toml"] = PROJECT
    file = sdist(index / NAME, {f"sparq_fake-1.0/{name}": text for name, text in members.items()})
    good = source.Pin(**{**PIN.__dict__, "sha256": source.sha256(file)})
    where = source.locate(good)
    source.fetch(good, where)
    assert where.path.read_bytes() == file.read_bytes()
    assert left(cache) == [where.path.name]
    with pytest.raises(SparqError, match="wrong checksum") as error:
        source.fetch(PIN, where)
    assert error.value.hint
    assert not where.path.exists()  # so that the next try downloads it again


@pytest.mark.parametrize("online", [True, False])
def test_without_the_right_file_nothing_runs_and_nothing_is_left(
    cache: Path, index: Path, online: bool
) -> None:
    """As from an index that was broken into, whose build backend is its own; and offline."""
    project = '[build-system]\nrequires = []\nbuild-backend = "own"\nbackend-path = ["."]\n'
    members = {"pyproject.toml": project, "own.py": f"open({str(index / 'ran')!r}, 'w')\n"}
    if online:
        sdist(index / NAME, {f"sparq_fake-1.0/{name}": text for name, text in members.items()})
    with pytest.raises(SparqError, match=NAME if online else "sparq-fake 1.0") as error:
        source.fetch(PIN, source.locate(PIN))
    assert error.value.hint and not (index / "ran").exists()
    assert left(cache) == []


@pytest.mark.parametrize(
    "bad", ["x/vendor/llama.cpp/../../../evil", "x/vendor/llama.cpp/a/../../b"]
)
def test_unsafe_path(tmp_path: Path, bad: str) -> None:
    file = sdist(tmp_path / "s.tar.gz", {"x/vendor/llama.cpp/ok": "1", bad: "2"})
    with pytest.raises(SparqError, match="unsafe path"):
        source.unpack(source.Source(file, "", True), "vendor/llama.cpp", tmp_path / "out" / "deep")
    assert not list(tmp_path.rglob("evil")) and not list(tmp_path.rglob("b"))


def test_truncated_archive(tmp_path: Path) -> None:
    file = sdist(tmp_path / "s.tar.gz", {"x/vendor/llama.cpp/a": os.urandom(4000).hex()})
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(SparqError, match="is damaged"):
        source.unpack(source.Source(file, "", True), "vendor/llama.cpp", tmp_path / "out")


@pytest.mark.parametrize("unpacked", [False, True])
def test_unpack_leaves_out_git_links_and_what_is_skipped(tmp_path: Path, unpacked: bool) -> None:
    top, where = "vendor/llama.cpp", tmp_path / "sdist"
    for name in (".git", "a", "d/b", "docs/c"):
        (where / top / name).parent.mkdir(parents=True, exist_ok=True)
        (where / top / name).write_text(name)
    if not unpacked:
        (where / top / "link").symlink_to("/etc")
        with tarfile.open(where := tmp_path / "s.tar.gz", "w:gz") as archive:
            archive.add(tmp_path / "sdist", "x")
    source.unpack(source.Source(where, "", True), top, out := tmp_path / "out", skip=("docs",))
    files = {str(f.relative_to(out)): f.read_text() for f in out.rglob("*") if f.is_file()}
    assert files == {"a": "a", "d/b": "d/b"}


def test_own_source_is_said_and_not_checked(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sdist(tmp_path / "mine.tar.gz", {"x/a": "1"})
    monkeypatch.setenv("SPARQ_LLAMA_SOURCE", str(file))
    where = source.locate(PIN)
    source.fetch(PIN, where)
    assert where.path == file and not where.pinned
    assert str(file) in capsys.readouterr().err
    sdist(file, {"x/a": "2"})
    assert source.locate(PIN).key != where.key
    monkeypatch.setenv("SPARQ_LLAMA_SOURCE", str(tmp_path))
    with pytest.raises(SparqError, match=tmp_path.name):
        source.locate(PIN)


def test_another_pin_is_chosen_by_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = "# a note\npackage  sparq-fake\nfolder   vendor/llama.cpp\nrepo     -\n"
    blocks = [f"\nversion  {v}\nsha256   {v * 16}\ncommit   c{v}\n" for v in ("1.10", "1.9")]
    (tmp_path / "UPSTREAM").write_text(common + "".join(blocks))
    monkeypatch.delenv("SPARQ_LLAMA_PIN", raising=False)
    assert source.read_pin(tmp_path).version == "1.10"
    monkeypatch.setenv("SPARQ_LLAMA_PIN", "1.9")
    pin = source.read_pin(tmp_path)
    assert (pin.package, pin.version, pin.commit) == ("sparq-fake", "1.9", "c1.9")
    monkeypatch.setenv("SPARQ_LLAMA_PIN", "1.8")
    with pytest.raises(SparqError, match=r"1\.8"):
        source.read_pin(tmp_path)
    (tmp_path / "UPSTREAM").write_text("package  x\n")
    with pytest.raises(SparqError, match="UPSTREAM"):
        source.read_pin(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("version", [pin.version for pin in source.pins()[1:]])
def test_another_pin_passes_the_gate(version: str) -> None:
    """Downloads it, builds it with the series and without, and compares the two."""
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    argv.append("tests/e2e/test_gate.py")
    env = {**os.environ, "SPARQ_LLAMA_PIN": version}
    done = subprocess.run(argv, cwd=paths.REPOSITORY, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
