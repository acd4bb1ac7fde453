"""Built once for the same inputs; nothing half-built is ever used; every failure is one line."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from fakes import edit, runs

from pyorch import native, paths
from pyorch.errors import SparqError
from pyorch.native import build, probe

OPTIONS = build.Options()


def make(options: build.Options = OPTIONS, **more: object) -> Path:
    return build.build(options, **more)  # type: ignore[arg-type]


def trees(world: Path) -> list[Path]:
    return list((world / "cache" / "build").iterdir())


INPUTS: dict[str, tuple[object, ...]] = {  # a file that gets another line, or what the probe finds
    "upstream": ("sdist/vendor/llama.cpp/src/b.cpp",),
    "patch": ("patches/0001-hook.patch",),
    "ours": ("ggml_ops/cpu/op.c",),
    "another file": ("ggml_ops/new.c",),
    "compiler": ("find_compiler", probe.Compiler("cc", "c++", "another")),
    "CPU": ("cpu", ("another", "another")),
    "flags": ("probe", probe.Probe((), ("-O1",), {}, True)),
    "OpenMP": ("probe", probe.Probe((), (), {}, False)),
}


@pytest.mark.parametrize("what", [*INPUTS, "CFLAGS", "CUDAFLAGS"])
def test_every_input_counts(world: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    before = make()
    name, *values = INPUTS.get(what, (None,))
    if values:
        monkeypatch.setattr(probe, str(name), lambda *_, **__: values[0])
    elif name is None:
        monkeypatch.setenv(what, "-O1")
    else:
        with (world / str(name)).open("a") as file:
            file.write("\n")
    assert make() != before and runs(world) == 2
    assert before.is_dir()  # programs that use it go on


@pytest.mark.skipif(not hasattr(os, "ST_NOEXEC"), reason="the system does not say it")
def test_a_place_where_nothing_runs_is_refused(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    for use in (make, native.built, native.lib_dir):
        with pytest.raises(SparqError, match="noexec") as e:
            use()
        assert "SPARQ_CACHE" in e.value.hint
    assert runs(world) == 1


def test_options_count(world: Path) -> None:
    every = [build.Options(stock=s, portable=p) for s in (False, True) for p in (False, True)]
    assert len({make(options) for options in every}) == 4
    texts = {(tree / "src/src/a.cpp").read_text() for tree in trees(world)}
    assert texts == {"one\ntwo\n", "one\nhook\ntwo\n"}


def test_what_does_not_count(world: Path) -> None:
    before = make()
    (world / "ggml_ops" / "README.md").write_text("prose")
    os.utime(world / "ggml_ops" / "op.c", (1, 1))
    assert build.find(OPTIONS) == make() == before and runs(world) == 1


def test_an_edit_of_our_sources_keeps_the_work_tree(world: Path) -> None:
    make()
    (tree,) = trees(world)
    kept = (tree / "ops" / "op.c").stat().st_mtime_ns
    (world / "ggml_ops" / "cpu" / "op.c").write_text("int c;\n")
    (world / "ggml_ops" / "cpu" / "more.c").write_text("int d;\n")
    make()
    assert trees(world) == [tree]
    assert (tree / "ops" / "cpu" / "op.c").read_text() == "int c;\n"
    assert (tree / "ops" / "op.c").stat().st_mtime_ns == kept  # ninja leaves it alone
    (world / "ggml_ops" / "cpu" / "more.c").unlink()
    make()
    assert not (tree / "ops" / "cpu" / "more.c").exists()


def test_edits_during_a_build(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stamp is that of what was compiled, not of what was there when the build began."""
    edited = {"ggml_ops/op.c": "int edited;\n"}
    prepare = build.prepare

    def meanwhile(tree: Path, options: build.Options) -> None:
        for name, text in edited.items():
            (world / name).write_text(text)
        prepare(tree, options)

    monkeypatch.setattr(build, "prepare", meanwhile)
    assert make() == build.find(OPTIONS)
    edit(world, "a")
    assert build.find(OPTIONS) is None
    edited["patches/0002-late.patch"] = ""
    with pytest.raises(SparqError, match="patches/"):
        make()


def test_a_portable_build_is_used_where_there_is_no_other(world: Path) -> None:
    portable = make(build.Options(portable=True))
    assert native.lib_dir() == portable
    best = make()
    assert native.lib_dir() == best != portable


def test_what_is_not_built_is_not_built_unasked(world: Path) -> None:
    assert native.find() is None
    with pytest.raises(SparqError) as e:
        native.lib_dir(stock=True, tools=("llama-cli",))
    assert "build --stock --tools" in e.value.hint
    assert not build.finished()
    assert native.built() == native.lib_dir() == native.find()


def test_a_build_without_its_bindings_or_its_stamp_is_none(world: Path) -> None:
    folder = make()
    shutil.rmtree(build.bindings() / "llama_cpp")
    assert native.find() is None
    assert make() == folder == native.find()
    (folder / "stamp.json").write_text("")
    assert build.find(OPTIONS) is None
    assert make() == folder == build.find(OPTIONS)


