"""What a build with Vulkan needs, as cmake finds it on this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pyorch.native import probe

_PROJECT = """
cmake_minimum_required(VERSION 3.21)
project(vulkan C)
find_package(Vulkan COMPONENTS glslc)
find_package(SPIRV-Headers CONFIG)
file(STRINGS "${Vulkan_INCLUDE_DIR}/vulkan/vulkan_core.h" lines REGEX "define VK_HEADER_VERSION ")
string(REGEX REPLACE "[^0-9]" "" version "0${lines}")
foreach(part Vulkan_INCLUDE_DIR Vulkan_LIBRARY Vulkan_GLSLC_EXECUTABLE SPIRV-Headers_DIR version)
    message("${part} ${${part}}")
endforeach()
"""
_PARTS = {
    "Vulkan_INCLUDE_DIR": "headers of Vulkan",
    "Vulkan_LIBRARY": "libvulkan",
    "Vulkan_GLSLC_EXECUTABLE": "glslc",
    "SPIRV-Headers_DIR": "spirv-headers",
}
OLDEST = 275  # of 1.3


def parts(cmake: str, ninja: str) -> tuple[dict[str, str], str]:
    """Where they are, by cmake's names; and why nothing can be built, "" if it can. A second."""
    with tempfile.TemporaryDirectory(prefix="sparq-probe-") as temp:
        (Path(temp) / "CMakeLists.txt").write_text(_PROJECT, "utf-8")
        argv = [cmake, "-S", temp, "-B", temp, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        lines = [line.partition(" ") for line in probe.run(argv).stderr.splitlines()]
    lines = [line for line in lines if not line[2].endswith("NOTFOUND")]
    found = {part: value for part, _, value in lines if part in _PARTS}
    version = max((int(value) for part, _, value in lines if part == "version"), default=0)
    if missing := [what for part, what in _PARTS.items() if not found.get(part)]:
        return found, f"missing: {', '.join(missing)}"
    if version < OLDEST:
        return found, f"the headers of Vulkan are of 1.3.{version}, below 1.3.{OLDEST}"
    return found, ""
