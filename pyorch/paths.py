"""Where the package's data and its cache are."""

from __future__ import annotations

import os
from pathlib import Path

from pyorch.errors import SparqError

PACKAGE = Path(__file__).resolve().parent
REPOSITORY = PACKAGE.parent


def data(name: str) -> Path:
    """Folder `patches`, `ggml_ops` or `models`: inside an installed wheel, else of the checkout.

    Raises:
        SparqError: the installation lacks it.
    """
    for root in (PACKAGE / "_data", REPOSITORY):
        if (root / name).is_dir():
            return root / name
    raise SparqError(
        f"this installation lacks its {name} folder", "reinstall: pip install --force-reinstall ."
    )


def cache() -> Path:
    """Root of everything that is built or downloaded; not created here."""
    return Path(os.environ.get("SPARQ_CACHE") or "~/.cache/sparq-cpp").expanduser().absolute()
