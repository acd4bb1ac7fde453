"""Measures the attention caught per byte read, which the defaults of `--ratio` rest on.

    python bench/recall.py --text BOOKS [--model FILE] [--positions 1024,2048,4096]

It uses queries, keys and values of a real model over real text. At S positions a ratio is a budget
of bytes, `ratio * 4*S*d` per KV head with an f16 cache. Of it the scan of `rank` components of the
transposed K takes `S*rank*bits/8` and the scales of its runs, and the rest buys the `topk` rows of
K and V that are read exactly. For every type of the transposed K and every rank this measures

    mass     share of the true attention inside the selected positions
    error    |y - y'|^2 / |y|^2 of the head's output, without and with the mean of V for the rest
    peaks    the share of positions that were selected, of those outside sinks and window that get a
             quarter of a head's attention or more. Copying depends on these

There are two kinds of text: `prose`, a book, and `recite`, in which a passage of the context is
repeated. Queries are those of the last 64 positions, so the positions before them are sealed in
whole groups and the last group is scored from K itself, as in the library; the coefficients of the
scan are rounded as it rounds them. The byte arithmetic is that of `pyorch/attention/bytes.py`
without `min_k` and `min_ctx`.

It writes recall.jsonl, recall.csv and recall.md.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import capture
import commands
import numpy as np

from pyorch.attention.bytes import GROUP, RUN, SHADOW_BYTES
from pyorch.attention.spec import ratio_text
from pyorch.bench.records import Record
from pyorch.cli import run as run_command
from pyorch.evals import stats
from pyorch.progress import Progress, progress_bar
from pyorch.table import markdown as table

BENCH = "recall"
RATIOS = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
# ranks, in 64ths of d
SHARES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
SINKS = 4
PEAK = 0.25
KINDS = tuple(SHADOW_BYTES)


@dataclass(frozen=True)
class Case(capture.Case):
    """A case: all types and ranks at one length and kind of text."""

    ratios: tuple[float, ...] = RATIOS


# ---- the steps of the library ----


@dataclass(frozen=True)
class Shadow:
    """K (S, d) as the scan reads it; of each run of codes the scale and the value of the middle
    code, both (n_run, d). Cells from `n_sealed` on are K itself."""

    values: np.ndarray
    scales: np.ndarray
    middles: np.ndarray
    n_sealed: int
    most: int  # the largest whole number that a coefficient is rounded to


def shadow_of(k: np.ndarray, n_sealed: int, kind: str) -> Shadow:
    """The transposed copy of `k` (S, d)."""
    none = np.zeros((0, k.shape[1]), np.float32)
    if kind == "f16":
        return Shadow(k.astype(np.float16).astype(np.float32), none, none, 0, 0)
    top, most = (255, 64 * 64) if kind == "q8" else (15, 127)
    values, scales, middles = k.copy(), [], []
    for a in range(0, n_sealed, RUN):
        run = k[a : min(a + RUN, n_sealed)]
        low = run.min(0)
        scale = (run.max(0) - low) / np.float32(top)
        codes = np.rint((run - low) / np.where(scale > 0, scale, 1))
        values[a : a + len(run)] = low + scale * codes
        scales.append(scale)
        middles.append(low + scale * np.float32(top / 2))
    return Shadow(values, np.stack(scales), np.stack(middles), n_sealed, most)


def approximate(q: np.ndarray, shadow: Shadow, rank: int, scale: float) -> np.ndarray:
    """The logits (n_query, n_group_q, S) from the `rank` components with the largest sum of |q|."""
    size = np.abs(q)
    order = np.argsort(-size.sum(1), axis=1, kind="stable")[:, :rank]
    kept = np.zeros((len(q), 1, q.shape[2]), np.float32)
    np.put_along_axis(kept[:, 0], order, 1, axis=1)
    whole, part = size.sum(2), (size * kept).sum(2)
    factor = scale / np.sqrt(np.where(whole > 0, part / np.where(whole > 0, whole, 1), 1))
    coef = (q * kept * factor[..., None]).astype(np.float32)
    logits = coef @ shadow.values.T
    for i, (scales, middles) in enumerate(zip(shadow.scales, shadow.middles, strict=True)):
        rows = slice(i * RUN, min((i + 1) * RUN, shadow.n_sealed))
        step = np.abs(coef * scales).max(2, keepdims=True) / shadow.most
        whole_steps = np.rint(coef * scales / np.where(step > 0, step, 1)) * step
        rounded = np.where(scales > 0, whole_steps / np.where(scales > 0, scales, 1), coef)
        rest = ((coef - rounded) * middles).sum(2)
        logits[..., rows] = rounded @ shadow.values[rows].T + rest[..., None]
    return logits


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def select(score: np.ndarray, n_visible: np.ndarray, topk: int) -> np.ndarray:
    """(n_query, topk) positions: sinks, the newest topk/4, then the highest scores."""
    score = score.copy()
    score[:, :SINKS] = np.inf
    for row, n in zip(score, n_visible, strict=True):
        row[n - max(topk // 4, 1) : n] = np.inf
    return np.argpartition(-score, topk - 1, axis=1)[:, :topk]


def scan_bytes(n_pos: int, rank: int, kind: str) -> float:
    """The bytes per KV head that step 1 reads."""
    scales = 0 if kind == "f16" else -(-n_pos // RUN) * 8
    return n_pos * rank * SHADOW_BYTES[kind] + rank * scales


def rows_for(ratio: float, n_pos: int, d: int, scan: float) -> int:
    """The topk that the rest of the budget buys."""
    return int((ratio * 4 * n_pos * d - scan) // (4 * d))


def configs(n_pos: int, d: int, ratios: Sequence[float]) -> list[dict[str, Any]]:
    """All (shadow, rank, ratio) whose budget buys at least twice as many rows as sinks."""
    out = []
    ranks = sorted({max(d * s // 64, 1) for s in SHARES})
    for kind in KINDS:
        for rank in ranks:
            scan = scan_bytes(n_pos, rank, kind)
            for ratio in ratios:
                topk = rows_for(ratio, n_pos, d, scan)
                if topk >= 2 * SINKS:
                    share = scan / (scan + topk * 4 * d)
                    out.append(
                        {"shadow": kind, "rank": rank, "ratio": ratio, "topk": topk, "scan": share}
                    )
    for ratio in ratios:  # the best rows for all of the bytes, as if the choice were free
        topk = int(ratio * n_pos)
        out.append({"shadow": "oracle", "rank": d, "ratio": ratio, "topk": topk, "scan": 0.0})
    return out


def measure(layer: capture.Heads, n_query: int, cases: Sequence[dict[str, Any]]) -> np.ndarray:
    """(n_case, n_head_kv, 5): mass, error, error with the mean of V; peaks found, and peaks.

    The first three are means over the queries, the last two counts.
    """
    n_head_kv, n_pos, _ = layer.k.shape
    pick = np.linspace(0, GROUP - 1, n_query).astype(int)
    n_visible = n_pos - GROUP + pick + 1
    hidden = np.arange(n_pos) >= n_visible[:, None]
    out = np.zeros((len(cases), n_head_kv, 5))
    for h in range(n_head_kv):
        q, k, v = layer.q[pick, h], layer.k[h], layer.v[h]
        logits = np.where(hidden[:, None], -np.inf, (q @ k.T) * np.float32(layer.scale))
        true = softmax(logits)
        y = true @ v
        peak, is_peak = _peaks(true, n_visible)
        v_mean = np.stack([v[:n].mean(0) for n in n_visible])
        shadows = {s: shadow_of(k, n_pos - GROUP, s) for s in KINDS}
        last, guess = None, true
        for i, c in enumerate(cases):
            if (c["shadow"], c["rank"]) != last:
                last = c["shadow"], c["rank"]
                guess = true
                if c["shadow"] != "oracle":
                    guess = approximate(q, shadows[c["shadow"]], c["rank"], layer.scale)
                    guess = softmax(np.where(hidden[:, None], -np.inf, guess))
                # with one query head softmax keeps the order of the logits
                score = guess.sum(1)
            cells = select(score, n_visible, c["topk"])
            inside = np.take_along_axis(true, cells[:, None], axis=2)
            mass = inside.sum(2)
            got = (inside / mass[..., None]) @ v[cells]
            alpha = np.take_along_axis(guess, cells[:, None], axis=2).sum(2)[..., None]
            mixed = alpha * got + (1 - alpha) * v_mean[:, None]
            size = (y**2).sum()
            errors = ((got - y) ** 2).sum() / size, ((mixed - y) ** 2).sum() / size
            found = (peak[..., None] == cells[:, None]).any(2) & is_peak
            out[i, h] = mass.mean(), *errors, found.sum(), is_peak.sum()
    return out


def _peaks(true: np.ndarray, n_visible: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest position of each (query, head) far from both ends, and whether it is a peak."""
    far = true.copy()
    far[:, :, :SINKS] = 0
    for row, n in zip(far, n_visible, strict=True):
        row[:, n - GROUP :] = 0
    return far.argmax(2), far.max(2) >= PEAK


