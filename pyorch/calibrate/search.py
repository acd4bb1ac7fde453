"""Finds the k and the rank of each layer by decoding real text with many settings.

It minimises KL(dense || sparse) of the next token, in nats, as a mean over the decoded positions
with all layers sparse at once: the errors of single layers do not add up to it. The search begins
at the uniform budget and proceeds in rounds with ever smaller steps:

1. One layer at a time gets more and less k, and a higher and a lower rank, while the others stay
   where they are. What that does to KL, and to the bytes that the library counts, is measured on
   half of the contexts; the next round takes the other half.
2. Near this point the changes add up: each layer takes the k and rank at which the price of a byte
   is the same for all (`allocate`). A layer may end dense.
3. All k are scaled until as many bytes are read as with uniform; the full step, half of it, and
   the step without the ranks are measured. The best is the next point, if it is an improvement.
4. At this point other local windows are tried at equal bytes.

In 3 and 4 all contexts decide, so that a step which only suits those it was found on is not taken.
The first round is done without and with the mean of V, unless uniform is clearly better with one of
them; the better one goes on. The best point is the result, unless uniform or a ramp is better, or
uniform may be as good: what the search gains on its own contexts has to be more than chance. From
there it continues with `top_p`: k is then the most that a KV head may read, and p is one more
shared setting.

There are no gradients, and no weights change. `meter.py` makes the contexts and measures. A search
decodes all contexts about 120 times, and 12 times more for each layer: with 8 contexts of 8 tokens
and 30 layers these are 31,000 tokens, beside 16,000 of prompts.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pyorch import native, paths
from pyorch.attention import saved
from pyorch.attention.bytes import split, uses_mean_v
from pyorch.attention.spec import AttentionSpec, LayerK, join_layers
from pyorch.calibrate.meter import Measured, Meter, contexts
from pyorch.engine import Session
from pyorch.evals import stats
from pyorch.evals.texts import read_texts
from pyorch.models.content import content_hash
from pyorch.progress import Progress, silent

STEPS = (4.0, 2.0, 1.4)  # k of a layer is multiplied and divided by these; its rank by at most 2
STEPS_P = (2.0, 1.4)  # the steps with top_p
FIRST_P = 0.99
LOCAL = (None, 4, 16)  # windows tried; None: a quarter of k
N_GRID = 61  # values of k between the two that were measured
LEAST_K = 8  # the fewest positions of a layer
MAX_SHARE = 1.005  # the bytes that may be read, over those of uniform
MAX_KL = 0.99  # another shared setting is taken below this share of the present KL

OTHER_MEAN_V = "uniform, other mean_v"

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

    def scaled(self, factor: float, least: float) -> Point:
        """The point with all k below 1 multiplied by `factor`."""
        k = np.where(self.k < 1, np.clip(self.k * factor, least, 0.999), 1)
        return replace(self, k=k)


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

    @property
    def record(self) -> saved.Candidate:
        return {
            "name": self.name,
            "spec": str(self.spec),
            "kl": self.kl,
            "kl_contexts": self.found.kl.tolist(),
            "share": self.share,
        }


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
    """A search at the bytes of `share`. Contexts come in pairs: prose, and a repeated passage."""

    meter: Meter
    n_contexts: int
    n_pos: int
    head_dim: int
    share: float
    progress: Progress = silent

    def measure(
        self, points: Sequence[Point], which: Sequence[int] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """KL and bytes of each point in the contexts `which`, by default in all."""
        which = which or range(self.n_contexts)
        found = self.meter.measure([p.spec for p in points], which, self.progress)
        return np.array([m.kl.mean() for m in found]), np.array([m.share.mean() for m in found])

    def best(self, points: Sequence[Point]) -> tuple[Point, float]:
        """The point of least KL within the bytes allowed, with its KL; the first one if none is."""
        kl, share = self.measure(points)
        i = int(np.argmin(np.where(share <= MAX_SHARE * self.share, kl, np.inf)))
        return points[i], float(kl[i])

    def to_share(self, p: Point) -> Point:
        """Scale all k so that `share` is read, as closely as a few measurements allow."""
        # without top_p the bytes do not depend on the text
        which = range(self.n_contexts if p.base.top_p else 1)
        at = np.where(p.k < 1, p.k, 0)[self.meter.layers].sum() / len(self.meter.layers)
        x, tried = 1.0, []
        for _ in range(5 if at else 0):
            (m,) = self.meter.measure(
                [p.scaled(x, LEAST_K / self.n_pos).spec], which, self.progress
            )
            tried.append((x, float(m.share.mean())))
            missing = self.share - tried[-1][1]
            if abs(missing) < 0.002 * self.share:
                break
            (x0, y0), (x1, y1) = tried[-2:] if len(tried) > 1 else [(0.0, tried[0][1] - at)] + tried
            slope = (y1 - y0) / (x1 - x0) if (y1 - y0) * (x1 - x0) > 0 else at
            x = float(np.clip(x + missing / slope, x / 4, x * 4))
        if tried:
            x = min(tried, key=lambda t: (t[1] > MAX_SHARE * self.share, abs(t[1] - self.share)))[0]
        return p.scaled(x, LEAST_K / self.n_pos)

    def round(self, p: Point, step: float, half: int) -> Point:
        """Steps 1 to 4 of the module's text; `half` (0 or 1) of the contexts proposes the step."""
        cut = self.n_contexts // 4 * 2  # neighbours are decoded together
        which = range(cut, self.n_contexts) if half or not cut else range(cut)
        full = self._step(p, step, which)
        between = np.where(full.k < 1, np.minimum(np.sqrt(p.k * full.k), 0.999), 1)
        points = [full, replace(full, k=between), replace(full, rank=p.rank)]
        if (full.k > 0.5).any():  # a dense layer needs no scores: a leap that small steps miss
            points.append(replace(full, k=np.where(full.k > 0.5, 1, full.k)))
        p, kl = self.best([p, *map(self.to_share, points)])
        b = p.base
        bases = [replace(b, local=x) for x in LOCAL if x != b.local]
        if b.top_p:
            bases += [replace(b, top_p=1 - (1 - b.top_p) * x) for x in (1 / 3, 3)]
        other, least = self.best([p, *(self.to_share(replace(p, base=x)) for x in bases)])
        return other if least < MAX_KL * kl else p

    def _step(self, p: Point, step: float, which: Sequence[int]) -> Point:
        """Steps 1 and 2."""
        layers, turn = self.meter.layers, min(step, 2)
        ks = np.array([p.k / step, p.k, np.minimum(p.k * step, 1)])
        ranks = np.array([np.minimum(p.rank - 1, p.rank / turn), p.rank,
                          np.maximum(p.rank + 1, p.rank * turn)])  # fmt: skip
        ranks = np.clip(np.round(ranks), 1, self.head_dim).astype(int)
        points = [p]
        for il in layers:
            me = np.arange(len(p.k)) == il
            points += [replace(p, k=np.where(me, ks[i], p.k)) for i in (0, 2)]
            points += [replace(p, rank=np.where(me, ranks[i], p.rank)) for i in (0, 2)]
        kl, share = self.measure(points, which)
        left = self.share - share[0]
        # (n_layer, k or rank, less or more)
        kl, share = ((x[1:] - x[0]).reshape(-1, 2, 2) for x in (kl, share))
        # per layer: N_GRID values of k, each with three ranks
        grid = np.geomspace(ks[0], ks[2], N_GRID)
        kls: list[np.ndarray] = []
        costs: list[np.ndarray] = []
        for i, il in enumerate(layers):
            for out, x, scale in ((kls, kl, np.log), (costs, share, np.asarray)):
                of_k = np.interp(scale(grid[:, il]), scale(ks[:, il]), np.insert(x[i, 0], 1, 0))
                out.append(np.add.outer(np.insert(x[i, 1], 1, 0), of_k).ravel())
        choice = allocate(np.array(kls), np.array(costs), left)
        k, rank = p.k.copy(), p.rank.copy()
        for il, j in zip(layers, choice, strict=True):
            k[il] = grid[j % N_GRID, il]
            rank[il] = ranks[j // N_GRID, il]
        return replace(p, k=k, rank=rank)


# ---- the whole search ----


def joined(sources: Sequence[Path]) -> str:
    """The texts of files and folders as one, for `run`, with an empty line after each.

    Raises:
        SparqError: there is no such file, or no text in it.
    """
    return "".join(f"{t}\n\n" for t in read_texts(sources))


def run(
    session: Session,
    text: str,
    *,
    ratio: float,
    shadow: str = "q4",
    n_pos: int = 2048,
    n_contexts: int = 8,
    n_tokens: int = 64,
    seed: int = 1,
    bar: Bar,
) -> saved.Result:
    """Search for one ratio; `saved.save` keeps the result. An interrupted search can be resumed.

    Args:
        n_pos: positions that the last decoded token sees.
        session: with `n_contexts` sequences or more, each of `n_pos` positions.
        n_contexts: an even number, preferably a multiple of 4.

    Raises:
        SparqError: the text is too short, or no layer can be sparse.
    """
    base = AttentionSpec("sparq", ratio=ratio, shadow=shadow, min_ctx=0, min_k=1)
    about: saved.About = {
        "ratio": ratio,
        "shadow": shadow,
        "n_pos": n_pos,
        "n_contexts": n_contexts,
        "n_tokens": n_tokens,
        "seed": seed,
        "types": [t.name for t in session.types],
        "text": hashlib.sha256(text.encode()).hexdigest()[:16],
        "library": native.lib_dir().name,
    }
    model = content_hash(session.model.file)
    key = hashlib.sha256(repr((model, {**about, "ratio": 0})).encode()).hexdigest()[:16]
    file = paths.cache() / "calibrated" / f"{key}.jsonl"
    meter = Meter(session, contexts(session, text, n_contexts, n_pos, n_tokens, seed), file)
    with bar("calibrating") as progress:
        best, best_p, candidates = _compared(session, meter, base, n_pos, n_contexts, progress)
    return {
        **about,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "layers": list(meter.layers),
        "chosen": best.name,
        "chosen_top_p": best_p.name,
        "calibrated": _settings(best.spec, n_pos),
        "top-p": _settings(best_p.spec, n_pos),
        "candidates": [c.record for c in candidates],
    }


class _Whole:
    """The progress of a whole search, by the work of its meter.

    How often `to_share` has to measure is not known beforehand, so each stage has an estimate of
    its work, and ends there whatever it took.
    """

    def __init__(self, meter: Meter, n_layer: int, progress: Progress) -> None:
        self.meter, self.n_layer, self.progress = meter, n_layer, progress
        self.stage, self.begun = 0, 0.0
        self.n_begin = 2  # the first rounds that begin at different points

    def next(self) -> None:
        """A stage ended."""
        self.stage, self.begun = self.stage + 1, self.meter.work

    def __call__(self, *_: int) -> None:
        ends = np.cumsum(self._stages())
        start = ends[self.stage - 1] if self.stage else 0
        done = min(start + self.meter.work - self.begun, ends[self.stage])
        self.progress(round(done), round(ends[-1]))

    def _stages(self) -> list[float]:
        """The work of each stage: of half of the contexts for each change of a layer, then of all,
        more often with `top_p`, whose bytes are those of all contexts."""
        full = len(self.meter.contexts) * self.meter.n_tokens
        changes = 2 * (len(self.meter.layers) or self.n_layer)
        out = [self.meter.reading + 4 * full]
        out += [full * (changes + 15)] * (self.n_begin + len(STEPS) - 1)
        return out + [full * (changes + 35)] * len(STEPS_P)


def _compared(
    session: Session,
    meter: Meter,
    base: AttentionSpec,
    n_pos: int,
    n_contexts: int,
    progress: Progress,
) -> tuple[Candidate, Candidate, list[Candidate]]:
    """Search at the bytes of `base`. Returns the best candidate without `top_p`, the best with or
    without it, and all candidates."""
    whole = _Whole(meter, session.geometry.n_layer, progress)
    (m,) = meter.measure([base], range(n_contexts), whole)
    head_dim = session.geometry.head_dim_k
    search = Search(meter, n_contexts, n_pos, head_dim, float(m.share.mean()), whole)
    points = {n: search.to_share(p) for n, p in _usual(session, base, n_pos, meter).items()}
    whole.next()
    begins = {n: points[n] for n in ("uniform", OTHER_MEAN_V)}
    begins = {c.name: points[c.name] for c in near_best(_measured(meter, begins, n_contexts))}
    whole.n_begin = len(begins)
    firsts: dict[str, Point] = {}
    for p in begins.values():
        firsts |= _rounds(search, p, STEPS[:1], whole)
    first = min(_measured(meter, firsts, n_contexts), key=lambda c: c.kl)
    points |= firsts | _rounds(search, firsts[first.name], STEPS, whole, 1)
    candidates = _measured(meter, points, n_contexts)
    candidates[0] = replace(candidates[0], spec=base)  # the same up to rounding
    best = _least(candidates)
    p = points[best.name]
    points = {"top-p": search.to_share(replace(p, base=replace(p.base, top_p=FIRST_P)))}
    points |= _rounds(search, points["top-p"], STEPS_P, whole)
    with_p = _measured(meter, points, n_contexts)
    return best, _least([candidates[0], best, *with_p]), [*candidates, *with_p]


def _usual(session: Session, base: AttentionSpec, n_pos: int, meter: Meter) -> dict[str, Point]:
    """Uniform, also with the other `mean_v`, and ramps; their bytes are not yet equal."""
    geo, sizes = session.geometry, [t.bytes_per_element for t in session.types]
    row = geo.head_dim_k * sizes[0] + geo.head_dim_v * sizes[1]
    s = split(base, n_pos, geo.head_dim_k, row / (2 * geo.head_dim_k))
    n, layers = geo.n_layer, meter.layers
    names = ("on", "off") if uses_mean_v(base) else ("off", "on")
    modes = [replace(base, mean_v=x) for x in names]
    uniform, other = (Point(np.full(n, s.topk / n_pos), np.full(n, s.rank), x) for x in modes)
    up, down = np.ones(n), np.ones(n)
    up[layers] = 2 * (np.arange(len(layers)) + 1) / (len(layers) + 1)
    down[layers] = up[layers][::-1]
    ramp, ramp_down = (replace(uniform, k=uniform.k * x) for x in (up, down))
    return {"uniform": uniform, OTHER_MEAN_V: other, "ramp": ramp, "ramp-down": ramp_down}


def _rounds(
    search: Search, p: Point, steps: Sequence[float], whole: _Whole, begin: int = 0
) -> dict[str, Point]:
    """The rounds from number `begin` on."""
    out = {}
    name = "top-p" if p.base.top_p else f"mean_v={p.base.mean_v}"
    for i in range(begin, len(steps)):
        p = search.round(p, steps[i], i % 2)
        whole.next()
        out[f"{name}, round {i + 1}"] = p
    return out


def _measured(meter: Meter, points: Mapping[str, Point], n_contexts: int) -> list[Candidate]:
    specs = [p.spec for p in points.values()]
    found = meter.measure(specs, range(n_contexts), lambda *_: None)
    return [Candidate(*x) for x in zip(points, specs, found, strict=True)]


def near_best(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidate of least KL, and those that may be as good: 0 is in the 95 % interval of their
    difference to it, context by context."""
    best = min(candidates, key=lambda c: c.kl)
    worse = [c.found.kl - best.found.kl for c in candidates]
    errors = [d.std(ddof=1) / np.sqrt(d.size) for d in worse]
    near = [d.mean() <= stats.quantile(d.size) * e for d, e in zip(worse, errors, strict=True)]
    return [c for c, taken in zip(candidates, near, strict=True) if taken]


def _least(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate of least KL among those that read no more than the first, uniform, and are
    clearly better; uniform if there is none."""
    uniform = candidates[0]
    fit = [c for c in candidates[1:] if c.share <= 1.01 * uniform.share]
    better = [c for c in fit if near_best([uniform, c])[0] is c]
    return min(better, key=lambda c: c.kl, default=uniform)


def _settings(spec: AttentionSpec, n_pos: int) -> saved.Found:
    """The settings that replace a spec's own. min_k: the smallest k of the measurement."""
    out: saved.Found = {"mean_v": spec.mean_v}
    if spec.local is not None:
        out["local"] = spec.local
    if spec.k_layers:
        least = min((k for k, _ in spec.k_layers if k < 1), default=1)
        ranks = spec.rank_layers or ()
        out["k_layers"], out["rank_layers"] = join_layers(spec.k_layers), join_layers(ranks)
        out["min_k"] = min(max(int(least * n_pos), 1), AttentionSpec().min_k)
    if spec.top_p is not None:
        out["top_p"] = spec.top_p
    return out
