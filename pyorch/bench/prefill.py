"""What sparse attention costs in prefill: the groups sealed on the way, and nothing else.

One layer of a model's own shape reads a prompt with sparse attention off and on, in turns, in one
process on the patched library, and with stock beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pyorch import native, paths
from pyorch.attention.spec import parse_spec
from pyorch.bench import records
from pyorch.bench.records import Record, spread
from pyorch.bench.worker import Worker
from pyorch.errors import SparqError
from pyorch.models import synth

BENCH = "prefill"
GROUP = 64  # positions sealed together

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Case:
    """One row. `n_prompt` as in llama-bench."""

    like: str
    n_layer: int
    n_prompt: int
    n_batch: int
    n_threads: int
    library: str  # stock | sparq
    spec: str
    n_samples: int

    @property
    def label(self) -> str:
        return "stock -fa 1" if self.library == "stock" else self.spec


def run(
    like: str,
    n_prompt: int,
    n_threads: int,
    spec: str,
    n_samples: int,
    file: Path,
    progress: Progress,
    *,
    force: bool = False,
) -> list[Record]:
    """Records of stock, off and `spec`, from `file` or measured and added to it.

    Raises:
        SparqError: nothing was sealed with `spec` on, or the library refused something.
    """
    libraries = {"stock": native.lib_dir(stock=True), "sparq": native.lib_dir()}
    env = records.environment(libraries)
    off = Case(like, 1, n_prompt, 512, n_threads, "sparq", "off", n_samples)
    cases = [replace(off, library="stock"), off, replace(off, spec=str(parse_spec(spec)))]
    keys = [records.key(BENCH, asdict(c), env["stamps"][c.library]) for c in cases]
    done = {} if force else records.load(file)
    if not all(k in done for k in keys):
        with Worker(stock=True) as stock, Worker() as ours:
            measured = _measure(cases, {"stock": stock, "sparq": ours}, progress)
        for case, key, result in zip(cases, keys, measured, strict=True):
            stamp = env["stamps"][case.library]
            done[key] = records.record(BENCH, asdict(case), stamp, **result, env=env)
            records.append(file, done[key])
    return [done[k] for k in keys]


def model_file(like: str) -> Path:
    """One whole layer of the model; written on first use."""
    path = paths.cache() / "bench" / f"layer-{like}-v{synth.VERSION}.gguf"
    if not path.exists():
        synth.write(path, synth.shape_like(like, n_layer=1, n_vocab=288))
    return path


def _measure(
    cases: Sequence[Case], workers: dict[str, Worker], progress: Progress
) -> list[dict[str, Any]]:
    model = str(model_file(cases[0].like))
    for worker in workers.values():
        worker.open(
            model=model,
            n_ctx=cases[0].n_prompt,
            n_threads=cases[0].n_threads,
            n_batch=cases[0].n_batch,
        )
    results: list[dict[str, Any]] = [{"samples_ns": [], "counters": {}} for _ in cases]
    turns = cases[0].n_samples
    for turn in range(-1, turns):  # the first turn is not kept
        order = range(len(cases)) if turn % 2 == 0 else range(len(cases) - 1, -1, -1)
        for n, i in enumerate(order):
            case, worker = cases[i], workers[cases[i].library]
            worker.attention(spec=case.spec)
            # the first turn only warms up: a short prompt is enough
            got = worker.prefill(n=case.n_prompt if turn >= 0 else 256, seed=max(turn, 0))
            if turn >= 0:
                results[i]["samples_ns"] += got["samples_ns"]
                results[i]["counters"] = got["counters"]
            progress((turn + 1) * len(cases) + n + 1, (turns + 1) * len(cases))
    for case, result in zip(cases, results, strict=True):
        refuse_idle(case, result["counters"])
    return results


def refuse_idle(case: Case, counters: dict[str, int]) -> None:
    """With SparQ on, a prefill seals every complete group but those of its last batch.

    Raises:
        SparqError: fewer were sealed, so nothing was measured.
    """
    if parse_spec(case.spec).method != "sparq":
        return
    least = (case.n_prompt - case.n_batch) // GROUP * case.n_layer
    if counters.get("groups_sealed", 0) < max(least, 1):
        raise SparqError(
            f"{case.label}: {counters.get('groups_sealed', 0)} groups of positions sealed in a "
            f"prefill of {case.n_prompt} tokens, not {least}; not reported"
        )


def markdown(recs: Sequence[Record]) -> str:
    """Times, and each against "off"."""
    cases = [Case(**rec["case"]) for rec in recs]
    off = next(rec for rec, c in zip(recs, cases, strict=True) if c.label == "off")
    c = cases[0]
    out = [
        f"**Prefill** of {c.n_prompt} tokens, one layer like {c.like}, {c.n_threads} threads",
        "",
        "| attention | s (p10-p90) | against off |",
        "| --- | ---: | ---: |",
    ]
    for rec, case in zip(recs, cases, strict=True):
        mid, low, high = (x / 1e9 for x in spread(rec["samples_ns"]))
        pairs = [a / b for a, b in zip(rec["samples_ns"], off["samples_ns"], strict=True)]
        change = 100 * (spread(pairs)[0] - 1)  # turn by turn, so drift of the machine cancels
        out.append(f"| `{case.label}` | {mid:.3f} ({low:.3f}-{high:.3f}) | {change:+.1f} % |")
    return "\n".join(out)