# ---- records ----


def run(
    model: Path, texts: Sequence[Path], file: Path, progress: Progress, **options: Any
) -> list[Record]:
    """Measure what `file` lacks, add it there, return all records: `measured` has the options."""
    return capture.measured(BENCH, Case, _samples, model, texts, file, progress, **options)


def _samples(found_layers: Iterator[list[capture.Heads]], case: Case) -> list[dict[str, Any]]:
    todo: list[dict[str, Any]] = []
    results = []
    for layers in found_layers:
        todo = todo or configs(case.n_pos, layers[0].k.shape[2], case.ratios)
        results.append(np.stack([measure(h, case.n_query, todo) for h in layers], axis=1))
    found = np.stack(results)  # (n_context, n_config, n_layer, n_head_kv, 5)
    out = []
    for i, c in enumerate(todo):
        here = found[:, i]
        mass, error, error_mean_v = here[..., :3].mean((1, 2)).T
        out.append(
            c
            | {
                "mass": mass.round(4).tolist(),  # one value per context
                "mass_by_layer_and_head": here[..., 0].mean(0).round(3).tolist(),
                "error": round(float(error.mean()), 5),
                "error_mean_v": round(float(error_mean_v.mean()), 5),
                "peaks_found": int(here[..., 3].sum()),
                "peaks": int(here[..., 4].sum()),
            }
        )
    return out


