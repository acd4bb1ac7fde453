"""python -m pyorch.native dist               # all wheels
python -m pyorch.native dist linux-x86_64  # one
python -m pyorch.native dist cuda [90]     # that of sparq-cpp-cuda
"""

from __future__ import annotations

import os
import sys
from importlib import metadata

from pyorch import paths
from pyorch.errors import SparqError
from pyorch.native import cuda_wheel, wheel


def main() -> None:
    """Make the wheels that the command line names; all of `wheel.TARGETS` if it names none."""
    into, names = paths.expanded(sys.argv[1]).absolute(), sys.argv[2:]
    for name in ("CFLAGS", "CXXFLAGS", "CUDAFLAGS", "LDFLAGS"):  # they would make another wheel
        os.environ.pop(name, None)
    try:
        if names[:1] == ["cuda"]:
            print(cuda_wheel.make(into, tuple(names[1:]) or cuda_wheel.ARCHS))
        else:
            for name in names or wheel.TARGETS:
                print(wheel.make(name, into))
    except metadata.PackageNotFoundError as error:
        sys.exit(f"error: {error.name} is not installed\nhint: make wheels or wheel-cuda does it")
    except SparqError as error:
        sys.exit(f"error: {error.message}\nhint: {error.hint}")


main()
