"""`python -m bench ablations`: the commands that measure SparQ's choices, one at a time (Fig. 7).

All methods run on the same examples of two tasks, `fidelity` (KL to dense) and `repetition`, at
equal bytes or with the paper's own parameters r (rank) and k:

    7a  the largest components of q against a random low-rank projection and against the oracle
    7b  temperatures of the approximate softmax, which says how much the mean of V stands for
    7c  r x k
"""

from __future__ import annotations

import click

from pyorch import policies
from pyorch.attention.spec import BOUNDS
from pyorch.cli.bench import measurement

RATIOS = ("1/2", "1/4", "1/8", "1/16", "1/32")
SCANS = ("oracle", f"sparq,shadow=f16,{BOUNDS}", f"sparq,{BOUNDS}", "low-rank")
CONFIGS = ((16, 128), (8, 64), (4, 32))  # r, k
TAUS = (
    "mean_v=on",  # eq. 9
    "mean_v=on,tau=sqrt-d",
    "mean_v=on,tau=sqrt-r",
    "mean_v=off",
    "mean_v=off,tau=sqrt-r",  # the gain from ranking shared heads
)
RANKS, KS = (4, 8, 16, 32), (16, 32, 64, 128, 256, 512)
TASKS = {"fidelity": (2048, 20), "repetition": (2336, 100)}  # positions, examples


def methods() -> list[policies.Method]:
    lines = ["off", *(f"{spec},ratio={r}" for spec in SCANS for r in RATIOS)]
    lines += [f"sparq-tau,rank={r},k={k},{tau}" for tau in TAUS for r, k in CONFIGS]
    lines += [f"sparq,rank={r},topk={k},{BOUNDS}" for r in RANKS for k in KS]
    return list(map(policies.parse, lines))


@click.command("ablations", context_settings=measurement.SETTINGS)
def command() -> None:
    """Print the commands that measure SparQ's choices, with books that the model has not seen."""
    some = " ".join(f"-a {method}" for method in methods())
    for task, (n_pos, n) in TASKS.items():
        of = f"--text BOOKS --ctx {n_pos} -n {n} -t 1"
        print(f"sparq-cpp eval {task} -m models/demo/demo.gguf {of} {some} --out DIR")
    to = "bench/results/MACHINE/ablations"
    print(f"sparq-cpp eval pack DIR {to}\nsparq-cpp eval table {to} > {to}.md")
