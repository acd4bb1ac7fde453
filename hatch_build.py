"""Lets `make wheels` put a built library into the wheel, which is of Python alone otherwise.

SPARQ_WHEEL_LIBRARY is the folder that `pyorch/native/wheel.py` has filled, SPARQ_WHEEL_TAG says for
which systems it is. The wheel of `pyorch/native/gpu_wheel.py` has its library, and only that tag.
"""

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Hook(BuildHookInterface):  # type: ignore[misc]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if folder := os.environ.get("SPARQ_WHEEL_LIBRARY"):
            build_data["force_include"][folder] = "pyorch/_built"
        if tag := os.environ.get("SPARQ_WHEEL_TAG"):
            build_data["tag"] = tag
            build_data["pure_python"] = False
