"""How much faster the library that was built here is than the one that came with the wheel."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from pyorch import paths
from pyorch.bench.worker import Worker, Workers
from pyorch.models.quantize import quantize
from pyorch.native import build, probe

N_PROMPT, N_REPLY, N_TURNS = 512, 32, 7


def gain(here: Path, carried: Path) -> dict[str, float]:
    """Time both in turns, on the small model of the repository in Q4_K_M: ten seconds.

    Returns:
        `prompts` and `replies`: how many times as fast `here` is. Of each the fastest turn counts,
        since other programs that run meanwhile make turns slower, and none faster.

    Raises:
        SparqError: one of them does not run.
    """
    took: dict[str, dict[Path, list[float]]] = {
        kind: {here: [], carried: []} for kind in ("prompts", "replies")
    }
    with tempfile.TemporaryDirectory() as temp, Workers() as workers:
        model = Path(temp) / "model.gguf"
        quantize(paths.data("models") / "demo" / "demo.gguf", model, "Q4_K_M")
        for folder in (here, carried):
            workers[str(folder)] = Worker(env=_only(folder, Path(temp) / folder.name))
            workers[str(folder)].open(
                model=str(model),
                n_ctx=N_PROMPT + N_REPLY + 2,
                n_threads=probe.cores(),
                n_batch=N_PROMPT,
            )
        for turn in range(-1, N_TURNS):  # the first is not counted
            for folder in (here, carried) if turn % 2 else (carried, here):
                worker = workers[str(folder)]
                prompt = worker.prefill(n=N_PROMPT, seed=1)["samples_ns"]
                reply = worker.generate(n=N_REPLY, seed=1)["samples_ns"]
                worker.rewind(n_pos=0)
                if turn >= 0:
                    took["prompts"][folder].append(sum(prompt))
                    took["replies"][folder].append(sum(reply))
    return {kind: min(of[carried]) / min(of[here]) for kind, of in took.items()}


def _only(folder: Path, into: Path) -> Mapping[str, str]:
    """The variable with which a process uses this build and no other; `into` is filled with it."""
    into.mkdir()
    for file in folder.iterdir():
        (into / file.name).symlink_to(file)
    (into / "python").symlink_to(build.bindings())
    return {"SPARQ_LIBRARY": str(into)}
