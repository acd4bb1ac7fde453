"""As upstream's test-backend-ops compares backends: node by node, on the CPU's own inputs."""

from __future__ import annotations

import cases
import graphs
import numpy as np
import oracle
from device import DeviceGgml, nmse
from ggml_ctypes import STATS
from graphs import Selection, Sources
from tolerances import check_selection

ALL_CASES = cases.quick_cases()
LIMIT = 5e-7  # of the squared error, as upstream for attention with f16 K and V (5e-4 there)


def compare(device: DeviceGgml, case: cases.Case) -> int:
    """The steps of a case on both, PREFILL apart. Returns how many nodes were compared."""
    data = cases.make(case)
    names = ("logits", "sel", "fused", "out", "dense")
    with device.graph() as g:
        s = Sources(data, g)
        logits = graphs.score(s)
        sel = graphs.select(s, logits)
        nodes = (logits, sel, graphs.score_select(s), graphs.attend(s, sel), graphs.attend(s, None))
        on_cpu(device, g, nodes)
        want = {name: g.read(t) for name, t in zip(names, nodes, strict=True)}
        for name, node in zip(names, nodes, strict=True):
            stats = g.buffers[_address(s.stats)].bytes
            stats[:] = 0
            one = device.base.ggml_new_graph(g.ctx)
            device.base.ggml_graph_add_node(one, node)
            kept = g.buffers[_address(node)].bytes.copy()
            g.buffers[_address(node)].bytes[:] = 0xAB  # the device's result, not the CPU's
            device.compute(one, [node], 1)
            got = g.read(node)
            g.buffers[_address(node)].bytes[:] = kept
            if name in ("sel", "fused"):
                same_selection(got, want["sel"], want["logits"], case, data)
            else:
                assert nmse(got, want[name]) <= LIMIT, f"{name}: {nmse(got, want[name]):.2e}"
            if name in ("out", "dense"):
                counted = dict(zip(STATS, s.stats_read().values(), strict=True))
                sees = data.visible[:, 0].sum(axis=-1) > 0  # of each token: anything
                key = "attend_sparse" if name == "out" else "attend_dense"
                assert counted[key] == int(sees.sum()), counted
    return len(names)


def same_selection(got, want, logits, case: cases.Case, data: cases.Data) -> None:
    """A right answer for these logits: ties of rounded sums may fall either way."""
    g = case.heads[0] // case.heads[1]
    mine, theirs = Selection.unpack(got, g), Selection.unpack(want, g)
    for b in data.blocks():
        at = (b.stream, b.tok, b.head)
        rows = logits[b.stream, b.tok, b.head * g : (b.head + 1) * g]
        check_selection(mine.cells[at], rows, b.topk, b.forced, case.top_p)
        assert len(mine.cells[at]) == len(theirs.cells[at])
        if case.mean_v:  # a rest of almost nothing is rounding
            found = [
                oracle.kept(rows[:, x.cells[at]].astype(np.float64), x.rest[at].astype(np.float64))
                for x in (mine, theirs)
            ]
            assert np.allclose(*found, rtol=0, atol=1e-3)


def on_cpu(device: DeviceGgml, g, nodes) -> None:
    """The CPU's results, in the buffers of the graph."""
    compute = device.compute
    device.compute = lambda *args: super(DeviceGgml, device).compute(*args)
    try:
        g.compute(*nodes)
    finally:
        device.compute = compute


def _address(t) -> int:
    import ctypes

    return ctypes.addressof(t.contents)
