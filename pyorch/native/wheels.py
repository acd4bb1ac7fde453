"""Makes wheels, for `make wheels` and `make wheel-cuda`.

python -m pyorch.native.wheels dist               # all of `wheel.TARGETS`
python -m pyorch.native.wheels dist linux-x86_64  # one
python -m pyorch.native.wheels dist cuda [90]     # the package sparq-cpp-cuda, for all GPUs or one
"""

from __future__ import annotations

import os
import sys
from importlib import metadata

from pyorch import paths
from pyorch.errors import SparqError
from pyorch.native import cuda_wheel, wheel


def main() -> None:
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


if __name__ == "__main__":
    main()
