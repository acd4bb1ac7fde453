"""Damaged GGUF files: a model as a structure that can hold anything, and seeded ways to spoil it.

base = parse(path)                  # a good file
data = mutate(base, seed)           # bytes of a bad one, always the same for the seed
"""

from __future__ import annotations

import copy
import random
import struct
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_NUMBERS = [*range(45), 63, 64, 127, 128, 255, 256, 511, 512, 513, 1024, 4096]
_NUMBERS += [65535, 65536, 2**20, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**33, 2**40, 2**48]
_NUMBERS += [2**61, 2**62, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 32, 2**64 - 1]
_TEXTS = [b"", b" ", b"a", b"\0", b"\x1b[31m", b"../../../etc/passwd", b"/etc/passwd", b"\xff\xfe"]
_TEXTS += [b"C:\\x", b"%s%n%s", b"\n", b"a" * 63, b"a" * 64, b"a" * 65, b"a" * 70000, b"llama"]
_TEXTS += [
    b"gpt2",
    b"none",
    b"no_vocab",
    b"<0x41>",
    b"<0x",
    b"<0xZZ>",
    b"\xe2\x96\x81",
    b"\xc0\x80",
]
_TEXTS += [b"<|im_end|>", b"<s>", b"yarn", b"bert", b"t5", b"rwkv", b"plamo2", b"qwen2", b"default"]


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
        out, lengths = bytearray(), 0

        def length(n: int) -> bytes:
            nonlocal lengths
            lengths += 1
            return struct.pack("<Q", self.lies.get(lengths - 1, n) % 2**64)

        def text(s: bytes) -> bytes:
            return length(len(s)) + s

        def scalar(kind: int, v: Any) -> bytes:
            if kind == _STRING:
                return text(v if isinstance(v, bytes) else str(v).encode())
            fmt = _SCALARS.get(kind, "I")
            if isinstance(v, bytes | tuple):
                v = len(v)
            if fmt in "fd":
                try:
                    return struct.pack("<" + fmt, v)
                except OverflowError:
                    return struct.pack("<" + fmt, float("inf"))
            size = struct.calcsize("<" + fmt)
            v = int(v) if v == v and abs(v) != float("inf") else 0
            return (v % 256**size).to_bytes(size, "little")

        out += b"GGUF" + struct.pack("<I", self.version)
        for told, n in ((self.n_rows, len(self.rows)), (self.n_keys, len(self.keys))):
            out += struct.pack("<Q", (n if told is None else told) % 2**64)
        for k in self.keys:
            out += text(k.name) + struct.pack("<I", k.kind % 2**32)
            if k.kind == _ARRAY and isinstance(k.value, tuple):
                kind, values = k.value
                out += struct.pack("<I", kind % 2**32) + length(len(values))
                for v in values:
                    out += scalar(kind, v)
            else:
                out += scalar(k.kind, k.value)
        for r in self.rows:
            n_dims = len(r.dims) if r.n_dims is None else r.n_dims
            out += text(r.name) + struct.pack("<I", n_dims % 2**32)
            for d in r.dims:
                out += struct.pack("<Q", d % 2**64)
            out += struct.pack("<IQ", r.kind % 2**32, r.offset % 2**64)
        out += bytes(-len(out) % 32)
        return bytes(out) + self.data


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


# keys that decide much and that a file need not have, with their types
_SPECIAL = {"general.alignment": 4, "split.count": 2, "split.no": 2, "split.tensors.count": 5}
_SPECIAL |= {"llama.rope.scaling.type": 8, "llama.rope.scaling.factor": 6}
_SPECIAL |= {"llama.rope.freq_base": 6, "llama.rope.dimension_count": 4, "llama.vocab_size": 4}
_SPECIAL |= {"llama.expert_count": 4, "llama.expert_used_count": 4}
_SPECIAL |= {f"llama.attention.{x}": 4 for x in ("key_length", "value_length", "sliding_window")}
_SPECIAL |= {"llama.attention.head_count_kv": 9, "tokenizer.ggml.precompiled_charsmap": 9}
_SPECIAL |= {"tokenizer.ggml.pre": 8, "tokenizer.chat_template": 8}
_SPECIAL |= {"tokenizer.ggml.eot_token_id": 4, "tokenizer.ggml.add_eos_token": 7}


