"""`sparq-cpp explain`: what a ratio means for a model, from its metadata alone."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from pyorch.attention import bytes as cost
from pyorch.attention.saved import CALIBRATED, resolve
from pyorch.attention.spec import AttentionSpec, check_against_model
from pyorch.cli import options as opt
from pyorch.errors import SparqError
from pyorch.models.geometry import Geometry, geometry
from pyorch.models.gguf_file import read_gguf
from pyorch.text import human_bytes

if TYPE_CHECKING:
    from pyorch.ggml import TensorType

N_BATCH = 512  # tokens that llama.cpp reads at once by default


@click.command()
@opt.model_options
@opt.context_options
@opt.rope_options
@opt.cache_options
@opt.attention_options
@opt.json_option
def command(**options: Any) -> None:
    """Show what attention reads per token, what it needs in memory, and the speed-up to expect.

    The numbers come from the header of the model, or from its card if the model is not
    downloaded. The speed-ups are limits: they count bytes over the measured memory bandwidth, as if
    nothing else took time.
    """
    spec = opt.attention_from(options) or AttentionSpec("sparq")
    geo = _from_card(options["model"]) if spec.budget not in CALIBRATED else None
    if geo is None:
        path = opt.model_file(options)
        spec, geo = resolve(spec, path), geometry(read_gguf(path))
    from pyorch import engine

    check_against_model(spec, geo.head_dim_k, geo.n_layer)
    n_pos = engine.checked_ctx(
        geo, options["ctx"] or geo.n_ctx_train or 4096, opt.rope_from(options)
    )
    opt.note_if_beyond(n_pos, geo.n_ctx_train)
    n_threads = options["threads"] or engine.usable_cores()
    types = [engine.cache_type(options[f"cache_type_{x}"]) for x in "kv"]
    report = explain(geo, spec, n_pos, types, _bandwidth(n_threads))
    report["threads"] = n_threads
    if options["as_json"]:
        opt.print_json(report)
    else:
        _print(geo, report)


def _from_card(name: str) -> Geometry | None:
    """Of a card's model, unless one of its files is in the cache."""
    from pyorch.models import cache, cards, pull

    spec = pull.parse_spec(name, original=True)
    if spec is None or not spec.card:
        return None
    card = cards.load(spec.card)
    if any(m.repo == card.gguf for m in cache.models()):
        return None
    opt.note(f"{name} is not here: this is from its card, weights in Q4_K_M", "dim")
    return card.geometry


def _bandwidth(n_threads: int) -> float:
    """Bytes per second that the threads read from memory: the median of a few passes."""
    from pyorch.bench.bandwidth import MemoryReader

    reader = MemoryReader(n_threads)
    reader.read()
    return statistics.median(reader.read() for _ in range(5))


def explain(
    geo: Geometry, spec: AttentionSpec, n_pos: int, types: list[TensorType], rate: float
) -> dict[str, Any]:
    """Everything the command prints, times in seconds.

    Args:
        types: of K and V in the cache.
        rate: bytes read from memory per second.

    Raises:
        SparqError: the model has no KV cache at all.
    """
    layers = cost.layer_costs(geo, spec, n_pos, *(t.bytes_per_element for t in types))
    if not layers:
        raise SparqError(f"{geo.arch}: no layer of this model has a KV cache to be sparse about")
    dense, read = sum(c.bytes_dense for c in layers), sum(c.bytes_read for c in layers)
    ours = [c for c in layers if c.ours]
    weights = geo.weight_bytes_per_token
    return {
        "model": geo.name,
        "architecture": geo.arch,
        "spec": str(spec),
        "positions": n_pos,
        "top_p": spec.top_p,
        "cap": spec.cap,
        "layers": [_layer_row(c, spec) for c in layers],
        "attention_bytes_per_token_dense": dense,
        "attention_bytes_per_token": read,
        "counted_bytes_per_token_dense": sum(c.bytes_dense for c in ours),
        "counted_bytes_per_token": sum(c.bytes_read for c in ours),
        "weight_bytes_per_token": weights,
        "cache_types": [t.name for t in types],
        "kv_memory": cost.cache_bytes(geo, n_pos, *types),
        "kv_memory_windows_cut": cost.cache_bytes(geo, n_pos, *types, n_batch=N_BATCH),
        "shadow_memory": cost.shadow_bytes(geo, n_pos, spec),
        "bandwidth": rate,
        "token_s_dense": (dense + weights) / rate,
        "token_s": (read + weights) / rate,
        "speedup_attention": dense / read,
        "speedup_token": (dense + weights) / (read + weights),
    }


