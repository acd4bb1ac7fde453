"""The report: one page that needs no other file and no network."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from pyorch.bench import records, report
from pyorch.cli.report import command
from pyorch.errors import SparqError

SVG = """<?xml version="1.0" encoding="utf-8"?>
<svg xmlns="http://www.w3.org/2000/svg" width="10pt" height="5pt" viewBox="0 0 10 5">
<metadata><r:RDF xmlns:r="r" xmlns:dc="http://purl.org/dc/elements/1.1/">
<dc:title>Speed &amp; bytes</dc:title><dc:description>A &lt;caption&gt;.</dc:description></r:RDF>
</metadata><path d="M 0 0 L 1 1"/></svg>
"""
VOID = {"meta", "br", "hr", "img"}


class Balanced(HTMLParser):
    """Fails on tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "picture.svg").write_text(SVG)
    (tmp_path / "picture.csv").write_text("a,b\n1,<2>\n")
    (tmp_path / "attention.md").write_text("**x** `a<b`\n\n| n |\n| ---: |\n| 3 |\n")
    env = {
        "machine": {"cpu": "A & B", "cores": 2, "memory_gib": 4},
        "pin": "a pin",
        "version": "0.1",
        "commit": "0123456789ab",
        "dirty": False,
    }
    rec = records.record("attention", {}, "s", samples_ns=[1], env=env)
    records.append(tmp_path / "attention.jsonl", rec)
    return tmp_path


def test_page_holds_everything_itself(folder: Path) -> None:
    text = report.page(folder, folder)
    parser = Balanced()
    parser.feed(text)
    assert not parser.open
    for part in (
        "<h2>Speed &amp; bytes</h2>",
        "<figcaption>A &lt;caption&gt;.</figcaption>",
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 10 5">',
        "<td>&lt;2&gt;</td>",
        "<code>a&lt;b</code>",
        "A &amp; B, 2 cores, 4 GiB",
        "commit 012345678",
        "prefers-color-scheme: dark",
    ):
        assert part in text
    assert not re.search(r'(src|href)="(?!#)', text)
    assert "@import" not in text and "url(" not in text and "<script" not in text


def test_anchors_of_the_contents_exist(folder: Path) -> None:
    text = report.page(folder, folder)
    links = re.findall(r'href="#([^"]*)"', text)
    assert links == ["picture", "table-attention"]
    assert all(f'id="{name}"' in text for name in links)


def test_every_table_is_on_the_page(folder: Path) -> None:
    """Also those of the scripts of bench/, whose records count for the date."""
    names = ["step_times", "budgets", "ablations", "attention_stats", "eval-budgets"]
    for name in names:
        (folder / f"{name}.md").write_text(f"| {name} |\n| --- |\n| 1 |\n")
    (rec,) = records.load_all(folder / "attention.jsonl")
    records.append(folder / "budgets.jsonl", rec | {"time": "2001-01-01T00:00:00Z"})
    text = report.page(folder, folder)
    for name in names:
        assert f'<section id="table-{name}">' in text and f"<th>{name}</th>" in text
    assert "measured 2001-01-01 to 20" in text


def test_command_writes_the_page(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    where = ["--results", str(folder), "--figures", str(folder)]
    done = CliRunner().invoke(command, [*where, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0 and out.read_text().startswith("<!doctype html>")


def test_nothing_to_report_is_said(tmp_path: Path) -> None:
    with pytest.raises(SparqError, match="nothing to report"):
        report.page(tmp_path, tmp_path)
    (tmp_path / "x.svg").write_text("<svg")
    with pytest.raises(SparqError, match=r"x\.svg"):
        report.page(tmp_path, tmp_path)
