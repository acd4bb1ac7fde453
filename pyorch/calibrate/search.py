"""Finds the k and the rank of each layer by decoding real text with many settings.

It minimises KL(dense || sparse) of the next token, in nats, as a mean over the decoded positions
with all layers sparse at once: the errors of single layers do not add up to it. The search begins
at the uniform budget, with or without the mean of V, whichever is better, and takes two rounds:

1. One layer at a time gets more and less k, and a higher and a lower rank, while the others stay
   where they are. What that does to KL, and to the bytes that the library counts, is measured.
2. Near this point the changes add up: each layer takes the k and rank at which the price of a byte
   is the same for all (`allocate`). A layer may end dense.
3. All k are scaled until as many bytes are read as with uniform. The full step, half of it, or the
   full step with dense layers is the next point, if it is an improvement.

Then other local windows are tried at equal bytes, and at last `top_p`, where k is the most that a
KV head may read.

The last six contexts decide and take no part in this, since what a search gains on its own contexts
is partly chance. In them the result has to be clearly better than uniform: the 95 % interval of the
mean logarithm of its KL over uniform's lies below 0. Otherwise the result is uniform.

There are no gradients, and no weights change. `meter.py` makes the contexts and measures. A search
decodes its contexts about 40 times, and 8 times more for each layer.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from pyorch import native, paths
from pyorch.attention import line, saved
from pyorch.attention.cost import split
from pyorch.attention.spec import AttentionSpec, LayerK
from pyorch.calibrate.meter import Measured, Meter, contexts
from pyorch.engine import Session
from pyorch.errors import SparqError
from pyorch.evals import stats
from pyorch.models.content import content_hash
from pyorch.progress import Progress, silent

STEPS = (3.0, 1.5)  # k of a layer is multiplied and divided by these; its rank by at most 2
LOCAL = (4, 16)  # windows tried beside a quarter of k
TOP_P = (0.9, 0.97, 0.99, 0.997)
N_GRID = 61  # values of k between the two that were measured
LEAST_K = 8  # the fewest positions of a layer
MAX_SHARE = 1.005  # the bytes that may be read, over those of uniform
FEWEST = stats.FEWEST + 2  # contexts: those that decide, and a pair to search in
FORMAT = 2  # of the measurements in the cache folder

Bar = Callable[[str], AbstractContextManager[Progress]]


@dataclass(frozen=True)
class Point:
    """A point: k (n_layer,) as a share of all positions (1 = dense), rank (n_layer,), and the rest.

    Layers that cannot be sparse have entries too, which nothing reads.
    """

    k: np.ndarray
    rank: np.ndarray
    base: AttentionSpec

    @property
    def spec(self) -> AttentionSpec:
        """The settings as they will be kept, with four digits of each k."""
        ks = tuple(LayerK(float(f"{100 * min(k, 1):.4g}") / 100, True) for k in self.k)
        return replace(self.base, k_layers=ks, rank_layers=tuple(map(int, self.rank)))


def allocate(kl: np.ndarray, cost: np.ndarray, budget: float) -> np.ndarray:
    """Choose one option per layer: the least sum of KL at a sum of costs of at most `budget`.

    kl, cost (n_layer, n_option). Bytes have a price: each layer takes its best option at that
    price, and the price is the lowest one that keeps the budget.
    """
    low, high = 1e-9, 1e9
    for _ in range(100):
        price = float(np.sqrt(low * high))
        choice = np.argmin(kl + price * cost, axis=1)
        spent = np.take_along_axis(cost, choice[:, None], 1).sum()
        low, high = (low, price) if spent <= budget else (price, high)
    return np.asarray(np.argmin(kl + high * cost, axis=1))


@dataclass
class Search:
    """A search at the bytes of `share` in the contexts `which`, which are `n_pos` tokens long."""

    meter: Meter
    which: Sequence[int]
    n_pos: int
    head_dim: int
    share: float
    progress: Progress = silent  # called with (points measured, the most that there may be)
    n_done: int = 0

    def measure(self, points: Sequence[Point]) -> tuple[np.ndarray, np.ndarray]:
        """KL and bytes of each point."""
        results = []
        for p in points:
            results.append(self.meter.measure(p.spec, self.which))
            self.n_done += 1
            self.progress(self.n_done, len(STEPS) * (4 * len(self.meter.layers) + 23) + 51)
        return np.array([m.kl.mean() for m in results]), np.array([m.share for m in results])

    def best(self, points: Sequence[Point]) -> Point:
        """The point of least KL within the bytes allowed; the first one if none is."""
        kl, share = self.measure(points)
        return points[int(np.argmin(np.where(share <= MAX_SHARE * self.share, kl, np.inf)))]

    def to_share(self, p: Point) -> Point:
        """Scale all k below 1 so that `share` is read, as closely as a few measurements allow."""

        def scaled(x: float) -> Point:
            return replace(p, k=np.where(p.k < 1, np.clip(p.k * x, LEAST_K / self.n_pos, 0.999), 1))

        rows = np.where(p.k < 1, p.k, 0)[self.meter.layers].mean()
        x, tried = 1.0, []
        for _ in range(6 if rows else 0):
            missing = self.share - float(self.measure([scaled(x)])[1][0])
            tried.append((-missing > (MAX_SHARE - 1) * self.share, abs(missing), x))
            if abs(missing) < 0.002 * self.share:
                break
            x = float(np.clip(x + missing / rows, x / 4, x * 4))
        return scaled(min(tried)[2]) if tried else p

    def round(self, p: Point, step: float) -> Point:
        """Steps 1 to 3 of the module's text."""
        layers, turn = self.meter.layers, min(step, 2)
        ks = np.array([p.k / step, p.k, np.minimum(p.k * step, 1)])
        ranks = np.array([np.minimum(p.rank - 1, p.rank / turn), p.rank,
                          np.maximum(p.rank + 1, p.rank * turn)])  # fmt: skip
        ranks = np.clip(np.round(ranks), 1, self.head_dim).astype(int)
        (kl_here,), (share_here,) = self.measure([p])
        grid = np.geomspace(ks[0], ks[2], N_GRID)
        kls: list[np.ndarray] = []  # per layer: each of three ranks with each k of the grid
        costs: list[np.ndarray] = []
        for il in layers:
            me = np.arange(len(p.k)) == il
            changed = [replace(p, k=np.where(me, ks[i], p.k)) for i in (0, 2)]
            changed += [replace(p, rank=np.where(me, ranks[i], p.rank)) for i in (0, 2)]
            kl, share = self.measure(changed)
            for out, d, scale in ((kls, kl - kl_here, np.log), (costs, share - share_here, np.abs)):
                of_k = np.interp(scale(grid[:, il]), scale(ks[:, il]), [d[0], 0, d[1]])
                out.append(np.add.outer([d[2], 0, d[3]], of_k).ravel())
        choice = allocate(np.array(kls), np.array(costs), self.share - share_here)
        k, rank = p.k.copy(), p.rank.copy()
        k[layers] = grid[choice % N_GRID, layers]
        rank[layers] = ranks[choice // N_GRID, layers]
        half = np.where(k < 1, np.minimum(np.sqrt(p.k * k), 0.999), 1)
        full = replace(p, k=k, rank=rank)
        leap = np.where(k > 0.5, 1, k)  # a dense layer needs no scores: small steps miss that
        others = [replace(full, k=x) for x in (k, half, leap)]
        return self.best([p, *map(self.to_share, others)])


def check_contexts(n: int) -> None:
    """Raise SparqError unless so many contexts can search and decide."""
    if n < FEWEST or n % 2:
        raise SparqError(
            f"{n} contexts are {'too few' if n < FEWEST else 'odd'}: {stats.FEWEST} decide, the "
            "others search, and half of them repeat themselves",
            f"{FEWEST}, {FEWEST + 2} or another even number",
            exit_code=2,
        )


def run(
    session: Session,
    text: str,
    *,
    ratio: float,
    shadow: str = "q4",
    n_pos: int = 2048,
    n_contexts: int = 10,
    n_tokens: int = 64,
    bar: Bar,
) -> saved.Result:
    """Search for one ratio; `saved.save` keeps the result. An interrupted search can be resumed.

    Args:
        n_pos: positions that the last decoded token sees.
        session: with `n_contexts` sequences or more, each of `n_pos` positions.
        n_contexts: an even number, at least `FEWEST`; the last `stats.FEWEST` decide.

    Raises:
        SparqError: too few contexts, the text is too short, or no layer can be sparse.
    """
    check_contexts(n_contexts)
    about = {
        "shadow": shadow,
        "n_pos": n_pos,
        "n_contexts": n_contexts,
        "n_tokens": n_tokens,
        "types": [t.name for t in session.types],
        "text": hashlib.sha256(text.encode()).hexdigest()[:16],
        "library": native.lib_dir().name,
    }
    of = repr((FORMAT, content_hash(session.model.file), about))
    key = hashlib.sha256(of.encode()).hexdigest()[:16]
    file = paths.cache() / "calibrated" / f"{key}.jsonl"
    with bar("reading the contexts") as progress:
        parts = contexts(session, text, n_contexts, n_pos, n_tokens)
        meter = Meter(session, parts, file, progress)
    base = AttentionSpec("sparq", ratio=ratio, shadow=shadow, min_ctx=0, min_k=1)
    with bar("calibrating") as progress:
        points = _points(meter, base, n_pos, progress)
    deciding = range(n_contexts - stats.FEWEST, n_contexts)
    results = {name: meter.measure(spec, deciding) for name, spec in points.items()}
    best = chosen({n: m for n, m in results.items() if n != "top-p"})
    best_p = chosen({n: m for n, m in results.items() if n in ("uniform", best, "top-p")})
    return {
        **about,
        "ratio": ratio,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "layers": list(meter.layers),
        "chosen": best,
        "chosen_top_p": best_p,
        "calibrated": _settings(points[best], n_pos),
        "top-p": _settings(points[best_p], n_pos),
        "candidates": [
            {
                "name": name,
                "spec": str(points[name]),
                "kl": float(m.kl.mean()),
                "kl_contexts": m.kl.tolist(),
                "share": m.share,
            }
            for name, m in results.items()
        ],
    }


def _points(
    meter: Meter, base: AttentionSpec, n_pos: int, progress: Progress
) -> dict[str, AttentionSpec]:
    """What decides between: uniform, the result of the search, and the same with `top_p`."""
    which = range(len(meter.contexts) - stats.FEWEST)
    share = meter.measure(base, which).share
    geo = meter.session.geometry
    s = split(base, n_pos, geo.head_dim_k, geo.head_dim_v)
    search = Search(meter, which, n_pos, geo.head_dim_k, share, progress)
    uniform = Point(np.full(geo.n_layer, s.topk / n_pos), np.full(geo.n_layer, s.rank), base)
    without = replace(base, mean_v="off")
    p = search.best([uniform, search.to_share(replace(uniform, base=without))])
    for step in STEPS:
        p = search.round(p, step)
    others = [replace(p, base=replace(p.base, local=n)) for n in LOCAL]
    p = search.best([p, *map(search.to_share, others)])
    others = [replace(p, base=replace(p.base, top_p=x)) for x in TOP_P]
    with_p = search.best([*map(search.to_share, others)])
    return {"uniform": base, "layers": p.spec, "top-p": with_p.spec}


def chosen(results: dict[str, Measured]) -> str:
    """The least KL among those that read no more than the first, uniform, and are clearly better;
    uniform if there is none."""
    first, *others = results
    uniform = results[first]

    def is_better(m: Measured) -> bool:
        _, high = stats.mean(np.log(m.kl / uniform.kl))
        return high < 0 and m.share <= 1.01 * uniform.share

    better = [name for name in others if is_better(results[name])]
    return min(better, key=lambda name: float(results[name].kl.mean()), default=first)


def _settings(spec: AttentionSpec, n_pos: int) -> saved.Settings:
    """The settings that replace a spec's own, as text. min_k: the smallest k of the measurement."""
    names = ("mean_v", "local", "top_p", "k_layers", "rank_layers")
    parts = (part.split("=") for part in line.split(str(spec))[1])
    out = {name: text for name, text in parts if name in names}
    if spec.k_layers:
        least = min((k for k, _ in spec.k_layers if k < 1), default=1.0)
        out["min_k"] = str(min(max(int(least * n_pos), 1), AttentionSpec.min_k))
    return out