def _layer_row(c: cost.LayerCost, spec: AttentionSpec) -> dict[str, Any]:
    row = {"il": c.il, "n_head": c.n_head, "n_head_kv": c.n_head_kv, **asdict(c.split)}
    row["mean_v"] = cost.uses_mean_v(spec, c.n_head, c.n_head_kv) and not c.split.dense
    return {**row, "bytes_dense": c.bytes_dense, "bytes_read": c.bytes_read, "counted": c.ours}


def _print(geo: Geometry, r: dict[str, Any]) -> None:
    heads = f"{max(geo.n_head)} heads, {max(geo.n_head_kv)} for K and V, of {geo.head_dim_k}"
    print(f"{r['model']} ({r['architecture']}): {geo.n_layer} layers, {heads}")
    types = "/".join(dict.fromkeys(r["cache_types"]))
    print(f"attention {r['spec']} at {r['positions']} positions, {types} cache\n")
    print(
        f"  {'layers':<9}{'rank':>6}{'topk':>8}{'local':>8}{'sinks':>7}{'mean_v':>8}"
        f"{'dense':>11}{'read':>11}"
    )
    for first, last, row in _runs(r["layers"]):
        name = f"{first}" if first == last else f"{first}-{last}"
        if row["dense"]:
            print(
                f"  {name:<9}exact dense: {row['reason']:<24}"
                f"{human_bytes(row['bytes_dense']):>11}{human_bytes(row['bytes_read']):>11}"
            )
            continue
        print(
            f"  {name:<9}{row['rank']:>6}{row['topk']:>8}{row['local']:>8}{row['sinks']:>7}"
            f"{'on' if row['mean_v'] else 'off':>8}"
            f"{human_bytes(row['bytes_dense']):>11}{human_bytes(row['bytes_read']):>11}"
        )
    if r["top_p"]:
        print(f"  (top-p {r['top_p']:g}: a head reads fewer, or up to {r['cap']:g} times as many)")
    read, dense = r["attention_bytes_per_token"], r["attention_bytes_per_token_dense"]
    print(f"\n  attention, bytes per token  {_share(read, dense)}")
    ours, of = r["counted_bytes_per_token"], r["counted_bytes_per_token_dense"]
    if 0 < of < dense:
        print(f"    full layers               {_share(ours, of)}: what /stats and records count")
        print(
            f"    layers with a window      {human_bytes(dense - of)}, by llama.cpp's own attention"
        )
    print(f"  weights, bytes per token    {human_bytes(r['weight_bytes_per_token'])}")
    print(
        f"  memory                      cache {human_bytes(r['kv_memory'])}, "
        f"transposed K {human_bytes(r['shadow_memory'])}"
    )
    if r["kv_memory_windows_cut"] < r["kv_memory"]:
        print(
            f"    in llama.cpp's programs   cache {human_bytes(r['kv_memory_windows_cut'])}: they "
            "keep the windows only, and cannot go back"
        )
    print(
        f"  memory bandwidth            {r['bandwidth'] / 1e9:.1f} GB/s, measured now, "
        f"{r['threads']} threads"
    )
    print(
        f"  limit of the speed-up       attention {r['speedup_attention']:.2f}x, "
        f"whole token {r['speedup_token']:.2f}x"
    )
    print(
        f"  token time at that limit    {1000 * r['token_s']:.2f} ms, "
        f"dense {1000 * r['token_s_dense']:.2f} ms"
    )


def _share(part: float, whole: float) -> str:
    return f"{human_bytes(part)} of {human_bytes(whole)}  ({100 * part / whole:.1f} %)"


def _runs(rows: list[dict[str, Any]]) -> list[tuple[int, int, dict[str, Any]]]:
    """Neighbouring layers with the same numbers, as (first, last, row)."""
    out: list[tuple[int, int, dict[str, Any]]] = []
    for row in rows:
        same = out and {**out[-1][2], "il": 0} == {**row, "il": 0} and out[-1][1] == row["il"] - 1
        if same:
            out[-1] = (out[-1][0], row["il"], out[-1][2])
        else:
            out.append((row["il"], row["il"], row))
    return out
