"""`sparq-cpp calibrate`: which k and rank each layer needs, and where the result is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pyorch import paths
from pyorch.attention import saved
from pyorch.attention.spec import DEFAULT_RATIO, SHADOWS, AttentionSpec, ratio_text
from pyorch.cli import options as opt
from pyorch.errors import SparqError
from pyorch.models.gguf_file import read_gguf
from pyorch.progress import progress_bar

WIDTH = 40  # characters of the widest bar
SIZES = ((0.1e9, 8, 64), (1e9, 8, 16), (float("inf"), 4, 16))  # bytes of a model: contexts, tokens


@click.command()
@opt.model_options
@opt.context_options
@opt.cache_options
@opt.numa_option
@click.option(
    "--ratio",
    type=opt.Ratio(),
    default=str(DEFAULT_RATIO),
    help="Share of dense attention's bytes.  [default: 1/8]",
)
@click.option(
    "--attn-shadow",
    "shadow",
    type=opt.Name(*SHADOWS),
    default="q4",
    help="Type of the transposed K.  [default: q4]",
)
@opt.renamed("--shadow-type", "--attn-shadow")
@click.option("--text", metavar="FILE|DIR", help="Text to decode.  [default: a bundled one]")
@click.option(
    "--contexts",
    type=opt.Number(int, 2, 1000),
    help="Contexts to decode in.  [default: 8; 4 for a model of 1 GB and more]",
)
@click.option(
    "--tokens",
    type=opt.Number(int, 1, 10_000),
    help="Tokens per context.  [default: 64; 16 for a model of 0.1 GB and more]",
)
@click.option(
    "--seed",
    type=opt.Number(int, 0),
    default=1,
    show_default=True,
    help="Seed of the choice of contexts.",
)
@click.option("--show", is_flag=True, help="Show the result of an earlier run.")
@opt.json_option
@opt.verbose_option
def command(**options: Any) -> None:
    """Measure which k and rank each layer needs, and keep the result.

    All layers together read the bytes of a ratio. Other commands use the result with
    `--budget calibrated` and `--budget top-p`. An interrupted run continues where it stopped.
    """
    if options["ratio"] == 1:
        hint = "--ratio 1/8"
        raise SparqError(
            "ratio 1 is dense attention, which has no k and no rank", hint, exit_code=2
        )
    path = opt.model_file(options)
    if not options["show"]:
        _measure(path, options)
    result = saved.find(path, options["ratio"], options["shadow"])
    if options["as_json"]:
        opt.print_json(result)
    else:
        show(result)


def _measure(path: Path, options: dict[str, Any]) -> None:
    from pyorch.calibrate import search

    source = Path(options["text"] or paths.data("models") / "demo" / "document.txt")
    text = search.joined([source])
    ctx = options["ctx"] or 2048
    n_contexts, n_tokens = sizes(path)
    with opt.open_session({**options, "model": str(path), "ctx": ctx}, None) as session:
        result = search.run(
            session,
            text,
            ratio=options["ratio"],
            shadow=options["shadow"],
            n_pos=ctx,
            n_contexts=options["contexts"] or n_contexts,
            n_tokens=options["tokens"] or n_tokens,
            seed=options["seed"],
            bar=progress_bar,
        )
    opt.note(f"kept in {saved.save(path, result)}", "dim")


def sizes(path: Path) -> tuple[int, int]:
    """Contexts, and tokens of each, with which a model of this size takes minutes.

    By its size, not by a clock, so that a run which is interrupted goes on with the same.
    """
    size = read_gguf(path).n_bytes
    return next((contexts, tokens) for most, contexts, tokens in SIZES if size < most)


def show(result: dict[str, Any]) -> None:
    """k of every layer as bars, and what was compared."""
    found = saved.values_of(result["calibrated"])
    spec = AttentionSpec("sparq", ratio=result["ratio"], **found)
    n_pos = result["n_pos"]
    print(f"ratio {ratio_text(result['ratio'])} at {n_pos} positions: {result['chosen']}\n")
    if spec.k_layers:
        ranks = spec.rank_layers or ()
        shares = {il: spec.k_layers[il].k for il in result["layers"]}
        most = max((s for s in shares.values() if s < 1), default=1)
        for il, share in shares.items():
            bar = "=" * max(round(WIDTH * share / most), 1) if share < 1 else "#" * WIDTH
            what = f"k {share * n_pos:5.0f}  rank {ranks[il]:>3}" if share < 1 else "dense"
            print(f"  {il:>3} {bar:<{WIDTH}} {what}")
        local = "a quarter of k" if spec.local is None else spec.local
        print(f"\n  mean of V {spec.mean_v}, local window {local}")
    print(f"\n  {'settings':<22}{'KL to dense':>12}{'bytes':>9}")
    for c in result["candidates"]:
        mark = {result["chosen"]: " < calibrated", result["chosen_top_p"]: " < top-p"}
        print(
            f"  {c['name']:<22}{c['kl']:>12.5f}{100 * c['share']:>8.2f} %{mark.get(c['name'], '')}"
        )
    n = result["n_contexts"] * result["n_tokens"]
    print(f"\n  nats, mean over {n} decoded tokens")
