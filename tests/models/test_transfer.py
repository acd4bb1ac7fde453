"""Downloads that are interrupted, slow, refused or wrong, over real HTTP on this machine."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hub_server import COMMIT, REPO, Hub, found, serve
from huggingface_hub import constants, hf_hub_download, scan_cache_dir
from tiny_gguf import write_tiny_gguf

from pyorch.errors import SparqError
from pyorch.models import pull, transfer


def load(text: str = f"hf:{REPO}", say: Callable[[str], None] = lambda _: None) -> pull.Model:
    return pull.download(found(text), say=say)


def refused(text: str = f"hf:{REPO}") -> SparqError:
    with pytest.raises(SparqError) as e:
        load(text)
    assert "\n" not in e.value.message + e.value.hint
    return e.value


def incomplete(hub: Hub) -> list[int]:
    """Sizes of the unfinished downloads."""
    parts = Path(constants.HF_HUB_CACHE).glob("*/blobs/*.incomplete")
    return [p.stat().st_size for p in sorted(parts)]


def starts(hub: Hub) -> list[int]:
    """Where the requests began."""
    return [int(asked.removeprefix("bytes=").split("-")[0]) for _, asked in hub.sent()]


def shards(folder: Path, n: int) -> dict[str, bytes]:
    out = {}
    for i in range(1, n + 1):
        path = folder / f"m-0000{i}-of-0000{n}.gguf"
        write_tiny_gguf(path, n_layer=1, seed=i, keys={"split.count": n})
        out[path.name] = path.read_bytes()
    return out


# ---- interrupted ----


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_is_resumed(
    hub: Hub, gguf: bytes, run: Callable[..., Any], how: signal.Signals
) -> None:
    hub.files, hub.hold_after = {"m.gguf": gguf}, 300_000
    home = str(Path(constants.HF_HUB_CACHE).parent)
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": home, "HF_HUB_DOWNLOAD_TIMEOUT": "2"}
    env.pop("HF_HUB_CACHE", None)
    argv = [sys.executable, "-m", "pyorch", "pull", f"hf:{REPO}"]
    with subprocess.Popen(argv, env=env, stderr=subprocess.PIPE) as process:
        for _ in range(1000):
            if incomplete(hub) == [300_000]:
                break
            time.sleep(0.02)
        process.send_signal(how)
        process.communicate()
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130}[how]
    assert incomplete(hub) == [300_000]
    hub.hold_after = None
    before = len(hub.sent())
    status, out, err = run("pull", f"hf:{REPO}")
    assert status == 0 and Path(out.strip()).read_bytes() == gguf
    assert "264 KiB to download, 293 KiB already downloaded" in err
    assert starts(hub)[before:] == [300_000] and incomplete(hub) == []


@pytest.mark.parametrize("reset", [False, True])
def test_broken_connections_are_resumed(hub: Hub, gguf: bytes, reset: bool) -> None:
    hub.files, hub.breaks, hub.reset = {"m.gguf": gguf}, [100_000, 200_000], reset
    said: list[str] = []
    assert load(say=said.append).path.read_bytes() == gguf
    assert starts(hub) == [0, 100_000, 300_000]
    assert len(said) == 2 and "m.gguf: the connection broke; try 2 of 5 in 0 s" in said


def test_tries_are_counted_while_nothing_comes(hub: Hub, gguf: bytes) -> None:
    hub.files, hub.breaks = {"m.gguf": gguf}, [1000] * (2 * transfer.TRIES)
    assert load().path.read_bytes() == gguf
    hub.files, hub.breaks = {"n.gguf": gguf[::-1]}, [1000] + [0] * 99
    before = len(hub.sent())
    error = refused()
    assert "no usable answer" in error.message and "network" in error.hint
    assert len(hub.sent()) - before == 1 + transfer.TRIES - 1 and incomplete(hub) == [1000]
    hub.breaks = []
    assert load().path.read_bytes() == gguf[::-1] and starts(hub)[-1] == 1000


# ---- slow ----


def test_a_slow_link_is_let_be_and_a_dead_one_is_not(
    hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1.2)
    monkeypatch.setattr(transfer, "TRIES", 2)
    hub.files, hub.block_s = {"slow.gguf": gguf[:30_000]}, 0.06
    began = time.monotonic()
    load()
    assert time.monotonic() - began > 1.8 and starts(hub) == [0]
    hub.files, hub.block_s, hub.hold_after = {"dead.gguf": gguf[:5000]}, 0, 2000

    def wakes(_: str) -> None:
        hub.hold_after = None

    assert load(say=wakes).path.read_bytes() == gguf[:5000]
    assert starts(hub) == [0, 0, 2000]
    hub.files, hub.hold_after = {"deader.gguf": gguf[:6000]}, 0
    assert "no usable answer" in refused().message


# ---- refused ----


@pytest.mark.parametrize("where", ["/api/", "/resolve/"])
def test_a_busy_hub_is_waited_for(hub: Hub, gguf: bytes, where: str) -> None:
    hub.files, hub.refuse = {"m.gguf": gguf}, where
    hub.refusals = [(429, {"Retry-After": "1"}), (503, {}), (429, {"RateLimit": '"x";r=0;t=1'})]
    began, said = time.monotonic(), []
    assert pull.download(found(say=said.append), say=said.append).path.read_bytes() == gguf
    assert time.monotonic() - began > 2 and hub.refusals == []
    assert [s.split(": ")[1] for s in said] == [
        "the hub answered 429; try 2 of 5 in 1 s",
        "the hub answered 503; try 3 of 5 in 0 s",
        "the hub answered 429; try 4 of 5 in 1 s",
    ]


def test_what_will_not_pass_is_not_tried_again(
    hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing is public, the file is not. What is said: test_pull.py."""
    monkeypatch.setattr(transfer, "LONGEST_WAIT_S", 8)
    hub.files = {"m.gguf": gguf}
    for answer, said in (((403, {}), "denied"), ((429, {"Retry-After": "9"}), "too many requests")):
        hub.refusals = [answer] * 9
        assert said in refused().message and len(hub.refusals) == 8


