"""What `make lint` and `make fmt` do to the native code beside clang-format itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyorch.native import cpp_style

ROOT = Path(__file__).parents[2]
OURS = """\
int f(int a) {
    const int b   = a*2; // spaces within a line are ours
    const int ccc = a*3;
    if (a) { return b; }
    return ccc;
}
"""


def test_what_is_ours_stays() -> None:
    assert cpp_style.formatted(OURS, str(ROOT / "x.cpp")) == OURS


@pytest.mark.parametrize(
    ("wrong", "n_line"),
    [
        ("  const int b   = a*2;", 2),  # indentation
        ("    if (a)\n    { return b; }", 4),  # a brace
        ("    if (a) { return\n b; }", 4),  # a line broken that need not be
    ],
)
def test_what_is_not_is_told_and_mended(
    wrong: str, n_line: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = OURS.splitlines()
    lines[n_line - 1] = wrong + lines[n_line - 1].partition(";")[2] * (n_line == 2)
    file = tmp_path / "x.cpp"
    file.write_text("\n".join(lines) + "\n")
    (tmp_path / ".clang-format").write_text((ROOT / ".clang-format").read_text())
    assert cpp_style.main(["--check", str(file)]) == 1
    assert f"{file}:{n_line}" in capsys.readouterr().out
    assert cpp_style.main([str(file)]) == 0
    assert file.read_text().splitlines()[: n_line - 1] == lines[: n_line - 1]
    assert cpp_style.main(["--check", str(file)]) == 0


def test_a_line_too_long_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.cpp"
    file.write_text("// " + "x" * cpp_style.N_COLUMN + "\n")
    assert cpp_style.main(["--check", str(file)]) == 1
    assert capsys.readouterr().out == f"{file}:1: longer than {cpp_style.N_COLUMN} columns\n"
