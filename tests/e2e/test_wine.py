"""The programs of the wheel for Windows, under Wine: they answer as those of this system do."""

from __future__ import annotations

import shutil
import signal
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from server import ask, started

from pyorch import paths

BUILT = sorted((paths.REPOSITORY / "dist").glob("*-win_amd64.whl"))
WINE = shutil.which("wine")
DEMO = paths.REPOSITORY / "models" / "demo"
# with an instruction set that tells whether this CPU runs it
VARIANTS = {"x64": "sse2", "haswell": "avx2", "skylakex": "avx512f", "zen4": "avx512_bf16"}
SERVERS = "sparq,ratio=1/8,min_k=16"
SPECS = ("off", "dense", SERVERS, "sparq,ratio=1/16,min_k=16")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BUILT, reason="`make wheels` has put none for Windows into dist/"),
    pytest.mark.skipif(WINE is None, reason="no Wine here"),
]


@pytest.fixture(params=VARIANTS)
def windows(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with the library of the wheel, one variant of it, and llama-server under its usual
    name."""
    if VARIANTS[request.param] not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this CPU has no {VARIANTS[request.param]}")
    with zipfile.ZipFile(BUILT[-1]) as wheel:
        wheel.extractall(tmp_path / "wheel")
    folder = tmp_path / "wheel" / "pyorch" / "_built" / "lib"
    shutil.copy(folder / f"ggml-cpu-{request.param}.dll", folder / "ggml-cpu.dll")
    program = folder / "llama-server"
    program.write_text(f'#!/bin/sh\nexec {WINE} "{program}.exe" "$@"\n')
    program.chmod(0o755)
    for name, value in {"WINEDEBUG": "-all", "WINEPREFIX": str(tmp_path / "wine")}.items():
        monkeypatch.setenv(name, value)
    subprocess.run([str(WINE), "wineboot", "--init"], capture_output=True, check=True)
    return folder


def replies(tools: Path, log: Path) -> list[tuple[str, dict[str, Any]]]:
    """What a server says of the demo's text with each of the settings, and what it read."""
    story = (DEMO / "document.txt").read_text("utf-8")
    prompt = story[:8000] + "\n" + story[3000:3100]
    said = []
    line = ("-m", DEMO / "demo.gguf", "-c", 4096, "-t", 1, "-np", 1, "--sparse-attn", SERVERS)
    # Wine has no other way to end a program from outside
    with started(tools, log, *line, ends=-signal.SIGKILL, by=signal.SIGKILL) as (url, _):
        for spec in SPECS:
            asked = {"prompt": prompt, "n_predict": 24, "temperature": 0, "sparse_attn": spec}
            answer = ask(f"{url}/completion", asked | {"cache_prompt": False})
            said.append((answer["content"], answer["timings"]["sparse_attn"]))
    return said


def test_replies_and_what_they_read_are_those_of_this_system(
    windows: Path, server_dir: Path, tmp_path: Path
) -> None:
    here = replies(server_dir, tmp_path / "here.log")
    assert replies(windows, tmp_path / "windows.log") == here
    dense, sparse = (read["positions_read"] for _, read in here[1:3])
    assert 0 < sparse < dense / 8 < dense


def test_an_exception_passes_from_one_library_to_another(windows: Path) -> None:
    """Thrown by libllama, it is caught in llama.cpp's reader of options."""
    argv = [windows / "llama-server", "--sparse-attn", "sparq,ratio=7"]
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 1 and "ratio" in done.stdout + done.stderr
