"""Damaged GGUF files: a model as a structure that can hold anything, and seeded ways to spoil it.

base = parse(path)                  # a good file
data = mutate(base, seed)           # bytes of a bad one, always the same for the seed
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import random
import struct
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

_SCALARS = dict(enumerate("BbHhIifB")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_NUMBERS = [*range(45), *(2**i + d for i in (*range(6, 17), 20, 24) for d in (-1, 0, 1))]
_NUMBERS += [2**i + d for i in (31, 32, 33, 40, 48, 61, 62, 63, 64) for d in (-32, -1, 0, 1)]
_WORDS = (
    rb"a llama ../../../etc/passwd /etc/passwd C:\x %s%n%s gpt2 none no_vocab <0x41> <0x <0xZZ>"
)
_TEXTS = [*_WORDS.split(), *b"<|im_end|> <s> yarn bert t5 rwkv plamo2 qwen2 default".split()]
_TEXTS += [b"", b" ", b"\0", b"\n", b"\x1b[31m", b"\xff\xfe", b"\xe2\x96\x81", b"\xc0\x80"]
_TEXTS += [b"a" * n for n in (63, 64, 65, 70000)]


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
    n_dims: int | None = None  # what is written instead of the true one


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
            out += text(r.name), number("I", len(r.dims) if r.n_dims is None else r.n_dims)
            out += (number("Q", d) for d in r.dims)
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
    raw, at = path.read_bytes(), 24

    def take(fmt: str) -> Any:
        nonlocal at
        (v,) = struct.unpack_from("<" + fmt, raw, at)
        at += struct.calcsize("<" + fmt)
        return v

    def text() -> bytes:
        nonlocal at
        n = take("Q")
        at += n
        return raw[at - n : at]

    n_rows, n_keys = struct.unpack_from("<QQ", raw, 8)
    keys, rows = [], []
    for _ in range(n_keys):
        name, kind = text(), take("I")
        if kind == _ARRAY:
            inner, n = take("I"), take("Q")
            read = [text() if inner == _STRING else take(_SCALARS[inner]) for _ in range(n)]
            value: Any = (inner, read)
        else:
            value = text() if kind == _STRING else take(_SCALARS[kind])
        keys.append(Key(name, kind, value))
    for _ in range(n_rows):
        name, n = text(), take("I")
        rows.append(Row(name, [take("Q") for _ in range(n)], take("I"), take("Q")))
    return Model(keys, rows, raw[at + -at % 32 :])


def with_bpe(base: Model) -> Model:
    """The same model with a byte-level BPE vocabulary, as GPT-2 writes bytes."""
    m = copy.deepcopy(base)
    n = next(len(k.value[1]) for k in m.keys if k.name == b"tokenizer.ggml.tokens")
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    tokens = [chr(b) for b in plain] + [chr(256 + i) for i in range(len(rest))]
    tokens += ["he", "<s>", "</s>", *(f"x{i}" for i in range(n))]
    vocabulary = {
        b"model": (_STRING, b"gpt2"),
        b"pre": (_STRING, b"gpt-2"),
        b"tokens": (_ARRAY, (_STRING, [t.encode() for t in tokens[:n]])),
        b"token_type": (_ARRAY, (5, [3 if t in ("<s>", "</s>") else 1 for t in tokens[:n]])),
        b"merges": (_ARRAY, (_STRING, [b"h e"])),
        b"bos_token_id": (4, tokens.index("<s>")),
        b"eos_token_id": (4, tokens.index("</s>")),
    }
    m.keys = [k for k in m.keys if not k.name.startswith(b"tokenizer.")]
    m.keys += [Key(b"tokenizer.ggml." + k, kind, v) for k, (kind, v) in vocabulary.items()]
    return m


# keys that decide much and that a file need not have, by their types
_SPECIAL = {
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


def mutate(base: Model, seed: int) -> bytes:
    """The file of a seed: one to three faults, of its structure mostly, sometimes blind ones."""
    rng = random.Random(seed)
    m = copy.deepcopy(base)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        rng.choice([_key, _key, _key, _key, _row, _row, _list, _counts, _special, _special])(m, rng)
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
    near = [value - 1, value + 1, value * 2, value // 2, value + 32] if value is not None else [5]
    return rng.choice([*near, *(rng.choice(_NUMBERS) for _ in near)])


def _spoil(things: list[Any], rng: random.Random) -> None:
    """A field of one of them gets another value, or that of another one."""
    if things:
        thing, name = rng.choice(things), rng.choice(fields(things[0])).name
        of_another = getattr(rng.choice(things), name)
        values = [of_another, *(_other(getattr(thing, name), rng) for _ in range(3))]
        setattr(thing, name, rng.choice(values))


def _key(m: Model, rng: random.Random) -> None:
    _spoil(m.keys, rng)


def _row(m: Model, rng: random.Random) -> None:
    _spoil(m.rows, rng)


def _list(m: Model, rng: random.Random) -> None:
    """One of the keys or rows is missing, or there twice, or they are in another order."""
    things: list[Any] = rng.choice([m.keys, m.rows])
    i = rng.randrange(len(things) or 1)
    things[:] = rng.choice(
        [
            things[:i] + things[i + 1 :],
            things + copy.deepcopy(things[i : i + 1]),
            rng.sample(things, len(things)),
        ]
    )


def _counts(m: Model, rng: random.Random) -> None:
    """What the file says of its version and of how much there is."""
    name = rng.choice(["n_keys", "n_rows", "version", "lies"])
    if name == "lies":
        m.lies[rng.randrange(2 * len(m.keys) + len(m.rows) + 400)] = rng.choice(_NUMBERS)
    else:
        n = {"n_keys": len(m.keys), "n_rows": len(m.rows), "version": 3}[name]
        setattr(m, name, _other(n, rng))


def _special(m: Model, rng: random.Random) -> None:
    kind, name = rng.choice([(kind, name) for kind, names in _SPECIAL.items() for name in names])
    arch = next((k.value for k in m.keys if k.name == b"general.architecture"), b"llama")
    n = rng.choice(_NUMBERS)
    values = {6: _other(0.0, rng), 8: rng.choice(_TEXTS), 9: (4, [n] * rng.randrange(600))}
    name = name.encode().replace(b"llama", arch if isinstance(arch, bytes) else b"llama")
    m.keys.append(Key(name, kind, values.get(kind, n)))


def _blind(data: bytes, rng: random.Random) -> bytes:
    """Cut, or with other bytes somewhere, mostly near the beginning."""
    if rng.random() < 0.2:
        return data[: rng.randrange(len(data))]
    raw, reach = bytearray(data), rng.choice([64, 600, 8000, len(data)])
    way = rng.randrange(3)
    for _ in range(rng.choice([1, 2, 8, 64])):
        i = rng.randrange(min(reach, len(raw)))
        if way == 0:
            raw[i] ^= 1 << rng.randrange(8)
        elif way == 1:
            raw[i : i + 8] = number("Q", rng.choice(_NUMBERS))
        else:
            del raw[i : i + rng.randrange(1, 9)]
    return bytes(raw)
