"""Plans `sparq-cpp bench`: the cases, the models they need, and what cannot be measured."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

from pyorch.attention.bytes import N_BATCH, cache_bytes, layer_costs, shadow_bytes
from pyorch.attention.saved import resolve
from pyorch.attention.spec import CALIBRATED, AttentionSpec, check_against_model
from pyorch.bench import records
from pyorch.bench.bandwidth import BUFFER_BYTES
from pyorch.bench.records import where_given
from pyorch.bench.turns import FLOATS, Side
from pyorch.bench.worker import FORGET_BYTES
from pyorch.engine import cache_type
from pyorch.errors import SparqError
from pyorch.models import synth
from pyorch.models.geometry import Geometry, geometry
from pyorch.models.gguf_file import read_gguf
from pyorch.models.memory import of_nodes
from pyorch.text import printable

MAX_POSITIONS = 1 << 20  # the positions that a synthetic model claims to be trained on
FILL = 0.75  # the share of memory that a model of our choice may take
PROCESS_BYTES = 300 << 20  # per measured process, besides the model, the cache and FORGET_BYTES
# The types of weights that llama.cpp rearranges for a CPU (ggml-cpu/repack.cpp, amx/common.h).
_ON_X86 = frozenset(("q4_0", "q2_k", "q4_k", "iq4_nl", "mxfp4"))
_ON_AMX = frozenset(("q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k", "iq4_xs"))
_ELSEWHERE = _ON_X86 | {"q1_0", "q8_0", "q5_k", "q6_k"}


@dataclass(frozen=True)
class Case(Side):
    """A row. Fields that llama-bench has too keep its names.

    The key of a record is made from these fields: a new one has to be `where_given`, or all records
    are measured again.
    """

    model_filename: str
    model_type: str
    model_size: int  # the bytes of all tensors
    model_n_params: int
    n_threads: int
    type_k: str
    type_v: str
    n_prompt: int  # either this
    n_gen: int  # or this is 0
    n_depth: int
    library: str  # stock | sparq
    flash_attn: bool
    spec: AttentionSpec
    repetitions: int
    numa: str = ""
    below_min_ctx: bool = (
        False  # it stays because every key is made from it; records until November 2026 have both
    )
    seed: int = 1
    n_gpu_layers: int | None = where_given(None)  # all
    rope: str = where_given("")  # `engine.Rope` as text
    n_workers: int = where_given(0)  # other machines that hold the layers
    tensor_split: str = where_given("")
    calibration: str = where_given("")  # a hash of the settings of a calibrated budget
    text: str = where_given("")  # a hash of what ours has read; without one K and V are random
    repack: bool = where_given(True)  # whether llama.cpp may rearrange weights
    kv_offload: bool = where_given(True)  # whether K and V are on the GPU, with their layers

    @property
    def test(self) -> str:
        return test_name(self.n_prompt, self.n_gen, self.n_depth)

    @property
    def n_batch(self) -> int:
        """The tokens per batch, for which llama.cpp sets memory aside."""
        return N_BATCH if self.n_prompt or self.text else 8

    @property
    def n_positions(self) -> int:
        """The positions that the cache has room for."""
        return room_for(self.n_depth, max(self.n_prompt, self.n_gen))


def room_for(n_depth: int, n_tokens: int) -> int:
    """The positions of a cache that a test needs, with one to spare: the first token of a text
    counts as its prompt, so an empty cache gets one token before ours is checked at the next."""
    return n_depth + max(n_tokens, 1) + 1


def test_name(n_prompt: int, n_gen: int, n_depth: int) -> str:
    """The name of a test as llama-bench prints it: `tg16 @ d4096`."""
    name = f"pp{n_prompt}" if n_prompt else f"tg{n_gen}"
    return f"{name} @ d{n_depth}" if n_depth else name


def text_hash(text: str) -> str:
    """What a record tells of a text; "" without one."""
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""


@dataclass(frozen=True)
class Variant(Side):
    """The library that runs, and its attention."""

    library: str  # stock | sparq
    flash_attn: bool
    spec: AttentionSpec


@dataclass(frozen=True)
class Cache:
    """A cache before a test, for any model, and the variants that take turns in it."""

    n_depth: int
    type_k: str
    type_v: str
    variants: Sequence[Side]


@dataclass(frozen=True)
class SpeedPlan:
    """The plan of a run: the product of all lists. Models are files, or are synthesised."""

    models: Sequence[Path] = ()
    like: Sequence[str] = ("llama2-7b",)  # the shapes of synthetic models, if no files are given
    n_layer: int | None = None  # of `like`; None = as many as fit into memory, a power of two
    quant: str = "q8_0"
    n_prompt: Sequence[int] = (0,)
    n_gen: Sequence[int] = (16,)
    n_depth: Sequence[int] = (0,)
    threads: Sequence[int] = (1,)
    type_k: Sequence[str] = ("f16",)
    type_v: Sequence[str] = ("f16",)
    flash_attn: Sequence[bool] = (False, True)  # of stock
    specs: Sequence[AttentionSpec] = (AttentionSpec("sparq", ratio=1 / 8),)
    repetitions: int = 5
    text: str = ""  # read by ours before the tests; without one K and V are random
    repack: bool = True
    numa: str = ""
    n_gpu_layers: int | None = None
    kv_offload: bool = True
    workers: Sequence[str] = ()
    tensor_split: Sequence[float] = ()
    rope: str = ""
    seed: int = 1  # the seed of the positions before

    def groups(self) -> Iterator[tuple[Path, list[Case]]]:
        """Yields models, and cases that share a cache and take turns. Writes synthetic models."""
        for source, held in self._caches():
            path = source if isinstance(source, Path) else source.written()
            geo = geometry_of(path)
            stands_for = {v: calibration(v.spec, path) for v in held.variants}
            for (n_prompt, n_gen), n_threads in product(self._tests(), self.threads):
                cases = [
                    Case(
                        model_filename=printable(path.name),
                        model_type=geo.name,
                        model_size=geo.weight_bytes,
                        model_n_params=geo.n_params,
                        n_threads=n_threads,
                        type_k=held.type_k,
                        type_v=held.type_v,
                        n_prompt=n_prompt,
                        n_gen=n_gen,
                        n_depth=held.n_depth,
                        library=v.library,
                        flash_attn=v.flash_attn,
                        spec=v.spec,
                        text=text_hash(self.text),
                        repack=self.repack,
                        repetitions=self.repetitions,
                        numa=self.numa,
                        seed=self.seed,
                        n_gpu_layers=self.n_gpu_layers,
                        kv_offload=self.kv_offload,
                        rope=self.rope,
                        n_workers=len(self.workers),
                        tensor_split=",".join(f"{x:g}" for x in self.tensor_split),
                        calibration=stands_for[v],
                    )
                    for v in held.variants
                ]
                yield path, cases

    def to_write(self) -> dict[Path, int]:
        """The synthetic models that `groups` will write, and their sizes in bytes."""
        sources = [source for source, _ in self._caches() if isinstance(source, Synthetic)]
        return {s.path: s.n_bytes for s in sources if not s.path.exists()}

    def _tests(self) -> list[tuple[int, int]]:
        """The tests as (tokens of a prompt, decoded tokens), of which one is 0."""
        tests = [(n, 0) for n in self.n_prompt if n] + [(0, n) for n in self.n_gen if n]
        if not tests:
            raise SparqError("nothing to measure: -p 0 and -n 0", "-n 16", exit_code=2)
        return tests

    def _caches(self) -> Iterator[tuple[Path | Synthetic, Cache]]:
        """Yields each model with each of its caches."""
        sources: list[Path | str] = [*self.models] or [*self.like]
        every = product(sources, self.n_depth, self.type_k, self.type_v)
        for source, n_depth, type_k, type_v in every:
            stock = [fa for fa in self.flash_attn if fa or type_v in FLOATS]
            if not stock:
                raise SparqError(
                    f"llama.cpp has no {type_v} V without flash attention",
                    "-fa 1, or a -ctv of f16 or bf16",
                    exit_code=2,
                )
            variants = [Variant("stock", fa, AttentionSpec("off")) for fa in stock]
            variants += [Variant("sparq", True, spec) for spec in dict.fromkeys(self.specs)]
            cache = Cache(n_depth, type_k, type_v, variants)
            yield source if isinstance(source, Path) else self._synthetic(source, cache), cache

    def _synthetic(self, like: str, cache: Cache) -> Synthetic:
        """A model with as many layers as fit. The size of the memory decides, not how much is
        free, so that another run has the same cases."""
        room = room_for(cache.n_depth, max(map(max, self._tests())))
        full = synth.shape_like(like).n_layer
        memory, on_gpu = memory_of(self.n_gpu_layers, self.kv_offload)
        packed = rearranged([self.quant.removesuffix("_m")], self.repack)
        fewer = [2**i for i in range(10, -1, -1) if 2**i < full]
        fitting = (
            n
            for n in [full, *fewer]
            # what the buffers of more threads take is left to the rest of the memory
            if needs(cache, room, BUFFER_BYTES, *_size_of(like, n, self.quant), packed, on_gpu)
            < FILL * memory
        )
        return Synthetic(like, self.n_layer or next(fitting, 1), self.quant)


def calibration(spec: AttentionSpec, model: Path) -> str:
    """A hash of the settings that `calibrated` or `top-p` stands for, "" for other budgets: a new
    calibration makes other records.

    Raises:
        SparqError: the model is not calibrated for these settings.
    """
    found = str(resolve(spec, model))
    return hashlib.sha256(found.encode()).hexdigest()[:8] if spec.budget in CALIBRATED else ""


@dataclass(frozen=True)
class Synthetic:
    """A model of random weights with `n_layer` layers, and the output head in proportion."""

    like: str
    n_layer: int
    quant: str

    @property
    def path(self) -> Path:
        name = f"{self.like}-{self.n_layer}-{self.quant}-v{synth.VERSION}.gguf"
        return synth.folder() / name

    @property
    def n_bytes(self) -> int:
        return synth.file_bytes(synth.fewer_layers(self.like, self.n_layer), self.quant)

    def written(self) -> Path:
        """Write the model, unless the cache has it. Returns its file."""
        if not self.path.exists():
            full = synth.shape_like(self.like).n_layer
            fewer = f", {self.n_layer} of {full} layers" if self.n_layer != full else ""
            shape = replace(synth.fewer_layers(self.like, self.n_layer), n_ctx=MAX_POSITIONS)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            synth.write(self.path, shape, self.quant, name=f"{self.like} {self.quant}{fewer}")
        return self.path


def _size_of(like: str, n_layer: int, quant: str) -> tuple[int, Geometry]:
    """What `needs` has to know about a synthetic model, which need not exist."""
    shape = synth.fewer_layers(like, n_layer)
    n_bytes = synth.file_bytes(shape, quant)
    geo = Geometry(
        arch="llama",
        name=like,
        n_layer=n_layer,
        n_embd=shape.n_embd,
        n_head=(shape.n_head,) * n_layer,
        n_head_kv=(shape.n_head_kv,) * n_layer,
        head_dim_k=shape.head_dim,
        head_dim_v=shape.head_dim,
        n_ctx_train=shape.n_ctx,
        is_mla=False,
        n_params=0,
        weight_bytes=n_bytes,
        weight_bytes_per_token=n_bytes,
    )
    return n_bytes, geo


@cache
def rearranged_types() -> frozenset[str]:
    """The types of weights, in small letters, that llama.cpp rearranges for this machine's CPU."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return _ELSEWHERE
    info = Path("/proc/cpuinfo")
    has_amx = info.exists() and "amx_int8" in info.read_text("utf-8", "replace")
    return _ON_X86 | _ON_AMX if has_amx else _ON_X86


