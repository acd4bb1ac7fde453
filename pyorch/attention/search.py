"""Which k and rank each layer gets: measured on the model, kept beside it, found again.

`calibrate` decodes real text token by token, densely and with candidate settings, and compares the
distributions of the next token: KL(dense || candidate), in nats, mean over the decoded positions.

1. One layer at a time is sparse, the others dense: KL over k, for every layer.
2. These curves are added up (errors of different layers hardly meet), and k is given to the layers
   where a byte lowers the sum most, until the bytes of the ratio are spent. A layer may end dense.
3. At that k, half and twice the rank at the same bytes; a layer keeps what is better.
4. All this without and with the mean of V. Contexts that were not used so far decide between
   uniform, ramps, what 2 and 3 gave and what lies halfway, all layers at once and at equal bytes.
   Uniform wins unless something is better.
5. For `top-p`: several p, and for each the cap with which the library counts the winner's bytes.

Half of the contexts go on as a book does, half repeat a passage of themselves: the second need
retrieval, which prose seldom does. No gradients, no weights change.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pyorch import native, paths
from pyorch.attention import calibrate
from pyorch.attention.bytes import layer_costs, split
from pyorch.attention.meter import Measured, Meter, Progress, contexts
from pyorch.attention.spec import AttentionSpec, layer_k, make_spec

if TYPE_CHECKING:
    from pyorch.engine import CacheType, Session

FACTORS = (1 / 4, 1 / 2, 1, 2, 4)  # of the uniform k, on the curve of a layer
TOP_P = (0.98, 0.99, 0.995, 0.999)
CAPS = (1.05, 1.2, 1.5, 2.0)
LEAST_KL = 1e-9  # nats; below it f32 logits say nothing

Bar = Callable[[str], AbstractContextManager[Progress]]


# ---- what settings cost ----


@dataclass(frozen=True)
class Budget:
    """The bytes that may be read. `layers`: those that can be sparse; the others do not count."""

    session: Session
    base: AttentionSpec  # sparq with a ratio and mean_v, without lower bounds
    n_pos: int
    types: Sequence[CacheType]
    layers: Sequence[int]
    share: float = 0.0  # of what `layers` read densely

    def costs(self, spec: AttentionSpec) -> np.ndarray:
        """Bytes that each of `layers` reads, as a share of what all of them read densely."""
        sizes = (t.bytes_per_element for t in self.types)
        costs = {c.il: c for c in layer_costs(self.session.geometry, spec, self.n_pos, *sizes)}
        dense = sum(costs[il].bytes_dense for il in self.layers)
        return np.array([costs[il].bytes_read / dense for il in self.layers])

    def uniform(self) -> tuple[np.ndarray, np.ndarray]:
        """k, as a share of all positions, and rank of each of `layers`."""
        geo, sizes = self.session.geometry, [t.bytes_per_element for t in self.types]
        row = geo.head_dim_k * sizes[0] + geo.head_dim_v * sizes[1]
        s = split(self.base, self.n_pos, geo.head_dim_k, row / (2 * geo.head_dim_k))
        n = len(self.layers)
        return np.full(n, s.topk / self.n_pos), np.full(n, s.rank)

    def spec(self, k: np.ndarray, rank: np.ndarray) -> AttentionSpec:
        """k of 1: dense. Layers that are not ours get the same as the first that is."""
        at = {il: i for i, il in enumerate(self.layers)}
        index = [at.get(il, 0) for il in range(self.session.geometry.n_layer)]
        ks = ":".join("dense" if k[i] >= 1 else f"{100 * k[i]:.4g}%" for i in index)
        ranks = ":".join(str(int(rank[i])) for i in index)
        return replace(self.base, k_layers=ks, rank_layers=ranks)

    def fit(self, k: np.ndarray, rank: np.ndarray) -> AttentionSpec:
        """The settings with all k below 1 times a number such that they read `share`."""

        def scaled(factor: float) -> AttentionSpec:
            return self.spec(np.where(k >= 1, 1, np.minimum(k * factor, 0.999)), rank)

        low, high = 1e-3, 1e3
        for _ in range(50):
            mid = float(np.sqrt(low * high))
            fits = self.costs(scaled(mid)).sum() <= self.share
            low, high = (mid, high) if fits else (low, mid)
        return scaled(low)


def curve(k: np.ndarray, kl: np.ndarray, at: np.ndarray) -> np.ndarray:
    """KL at shares `at` from that measured at shares `k`, ascending: straight lines of logarithms,
    never rising, and 0 where everything is read."""
    x, y = np.log(k), np.log(np.maximum(np.minimum.accumulate(kl), LEAST_KL))
    z = np.log(at)
    out = np.interp(z, x, y)
    slopes = np.minimum(np.diff(y) / np.diff(x), 0)
    out = np.where(z < x[0], y[0] + slopes[0] * (z - x[0]), out)
    out = np.where(z > x[-1], y[-1] + slopes[-1] * (z - x[-1]), out)
    return np.where(at >= 1, 0, np.exp(out))


def allocate(kl: np.ndarray, cost: np.ndarray, budget: float) -> np.ndarray:
    """One option per layer, least sum of KL at a sum of costs of at most `budget`.

    kl, cost (n_layer, n_option). By the price of a byte: each layer takes what is best at the
    price, and the price is the lowest at which the budget holds.
    """
    low, high = 1e-9, 1e9
    for _ in range(100):
        price = float(np.sqrt(low * high))
        choice = np.argmin(kl + price * cost, axis=1)
        spent = np.take_along_axis(cost, choice[:, None], 1).sum()
        low, high = (low, price) if spent <= budget else (price, high)
    return np.asarray(np.argmin(kl + high * cost, axis=1))


# ---- the search ----


@dataclass(frozen=True)
class Candidate:
    name: str
    spec: AttentionSpec
    found: Measured

    @property
    def kl(self) -> float:
        return float(self.found.kl.mean())

    @property
    def share(self) -> float:
        return float(self.found.share.mean())


def run(
    session: Session,
    text: str,
    *,
    ratio: float,
    shadow: str = "q4",
    types: Sequence[CacheType],
    n_pos: int = 2048,
    n_contexts: int = 8,
    n_tokens: int = 32,
    seed: int = 1,
    bar: Bar,
) -> dict[str, Any]:
    """The result for one ratio; `calibrate.save` keeps it. Interrupted, it goes on where it was.

    Args:
        types: of K and V in the cache of the session.
        n_pos: positions that the last decoded token sees.
        n_contexts: an even number; half measure layers, half decide between the candidates.

    Raises:
        SparqError: the text is too short, or no layer can be sparse.
    """
    base = make_spec("sparq", ratio=ratio, shadow=shadow, min_ctx=0, min_k=1)
    about = {
        "ratio": ratio,
        "shadow": shadow,
        "n_pos": n_pos,
        "n_contexts": n_contexts,
        "n_tokens": n_tokens,
        "seed": seed,
        "types": [t.name for t in types],
        "text": hashlib.sha256(text.encode()).hexdigest()[:16],
        "library": native.lib_dir().name,
    }
    model = calibrate.model_hash(session.path)
    key = hashlib.sha256(repr((model, {**about, "ratio": 0})).encode()).hexdigest()[:16]
    file = paths.cache() / "calibrated" / f"{key}.jsonl"
    meter = Meter(session, contexts(session, text, n_contexts, n_pos, n_tokens, seed), file)
    # contexts come in pairs: prose, and a repeated passage
    some = [c for c in range(n_contexts) if c // 2 % 2 == 0]
    others = [c for c in range(n_contexts) if c not in some] or some
    try:
        budgets = _budgets(meter, base, n_pos, types, some, bar)
        found = [_choose(meter, b, some, bar) for b in budgets]
        candidates = _compare(meter, base, budgets, found, others, bar)
        fits = [c for c in candidates if c.share <= 1.02 * candidates[0].share]
        best = min(fits, key=lambda c: c.kl)
        with_p = _top_p(meter, best, others, bar)
    finally:
        meter.close()
    return {
        **about,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "layers": list(budgets[0].layers),
        "chosen": best.name,
        "calibrated": _settings(best.spec, n_pos),
        "top-p": _settings(with_p[-1].spec, n_pos),
        "candidates": [
            {
                "name": c.name,
                "spec": str(c.spec),
                "kl": c.kl,
                "kl_contexts": c.found.kl.tolist(),
                "share": c.share,
            }
            for c in [*candidates, *with_p]
        ],
        "curves": [c for f in found for c in f["curves"]],
    }


def _settings(spec: AttentionSpec, n_pos: int) -> dict[str, Any]:
    """What `resolve` puts in: no layer gets fewer positions than it had when this was measured."""
    out: dict[str, Any] = {"mean_v": spec.mean_v}
    if spec.k_layers:
        ks = [layer_k(spec, il)[0] for il in range(len(spec.k_layers.split(":")))]
        least = min((k for k in ks if k < 1), default=1)
        out |= {"k_layers": spec.k_layers, "rank_layers": spec.rank_layers}
        out["min_k"] = min(max(int(least * n_pos), 1), AttentionSpec().min_k)
    if spec.top_p is not None:
        out |= {"top_p": spec.top_p, "cap": spec.cap}
    return out


def _budgets(
    meter: Meter,
    base: AttentionSpec,
    n_pos: int,
    types: Sequence[CacheType],
    which: Sequence[int],
    bar: Bar,
) -> list[Budget]:
    """Without and with the mean of V, at the bytes that uniform without it reads."""
    modes = [replace(base, mean_v=m) for m in ("off", "on")]
    with bar("uniform") as progress:
        measured = meter.measure(modes, which, progress)
    share = float(measured[0].share.mean())
    out = []
    for mode, m in zip(modes, measured, strict=True):
        budget = Budget(meter.session, mode, n_pos, types, meter.layers, share)
        # the library counts what the formula does not know: groups that are not sealed yet
        extra = float(m.share.mean() - budget.costs(mode).sum())
        out.append(replace(budget, share=share - extra))
    return out


def _choose(meter: Meter, budget: Budget, which: Sequence[int], bar: Bar) -> dict[str, Any]:
    """Steps 1 to 3: `k` and `rank` of `layers` by k alone and with rank, and the curves."""
    k0, r0 = budget.uniform()
    n = len(k0)
    ones = np.ones(n)

    def alone(i: int, k: float, rank: float) -> AttentionSpec:
        me = np.arange(n) == i
        return budget.spec(np.where(me, k, 1), np.where(me, rank, r0))

    ks = [np.array([f * k for f in FACTORS if f * k < 1]) for k in k0]
    specs = [alone(i, k, r0[i]) for i in range(n) for k in ks[i]]
    with bar("k of each layer") as progress:
        flat = [m.kl.mean() for m in meter.measure(specs, which, progress)]
    curves, at = [], 0
    for i in range(n):
        curves.append(np.array(flat[at : at + len(ks[i])]))
        at += len(ks[i])

    grid = np.append(np.geomspace(k0.min() / 8, 0.98, 120), 1)
    options = np.array([curve(ks[i], curves[i], grid) for i in range(n)])
    cost = np.stack([budget.costs(budget.spec(g * ones, r0)) for g in grid], 1)
    choice = allocate(options, cost, budget.share)
    k = grid[choice]

    # half and twice the rank, k such that the layer reads the same
    head = budget.session.geometry.head_dim_k
    tries: list[tuple[int, int, float]] = []
    for rank in (r0 // 2, r0 * 2):
        rank = np.clip(rank, 1, head)
        costs = np.stack([budget.costs(budget.spec(g * ones, rank)) for g in grid], 1)
        for i in range(n):
            fits = np.flatnonzero(costs[i] <= cost[i, choice[i]])
            if k[i] < 1 and rank[i] != r0[i] and len(fits):
                tries.append((i, int(rank[i]), float(grid[fits[-1]])))
    specs = [alone(i, kk, r) for i, r, kk in tries]
    specs += [alone(i, k[i], r0[i]) for i in range(n)]
    with bar("rank of each layer") as progress:
        kls = [float(m.kl.mean()) for m in meter.measure(specs, which, progress)]
    least = np.array(kls[len(tries) :])
    k2, rank2 = k.copy(), r0.copy()
    for (i, r, kk), x in zip(tries, kls, strict=False):
        if x < least[i]:
            least[i], k2[i], rank2[i] = x, kk, r
    return {
        "by k": (k, r0),
        "by k and rank": (k2, rank2),
        "curves": [
            {
                "layer": il,
                "mean_v": budget.base.mean_v,
                "k": ks[i].tolist(),
                "kl": curves[i].tolist(),
            }
            for i, il in enumerate(budget.layers)
        ],
    }


def _compare(
    meter: Meter,
    base: AttentionSpec,
    budgets: Sequence[Budget],
    found: Sequence[Mapping[str, Any]],
    which: Sequence[int],
    bar: Bar,
) -> list[Candidate]:
    """Step 4. The uniform budget is the first: what wins must be better."""
    specs = {"uniform": base}
    for budget, f in zip(budgets, found, strict=True):
        k0, r0 = budget.uniform()
        n, name = len(k0), f"mean_v={budget.base.mean_v}"
        if budget.base.mean_v == "on":
            specs[f"uniform, {name}"] = budget.fit(k0, r0)
        else:
            ramp = 2 * (np.arange(n) + 1) / (n + 1)
            specs["ramp"] = budget.fit(k0 * ramp, r0)
            specs["ramp-down"] = budget.fit(k0 * ramp[::-1], r0)
        (k, r), (k2, r2) = f["by k"], f["by k and rank"]
        specs[f"by k, {name}"] = budget.fit(k, r)
        specs[f"by k and rank, {name}"] = budget.fit(k2, r2)
        specs[f"halfway, {name}"] = budget.fit(np.where(k2 >= 1, 1, np.sqrt(k0 * k2)), r2)
    with bar("candidates") as progress:
        measured = meter.measure(list(specs.values()), which, progress)
    return [Candidate(*x) for x in zip(specs, specs.values(), measured, strict=True)]


def _top_p(meter: Meter, best: Candidate, which: Sequence[int], bar: Bar) -> list[Candidate]:
    """Step 5: the settings tried; the last is the choice, which may be `best` itself."""
    specs = [replace(best.spec, top_p=p, cap=c) for p in TOP_P for c in CAPS]
    with bar("top-p") as progress:
        shares = np.array([m.share.mean() for m in meter.measure(specs, which, progress)])
    specs = [
        replace(best.spec, top_p=p, cap=round(float(np.interp(best.share, row, CAPS)), 4))
        for p, row in zip(TOP_P, shares.reshape(len(TOP_P), -1), strict=True)
    ]
    with bar("top-p") as progress:
        measured = meter.measure(specs, which, progress)
    out = [
        Candidate(f"top-p {s.top_p:g}, cap {s.cap:.2f}", s, m)
        for s, m in zip(specs, measured, strict=True)
    ]
    fits = [c for c in out if c.share <= 1.01 * best.share]
    return [*out, min([best, *fits], key=lambda c: c.kl)]
