"""The layout of the native code: `python -m pyorch.native.cpp_style [--check] FILE..`

clang-format (.clang-format) decides on braces and indentation. It cannot be told to keep our
spaces within a line, as in tables and in `a*b + c`, nor to keep a short statement on one line. So
we take only those lines of its result that differ in other ways.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path


def is_spread(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Whether their lines are ours with some of them broken."""
    n = 0
    for line in ours:
        rest = line
        while rest and n < len(theirs) and rest.startswith(part := theirs[n].rstrip("\\")):
            rest, n = rest[len(part) :], n + 1
        if rest:
            return False
    return n == len(theirs)


def merge(ours: Sequence[str], theirs: Sequence[str]) -> list[str]:
    """Our lines with their indentation, and their lines where those differ or were broken."""
    a, b = ([line.replace(" ", "") for line in lines] for lines in (ours, theirs))
    out: list[str] = []
    for _, i, j, k, n in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if a[i:j] == b[k:n]:
            pairs = zip(ours[i:j], theirs[k:n], strict=True)
            out += [y[: len(y) - len(y.lstrip())] + x.lstrip() for x, y in pairs]
        else:
            out += ours[i:j] if is_spread(a[i:j], b[k:n]) else theirs[k:n]
    return out


def main(args: Sequence[str]) -> int:
    """Format the files, or with `--check` name those that would change; 1 if there are any."""
    check, n_wrong = "--check" in args, 0
    tool = Path(sys.executable).with_name("clang-format")
    for file in (Path(x) for x in args if x != "--check"):
        text = file.read_text("utf-8")
        name = f"{file}.cpp" if file.suffix in (".cu", ".cuh") else file  # tells the language
        argv = [str(tool), "--style=file", f"--assume-filename={name}"]
        done = subprocess.run(argv, input=text, capture_output=True, text=True, check=True)
        want = "\n".join(merge(text.splitlines(), done.stdout.splitlines())) + "\n"
        if want != text and check:
            print(f"{file}: `make fmt` would change it")
            n_wrong += 1
        elif want != text:
            file.write_text(want, "utf-8")
    return int(n_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
