"""One HTML page with the figures and tables of a machine; it opens without a network."""

from __future__ import annotations

import csv
import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from markdown_it import MarkdownIt

from pyorch.bench import records
from pyorch.errors import SparqError

# file of a table -> its title
TABLES = {
    "speed": "Decoded tokens, end to end",
    "growth": "Growth with the length of the context",
    "attention": "Attention by itself",
    "step_times": "Steps of attention by themselves",
    "row_reads": "Memory by itself, in the orders of sparse attention",
    "eval": "Quality, task by task",
    "eval-floor": "Quality of what is exact: what rounding alone changes",
    "eval-budgets": "Quality, by how the bytes are spread",
    "budgets": "What a byte buys, by how it is spread",
    "ablations": "What each part of SparQ is for",
    "recall": "Attention caught per byte read",
    "attention_stats": "How sparse attention is",
}
_DUBLIN_CORE = "{http://purl.org/dc/elements/1.1/}"


def page(results: Path, figures: Path) -> str:
    """Returns the HTML of the page.

    Raises:
        SparqError: there is neither a figure nor a table.
    """
    pictures = [_figure(svg) for svg in sorted(figures.glob("*.svg"))]
    known = [results / f"{name}.md" for name in TABLES]
    tables = [_table(file) for file in known if file.is_file()]
    if not pictures and not tables:
        raise SparqError(
            f"nothing to report: no figures in {figures}, no tables in {results}",
            "`sparq-cpp bench` makes tables; --figures names a folder of pictures",
        )
    sections = [*pictures, *tables]
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title, _ in sections)
    return _PAGE.format(
        style=_STYLE,
        about=_about(results),
        links=links,
        body="\n".join(text for _, _, text in sections),
    )


def _figure(svg: Path) -> tuple[str, str, str]:
    """The anchor, title and HTML of a picture, with its numbers."""
    try:
        text = svg.read_text("utf-8")
        root = ElementTree.fromstring(text)
    except (OSError, ValueError, ElementTree.ParseError) as e:
        raise SparqError(f"{svg}: {e}", "`make figures` draws it again") from None
    title = root.findtext(f".//{_DUBLIN_CORE}title") or svg.stem
    caption = root.findtext(f".//{_DUBLIN_CORE}description") or ""
    title, caption = html.escape(title), html.escape(caption)
    # within a page a picture takes the available width
    inline = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", text[text.index("<svg") :], count=1)
    inline = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", inline, count=1)
    name = html.escape(svg.stem)
    return (
        name,
        title,
        f'<section id="{name}"><h2>{title}</h2><figure role="img" aria-label="{title}">{inline}'
        f"<figcaption>{caption}</figcaption></figure>{_numbers(svg.with_suffix('.csv'))}</section>",
    )


def _numbers(file: Path) -> str:
    """The numbers in the CSV beside a picture, collapsed."""
    if not file.is_file():
        return ""
    with file.open(newline="") as f:
        head, *rows = list(csv.reader(f)) or [[]]
    return (
        f"<details><summary>numbers ({len(rows)} rows)</summary><div class=wide><table><thead>"
        f"{_cells(head, 'th')}</thead><tbody>{''.join(_cells(r, 'td') for r in rows)}"
        "</tbody></table></div></details>"
    )


def _cells(row: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(x)}</{tag}>" for x in row) + "</tr>"


def _table(file: Path) -> tuple[str, str, str]:
    """The anchor, title and HTML of a table that a bench wrote beside its records."""
    title = TABLES[file.stem]
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    body = markdown.render(file.read_text("utf-8"))
    body = body.replace("<table>", "<div class=wide><table>").replace("</table>", "</table></div>")
    name = f"table-{file.stem}"
    return name, title, f'<section id="{name}"><h2>{title}</h2>{body}</section>'


def _about(results: Path) -> str:
    """The machine, versions and dates of the records."""
    newest: list[dict[str, Any]] = []
    for name in TABLES:
        file = results / f"{name}.jsonl"
        if file.is_file():
            newest += records.load(file).values()
    if not newest:
        return ""
    last = max(newest, key=lambda r: r["time"])
    env, machine = last["env"], last["env"]["machine"]
    parts = [f"{machine['cpu']}, {machine['cores']} cores, {machine.get('memory_gib', '?')} GiB"]
    if "pin" in env:
        parts += [f"sparq-cpp {env.get('version', '?')} on {env['pin']}"]
        parts += [f"commit {env['commit'][:9]}{' and changes' if env['dirty'] else ''}"]
    first = min(r["time"] for r in newest)
    parts += [f"measured {first[:10]} to {last['time'][:10]}"]
    return html.escape("; ".join(parts))


_STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --soft: #656d76; --back: #fff; --ink: #1f2328; }
@media (prefers-color-scheme: dark) {
  :root { --line: #30363d; --soft: #8b949e; --back: #0d1117; --ink: #d1d7e0; }
}
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem;
  background: var(--back); color: var(--ink); }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
p.about, figcaption, summary { color: var(--soft); font-size: .87rem; }
nav ul { padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; }
a { color: #2f7ed8; } figure { margin: 0; }
figure svg { width: 100%; height: auto; display: block; }
details { margin-top: .5rem; } .wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: left;
  white-space: nowrap; }
code { font-size: .95em; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>sparq-cpp: measurements</title>
<style>{style}</style>
</head>
<body>
<h1>sparq-cpp: measurements</h1>
<p class="about">{about}</p>
<nav><ul>{links}</ul></nav>
{body}
</body>
</html>
"""
