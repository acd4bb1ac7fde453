"""Damaged GGUF files: a model as a structure that can hold anything, and seeded faults.

base = parse(path)                  # a good file
data = mutate(base, seed)           # bytes of a bad one, always the same for the seed

`python gguf_faults.py` reads paths from stdin and runs each file in little memory: the reader,
then the whole path through llama.cpp. It answers each with the CPU seconds and the outcome.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import random
import resource
import signal
import struct
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import gguf

from pyorch import engine
from pyorch.errors import SparqError
from pyorch.models.geometry import geometry
from pyorch.models.gguf_file import read_gguf

_SCALARS = dict(enumerate("BbHhIifB")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_NUMBERS = [*range(45), *(2**i + d for i in (*range(6, 17), 20, 24) for d in (-1, 0, 1))]
_NUMBERS += [2**i + d for i in (31, 32, 33, 40, 48, 61, 62, 63, 64) for d in (-32, -1, 0, 1)]
_WORDS = (
    b"a llama ../../../etc/passwd /etc/passwd %s%n%s gpt2 none no_vocab <0x41> <0x <0xZZ> bert t5"
)
_TEXTS = [*_WORDS.split(), *b"<|im_end|> <s> yarn rwkv plamo2 qwen2 default".split()]
_TEXTS += [b"", b" ", b"\0", b"\n", b"\x1b[31m", b"\xff\xfe", b"\xe2\x96\x81", b"\xc0\x80"]
_TEXTS += [b"a" * n for n in (63, 64, 65, 70000)]
# keys that decide much and that a file need not have, by their types
_OPTIONAL = {
    2: ["split.count", "split.no"],
    4: ["general.alignment", "tokenizer.ggml.eot_token_id"]
    + ["llama.rope.dimension_count", "llama.vocab_size", "llama.expert_count"]
    + ["llama.expert_used_count", "llama.attention.key_length", "llama.attention.value_length"]
    + ["llama.attention.sliding_window"],
    5: ["split.tensors.count"],
    6: ["llama.rope.scaling.factor", "llama.rope.freq_base"],
    7: ["tokenizer.ggml.add_eos_token"],
    8: ["llama.rope.scaling.type", "tokenizer.ggml.pre", "tokenizer.chat_template"],
    9: ["llama.attention.head_count_kv", "tokenizer.ggml.precompiled_charsmap"],
}


@dataclass
class Key:
    name: bytes
    kind: int
    value: Any  # number, bytes, or (kind, list) of an array


@dataclass
class Row:
    name: bytes
    dims: list[int]
    kind: int
    offset: int


@dataclass
class Model:
    keys: list[Key]
    rows: list[Row]
    data: bytes
    version: int = 3
    n_keys: int | None = None
    n_rows: int | None = None
    lies: dict[int, int] = field(default_factory=dict)  # index of a length field -> value written

    def pack(self) -> bytes:
        lengths = itertools.count()

        def length(n: int) -> bytes:
            return number("Q", self.lies.get(next(lengths), n))

        def text(s: bytes) -> bytes:
            return length(len(s)) + s

        def scalar(kind: int, v: Any) -> bytes:
            if kind == _STRING:
                return text(v if isinstance(v, bytes) else str(v).encode())
            return number(_SCALARS.get(kind, "I"), len(v) if isinstance(v, bytes | tuple) else v)

        def value(kind: int, v: Any) -> bytes:
            if kind != _ARRAY or not isinstance(v, tuple):
                return scalar(kind, v)
            items = length(len(v[1])), *(scalar(v[0], x) for x in v[1])
            return number("I", v[0]) + b"".join(items)

        out = [b"GGUF", number("I", self.version)]
        for told, n in ((self.n_rows, len(self.rows)), (self.n_keys, len(self.keys))):
            out.append(number("Q", n if told is None else told))
        for k in self.keys:
            out += text(k.name), number("I", k.kind), value(k.kind, k.value)
        for r in self.rows:
            out += text(r.name), number("I", len(r.dims)), *(number("Q", d) for d in r.dims)
            out += number("I", r.kind), number("Q", r.offset)
        header = b"".join(out)
        return header + bytes(-len(header) % 32) + self.data


def number(fmt: str, v: Any) -> bytes:
    """A number of a type, cut to its size: any number fits."""
    if fmt in "fd":
        with contextlib.suppress(OverflowError):
            return struct.pack("<" + fmt, v)
        return struct.pack("<" + fmt, math.inf)
    size = struct.calcsize("<" + fmt)
    return (int(v) % 256**size if math.isfinite(v) else 0).to_bytes(size, "little")


def parse(path: Path) -> Model:
    """A file that is known to be good."""

    def raw(v: Any) -> Any:
        if isinstance(v, list):
            return [raw(x) for x in v]
        return v.encode() if isinstance(v, str) else v

    file, keys = gguf.GGUFReader(path), []
    for name, f in file.fields.items():
        if not name.startswith("GGUF."):
            v = raw(f.contents())
            value = (int(f.types[1]), v) if f.types[0] == _ARRAY else v
            keys.append(Key(name.encode(), int(f.types[0]), value))
    rows = [
        Row(t.name.encode(), t.shape.tolist(), int(t.tensor_type), t.data_offset - file.data_offset)
        for t in file.tensors
    ]
    return Model(keys, rows, path.read_bytes()[file.data_offset :])


def mutate(base: Model, seed: int) -> bytes:
    """The file of a seed: one to three faults, of its structure mostly, sometimes blind ones."""
    rng = random.Random(seed)
    m = copy.deepcopy(base)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        rng.choices([_field, _list, _count, _optional], [6, 1, 1, 2])[0](m, rng)
    data = m.pack()
    return _blind(data, rng) if rng.random() < 0.15 else data


def _other(value: Any, rng: random.Random) -> Any:
    """Another value of the same kind: any, or one that is wrong by little, so that the file stays
    plausible."""
    if isinstance(value, float):
        return rng.choice([math.nan, math.inf, -1.0, 0.0, 1e-30, 1e30])
    if isinstance(value, bytes):
        near = [value[:-1], value + b"\0", value.replace(b".0.", b".9.")]
        return rng.choice([*near, *(rng.choice(_TEXTS) for _ in near)])
    if isinstance(value, tuple):  # an array: what its items are called, or what they are
        kind, values = value
        return (rng.randrange(14), values) if rng.random() < 0.2 else (kind, _other(values, rng))
    if isinstance(value, list):
        spoilt = list(value)
        for _ in range(rng.choice([1, 1, 5, 50]) if value else 0):
            i = rng.randrange(len(value))
            spoilt[i] = rng.choice([rng.choice(value), _other(value[i], rng)])
        short, long = rng.randrange(len(value) + 1), rng.randrange(1, 400)
        ways = value[:short], value + value[:long], rng.sample(value, len(value)), spoilt, spoilt
        return rng.choice(ways)
    near = [value - 1, value + 1, value * 2, value // 2, value + 32]
    return rng.choice([*near, *(rng.choice(_NUMBERS) for _ in near)])


def _field(m: Model, rng: random.Random) -> None:
    """A field of a key or a tensor gets another value, or that of another one."""
    things: list[Any] = rng.choices([m.keys, m.rows], [2, 1])[0]
    if things:
        thing, name = rng.choice(things), rng.choice(fields(things[0])).name
        of_another = getattr(rng.choice(things), name)
        values = [of_another, *(_other(getattr(thing, name), rng) for _ in range(3))]
        setattr(thing, name, rng.choice(values))


def _list(m: Model, rng: random.Random) -> None:
    """One of the keys or tensors is missing, or there twice, or they are in another order."""
    things: list[Any] = rng.choice([m.keys, m.rows])
    i = rng.randrange(len(things) or 1)
    one = copy.deepcopy(things[i : i + 1])
    ways = things[:i] + things[i + 1 :], things + one, rng.sample(things, len(things))
    things[:] = rng.choice(ways)


def _count(m: Model, rng: random.Random) -> None:
    """The version, or how much there is of something."""
    truth = {"n_keys": len(m.keys), "n_rows": len(m.rows), "version": 3}
    name = rng.choice([*truth, "lies"])
    if name == "lies":
        m.lies[rng.randrange(2 * len(m.keys) + len(m.rows) + 400)] = rng.choice(_NUMBERS)
    else:
        setattr(m, name, _other(truth[name], rng))


def _optional(m: Model, rng: random.Random) -> None:
    kind, name = rng.choice([(kind, name) for kind, names in _OPTIONAL.items() for name in names])
    arch = next((k.value for k in m.keys if k.name == b"general.architecture"), b"llama")
    n = rng.choice(_NUMBERS)
    values = {6: _other(0.0, rng), 8: rng.choice(_TEXTS), 9: (4, [n] * rng.randrange(600))}
    name = name.encode().replace(b"llama", arch if isinstance(arch, bytes) else b"llama")
    m.keys.append(Key(name, kind, values.get(kind, n)))


def _blind(data: bytes, rng: random.Random) -> bytes:
    """Cut, or with other bytes somewhere, mostly near the beginning."""
    if rng.random() < 0.2:
        return data[: rng.randrange(len(data))]
    raw, reach, way = bytearray(data), rng.choice([64, 600, 8000, len(data)]), rng.randrange(3)
    for _ in range(rng.choice([1, 2, 8, 64])):
        i = rng.randrange(min(reach, len(raw)))
        if way == 0:
            raw[i] ^= 1 << rng.randrange(8)
        elif way == 1:
            raw[i : i + 8] = number("Q", rng.choice(_NUMBERS))
        else:
            del raw[i : i + rng.randrange(1, 9)]
    return bytes(raw)


# ---- the process that runs them ----


def run(path: Path) -> None:
    with engine.load(path, n_ctx=64, n_threads=1, attention="sparq,rank=4,topk=8,min_ctx=0") as s:
        tokens = engine.tokenize(s, "Hé, 12 <s>\n\0", parse_special=True)[:32] or [0]
        engine.prefill(s, tokens)
        for _ in range(2):
            token = int(engine.logits(s).argmax())
            engine.token_bytes(s, token, special=True)
            engine.is_eog(s, token)
            engine.decode(s, token)
        engine.detokenize(s, range(min(s.n_vocab, 300)), special=True)


def outcome(path: Path) -> str:
    step = "read"
    try:
        geometry(read_gguf(path))
        step = "run"
        run(path)
    except SparqError as e:
        return f"{step} refused: {e.message}"
    except BaseException as e:
        return f"{step} WRONG {type(e).__name__}: {e}"
    return "run ok"


def main() -> None:
    engine.library()  # its memory is not the file's
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
    for line in sys.stdin:
        signal.alarm(300)  # a hang ends as a crash
        started = time.process_time()
        text = outcome(Path(line.rstrip("\n")))
        print(f"{time.process_time() - started:.3f} {text}".replace("\n", "\\n"), flush=True)


if __name__ == "__main__":
    main()
