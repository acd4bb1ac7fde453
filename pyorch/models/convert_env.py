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

import errno
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
_OWN = "SPARQ_CONVERT_PYTHON=/path/to/python uses one that has torch and transformers"


def scripts(note: Say) -> Path:
    """The folder of the converter. The source is downloaded and unpacked if necessary.

    Raises:
        SparqError: the source is not available.
    """
    pin = source.read_pin()
    where = source.locate(pin)
    folder = paths.cache() / "convert" / f"scripts-{where.key[:12]}"
    if (folder / SCRIPT).is_file():
        return folder
    with _lock(note):
        if not (folder / SCRIPT).is_file():
            source.fetch(pin, where, note)
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            source.unpack(where, pin.folder, partial, only=_PARTS)
            if not (partial / SCRIPT).is_file():
                raise SparqError(f"{where.path} holds no {SCRIPT}", "unset SPARQ_LLAMA_SOURCE")
            partial.rename(folder)
    return folder


def python(note: Say, agree: Say) -> list[str]:
    """The command line of a Python that can run the converter. It is installed if necessary.

    Args:
        agree: called with a description of the download beforehand; it raises to refuse.

    Raises:
        SparqError: SPARQ_CONVERT_PYTHON cannot run it, there is no space, or pip failed. No
            unfinished environment stays.
    """
    own = os.environ.get("SPARQ_CONVERT_PYTHON")
    if own:
        return [_checked(str(paths.expanded(own)))]
    needs, options = _needs(scripts(note) / "requirements")
    tag = f"{sys.implementation.cache_tag} {platform.machine()}"
    digest = hashlib.sha256("\n".join([*needs, *options, tag]).encode()).hexdigest()[:12]
    folder = paths.cache() / "convert" / f"env-{digest}"
    if not (folder / "ready").is_file():
        with _lock(note) as lock:
            if not (folder / "ready").is_file():  # another process may have made it meanwhile
                _make(folder, needs, options, lock, note, agree)
    return [str(folder / "bin" / "python"), "-E", "-s"]


def _checked(program: str) -> str:
    try:
        done = children.run([program, "-c", f"import {_IMPORTS}"])
    except OSError as e:
        raise SparqError(f"SPARQ_CONVERT_PYTHON={program}: {e.strerror or e}") from None
    if done.returncode:
        raise SparqError(
            f"SPARQ_CONVERT_PYTHON={program} cannot run the converter: {children.reason(done)}",
            f"it has to import {_IMPORTS}; or unset it: then an environment is made",
        )
    return program


def _needs(folder: Path) -> tuple[list[str], list[str]]:
    """The packages and pip options in the converter's own list of requirements."""
    lines: list[str] = []
    for name in ("requirements-convert_legacy_llama.txt", "requirements-convert_hf_to_gguf.txt"):
        lines += [s.strip() for s in (folder / name).read_text("utf-8").splitlines()]
    packages = [s for s in lines if s and s[0] not in "-#" and not s.startswith("torch=")]
    indexes = [s for s in lines if s.startswith("--extra-index-url ")]
    return [_TORCH, *packages], [word for s in indexes for word in s.split()]


def _make(
    folder: Path,
    needs: list[str],
    options: list[str],
    lock: int,
    note: Say,
    agree: Say,
) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # the remains of an interrupted installation
    try:
        _run([sys.executable, "-I", "-m", "venv", str(folder)], lock, show=False)
        # -I keeps out the caller's Python. The index of llama.cpp has torch without CUDA; all else
        # comes from the user's own index.
        pip = [str(folder / "bin" / "python"), "-I", "-m", "pip", "install"]
        # wheels alone: installing one runs none of its code, and its hash is the index's word
        pip += ["--disable-pip-version-check", "--no-input", "--only-binary", ":all:"]
        torch = ["--no-deps", "--retries", "2", *options, needs[0]]
        what, n_bytes = _size_of(_run([*pip, "--dry-run", *torch], lock, show=False))
        check_space(folder, n_bytes, "the converter's environment")
        agree(f"the converter of llama.cpp needs an environment of its own, once: {what}")
        note(f"making {folder}")
        _run([*pip, *torch], lock, show=True)
        _run([*pip, *needs], lock, show=True)
        _run([str(folder / "bin" / "python"), "-I", "-c", f"import {_IMPORTS}"], lock, show=False)
        (folder / "ready").touch()
    except BaseException as e:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(e, OSError):
            reason = "the disk is full" if e.errno == errno.ENOSPC else e.strerror or str(e)
            raise SparqError(f"{folder}: {reason}", "set SPARQ_CACHE to another disk") from None
        raise


def _size_of(said: str) -> tuple[str, int]:
    """A description of what pip would download, and the bytes that it takes when installed.

    The disk use of the build without CUDA was measured (torch 2.13, Linux, x86); the other sizes
    are estimates.
    """
    found = re.findall(r"torch-([\w.]+(?:\+\w+)?)", said)
    version = found[-1] if found else ""
    if sys.platform == "darwin" or "+cpu" in version:
        return f"torch {version}, transformers: about 300 MB to download, 1.2 GB on disk", 1 << 30
    return (
        f"torch {version} WITH CUDA (no smaller build found), transformers: about 3 GB to "
        f"download, 7 GB on disk. {_OWN}",
        7 << 30,
    )


def _run(argv: list[str], lock: int, show: bool) -> str:
    """Run one command; its progress is shown on a terminal. Returns its stdout if not shown.

    The command holds the lock too: if this process is killed, others wait until it has ended.
    """
    visible = show and sys.stderr.isatty()
    out = sys.stderr if visible else subprocess.PIPE
    done = children.run(argv, stdout=out, **system.given(lock))
    said = done.stdout or ""
    if done.returncode == 0:
        return said
    if "No space left" in done.stderr + said:
        raise OSError(errno.ENOSPC, "No space left on device")
    raise SparqError(
        f"cannot make the converter's environment: {children.reason(done)}",
        f"connect to a package index; {_OWN}",
    )


@contextmanager
def _lock(note: Say) -> Iterator[int]:
    root = paths.cache() / "convert"
    text = "waiting for another process that makes the converter's environment"
    try:
        with paths.locked(root, lambda _: note(text)) as lock:
            yield lock
    except OSError as e:
        raise SparqError(f"{root}: {e.strerror}", "set SPARQ_CACHE to another folder") from None


def environment(cache: Path) -> dict[str, str]:
    """The variables of the converter: no network and no hub cache of the user's, so no remote code.

    llama.cpp loads tokenizers with `trust_remote_code`; a model's `auto_map` may name code in its
    folder (which convert.py does not pass on) or in any repository of the hub.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HOME": str(cache)}
    return env | {"TOKENIZERS_PARALLELISM": "false"}


def architectures(note: Say) -> set[str]:
    """The architectures in `config.json` that the converter knows, read from its source."""
    text = (scripts(note) / "conversion" / "__init__.py").read_text("utf-8")
    table = re.search(r"^TEXT_MODEL_MAP[^{]*(\{.*?^\})", text, re.MULTILINE | re.DOTALL)
    names = re.findall(r'^ *("\w+"): "\w+",?$', table[1], re.MULTILINE) if table else []
    return {json.loads(name) for name in names}
