"""`sparq-cpp explain`: the meaning of a ratio for a model, from its metadata alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from textwrap import fill
from typing import TYPE_CHECKING

import click

from pyorch.attention import bytes as cost
from pyorch.attention.placement import Cache
from pyorch.attention.saved import resolve
from pyorch.attention.spec import (
    CALIBRATED,
    DEFAULT_RATIO,
    AttentionSpec,
    check_against_model,
    ratio_text,
)
from pyorch.cli import gpu
from pyorch.cli import options as opt
from pyorch.cli.cluster import cluster
from pyorch.cli.cluster import show as show_cluster
from pyorch.cli.groups import given_on_command_line, takes
from pyorch.cli.lengths import (
    expectation,
    kinds_text,
    layer_kinds,
    lengths,
    product_rate,
    show,
)
from pyorch.cli.loading import model_path
from pyorch.cli.terminal import note, note_if_beyond, print_json
from pyorch.errors import SparqError
from pyorch.models.geometry import Geometry, geometry, layer_weights
from pyorch.models.gguf_file import read_gguf
from pyorch.models.memory import available_memory
from pyorch.text import human_bytes

if TYPE_CHECKING:
    from pyorch.ggml import TensorType


@dataclass(frozen=True)
class WholeContext(opt.ContextOptions):
    """A context that costs nothing, so it may be as long as the model allows."""

    ctx: int | None = opt.ctx_option("the model's own")


@dataclass(frozen=True)
class Machines(opt.WorkerOptions):
    """The other machines, and how many layers they hold together; or the GPU of this one."""

    n_gpu_layers: int | None = opt.gpu_option("on the workers of --rpc")
    kv_offload: bool | None = opt.kv_option("and in memory: both are told")


@dataclass(frozen=True)
class Attention(opt.AttentionOptions):
    """The settings of attention, which are sparse by default."""

    ratio: float | None = opt.ratio_option(ratio_text(DEFAULT_RATIO))


@click.command()
@opt.model_options
@takes(context=WholeContext)
@takes(elsewhere=Machines)
@opt.cache_options
@takes(attention=Attention)
@opt.json_option
def command(
    model: opt.ModelOptions,
    context: WholeContext,
    elsewhere: Machines,
    cache: opt.CacheOptions,
    attention: Attention,
    as_json: bool,
) -> None:
    """Show what attention reads per token, what it needs in memory, and the speed-up to expect.

    The numbers come from the header of the model, or from its card if the model is not
    downloaded. The speed-ups are limits, by a roofline of bytes: the weights that a token reads, of
    experts only those in use, and K and V over the measured memory bandwidth, as if nothing else
    took time. With a GPU it measures that as well, and tells what fits there and how fast tokens
    are with K and V there and in memory. With --rpc it asks the workers, and tells what each of
    them holds and reads, and what passes for a token.
    """
    from pyorch import engine
    from pyorch.bench import bandwidth
    from pyorch.engine.settings import batch_size
    from pyorch.models.content import card_of

    if not elsewhere.workers and given_on_command_line(["n_gpu_layers", "tensor_split"]):
        raise SparqError(
            "--n-gpu-layers and --tensor-split say what workers hold, and there are none",
            "--rpc HOST:PORT names them",
            exit_code=2,
        )
    spec = attention.spec() or AttentionSpec("sparq")
    needs_file = spec.budget in CALIBRATED or elsewhere.workers
    file, geo = None, None if needs_file else _from_card(model.model)
    if geo is None:
        path = model_path(model.model, model.yes)
        spec, geo = resolve(spec, path), geometry(file := read_gguf(path))
        if card := card_of(path):  # the file may call itself otherwise
            geo = replace(geo, name=card.title)
    check_against_model(spec, geo.head_dim_k, geo.n_layer)
    n_pos = context.ctx or geo.n_ctx_train or 4096
    note_if_beyond(
        n_pos, geo.n_ctx_train, "chat, generate and serve refuse it without --rope-scaling"
    )
    types = engine.cache_type(cache.cache_type_k), engine.cache_type(cache.cache_type_v)
    layers = cost.layer_costs(geo, spec, n_pos, *(t.bytes_per_element for t in types))
    if not layers:
        raise SparqError(f"{geo.arch}: no layer has a KV cache, so there is nothing to make sparse")
    threads = context.threads or engine.usable_cores()
    found = Prediction(geo, spec, n_pos, types, layers, bandwidth.measured(threads), threads)
    rate = product_rate() * min(threads / engine.usable_cores(), 1)
    contexts = list(lengths(geo, spec, types, found.bandwidth, rate, free := available_memory()))
    apart = None
    if elsewhere.workers and file:
        away = elsewhere.n_gpu_layers
        apart = cluster(elsewhere, away, file, geo, spec, n_pos, types, found.bandwidth)
    there = None if apart else gpu.facts(found.bandwidth)
    if not (there or apart) and elsewhere.kv_offload is not None:
        note("note: no GPU is here, so K and V lie in memory", "yellow")
    weights = sum(layer_weights(file, geo.n_layer, used=False)) if file else geo.weight_bytes
    whole = Cache(geo, spec, types, n_pos, batch_size(n_pos))
    places = gpu.places(there, whole, weights, elsewhere.kv_offload) if there else []
    expected = expectation(geo, contexts)
    if as_json:
        several = apart.json() if apart else {}
        several |= {"gpu": asdict(there), "places": [asdict(x) for x in places]} if there else {}
        many = {"lengths": [asdict(x) for x in contexts], "expectation": expected}
        print_json({**found.json(), **many, **several})
    else:
        _print(found)
        if apart:
            show_cluster(apart)
        if there:
            gpu.show(there, places)
        show(contexts, free)
        print(f"\n{fill(expected, 90, initial_indent='  ', subsequent_indent='  ')}")


def _from_card(name: str) -> Geometry | None:
    """The geometry on the card of that name; None if there is no card, or the very file that the
    name means is here."""
    from pyorch.models import cache, cards, pull

    spec = pull.parse_spec(name, original=True)
    if spec is None or not spec.card:
        return None
    card = cards.load(spec.card)
    if card.source and (wanted := pull.parse_spec(name)):
        there = (m for m in cache.models() if m.repo == wanted.repo and m.complete)
        if any(pull.is_named(wanted, m.name) for m in there) and pull.find(wanted, note).complete:
            return None
    note(f"{name} is not here: this is from its card, weights in Q4_K_M", "dim")
    return card.geometry


@dataclass(frozen=True)
class Prediction:
    """The bytes that a decoded token reads, and the time that this takes at least.

    types: those of K and V in the cache; bandwidth: bytes per second that the threads read.
    """

    geo: Geometry
    spec: AttentionSpec
    n_pos: int
    types: tuple[TensorType, TensorType]
    layers: Sequence[cost.LayerCost]
    bandwidth: float
    threads: int

    @property
    def read(self) -> int:
        return sum(c.bytes_read for c in self.layers)

    @property
    def dense(self) -> int:
        return sum(c.bytes_dense for c in self.layers)

    @property
    def counted(self) -> tuple[int, int]:
        """The bytes read, and those of dense attention, in the layers that /stats counts."""
        ours = [c for c in self.layers if c.ours]
        return sum(c.bytes_read for c in ours), sum(c.bytes_dense for c in ours)

    @property
    def memory(self) -> tuple[int, int]:
        """The bytes of the cache and of the transposed K."""
        cache = cost.cache_bytes(self.geo, self.n_pos, *self.types, cost.N_BATCH)
        return cache, cost.shadow_bytes(self.geo, self.n_pos, self.spec)

    def token_s(self, attention_bytes: int) -> float:
        return (attention_bytes + self.geo.weight_bytes_per_token) / self.bandwidth

    @property
    def speedups(self) -> tuple[float, float]:
        """The speed-ups of attention alone, and of a whole token."""
        return self.dense / self.read, self.token_s(self.dense) / self.token_s(self.read)

    def uses_mean_v(self, c: cost.LayerCost) -> bool:
        return cost.uses_mean_v(self.spec) and not c.split.dense

    def json(self) -> dict[str, object]:
        cache, shadow = self.memory
        return {
            "model": self.geo.name,
            "architecture": self.geo.arch,
            "spec": str(self.spec),
            "positions": self.n_pos,
            "top_p": self.spec.top_p,
            "cap": self.spec.cap,
            "layers": [self._layer(c) for c in self.layers],
            "layer_kinds": layer_kinds(self.geo),
            "attention_bytes_per_token_dense": self.dense,
            "attention_bytes_per_token": self.read,
            "counted_bytes_per_token_dense": self.counted[1],
            "counted_bytes_per_token": self.counted[0],
            "weight_bytes_per_token": self.geo.weight_bytes_per_token,
            "attention_share_dense": self.dense / (self.dense + self.geo.weight_bytes_per_token),
            "cache_types": [t.name for t in self.types],
            "kv_memory": cache,
            "shadow_memory": shadow,
            "bandwidth": self.bandwidth,
            "token_s_dense": self.token_s(self.dense),
            "token_s": self.token_s(self.read),
            "speedup_attention": self.speedups[0],
            "speedup_token": self.speedups[1],
            "threads": self.threads,
        }

    def _layer(self, c: cost.LayerCost) -> dict[str, object]:
        row = {"il": c.il, "n_head": c.n_head, "n_head_kv": c.n_head_kv, **asdict(c.split)}
        row["mean_v"] = self.uses_mean_v(c)
        return {**row, "bytes_dense": c.bytes_dense, "bytes_read": c.bytes_read, "counted": c.ours}


# ---- for people ----


def _print(p: Prediction) -> None:
    geo = p.geo
    heads = f"{max(geo.n_head)} heads, {max(geo.n_head_kv)} for K and V, of {geo.head_dim_k}"
    print(f"{geo.name} ({geo.arch}): {geo.n_layer} layers, {heads}")
    print(f"of these layers {kinds_text(geo)}")
    types = "/".join(dict.fromkeys(t.name for t in p.types))
    print(f"attention {p.spec} at {p.n_pos} positions, {types} cache\n")
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
    weights = geo.weight_bytes_per_token
    share = 100 * weights / (weights + p.dense)
    print(f"  weights, bytes per token    {human_bytes(weights)}  ({share:.0f} % of a dense token)")
    _print_memory(p)
    attention, token = p.speedups
    print(
        f"  memory bandwidth            {p.bandwidth / 1e9:.1f} GB/s, measured now, "
        f"{p.threads} thread{'s' * (p.threads > 1)}"
    )
    print(f"  limit of the speed-up       attention {attention:.2f}x, whole token {token:.2f}x")
    print(
        f"  token time at that limit    {1000 * p.token_s(p.read):.2f} ms, "
        f"dense {1000 * p.token_s(p.dense):.2f} ms"
    )


def _print_layers(p: Prediction) -> None:
    print(
        f"  {'layers':<11}{'rank':>6}{'topk':>8}{'local':>8}{'sinks':>7}{'mean_v':>8}"
        f"{'dense':>11}{'read':>11}"
    )
    for run in _runs(p.layers):
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


def _print_memory(p: Prediction) -> None:
    cache, shadow = p.memory
    print(
        f"  memory                      cache {human_bytes(cache)}, "
        f"transposed K {human_bytes(shadow)}"
    )


def _share(part: float, whole: float) -> str:
    return f"{human_bytes(part)} of {human_bytes(whole)}  ({100 * part / whole:.1f} %)"


def _runs(layers: Sequence[cost.LayerCost]) -> list[list[cost.LayerCost]]:
    """Runs of layers with the same costs; layers without a cache may stand between them."""
    same = groupby(layers, lambda c: replace(c, il=0))
    return [list(run) for _, run in same]