# ---- tables ----


def rule_rank(ratio: float, d: int, kind: str, most: float) -> float:
    """Half of the bytes to the scan, of at most `most` of the components."""
    return min(ratio * d * 2 / SHADOW_BYTES[kind], d * most)


RULE = "half, at most d/2"  # the default rule
RULES = {"half": 1.0, RULE: 0.5}


@dataclass(frozen=True)
class Row:
    """A line of the CSV. `below`: the best mass at these bytes minus this one's, by context."""

    n_pos: int
    task: str
    ratio: float
    shadow: str
    rank: int
    topk: int
    scan: float
    mass: float
    mass_low: float
    mass_high: float
    below: float
    below_low: float
    below_high: float
    error: float
    error_mean_v: float
    peaks_found: float


def rows(rec: Record) -> list[Row]:
    """All settings of a record, by ratio."""
    case = rec["case"]
    out = []
    for ratio in case["ratios"]:
        here = [s for s in rec["samples"] if s["ratio"] == ratio]
        best = max((s for s in here if s["shadow"] in KINDS), key=lambda s: np.mean(s["mass"]))
        for s in here:
            mass = np.array(s["mass"])
            gap = np.array(best["mass"]) - mass
            low, high = stats.mean(mass)
            gap_low, gap_high = stats.mean(gap)
            values = {
                "scan": s["scan"],
                "mass": mass.mean(),
                "mass_low": low,
                "mass_high": high,
                "below": gap.mean(),
                "below_low": gap_low,
                "below_high": gap_high,
                "error": s["error"],
                "error_mean_v": s["error_mean_v"],
                "peaks_found": s["peaks_found"] / max(s["peaks"], 1),
            }
            out.append(
                Row(
                    n_pos=case["n_pos"],
                    task=case["task"],
                    ratio=ratio,
                    shadow=s["shadow"],
                    rank=s["rank"],
                    topk=s["topk"],
                    **{name: round(float(x), 5) for name, x in values.items()},
                )
            )
    return out


