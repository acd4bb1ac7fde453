"""Makes wheels, for `make wheels`, `make wheel-cuda` and `make wheel-vulkan`.

python -m pyorch.native.wheels dist               # all of `wheel.TARGETS`
python -m pyorch.native.wheels dist linux-x86_64  # one
python -m pyorch.native.wheels dist vulkan [windows-x86_64]  # the package sparq-cpp-vulkan
python -m pyorch.native.wheels dist cuda [90]  # the package sparq-cpp-cuda, for all GPUs or one
"""

from __future__ import annotations

import os
import sys
from importlib import metadata

from pyorch import paths
from pyorch.errors import SparqError
from pyorch.native import carried_gpu, gpu_wheel, wheel


def main() -> None:
    into, names = paths.expanded(sys.argv[1]).absolute(), sys.argv[2:]
    for name in ("CFLAGS", "CXXFLAGS", "CUDAFLAGS", "LDFLAGS"):  # they would make another wheel
        os.environ.pop(name, None)
    backend = names.pop(0) if names and names[0] in carried_gpu.BACKENDS else ""
    try:
        if backend != "cuda" and (wrong := [x for x in names if x not in wheel.TARGETS]):
            every = (*wheel.TARGETS, *carried_gpu.BACKENDS)
            raise SparqError(f"no wheel is called {wrong[0]}", f"those are {', '.join(every)}")
        if backend:
            print(gpu_wheel.make(backend, into, tuple(names)))
        else:
            for name in names or wheel.TARGETS:
                print(wheel.make(name, into))
    except metadata.PackageNotFoundError as error:
        sys.exit(
            f"error: {error.name} is not installed\nhint: make wheels, wheel-cuda or wheel-vulkan"
        )
    except SparqError as error:
        sys.exit(f"error: {error.message}\nhint: {error.hint}")


if __name__ == "__main__":
    main()
