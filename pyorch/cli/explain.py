"""`sparq-cpp explain`: the meaning of a ratio for a model, from its metadata alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby

import click

from pyorch.attention.saved import resolve
from pyorch.attention.spec import CALIBRATED, check_against_model
from pyorch.cli import gpu
from pyorch.cli import options as opt
from pyorch.cli.groups import given_on_command_line, takes
from pyorch.cli.loading import default_spec, model_path
from pyorch.cli.prediction import Prediction, kinds_text, machine_shares, show_shares
from pyorch.cli.terminal import note, note_if_beyond, print_json
from pyorch.errors import SparqError
from pyorch.ggml import CACHE_TYPES
from pyorch.models.geometry import Geometry, geometry, layer_weights
from pyorch.models.gguf_file import read_gguf
from pyorch.models.memory import available_memory
from pyorch.text import human_bytes

LENGTHS = (8192, 32768, 131072, 524288, 1048576)


@dataclass(frozen=True)
class WholeContext(opt.ContextOptions):
    """A context that costs nothing, so it may be as long as the model allows."""

    ctx: int | None = opt.ctx_option("the model's own")


@dataclass(frozen=True)
class Machines(opt.RpcOptions):
    """The other machines, and how many layers they hold together; or the GPU of this one."""

    n_gpu_layers: int | None = opt.gpu_option("on the workers of --rpc")
    kv_offload: bool | None = opt.kv_option()


@click.command()
@opt.model_argument
@opt.model_options
@opt.attention_options
@takes(context=WholeContext)
@opt.cache_options
@opt.json_option
@takes(elsewhere=Machines)
def command(
    model: opt.ModelOptions,
    context: WholeContext,
    elsewhere: Machines,
    cache: opt.CacheOptions,
    attention: opt.AttentionOptions,
    as_json: bool,
) -> None:
    """Show what attention reads per token, what it needs in memory, and the speed-up to expect.

    The numbers come from the header of the model, or from its card if the model is not
    downloaded. The speed-ups are limits, by a roofline of bytes: the weights that a token reads, of
    experts only those in use, and K and V over the memory bandwidth, which is measured once, as if
    nothing else took time. With a GPU it tells what fits there. With --rpc it asks the workers, and
    tells what each of them holds and reads.
    """
    from pyorch import engine
    from pyorch.engine import bandwidth
    from pyorch.engine.settings import batch_size
    from pyorch.models.content import card_of

    if not elsewhere.workers and given_on_command_line(["n_gpu_layers", "tensor_split"]):
        what = "--n-gpu-layers and --tensor-split say what workers hold, and there are none"
        hint = "--rpc HOST:PORT names them"
        raise SparqError(what, hint, exit_code=2)
    spec = attention.spec()
    needs_file = elsewhere.workers or (spec and spec.budget in CALIBRATED)
    file, geo = None, None if needs_file else _from_card(model.model)
    if geo is not None:
        spec = spec or default_spec(model.model, None)
    else:
        path = model_path(model.model, model.yes)
        spec = resolve(spec or default_spec(model.model, path), path)
        geo = geometry(file := read_gguf(path))
        if card := card_of(path):  # the file may call itself otherwise
            geo = replace(geo, name=card.title)
    check_against_model(spec, geo.head_dim_k, geo.n_layer)
    n_pos, trained = context.ctx or geo.n_ctx_train or 4096, geo.n_ctx_train
    note_if_beyond(n_pos, trained, "chat, generate and serve refuse it without --rope-scaling")
    types = engine.cache_type(cache.cache_type_k), engine.cache_type(cache.cache_type_v)
    p = Prediction(geo, spec, types, n_pos)
    if not p.layers:
        raise SparqError(f"{geo.arch}: no layer has a KV cache, so there is nothing to make sparse")
    known = (trained, *LENGTHS) if 0 < trained < LENGTHS[0] else LENGTHS
    rows = [replace(p, n_ctx=n) for n in known]
    threads, free = context.threads or engine.usable_cores(), available_memory()
    shares = machine_shares(elsewhere, elsewhere.n_gpu_layers, file, p) if file else []
    room = None
    gpus, rates = ((), None) if shares else gpu.asked(spec, threads)
    if gpus:
        held = layer_weights(file, geo.n_layer, used=False) if file else [geo.weight_bytes]

        def on_gpu(x: Prediction) -> gpu.Room:
            whole = replace(x, n_batch=batch_size(x.n_ctx))
            return gpu.room(gpus, rates, whole, sum(held), elsewhere.kv_offload)

        room = on_gpu(p)
        p, *rows = (replace(x, exact=frozenset(on_gpu(x).exact)) for x in (p, *rows))
    elif not shares and elsewhere.kv_offload is not None:
        note("note: no GPU is here, so K and V lie in memory", "yellow")
    rate = bandwidth.measured(threads)
    if as_json:
        more: dict[str, object] = {"machines": [x.json() for x in shares]} if shares else {}
        more |= {"gpu": asdict(room)} if room else {}
        lengths = [
            {
                "positions": x.n_ctx,
                "memory": x.memory,
                "fits": x.memory <= free,
                "beyond_training": 0 < x.geo.n_ctx_train < x.n_ctx,
                **x.times(rate),
                "attention_share": x.share,
                "attention_read": x.read / x.dense,
                "speedup": x.speedup,
            }
            for x in rows
        ]
        of_memory = {"bandwidth": rate, "threads": threads, **p.times(rate)}
        print_json({**p.json(), **of_memory, "lengths": lengths, **more})
        return
    _print(p, rate, threads)
    if shares:
        show_shares(shares)
    if room:
        gpu.show(room, len(p.layers))
    _print_lengths(rows, rate, free)


def _from_card(name: str) -> Geometry | None:
    """The geometry on the card of that name; None if there is no card, or the very file that the
    name means is here."""
    from pyorch.models import cache, cards, pull

    spec = pull.parse_spec(name, original=True)
    if spec is None or not spec.card:
        return None
    card = cards.load(spec.card)
    if card.source and (named := pull.parse_spec(name)):
        models = (m for m in cache.models() if m.repo == named.repo and m.complete)
        if any(pull.is_named(named, m.name) for m in models) and pull.find(named, note).complete:
            return None
    note(f"{name} is not here: this is from its card, weights in Q4_K_M", "dim")
    return card.geometry


def _print(p: Prediction, rate: float, threads: int) -> None:
    geo = p.geo
    heads = f"{max(geo.n_head)} heads, {max(geo.n_head_kv)} for K and V, of {geo.head_dim_k}"
    print(f"{geo.name} ({geo.arch}): {geo.n_layer} layers, {heads}")
    print(f"of these layers {kinds_text(geo)}")
    types = "/".join(dict.fromkeys(t.name for t in p.types))
    print(f"attention {p.spec} at {p.n_ctx} positions, {types} cache\n")
    _print_layers(p)
    if p.spec.top_p < 1:
        more = f", or up to {p.spec.cap:g} times as many" if p.spec.cap > 1 else ""
        print(f"  (top-p {p.spec.top_p:g}: a head reads fewer positions{more})")
    print(f"\n  attention, bytes per token  {_share(p.read, p.dense)}")
    ours, of = p.counted
    if 0 < of < p.dense:
        rest = human_bytes(p.dense - of)
        print(f"    full layers               {_share(ours, of)}: what /stats and records count")
        print(f"    layers with a window      {rest}, by llama.cpp's own attention")
    weights = f"{human_bytes(p.weights)}  ({100 * (1 - p.share):.0f} % of a dense token)"
    print(f"  weights, bytes per token    {weights}")
    cache, shadow = human_bytes(p.kv_bytes()), human_bytes(p.shadow_bytes())
    print(f"  memory                      cache {cache}, transposed K {shadow}")
    q8 = replace(p, types=(CACHE_TYPES["q8_0"],) * 2)
    whole = geo.head_dim_k % 32 == geo.head_dim_v % 32 == 0
    if whole and q8.read < p.read and not all(c.split.dense for c in p.layers):
        less = f"{human_bytes(q8.read)}, cache {human_bytes(q8.kv_bytes())}"
        print(f"  from a q8_0 cache           {less}: -ctk q8_0 -ctv q8_0")
    many = f"{threads} thread{'s' * (threads > 1)}"
    print(f"  memory bandwidth            {rate / 1e9:.1f} GB/s, as measured with {many}")
    limits = f"attention {p.dense / p.read:.2f}x, whole token {p.speedup:.2f}x"
    print(f"  limit of the speed-up       {limits}")
    dense, token = (f"{1000 * seconds:.2f} ms" for seconds in p.times(rate).values())
    print(f"  token time at that limit    {token}, dense {dense}")


def _print_layers(p: Prediction) -> None:
    print(
        f"  {'layers':<11}{'rank':>6}{'topk':>8}{'local':>8}{'sinks':>7}{'mean_v':>8}"
        f"{'dense':>11}{'read':>11}"
    )
    # layers with the same costs; layers without a cache may stand between them
    for _, same in groupby(p.layers, lambda c: replace(c, il=0)):
        run = list(same)
        c, first = run[-1], run[0].il
        name = f"{c.il}" if first == c.il else f"{first}-{c.il}"
        if len(run) < c.il - first + 1:
            name = f"{len(run)} of {name}"
        s, sizes = c.split, f"{human_bytes(c.bytes_dense):>11}{human_bytes(c.bytes_read):>11}"
        if s.dense:
            print(f"  {name:<11}exact dense: {s.reason:<24}{sizes}")
        else:
            mean_v = "on" if p.uses_mean_v(c) else "off"
            print(f"  {name:<11}{s.rank:>6}{s.topk:>8}{s.local:>8}{s.sinks:>7}{mean_v:>8}{sizes}")


def _share(part: float, whole: float) -> str:
    return f"{human_bytes(part)} of {human_bytes(whole)}  ({100 * part / whole:.1f} %)"


def _print_lengths(rows: Sequence[Prediction], rate: float, free: int) -> None:
    print(f"\n  lengths, with {human_bytes(free)} of memory free")
    head = f"{'positions':>9}{'memory':>10}{'K and V':>9}{'dense':>12}{'token':>12}{'speed-up':>10}"
    print(f"  {head}")
    for p in rows:
        times = "".join(f"{1000 * seconds:>9.1f} ms" for seconds in p.times(rate).values())
        why = ["does not fit"] * (p.memory > free)
        why += ["beyond the training"] * (0 < p.geo.n_ctx_train < p.n_ctx)
        row = f"  {p.n_ctx:>9}{human_bytes(p.memory):>10}{100 * p.share:>7.0f} %{times}"
        row += f"{p.speedup:>9.2f}x"
        print(f"{row}  {', '.join(why)}".rstrip())
    print("  (limits, by the bytes of a token; K and V: their share of a dense one)")