def by_rule(found: Sequence[Row], ratio: float, kind: str, d: int, most: float) -> Row | None:
    """The measured setting that is nearest to a rule; None if none is near."""
    rank = rule_rank(ratio, d, kind, most)
    here = [r for r in found if r.ratio == ratio and r.shadow == kind]
    near = min(here, key=lambda r: abs(r.rank - rank), default=None)
    return near if near and abs(near.rank - rank) < 1 else None


def best(found: Sequence[Row], ratio: float, kind: str) -> Row | None:
    here = [r for r in found if r.ratio == ratio and r.shadow == kind]
    return max(here, key=lambda r: r.mass, default=None)


def write_csv(recs: Sequence[Record], file: Path) -> None:
    with file.open("w", newline="") as f:
        writer = csv.DictWriter(f, [f.name for f in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for rec in recs for row in rows(rec))


def markdown(recs: Sequence[Record]) -> str:
    """The best of each type at each length, text and ratio, and the default rule with q4."""
    d, case = recs[0]["head_dim"], recs[0]["case"]
    head = ["positions", "text", "ratio", *(f"best {kind}" for kind in KINDS), "free choice"]
    head += [
        f"q4, {RULE}",
        "below the best (95 % CI)",
        "peaks",
        "error, without and with mean of V",
    ]
    lines = []
    for rec in recs:
        found = rows(rec)
        for ratio in rec["case"]["ratios"]:
            cells = [rec["case"]["n_pos"], rec["case"]["task"], ratio_text(ratio)]
            cells += [_cell(best(found, ratio, kind)) for kind in (*KINDS, "oracle")]
            r = by_rule(found, ratio, "q4", d, RULES[RULE])
            cells.append(_cell(r))
            if r is None:
                cells += ["-"] * 3
            else:
                cells.append(f"{r.below:.3f} ({r.below_low:.3f} to {r.below_high:.3f})")
                cells.append(f"{100 * r.peaks_found:.1f} %")
                cells.append(f"{r.error:.3f}, {r.error_mean_v:.3f}")
            lines.append(cells)
    text = (
        "Share of the true attention inside the selected positions, mean over layers, heads and "
        f"{case['n_query']} queries in each of {case['n_context']} contexts of "
        f"{recs[0]['model_name']} (heads of {d}); in brackets the rank, and the share of the bytes "
        f"that go to the scan. Free choice: the best positions that all of the bytes could buy. "
        "The rule gives half of the bytes to the scan, of at most half of the channels; how "
        "far it is below the best setting at the same bytes is compared context by context. Peaks: "
        f"positions with {PEAK} of a head's attention or more that are among the selected. Error: "
        "|y - y'|^2 / |y|^2 of the heads' outputs; the bytes of the mean of V are not counted here."
    )
    return table(head, lines, left=("text",)) + "\n\n" + text


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.shadow == "oracle":
        return f"{row.mass:.3f}"
    return f"{row.mass:.3f} ({row.rank}, {100 * row.scan:.0f} %)"


@commands.measurement(*capture.SIZES)
def command(model: Path, texts: list[Path], folder: Path, threads: int, **sizes: Any) -> None:
    """Measure the attention caught per byte read, by rank and type of the transposed K."""
    with progress_bar("recall") as progress:
        found = run(model, texts, folder / "recall.jsonl", progress, n_threads=threads, **sizes)
    write_csv(found, folder / "recall.csv")
    commands.show(markdown(found), folder / "recall.jsonl")


if __name__ == "__main__":
    run_command(command)
