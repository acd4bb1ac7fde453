"""`sparq-cpp models`: the cards of known models, and the models in the hub's cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import click

from pyorch.cli.loading import spec_of
from pyorch.cli.options import json_option
from pyorch.cli.prediction import Prediction, kinds_text
from pyorch.cli.terminal import confirm_removal, note, print_freed, print_json
from pyorch.cli.types import File
from pyorch.errors import SparqError
from pyorch.ggml import CACHE_TYPES
from pyorch.models import cards
from pyorch.table import columns
from pyorch.text import human_bytes


@click.group(invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """List known models, show one, or remove one from the hub's cache."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_command, as_json=False)


@command.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the known models, then what else the cache holds."""
    from pyorch.models import cache, synth

    known = [cards.load(name) for name in cards.names()]
    cached = cache.models(note)
    whole = [m for m in cached if m.complete]
    unfinished: dict[str, int] = {}
    for m in cached:
        if not m.complete:
            unfinished[m.repo] = unfinished.get(m.repo, 0) + m.n_bytes
    if as_json:
        rows = [{"repo": m.repo, "name": m.name, "bytes": m.n_bytes} for m in whole]
        print_json({"models": [*map(asdict, known)], "cached": rows, "unfinished": unfinished})
        return
    width = max(len(c.name) for c in known) + 2
    arch = max(len(c.architecture) for c in known) + 1
    print(
        f"{'name':<{width}}{'architecture':<{arch}}{'file':>9}{'context':>9}  {'K and V':<9}"
        f"{'ratio':<13}here"
    )
    for c in known:
        files = c.known_files
        size = human_bytes(files[0].n_bytes) if files else "~" + human_bytes(c.file_bytes)
        mine = sum(m.n_bytes for m in whole if m.repo == c.source)
        state = human_bytes(mine) if mine else "-" if c.source else "to convert"
        rest = f"{human_bytes(c.kv_bytes):<9}{_ratio(c) or 'stays dense':<13}{state}"
        print(f"{c.name:<{width}}{c.architecture:<{arch}}{size:>9}{c.n_ctx:>9}  {rest}")
    others = [m for m in whole if m.repo not in {c.source for c in known}]
    if others:
        print("\nalso here")
    for m in others:
        print(f"{m.spec:<82}{human_bytes(m.n_bytes)}")
    for repo, n_bytes in unfinished.items():
        note(f"unfinished: {human_bytes(n_bytes)} of {repo}; pull it again, or models rm")
    if written := synth.written():
        n_bytes = sum(path.stat().st_size for path in written)
        note(f"synthetic, for bench: {human_bytes(n_bytes)}; sparq-cpp clean bench")
    note(
        "~: an estimate for Q4_K_M. K and V: bytes per position, f16. A name is a model for\n"
        "--model and for sparq-cpp pull, also as NAME:Q8_0. The evidence for the ratio:\n"
        "sparq-cpp models show NAME"
    )


@command.command("table")
def table_command() -> None:
    """Print the known models as Markdown, with the speed-ups to expect."""
    print(columns(_COLUMNS, map(cards.load, cards.names()), left=("model", "of these layers")))


def _ratio(c: cards.Card) -> str:
    """The ratio that is the model's default, "" if it stays dense."""
    return "" if c.n_latent else str(spec_of(c)).removeprefix("sparq,ratio=")


def _expected(c: cards.Card, n_pos: int) -> str:
    """The share of K and V in what a dense token reads, and the speed-up to expect."""
    if c.n_latent or n_pos > c.n_ctx:
        return "dense" if c.n_latent else "-"
    p = Prediction(c.geometry, spec_of(c), (CACHE_TYPES["f16"],) * 2, n_pos)
    return f"{100 * p.share:.0f} %, {p.speedup:.2f}x"


