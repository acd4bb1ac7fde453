"""Every pin in patches/UPSTREAM is built and passes the gate; and our sources have one way in."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pyorch import paths
from pyorch.native import source

OTHERS = [pin.version for pin in source.pins()[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("version", OTHERS)
def test_another_pin_passes_the_gate(version: str) -> None:
    """Downloads it, builds it with the series and without, and compares the two."""
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    argv.append("tests/e2e/test_gate.py")
    env = {**os.environ, "SPARQ_LLAMA_PIN": version}
    done = subprocess.run(argv, cwd=paths.REPOSITORY, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