def test_tools_come_later(world: Path) -> None:
    folder = make()
    assert build.find(OPTIONS, ("llama-bench",)) is None
    assert make(tools=("llama-bench",)) == folder
    assert (folder / "llama-bench").is_file() and (folder / "libllama-common.so").is_file()
    assert make(force=True) == folder
    assert (folder / "llama-bench").is_file()  # once there, it is kept up to date
    edit(world, "z")
    names = {file.name for file in make().iterdir()}
    assert names == {"libllama.so", "stamp.json"}  # the tools in the work tree are of before


@pytest.mark.parametrize("lacks", ["compiler", "system"])
def test_where_nothing_can_be_built(
    world: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    """What is built is used."""
    folder = make()
    if lacks == "compiler":
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setattr("platform.system", lambda: "Windows")
    assert build.find(OPTIONS) == folder
    edit(world, "z")
    with pytest.raises(SparqError, match="compiler|Windows") as error:
        make()
    assert error.value.hint and build.find(OPTIONS) is None


def test_compile_error(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named where a person can edit it."""
    file = world / "cache" / "build" / "*" / "ops" / "op.c"
    script = f"echo 'note: fine'; for f in {file}; do echo \"$f:1: error: nothing\"; done; exit 1"
    monkeypatch.setenv("FAKE_NINJA", script)
    with pytest.raises(SparqError) as error:
        make()
    assert f"{world}/ggml_ops/op.c:1: error: nothing" in error.value.message
    assert "note: fine" in Path(error.value.hint.removeprefix("full log: ")).read_text()
    assert build.find(OPTIONS) is None


@pytest.mark.parametrize(
    ("script", "hint"),
    [
        ("kill -9 $$", "--jobs 1"),
        ("echo 'c++: fatal error: Killed signal terminated cc1plus'; exit 1", "--jobs 1"),
        ("echo 'ld: final link failed: No space left on device'; exit 1", "SPARQ_CACHE"),
        ("exit 3", "log"),
    ],
)
def test_ninja_dies(world: Path, monkeypatch: pytest.MonkeyPatch, script: str, hint: str) -> None:
    monkeypatch.setenv("FAKE_NINJA", script)
    with pytest.raises(SparqError, match="ninja failed") as error:
        make()
    assert hint in error.value.hint
    assert build.find(OPTIONS) is None
    monkeypatch.delenv("FAKE_NINJA")
    assert make() == build.find(OPTIONS)


@pytest.mark.parametrize(("module", "step"), [(Path, "write_bytes"), (shutil, "copy2")])
def test_disk_is_full(
    world: Path, monkeypatch: pytest.MonkeyPatch, module: object, step: str
) -> None:
    """When the source is unpacked, and when the result is copied."""

    def full(*args: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(module, step, full)
        make()
    assert build.find(OPTIONS) is None
    assert (make() / "libllama.so").is_file()


def start(world: Path, ninja: str) -> subprocess.Popen[str]:
    """The same build in another process."""
    env = {**os.environ, "FAKE_NINJA": ninja, "PYTHONPATH": str(paths.REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("fakes.py")), str(world)],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


@pytest.mark.parametrize("killed", [False, True])
def test_a_second_build_waits_for_the_first(world: Path, killed: bool) -> None:
    """Also for the compilers of one that was killed, which go on."""
    busy, go, gone = world / "busy", world / "go", world / "gone"
    first = start(world, f"touch {busy}; while [ ! -e {go} ]; do sleep 0.05; done; touch {gone}")
    while not busy.exists() and first.poll() is None:
        time.sleep(0.01)
    assert build.find(OPTIONS) is None  # not while it is being built
    if killed:
        first.kill()
        assert build.find(OPTIONS) is None
    second = start(world, f"[ -e {gone} ] || exit 1")
    assert second.stderr is not None
    line = second.stderr.readline()
    assert "waiting" in line and (killed or str(first.pid) in line)
    go.touch()
    built = [process.communicate(timeout=30)[0].strip() for process in (first, second)]
    assert (first.returncode == 0) is not killed and second.returncode == 0
    assert set(built) <= {"", str(build.find(OPTIONS))} and built[1]
    assert runs(world) == 1 + killed


def test_a_build_waits_for_who_unpacks_the_same_bindings(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make wheels`, which holds another lock than builds do."""
    thread = Thread(target=make)
    with paths.locked(build.bindings()):
        thread.start()
        while thread.is_alive() and "waiting for process" not in capsys.readouterr().err:
            time.sleep(0.01)
        assert thread.is_alive() and not build.has_bindings()
    thread.join()
    assert build.has_bindings()


def test_old_builds_are_deleted_but_none_of_another_kind(world: Path) -> None:
    stock = make(build.Options(stock=True))
    for i in range(build._KEEP_BUILDS + 2):
        edit(world, f"a{i}")
        newest = make()
    assert len(build.finished()) == build._KEEP_BUILDS + 1
    assert newest.is_dir() and stock.is_dir()