def rearranged(types: Iterable[str], repack: bool) -> bool:
    """Whether llama.cpp makes a rearranged copy of weights of these types on the CPU.

    Args:
        repack: whether it may.
    """
    return repack and any(t.lower() in rearranged_types() for t in types)


def memory_of(n_gpu_layers: int | None, kv_offload: bool = True) -> tuple[float, bool]:
    """The bytes of the memory that K and V go to, and whether it is a GPU's."""
    machine = records.machine()
    on_gpu = "gpu_gib" in machine and n_gpu_layers != 0 and kv_offload
    total = machine["gpu_gib" if on_gpu else "memory_gib"] * 2**30
    return total if on_gpu else min(total, of_nodes("MemTotal") or total), on_gpu


def needs(
    held: Cache,
    n_positions: int,
    buffers: int,
    weights: int,
    geo: Geometry,
    packed: bool,
    on_gpu: bool = False,
) -> int:
    """The bytes of memory, the GPU's or the machine's, that the variants of a cache take.

    Each process has its own cache, which is filled from a copy. If `packed` it has its own weights
    too, because llama.cpp rearranges them; otherwise all share one mapping of the file. `buffers`
    are the bytes of the MemoryReader. On a GPU each process has its own weights, and there is no
    copy.
    """
    specs = {v.place: v.spec for v in held.variants}.values()
    types = cache_type(held.type_k), cache_type(held.type_v)
    cache = cache_bytes(geo, n_positions, *types, N_BATCH)
    shadows = sum(shadow_bytes(geo, n_positions, spec) for spec in specs)  # stock's `off` has none
    if on_gpu:
        return (weights + cache + PROCESS_BYTES) * len(specs) + shadows
    each = cache + FORGET_BYTES + PROCESS_BYTES
    weights *= 1 + len(specs) if packed else 1
    return weights + each * len(specs) + shadows + cache + buffers