_COLUMNS: dict[str, Callable[[cards.Card], object]] = {
    "model": lambda c: f"`{c.name}`",
    "parameters": lambda c: f"{c.n_params / 1e9:.3g} B",
    "layers": lambda c: c.n_layer,
    "of these layers": lambda c: kinds_text(c.geometry),
    "ratio": lambda c: _ratio(c) or "-",
    **{f"{n:,}": partial(_expected, n_pos=n) for n in (8192, 32768, 131072)},
}


@command.command("show")
@click.argument("name", type=File(), metavar="NAME|FILE")
def show_command(name: str) -> None:
    """Show everything that is known about the model NAME, or about a FILE if its content is known.

    Evidence is from papers, with their split of the ratio, unless it names docs/quality.md.
    """
    from pyorch.models.content import card_of

    c = card_of(Path(name)) if Path(name).is_file() else cards.load(name)
    if c is None:
        hint = f"sparq-cpp explain --model {name} shows what its header says"
        raise SparqError(f"{name}: no card knows a file of this content", hint)
    kv = f"{human_bytes(c.kv_bytes)} per position, {human_bytes(c.kv_bytes * c.n_ctx)} at {c.n_ctx}"
    experts = f" in each of {c.n_expert} experts" if c.n_expert > 1 else ""
    gguf = f"hf:{c.gguf}:{c.quant}"
    if not c.gguf:
        gguf = f"none is known for certain; make one: sparq-cpp convert hf:{c.repository}"
    files = [
        f"{f.name} ({human_bytes(f.n_bytes)}, sha256 {f.sha256[:12]}.."
        f"{f.origin and ', ' + f.origin})"
        for f in c.known_files
    ]
    lines = {
        "repository": c.repository,
        "GGUF": "" if c.package else gguf,
        "known files": ", ".join(files),
        "package": f"{c.package.requirement} of the Python index" if c.package else "",
        "licence": c.licence,
        "architecture": c.architecture,
        "note": c.note,
        "parameters": f"{c.n_params / 1e9:.2f} B",
        "geometry": c.read_from,
        "layers": f"{c.n_layer}, width {c.n_embd}, feed-forward {c.n_ff}{experts}",
        "of these": kinds_text(c.geometry),
        "heads": f"{c.n_head}, {c.n_head_kv} for K and V, of {c.head_dim}",
        "positions": f"{c.positions}, {c.n_ctx}",
        "vocabulary": str(c.n_vocab),
        "K and V": f"{kv}, f16" + (f"; less with windows of {c.n_swa}" if c.n_swa else ""),
        "ratio": _ratio(c),
        "evidence": c.evidence,
    }
    print(c.title)
    for key, value in lines.items():
        if value:
            print(f"  {key:<14}{value}")


@command.command("rm")
@click.argument("spec", metavar="NAME|SPEC")
@click.option("--yes", is_flag=True, help="Remove without asking.")
def rm_command(spec: str, yes: bool) -> None:
    """Remove a model from the hub's cache, in all its revisions.

    NAME and hf:org/repo mean every GGUF model of that repository, with what is left of interrupted
    downloads. NAME:Q8_0, hf:org/repo:Q8_0 and org/repo/file.gguf mean one model.
    """
    from pyorch.models import cache, pull

    named = pull.parse_spec(spec)
    if named is None:
        raise SparqError(f"{spec} is a file of yours", "rm removes from the hub's cache only", 2)
    if named.card and ":" not in spec:
        named = replace(named, quant="")
    cached = [m for m in cache.models(note) if m.repo == named.repo]
    chosen = [m for m in cached if pull.is_named(named, m.name)]
    if not chosen:
        hint = ", ".join(m.spec for m in cached) or "sparq-cpp models list shows what is"
        raise SparqError(f"{spec} is not in the cache", hint)
    n_bytes = sum(m.n_bytes for m in chosen)
    confirm_removal(f"{', '.join(m.name for m in chosen)} of {named.repo}", n_bytes, yes)
    print_freed(cache.remove([path for m in chosen for path in m.paths]))
