"""Wheels with the library inside: what the maker asks of llama.cpp's build."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pyorch.native import wheel


@pytest.mark.parametrize("target", wheel.TARGETS.values(), ids=wheel.TARGETS)
def test_llama_cpp_has_the_variants(target: wheel.Target, unpacked: Callable[[str], Path]) -> None:
    text = (unpacked("ggml/src") / "CMakeLists.txt").read_text()
    known = re.findall(r"ggml_add_cpu_backend_variant\(([\w.]+)", text)
    assert len(known) > 5 and set(target.variants) <= set(known)
    assert target.zig.split("-")[0] == target.processor and target.tag.endswith(target.processor)
