"""Vulkan on this machine: what a build with it needs, and the devices, found out by using them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pyorch.native import probe

_PROJECT = """
cmake_minimum_required(VERSION 3.21)
project(devices C)
find_package(Vulkan COMPONENTS glslc)
find_package(SPIRV-Headers CONFIG)
foreach(part Vulkan_INCLUDE_DIR Vulkan_LIBRARY Vulkan_GLSLC_EXECUTABLE SPIRV-Headers_DIR)
    if(NOT ${part})
        message("missing ${part}")
    endif()
endforeach()
add_executable(devices devices.c)
target_link_libraries(devices Vulkan::Vulkan)
"""
_PARTS = {
    "Vulkan_INCLUDE_DIR": "Vulkan's headers (libvulkan-dev)",
    "Vulkan_LIBRARY": "libvulkan (libvulkan-dev)",
    "Vulkan_GLSLC_EXECUTABLE": "glslc",
    "SPIRV-Headers_DIR": "spirv-headers",
}
_PROGRAM = """
#include <stdio.h>
#include <vulkan/vulkan.h>
#if VK_HEADER_VERSION < 275
#error Vulkan's headers are older than 1.3.275
#endif
int main(void) {
    VkInstanceCreateInfo info = { .sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO };
    VkInstance instance;
    VkPhysicalDevice devices[16];
    uint32_t n = 16;
    if (vkCreateInstance(&info, NULL, &instance)) return 0; // no driver
    vkEnumeratePhysicalDevices(instance, &n, devices);
    for (uint32_t i = 0; i < n; i++) {
        VkPhysicalDeviceProperties properties;
        vkGetPhysicalDeviceProperties(devices[i], &properties);
        puts(properties.deviceName);
    }
}
"""


def devices(cmake: str, ninja: str) -> tuple[list[str], str]:
    """The names of the devices, or why nothing can be built with Vulkan. Takes some seconds."""
    with tempfile.TemporaryDirectory(prefix="sparq-probe-") as temp:
        (Path(temp) / "CMakeLists.txt").write_text(_PROJECT, "utf-8")
        (Path(temp) / "devices.c").write_text(_PROGRAM, "utf-8")
        argv = [cmake, "-S", temp, "-B", temp, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        done = probe.run(argv)
        missing = [what for part, what in _PARTS.items() if f"missing {part}\n" in done.stderr]
        if missing:
            return [], f"missing: {', '.join(missing)}"
        done = probe.run([ninja, "-C", temp])
        if done.returncode:
            return [], probe.first_error(done.stdout + done.stderr)
        return probe.run([str(Path(temp) / "devices")]).stdout.splitlines(), ""