def mutate(base: Model, seed: int) -> bytes:
    """The file of a seed: one to three faults, of its structure mostly, sometimes blind ones."""
    rng = random.Random(seed)
    m = copy.deepcopy(base)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        rng.choice([_key, _key, _key, _key, _row, _row, _list, _counts, _special, _special])(m, rng)
    data = m.pack()
    return _blind(data, rng) if rng.random() < 0.15 else data


def _number(rng: random.Random) -> int:
    return rng.choice(_NUMBERS) + rng.choice([0, 0, 0, -1, 1])


def _other(value: Any, rng: random.Random) -> Any:
    """Another value of the same kind: any, or one that is wrong by little, so that the file stays
    plausible."""
    if isinstance(value, float):
        return rng.choice([float("nan"), float("inf"), -1.0, 0.0, 1e-30, 1e30])
    if isinstance(value, bytes):
        near = [value[:-1], value + b"\0", value.replace(b".0.", b".9.")]
        return rng.choice([*near, *(rng.choice(_TEXTS) for _ in near)])
    if isinstance(value, tuple):  # an array: what its items are called, or what they are
        kind, values = value
        return (rng.randrange(14), values) if rng.random() < 0.2 else (kind, _other(values, rng))
    if isinstance(value, list):
        way = rng.randrange(5)
        if way == 0:
            return value[: rng.randrange(len(value) + 1)]
        if way == 1:
            return value + value[: rng.randrange(1, 400)]
        if way == 2:
            return rng.sample(value, len(value))
        spoilt = list(value)
        for _ in range(rng.choice([1, 1, 5, 50]) if value else 0):
            i = rng.randrange(len(value))
            spoilt[i] = rng.choice([rng.choice(value), _other(value[i], rng)])
        return spoilt
    near = [value - 1, value + 1, value * 2, value // 2, value + 32] if value is not None else [5]
    return rng.choice([*near, *(_number(rng) for _ in near)])


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
    way, i = rng.randrange(3), rng.randrange(len(things) or 1)
    if way == 0:
        del things[i : i + 1]
    elif way == 1:
        things += copy.deepcopy(things[i : i + 1])
    else:
        rng.shuffle(things)


def _counts(m: Model, rng: random.Random) -> None:
    """What the file says of its version and of how much there is."""
    way = rng.randrange(4)
    if way == 0:
        m.n_keys = _other(len(m.keys), rng)
    elif way == 1:
        m.n_rows = _other(len(m.rows), rng)
    elif way == 2:
        m.version = rng.choice([0, 1, 2, 4, 0x03000000, 2**32 - 1])
    else:
        m.lies[rng.randrange(2 * len(m.keys) + len(m.rows) + 400)] = _number(rng)


def _special(m: Model, rng: random.Random) -> None:
    name, kind = rng.choice([*_SPECIAL.items()])
    arch = next((k.value for k in m.keys if k.name == b"general.architecture"), b"llama")
    numbers = [_number(rng)] * rng.randrange(600)
    value = {8: rng.choice(_TEXTS), 6: _other(0.0, rng), 9: (4, numbers)}.get(kind, _number(rng))
    arch = arch if isinstance(arch, bytes) else b"llama"
    m.keys.append(Key(name.encode().replace(b"llama", arch), kind, value))


def _blind(data: bytes, rng: random.Random) -> bytes:
    raw = bytearray(data)
    way = rng.randrange(5)
    if way == 0:
        return bytes(raw[: rng.randrange(len(raw))])
    if way == 1:
        return bytes(raw) + rng.randbytes(rng.randrange(100))
    reach = rng.choice([64, 600, 8000, len(raw)])
    for _ in range(rng.choice([1, 2, 8, 64])):
        i = rng.randrange(min(reach, len(raw)))
        if way == 2:
            raw[i] ^= 1 << rng.randrange(8)
        elif way == 3:
            raw[i : i + 8] = struct.pack("<Q", _number(rng) % 2**64)
        else:
            del raw[i : i + rng.randrange(1, 9)]
    return bytes(raw)
