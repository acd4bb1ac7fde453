"""What `sparq-cpp bench` has in common with and without --attn-only: llama-bench's options, the
fields of a cache, and tables of stock beside ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.cli import options as opt
from pyorch.cli import types
from pyorch.cli.bench.measurement import Column, Row
from pyorch.cli.groups import option, several
from pyorch.cli.types import Numbers
from pyorch.engine import cache_type, usable_cores
from pyorch.evals.texts import read_texts
from pyorch.ggml import CACHE_TYPES
from pyorch.measure import records
from pyorch.measure.records import Record
from pyorch.measure.turns import Side
from pyorch.models.synth import QUANTS

# as in llama-bench; with `auto` stock is measured both ways
_OFF, _ON = (False,), (True,)
_FLASH_ATTN = {"0": _OFF, "off": _OFF, "1": _ON, "on": _ON, "auto": _OFF + _ON}


def _cache_option(short: str, name: str) -> Any:
    text = f"Type of {name.upper()} in the cache."
    kind = click.Choice(CACHE_TYPES)
    return several(short, f"--cache-type-{name}", of=kind, default="f16", text=text)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The options of both; an empty list is the default of each."""

    yes: bool = opt.yes_option()
    like: tuple[str, ...] = option(
        "--like",
        multiple=True,
        metavar="NAME",
        help="Time a synthetic model of this shape.  [default: llama2-7b]",
    )
    n_layer: int | None = option(
        "--layers",
        type=types.LAYERS,
        help="Layers of the synthetic model.  [default: as many as fit]",
    )
    ratio: list[float] = several(
        "--ratio",
        of=types.Ratio(),
        text="Shares of dense attention's bytes to read.  [default: 1/8]",
    )
    attn: tuple[str, ...] = option(
        *opt.SPEC_OPTION,
        multiple=True,
        metavar="SPEC",
        help="All settings of attention as one line, in place of --ratio.",
    )
    n_depth: list[int] = several(
        "-d",
        "--n-depth",
        of=Numbers(),
        text="Positions in the cache before.  [default: 4096; with --attn-only 4096,16384,32768]",
    )
    type_k: list[str] = _cache_option("-ctk", "k")
    type_v: list[str] = _cache_option("-ctv", "v")
    n_threads: list[int] = several(
        "-t",
        "--threads",
        of=Numbers(1, types.THREADS.max),
        text="Number of threads.  [default: one per core]",
    )
    repetitions: int = option(
        "-r",
        "--repetitions",
        type=click.IntRange(1),
        default=5,
        help="Repeat each test this many times.",
    )
    numa: str | None = opt.numa_option()
    output: str = option(
        "-o",
        "--output",
        type=click.Choice(["md", "csv", "json", "jsonl"]),
        default="md",
        help="Format of the table.",
    )

    @property
    def threads(self) -> list[int]:
        return self.n_threads or [usable_cores()]

    def specs(self, *default: str) -> list[AttentionSpec]:
        """The settings of attention: all lines, or the ratios, or else the default."""
        if self.attn or not self.ratio:
            return [parse_spec(line) for line in self.attn or default]
        return [AttentionSpec("sparq", ratio=x) for x in self.ratio]


@dataclass(frozen=True, kw_only=True)
class _Models:
    """A base of its own, so that -m is the first in --help."""

    models: list[str] = several(
        "--model", "-m", of=types.Files(), text="GGUF models, as in `sparq-cpp pull`."
    )


@dataclass(frozen=True, kw_only=True)
class SpeedOptions(CompareOptions, _Models):
    """Those without --attn-only."""

    quant: str = option(
        "--quant",
        type=click.Choice(QUANTS),
        default="q8_0",
        help="Weights of the synthetic model.",
    )
    n_prompt: list[int] = several(
        "-p", "--n-prompt", of=Numbers(), default="0", text="Time prompts of this many tokens."
    )
    n_gen: list[int] = several(
        "-n", "--n-gen", of=Numbers(), default="16", text="Time this many decoded tokens."
    )
    flash_attn: list[str] = several(
        "-fa",
        "--flash-attn",
        of=click.Choice(_FLASH_ATTN),
        default="0,1",
        text="Flash attention of stock: 0, 1 or auto, which is both.",
    )
    text: str | None = option(
        "--text",
        type=types.File(),
        metavar="FILE",
        help="A book, of which -d tokens are read in place of random K and V.",
    )
    rivals: dict[str, str] = option(
        "--rival",
        multiple=True,
        type=types.File(),
        metavar="PROGRAM",
        callback=lambda _, __, names: {
            Path(name).name: str(Path(name).resolve()) for name in names
        },
        help="Another llama.cpp that takes turns too, as bench/rivals/ has.",
    )
    no_repack: bool = opt.repack_option()
    n_gpu_layers: int | None = opt.gpu_option()
    kv_offload: bool | None = opt.kv_option("in any case")
    rope: opt.RopeOptions = field(default_factory=opt.RopeOptions)
    rpc: opt.RpcOptions = field(default_factory=opt.RpcOptions)

    @cached_property
    def book(self) -> str:
        """What is in the file, "" without one."""
        return read_texts([Path(self.text)])[0] if self.text else ""

    @property
    def stock(self) -> list[bool]:
        """Whether stock uses flash attention: one way, or both."""
        return list(dict.fromkeys(fa for name in self.flash_attn for fa in _FLASH_ATTN[name]))


@dataclass(frozen=True, kw_only=True)
class CacheCase(Side):
    """A cache of a kind and size, and the threads that read it."""

    n_depth: int
    type_k: str = "f16"
    type_v: str = "f16"
    n_threads: int

    @property
    def element_bytes(self) -> list[float]:
        """Of K and of V."""
        return [cache_type(t).bytes_per_element for t in (self.type_k, self.type_v)]


# ---- tables ----


def best_of_stock(
    recs: Sequence[Record], time: Callable[[Record], float]
) -> Mapping[str, tuple[float, Record]]:
    """The least time of stock in each run, and the record that has it."""
    best: dict[str, tuple[float, Record]] = {}
    for rec in recs:
        if rec["case"]["library"] == "stock":
            run, this = records.run_of(rec), time(rec)
            if run not in best or this < best[run][0]:
                best[run] = this, rec
    return best


def types_of(row: Row) -> str:
    """The types of K and V, once if they are the same."""
    return ", ".join(dict.fromkeys((row["type_k"], row["type_v"])))


def about(recs: Sequence[Record], bandwidths: Sequence[float], *more: str) -> str:
    """The sentence below a table: where and when, and how fast memory was read."""
    speeds = sorted(x / 1e9 for x in bandwidths)
    read = f"sequential read {speeds[0]:.1f}-{speeds[-1]:.1f} GB/s in the same run"
    return f"{'; '.join((records.about(recs), read, *more))}.{records.about_old(recs)}"


NUMA: dict[str, Column] = {"numa": lambda r: r["numa"] or "none"}
