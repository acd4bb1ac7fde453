"""How much faster the library that was built here is than the one that came with the wheel."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from pyorch.bench.worker import Worker, Workers
from pyorch.models import synth
from pyorch.native import build, probe
from pyorch.progress import progress_bar, say

# what is timed: two of its layers, with weights that no cache of a CPU holds
LIKE, N_LAYER, QUANT = "llama3.2-3b", 2, "q4_k_m"
N_PROMPT, N_REPLY, N_BEFORE = 512, 16, 4096
DECODES = ("dense", "sparq,ratio=1/8")
TURNS = 9
ENOUGH_S = 20.0  # no turn begins later than this


def gain(here: Path, carried: Path) -> dict[str, tuple[float, float]]:
    """Time both in turns, on layers of a real model's sizes and after `N_BEFORE` positions: about
    25 seconds.

    Returns:
        how many times as fast `here` is, in the turn that is worst for it and in the best:
        `prompt` for `N_PROMPT` tokens read at once, and each of `DECODES` for decoded ones. They
        are far apart where other programs run meanwhile.

    Raises:
        SparqError: one of them does not run, or there is no space for the weights.
    """
    took: dict[str, dict[Path, list[int]]] = {
        kind: {here: [], carried: []} for kind in ("prompt", *DECODES)
    }
    with (
        tempfile.TemporaryDirectory() as temp,
        Workers() as workers,
        progress_bar("measuring", off_terminal=say) as bar,
    ):
        model = Path(temp) / "model.gguf"
        synth.write(model, synth.fewer_layers(LIKE, N_LAYER), QUANT)
        for folder in (here, carried):
            worker = workers[str(folder)] = Worker(env=_only(folder, Path(temp) / folder.name))
            worker.open(
                model=str(model),
                n_ctx=N_BEFORE + N_PROMPT + 2,
                n_threads=probe.cores(),
                n_batch=N_PROMPT,
            )
            worker.fill(n_pos=N_BEFORE, seed=1)
        started = time.monotonic()
        for turn in range(-1, TURNS):  # the first is not counted
            for folder in (here, carried) if turn % 2 else (carried, here):
                worker = workers[str(folder)]
                for kind, of in took.items():
                    if kind == "prompt":
                        found = worker.prefill(n=N_PROMPT, seed=1)
                        worker.rewind(n_pos=N_BEFORE)
                    else:
                        worker.attention(spec=kind)
                        found = worker.decode(n=N_REPLY, seed=1)
                    if turn >= 0:
                        of[folder].append(min(found["samples_ns"]))
            bar(turn + 1, TURNS)
            if turn >= 0 and time.monotonic() - started > ENOUGH_S:
                break
    found = {}
    for kind, of in took.items():
        turns = [theirs / ours for ours, theirs in zip(of[here], of[carried], strict=True)]
        found[kind] = min(turns), max(turns)
    return found


def _only(folder: Path, into: Path) -> Mapping[str, str]:
    """The variable with which a process uses this build and no other; `into` is filled with it."""
    into.mkdir()
    for file in folder.iterdir():
        (into / file.name).symlink_to(file)
    (into / "python").symlink_to(build.bindings())
    return {"SPARQ_LIBRARY": str(into)}