@cache
def geometry_of(path: Path) -> Geometry:
    return geometry(read_gguf(path))


def check(planned: Iterable[tuple[Path, Sequence[Case]]]) -> None:
    """Refuse rows of tokens that cannot run as they say, before anything is measured.

    Raises:
        SparqError: a sparse row is dense at its positions.
    """
    for model, group in planned:
        geo = geometry_of(model)
        for c in group:
            spec = resolve(c.spec, model)
            check_against_model(spec, geo.head_dim_k, geo.n_layer)
            if not (c.n_gen and spec.sparse) or geo.why_dense:
                continue
            # what the first token sees; the very first of a text counts as its prompt
            n_pos = max(c.n_depth, 1) + 1
            types = (cache_type(t).bytes_per_element for t in (c.type_k, c.type_v))
            splits = [layer.split for layer in layer_costs(geo, spec, n_pos, *types)]
            if all(s.dense for s in splits):
                reason = f": {splits[0].reason}" if splits else ""
                raise SparqError(
                    f"{c.spec} stays dense at {n_pos} positions{reason}",
                    "more positions (-d), or min_ctx=0 in -a; -a dense measures our dense",
                    exit_code=2,
                )


def cost(model: Path, group: Sequence[Case]) -> int:
    """The relative duration of a group, for the estimate of the time left: roughly the MB read."""
    c = group[0]
    read = c.model_size + cache_bytes(
        geometry_of(model), c.n_positions, cache_type(c.type_k), cache_type(c.type_v)
    )
    per_prompt = 1 / 10  # the time per token of a prompt, over that of a decoded token
    once = c.n_depth * per_prompt if c.text else 0
    tokens = once + (c.repetitions + 1) * (c.n_gen or c.n_prompt * per_prompt)
    threads = min(c.n_threads, 8)  # more threads hardly read faster
    return int(len(group) * (2e9 + read * (5 + tokens / threads)) / 1e6)
