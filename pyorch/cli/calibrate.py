"""`sparq-cpp calibrate`: measures the k and the rank that each layer needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click

from pyorch import paths
from pyorch.attention import saved
from pyorch.attention.spec import DEFAULT_RATIO, SHADOWS, AttentionSpec, ratio_text
from pyorch.cli import options as opt
from pyorch.cli.groups import option, takes
from pyorch.cli.loading import find_model, model_path, open_session
from pyorch.cli.terminal import note
from pyorch.cli.types import File, Ratio
from pyorch.errors import SparqError
from pyorch.ggml import MAX_SEQUENCES
from pyorch.progress import progress_bar, say

WIDTH = 40  # characters of the widest bar
N_CTX = 768  # the default: ten parts of the bundled texts
SIZES = ((30e6, 10, 64), (2e9, 10, 16), (float("inf"), 8, 32))  # bytes of a model: contexts, tokens


@dataclass(frozen=True)
class SearchContext(opt.ContextOptions):
    """The context that a search decodes in."""

    ctx: int | None = opt.ctx_option(str(N_CTX))


@dataclass(frozen=True)
class SearchOptions:
    """The settings of a search, and its text."""

    ratio: float = option(
        "--ratio",
        type=Ratio(),
        default=str(DEFAULT_RATIO),
        help="Share of dense attention's bytes.  [default: 1/8]",
    )
    shadow: str = option(
        "--shadow",
        type=click.Choice(SHADOWS),
        default="q4",
        help="Type of the transposed K.  [default: q4]",
    )
    text: str | None = option(
        "--text", type=File(), metavar="FILE|DIR", help="Text to decode.  [default: bundled ones]"
    )
    contexts: int | None = option(
        "--contexts",
        type=click.IntRange(1, MAX_SEQUENCES),
        help="Parts of the text to decode in; six of them decide, the others search."
        "  [default: 10; 8 for a model of 2 GB and more]",
    )
    tokens: int | None = option(
        "--tokens",
        type=click.IntRange(1, 10_000),
        help="Tokens per context.  [default: 64 below 30 MB, 16 below 2 GB, else 32]",
    )


@click.command()
@opt.model_options
@takes(context=SearchContext)
@takes(options=SearchOptions)
@click.option("--show", is_flag=True, help="Show the result of an earlier run.")
@opt.verbose_option
def command(
    model: opt.ModelOptions, context: SearchContext, options: SearchOptions, show: bool
) -> None:
    """Measure which k and rank each layer needs, and keep the result.

    All layers together read the bytes of a ratio. Other commands use the result with
    `--budget calibrated` and `--budget top-p`. An interrupted run continues where it stopped.
    """
    if options.ratio == 1:
        raise SparqError("ratio 1 is dense, without k and rank", "--ratio 1/8", exit_code=2)
    if show:
        path = model_path(model.model, model.yes)
    else:
        file = find_model(model.model, model.yes)
        path, model = file.path, replace(model, model=str(file.path))
        result = _search(model, context, options, file.n_bytes)
        note(f"kept in {saved.save(path, result)}", "dim")
    _print(saved.find(path, options.ratio, options.shadow))


def _search(
    model: opt.ModelOptions, context: SearchContext, options: SearchOptions, n_bytes: int
) -> saved.Result:
    from pyorch.calibrate import search
    from pyorch.evals.texts import read_texts

    # the size decides, not a clock, so that an interrupted run continues with the same numbers
    sizes = next((n, tokens) for most, n, tokens in SIZES if n_bytes < most)
    n_contexts, n_tokens = options.contexts or sizes[0], options.tokens or sizes[1]
    search.check_contexts(n_contexts)
    demo = paths.data("models") / "demo"
    n_pos = context.ctx or N_CTX
    books = [Path(options.text)] if options.text else [demo / "document.txt", demo / "story.txt"]
    text = "\n\n".join(read_texts(books, n_contexts * n_pos))
    context, load = replace(context, ctx=n_pos), opt.LoadOptions()
    with open_session(model, AttentionSpec(), context, load, n_contexts) as session:
        return search.run(
            session,
            text,
            ratio=options.ratio,
            shadow=options.shadow,
            n_pos=n_pos,
            n_contexts=n_contexts,
            n_tokens=n_tokens,
            bar=partial(progress_bar, off_terminal=say),
        )


def _print(result: saved.Result) -> None:
    """Print k of every layer as bars, and the candidates that were compared."""
    spec = saved.applied(result["calibrated"], AttentionSpec("sparq", ratio=result["ratio"]))
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
        chosen = {"calibrated": result["chosen"], "top-p": result["chosen_top_p"]}
        marks = ", ".join(budget for budget, name in chosen.items() if name == c["name"])
        mark = f" < {marks}" if marks else ""
        print(f"  {c['name']:<22}{c['kl']:>12.5f}{100 * c['share']:>8.2f} %{mark}")
    n = len(result["candidates"][0]["kl_contexts"]) * result["n_tokens"]
    print(f"\n  nats, mean over {n} decoded tokens")