# ---- wrong ----


@pytest.mark.parametrize("rubbish", [b"rubbish", b"rubbish" * 100_000])
def test_wrong_beginnings_are_found(hub: Hub, gguf: bytes, rubbish: bytes) -> None:
    hub.files = {"m.gguf": gguf}
    part = transfer.repo_folder(REPO) / "blobs" / f"{hub.digest(gguf)}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(rubbish)
    assert "wrong checksum" in refused().message and incomplete(hub) == []
    assert load().path.read_bytes() == gguf


def test_ranges_of_other_servers(hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that knows no ranges, one that sends another, one that sends too much, one in parts."""
    hub.files, hub.breaks, hub.no_ranges = {"a.gguf": gguf}, [1000], True
    assert load().path.read_bytes() == gguf and starts(hub) == [0, 1000]
    hub.files, hub.breaks, hub.no_ranges = {"b.gguf": gguf[1:]}, [1000], False
    hub.shift = 1
    assert "a different part" in refused().message
    hub.files, hub.breaks, hub.shift, hub.more = {"c.gguf": gguf[2:]}, [], 0, b"more"
    assert load().path.read_bytes() == gguf[2:]
    monkeypatch.setattr(transfer, "PART", 200_000)
    hub.files, hub.more, n = {"d.gguf": gguf[3:]}, b"", len(gguf) - 3
    before = len(hub.sent())
    assert load().path.read_bytes() == gguf[3:]
    asked = [asked for _, asked in hub.sent()[before:]]
    assert asked == ["bytes=0-199999", "bytes=200000-399999", f"bytes=400000-{n - 1}"]


@pytest.mark.parametrize("off", [-1000, 1000])
def test_a_wrong_size(hub: Hub, gguf: bytes, off: int) -> None:
    hub.files, hub.sizes = {"m.gguf": gguf}, {"m.gguf": len(gguf) + off}
    error = refused()
    assert "wrong checksum" in error.message if off < 0 else "no usable" in error.message


def test_a_full_disk(hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {"m.gguf": gguf}

    def full(state: object, block: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(transfer._State, "write", full)
    error = refused()
    assert "the disk is full" in error.message and "pull again" in error.hint
    assert starts(hub) == [0]


# ---- several at once ----


def test_parts_come_at_once_with_one_count(hub: Hub, tmp_path: Path) -> None:
    hub.files, hub.block_s = shards(tmp_path, 4), 0.0005
    model, seen = found(), []
    got = pull.download(model, lambda done, total: seen.append((done, total)))
    n_bytes = sum(map(len, hub.files.values()))
    assert seen == sorted(seen) and seen[-1] == (n_bytes, n_bytes)
    assert [f.path.read_bytes() for f in got.files if f.path] == list(hub.files.values())
    assert hub.at_once >= 2 and len(hub.fetched()) == 4


def test_a_refused_part_stops_the_others(hub: Hub, tmp_path: Path) -> None:
    hub.files, hub.block_s = shards(tmp_path, 2), 0.01  # 6 s
    hub.refuse, hub.refusals = "-00002-of", [(403, {})] * 9
    assert "access denied" in refused().message
    blobs = Path(constants.HF_HUB_CACHE).glob("*/blobs/*")
    assert all(blob.suffix == ".incomplete" for blob in blobs)
    there = incomplete(hub)
    hub.refusals, hub.block_s = [], 0
    model = load()
    assert [f.path.read_bytes() for f in model.files if f.path] == list(hub.files.values())
    assert there == [] or there[0] in starts(hub)  # what came is not loaded again


def test_a_file_is_loaded_by_one_at_a_time(hub: Hub, gguf: bytes) -> None:
    hub.files, hub.block_s = {"m.gguf": gguf}, 0.001
    models, said = [], []
    threads = [
        threading.Thread(target=lambda: models.append(load(say=said.append))) for _ in range(2)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [m.path.read_bytes() == gguf for m in models] == [True, True]
    assert hub.fetched() == ["m.gguf"]
    assert said == ["m.gguf: another process is downloading it; waiting"]


# ---- the cache, the token ----


def test_huggingface_hub_finds_it(hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {"sub/m.gguf": gguf}
    model = load(f"hf:{REPO}@v1.0")
    pull.check(model, lambda done, total: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for revision in (COMMIT, "v1.0"):
        theirs = hf_hub_download(REPO, "sub/m.gguf", revision=revision, local_files_only=True)
        assert Path(theirs) == model.path
    scan = scan_cache_dir(constants.HF_HUB_CACHE)
    assert not scan.warnings and [r.repo_id for r in scan.repos] == [REPO]
    assert scan.size_on_disk == len(gguf)


def test_a_new_revision_with_the_old_content(
    hub: Hub, gguf: bytes, run: Callable[..., Any]
) -> None:
    hub.files = {"m.gguf": gguf}
    old = load().path
    hub.history[COMMIT], hub.commit = hub.files, "f" * 40
    command = ("explain", "--ctx", "64", "--json", "-m", f"hf:{REPO}")
    assert run(*command)[0] == 0 and hub.fetched() == ["m.gguf"]  # not asked for, not loaded
    hub.history["f" * 40], hub.commit = hub.files, "e" * 40
    old.resolve().write_bytes(gguf[:-1] + b"!")
    code, _, err = run(*command)
    assert code == 1 and "wrong checksum" in err and not old.is_symlink()


def test_what_huggingface_hub_loaded_is_not_loaded_again(hub: Hub, gguf: bytes) -> None:
    hub.files = {"m.gguf": gguf}
    theirs = hf_hub_download(REPO, "m.gguf", revision="main")
    assert load().path == Path(theirs) and hub.fetched() == ["m.gguf"]


def test_the_token_stays_with_the_hub(
    hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.files, hub.breaks = {"m.gguf": gguf}, []
    with serve(Hub(files=hub.files, breaks=[1000])) as cdn:
        hub.elsewhere = cdn.url.replace("127.0.0.1", "localhost")
        assert load().path.read_bytes() == gguf
        assert {token for _, _, _, token in hub.log} == {"Bearer hf_secret"}
        assert {token for _, _, _, token in cdn.log} == {""} and starts(cdn) == [0, 1000]


def test_no_links_on_the_file_system(
    hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "symlink_to", no_links)
    hub.files = {"m.gguf": gguf}
    path = load().path
    assert path.read_bytes() == gguf and not path.is_symlink()
    assert load().path == path and hub.fetched() == ["m.gguf"]
