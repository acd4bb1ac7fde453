"""The sweep for servers: what it calls for each place, and that one failure does not end it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "epyc.sh"
pytestmark = pytest.mark.skipif(not shutil.which("lscpu"), reason="needs lscpu")


def sweep(folder: Path, **env: str) -> tuple[int, list[str]]:
    """Runs the script with commands that only write down how they were called."""
    log = programs_in(folder, folder)
    outside = {k: v for k, v in os.environ.items() if k != "ARGS"}  # make has one of that name
    env = {**outside, "PATH": f"{folder}:{os.environ['PATH']}", **env}
    argv = ["bash", str(SCRIPT), "llama2-7b", str(folder / "out")]
    code = subprocess.run(argv, env=env, capture_output=True).returncode
    return code, log.read_text().splitlines()


def programs_in(folder: Path, sparq: Path) -> Path:
    """Make numactl in `folder` and sparq-cpp in `sparq`; where both write their calls."""
    log = folder / "calls"
    programs = {
        "sparq-cpp": '[[ "$*" != *"-d 99 "* ]] && echo table',
        "numactl": 'while [[ $1 == -* ]]; do shift; done; "$@"',
    }
    for name, text in programs.items():
        path = (sparq if name == "sparq-cpp" else folder) / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {log}\n{text}\n')
        path.chmod(0o755)
    return log


def test_sweep_covers_threads_depths_and_ratios(tmp_path: Path) -> None:
    code, calls = sweep(tmp_path, DEPTHS="64 128", THREADS="1,4", RATIOS="1/8", PLACES="plain")
    out = tmp_path / "out" / "plain"
    assert code == 0
    assert calls == [
        f"sparq-cpp bench --yes --like llama2-7b -d {d} -t 1,4 --ratio 1/8 --out {out}"
        for d in (64, 128)
    ]
    assert (out / "d128.md").read_text() == "table\n"


def test_sweep_goes_on_after_a_failure_and_says_so(tmp_path: Path) -> None:
    code, calls = sweep(tmp_path, DEPTHS="99 64", PLACES="plain", ARGS="-r 2")
    assert code == 1 and len(calls) == 2 and calls[1].endswith("-r 2")
    assert not (tmp_path / "out" / "plain" / "d99.md").exists()


def test_sweep_binds_memory_with_numactl(tmp_path: Path) -> None:
    code, calls = sweep(tmp_path, DEPTHS="64", PLACES="distribute interleave node0")
    assert code == 0
    assert "--numa distribute" in calls[0]
    assert calls[1].startswith("numactl --interleave=all sparq-cpp bench --yes")
    assert "--numa numactl" in calls[2]
    assert calls[3].startswith("numactl --cpunodebind=0 --membind=0 sparq-cpp bench")


def test_sweep_starts_a_worker_per_node(tmp_path: Path) -> None:
    """On nodes that lscpu only claims."""
    lscpu = tmp_path / "lscpu"
    lscpu.write_text(
        """#!/bin/bash
case $1 in
    -p=NODE) printf '%s\\n' 0 0 1 1 ;;
    *) printf '%s\\n' 0,0,0 1,0,0 2,1,1 3,1,1 ;;
esac
"""
    )
    lscpu.chmod(0o755)
    code, calls = sweep(tmp_path, DEPTHS="64", PLACES="workers", PORT="50300", WAIT="0.3")
    assert code == 0
    for node in (0, 1):
        bound = f"numactl --cpunodebind={node} --membind={node}"
        worker = f"{bound} {tmp_path}/sparq-cpp worker --port {50300 + node} -t 2"
        assert any(c.replace(" sparq-cpp", f" {tmp_path}/sparq-cpp") == worker for c in calls)
    (line,) = (c for c in calls if c.startswith("sparq-cpp bench"))
    assert " --rpc 127.0.0.1:50300,127.0.0.1:50301 -ts 1,1 -t 2 " in line


def test_sweep_takes_the_command_of_the_clone(tmp_path: Path) -> None:
    """Beside the script when none is on PATH; when there is none at all, nothing is begun."""
    script = tmp_path / "clone" / "bench" / "epyc.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(SCRIPT, script)
    argv = ["bash", str(script), "llama2-7b", str(tmp_path / "out")]
    env = {"PATH": "/usr/bin:/bin", "DEPTHS": "64 128", "PLACES": "plain"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    assert done.stderr.splitlines()[1:] == ["hint: make build"]
    programs = script.parents[1] / ".venv" / "bin"
    programs.mkdir(parents=True)
    log = programs_in(tmp_path, programs)
    assert subprocess.run(argv, env=env, capture_output=True).returncode == 0
    assert len(log.read_text().splitlines()) == 2
