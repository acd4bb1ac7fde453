"""Marks for tests beside a GPU by Vulkan: the library in use has it, as `make test-vulkan` makes
it, and a device, of which Mesa's on the CPU will do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pyorch import native
from pyorch.native import build, devices

OURS = native.find() or Path()
STOCK = Path(os.environ.get("SPARQ_TEST_STOCK_DIR") or native.find(stock=True) or "")
IN_USE = "vulkan" in build.backends(OURS)
if IN_USE:  # a device on the CPU is not looked at without
    os.environ.setdefault("GGML_VK_VISIBLE_DEVICES", "0")
needs_vulkan = pytest.mark.skipif(
    not (IN_USE and devices.of_library(OURS)),
    reason="no build with Vulkan, or no device for it: make test-vulkan",
)
needs_stock_vulkan = pytest.mark.skipif(
    not (IN_USE and "vulkan" in build.backends(STOCK)),
    reason="no stock build with Vulkan: make test-vulkan",
)
