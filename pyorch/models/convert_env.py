"""The converter of the pinned llama.cpp, and a Python that can run it.

It needs torch and transformers, which nothing else here does. So it has a virtual environment of
its own in the cache, which is made on first use and found again by the hash of its requirements. If
you have a Python with torch, you can name it in SPARQ_CONVERT_PYTHON instead.

Below the cache root:

    convert/scripts-<source>/    convert_hf_to_gguf.py with what it imports, unpacked
    convert/env-<needs>/         the virtual environment; its file `ready` comes last
    convert/lock                 held while any of this is written
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from pyorch import children, paths, system
from pyorch.errors import SparqError
from pyorch.models.new_file import check_space
from pyorch.native import source
from pyorch.progress import Say

SCRIPT = "convert_hf_to_gguf.py"
_PARTS = (SCRIPT, "conversion", "gguf-py", "requirements")
# llama.cpp pins one version of torch, and not every index has a build of it without CUDA
_TORCH = "torch>=2.11,<2.14"
_IMPORTS = "torch, transformers, sentencepiece, numpy, yaml"
# measured with torch 2.13 on Linux, x86
_SIZE = (
    "torch and transformers, for the converter: 300 MB to download, 1.2 GB on disk; with CUDA,"
    " where no smaller build is found, 3 GB and 7 GB"
)
_N_BYTES = 1_200_000_000
_OWN = "SPARQ_CONVERT_PYTHON=/path/to/python uses one that has torch and transformers"


def scripts() -> Path:
    """The folder of the converter. The source is downloaded and unpacked if necessary.

    Raises:
        SparqError: the source is not available.
    """
    pin = source.read_pin()
    where = source.locate(pin)
    folder = paths.cache() / "convert" / f"scripts-{where.key[:12]}"

    def make(_: int) -> None:
        source.fetch(pin, where)
        source.unpack(where, pin.folder, folder, only=_PARTS)

    paths.once(folder.parent, (folder / SCRIPT).is_file, make)
    return folder


def python(agree: Say) -> list[str]:
    """The command line of a Python that can run the converter. It is installed if necessary.

    Args:
        agree: called with a description of the download beforehand; it raises to refuse.

    Raises:
        SparqError: SPARQ_CONVERT_PYTHON cannot run it, there is no space, or pip failed. No
            unfinished environment stays.
    """
    own = os.environ.get("SPARQ_CONVERT_PYTHON")
    if own:
        program = str(paths.expanded(own))
        try:
            done = children.run([program, "-c", f"import {_IMPORTS}"])
        except OSError as e:
            raise SparqError(f"SPARQ_CONVERT_PYTHON={own}: {e.strerror or e}") from None
        if done.returncode:
            raise SparqError(
                f"SPARQ_CONVERT_PYTHON={own} cannot run the converter: {children.reason(done)}",
                f"it has to import {_IMPORTS}; or unset it: then an environment is made",
            )
        return [program]
    needs, options = _needs(scripts() / "requirements")
    tag = f"{sys.implementation.cache_tag} {platform.machine()}"
    digest = hashlib.sha256("\n".join([*needs, *options, tag]).encode()).hexdigest()[:12]
    folder = paths.cache() / "convert" / f"env-{digest}"

    def make(lock: int) -> None:
        paths.check_exec(folder)
        agree(_SIZE)
        check_space(folder, _N_BYTES, "the converter's environment", _OWN)
        try:
            _make(folder, needs, options, lock)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    paths.once(folder.parent, (folder / "ready").is_file, make)
    return [str(folder / "bin" / "python"), "-E", "-s"]


def _needs(folder: Path) -> tuple[list[str], list[str]]:
    """The packages and pip options in the converter's own list of requirements."""
    lines: list[str] = []
    for name in ("requirements-convert_legacy_llama.txt", "requirements-convert_hf_to_gguf.txt"):
        lines += [s.strip() for s in (folder / name).read_text("utf-8").splitlines()]
    packages = [s for s in lines if s and s[0] not in "-#" and not s.startswith("torch=")]
    indexes = [s for s in lines if s.startswith("--extra-index-url ")]
    return [_TORCH, *packages], [word for s in indexes for word in s.split()]


def _make(folder: Path, needs: list[str], options: list[str], lock: int) -> None:
    """Install the environment. The last of its files is `ready`."""
    program = str(folder / "bin" / "python")
    # -I keeps out the caller's Python
    pip = [program, "-I", "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    # wheels alone: installing one runs none of its code, and its hash is the index's word
    pip += ["--only-binary", ":all:"]
    shutil.rmtree(folder, ignore_errors=True)  # the remains of an interrupted installation
    for argv in (
        [sys.executable, "-I", "-m", "venv", str(folder)],
        # the index of llama.cpp has torch without CUDA; all else comes from the user's own index
        [*pip, "--no-deps", "--retries", "2", *options, needs[0]],
        [*pip, *needs],
        [program, "-I", "-c", f"import {_IMPORTS}"],
    ):
        _run(argv, lock)
    (folder / "ready").touch()


def _run(argv: list[str], lock: int) -> None:
    """Run one command; its progress is shown on a terminal.

    The command holds the lock too: if this process is killed, others wait until it has ended.
    """
    out = sys.stderr if sys.stderr.isatty() else subprocess.PIPE
    done = children.run(argv, stdout=out, **system.inherit(lock))
    if done.returncode:
        hint = f"connect to a package index, or free disk space; {_OWN}"
        raise SparqError(f"cannot make the converter's environment: {children.reason(done)}", hint)


def environment(cache: Path) -> dict[str, str]:
    """The variables of the converter: no network and no hub cache of the user's, so no remote code.

    llama.cpp loads tokenizers with `trust_remote_code`; a model's `auto_map` may name code in its
    folder (which convert.py does not pass on) or in any repository of the hub.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HOME": str(cache)}
    return env | {"TOKENIZERS_PARALLELISM": "false"}


def architectures() -> set[str]:
    """The architectures in `config.json` that the converter knows, read from its source."""
    text = (scripts() / "conversion" / "__init__.py").read_text("utf-8")
    table = re.search(r"^TEXT_MODEL_MAP[^{]*(\{.*?^\})", text, re.MULTILINE | re.DOTALL)
    names = re.findall(r'^ *("\w+"): "\w+",?$', table[1], re.MULTILINE) if table else []
    return {json.loads(name) for name in names}
