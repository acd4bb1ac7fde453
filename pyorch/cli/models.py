"""`sparq-cpp models`: the cards of known models."""

from __future__ import annotations

from dataclasses import asdict

import click

from pyorch.cli import options as opt
from pyorch.models import cards
from pyorch.models.gguf_file import human_bytes


@click.group(invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """List known models, or show one: geometry, settings to try first, and the evidence."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_command)


@command.command("list")
@opt.json_option
def list_command(as_json: bool = False) -> None:
    """One line per model."""
    known = [cards.load(name) for name in cards.names()]
    if as_json:
        opt.print_json({"models": [asdict(c) for c in known]})
        return
    print(
        f"{'name':<18}{'architecture':<14}{'parameters':>10}{'context':>9}  {'K and V':<10}settings"
    )
    for c in known:
        size = f"{c.n_params / 1e9:.2f} B"
        kv = human_bytes(c.kv_bytes)
        settings = c.settings if c.loads else "llama.cpp does not load it"
        print(f"{c.name:<18}{c.architecture:<14}{size:>10}{c.n_ctx:>9}  {kv:<10}{settings}")
    opt.note(
        "K and V: bytes per position, f16. Evidence for the settings: sparq-cpp models show NAME"
    )


@command.command("show")
@click.argument("name")
@opt.json_option
def show_command(name: str, as_json: bool) -> None:
    """Everything that is known of the model NAME.

    Numbers in the evidence are a paper's own, at its split of the ratio into rank and k.
    """
    c = cards.load(name)
    if as_json:
        opt.print_json({**asdict(c), "kv_bytes": c.kv_bytes})
        return
    kv = f"{human_bytes(c.kv_bytes)} per position, {human_bytes(c.kv_bytes * c.n_ctx)} at {c.n_ctx}"
    experts = f" in each of {c.n_expert} experts" if c.n_expert > 1 else ""
    lines = {
        "repository": c.repository,
        "licence": c.licence,
        "architecture": c.architecture + ("" if c.loads else ", which llama.cpp does not load"),
        "note": c.note,
        "parameters": f"{c.n_params / 1e9:.2f} B",
        "layers": f"{c.n_layer}, width {c.n_embd}, feed-forward {c.n_ff}{experts}",
        "heads": f"{c.n_head}, {c.n_head_kv} for K and V, of {c.head_dim}",
        "positions": f"{c.positions}, {c.n_ctx}",
        "vocabulary": str(c.n_vocab),
        "K and V": f"{kv}, f16" + (f"; less with windows of {c.n_swa}" if c.n_swa else ""),
        "settings": c.settings,
        "evidence": c.evidence,
    }
    print(c.title)
    for key, value in lines.items():
        if value:
            print(f"  {key:<14}{value}")
