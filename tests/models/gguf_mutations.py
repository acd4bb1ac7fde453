"""Damaged GGUF files: a model as a structure that can hold anything, and seeded ways to spoil it.

base = parse(path)                  # a good file
data = mutate(base, seed)           # bytes of a bad one, always the same for the seed
"""

from __future__ import annotations

import copy
import random
import struct
from dataclasses import dataclass, field
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
_NUMBERS = [0, 1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 127, 128, 255, 256, 511, 512, 513, 1024, 4096]
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


def mutate(base: Model, seed: int) -> bytes:
    """The file of a seed: one to three faults, of its structure mostly, sometimes blind ones."""
    rng = random.Random(seed)
    m = copy.deepcopy(base)
    ways = [_key_value, _key_value, _key_type, _key_name, _key_list, _array, _array, _array_item]
    ways += [_array_item, _row_name, _row_dims, _row_dims, _row_kind, _row_offset, _row_list]
    ways += [_counts, _lengths, _special, _special, _neighbour]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        rng.choice(ways)(m, rng)
    data = m.pack()
    return _blind(data, rng) if rng.random() < 0.15 else data


def _number(rng: random.Random) -> int:
    return rng.choice(_NUMBERS) + rng.choice([0, 0, 0, -1, 1])


def _key(m: Model, rng: random.Random) -> Key:
    return rng.choice(m.keys)


def _key_value(m: Model, rng: random.Random) -> None:
    k = _key(m, rng)
    if k.kind == _STRING:
        k.value = rng.choice(_TEXTS)
    elif k.kind != _ARRAY:
        k.value = (
            rng.choice([float("nan"), float("inf"), -1.0, 0.0, 1e-30, 1e30])
            if (_SCALARS.get(k.kind) in ("f", "d"))
            else _number(rng)
        )


def _neighbour(m: Model, rng: random.Random) -> None:
    """A number that is wrong by little, or by a factor: the file stays plausible."""
    k = _key(m, rng)
    if isinstance(k.value, int):
        k.value = rng.choice([k.value - 1, k.value + 1, k.value * 2, k.value // 2])


def _key_type(m: Model, rng: random.Random) -> None:
    _key(m, rng).kind = rng.choice([*range(14), 255, 2**31])


def _key_name(m: Model, rng: random.Random) -> None:
    k = _key(m, rng)
    k.name = rng.choice([rng.choice(_TEXTS), _key(m, rng).name, k.name + b"\0", k.name[:-1]])


def _key_list(m: Model, rng: random.Random) -> None:
    i = rng.randrange(len(m.keys))
    if rng.random() < 0.5:
        del m.keys[i]
    else:
        m.keys.insert(rng.randrange(len(m.keys)), copy.deepcopy(m.keys[i]))


def _arrays(m: Model) -> list[Key]:
    return [k for k in m.keys if k.kind == _ARRAY and isinstance(k.value, tuple)]


def _array(m: Model, rng: random.Random) -> None:
    if not _arrays(m):
        return
    k = rng.choice(_arrays(m))
    kind, values = k.value
    way = rng.randrange(5)
    if way == 0:
        values = values[: rng.randrange(len(values) + 1)]
    elif way == 1:
        values = values + values[: rng.randrange(1, 400)]
    elif way == 2:
        kind = rng.choice([*range(14), 77])
    elif way == 3:
        rng.shuffle(values)
    else:
        values = []
    k.value = (kind, values)


def _array_item(m: Model, rng: random.Random) -> None:
    if not _arrays(m):
        return
    kind, values = rng.choice(_arrays(m)).value
    for _ in range(rng.choice([1, 1, 5, 50])):
        if not values:
            return
        i = rng.randrange(len(values))
        if rng.random() < 0.4:
            values[i] = rng.choice(values)
        elif kind == _STRING:
            values[i] = rng.choice(_TEXTS)
        else:
            values[i] = rng.choice([_number(rng), float("nan"), -5, 9])


def _row_name(m: Model, rng: random.Random) -> None:
    r = rng.choice(m.rows)
    other = rng.choice(m.rows).name
    r.name = rng.choice([rng.choice(_TEXTS), other, r.name[:-1], r.name.replace(b".0.", b".9.")])


def _row_dims(m: Model, rng: random.Random) -> None:
    r = rng.choice(m.rows)
    way = rng.randrange(5)
    if way == 0:
        r.dims[rng.randrange(len(r.dims))] = _number(rng)
    elif way == 1:
        r.n_dims = rng.choice([0, 1, 2, 3, 4, 5, 255, 2**32 - 1])
    elif way == 2:
        r.dims = r.dims[::-1]
    elif way == 3:
        r.dims = [_number(rng) for _ in range(rng.randrange(6))]
    else:
        r.dims = [*r.dims, 1]


def _row_kind(m: Model, rng: random.Random) -> None:
    rng.choice(m.rows).kind = rng.choice([*range(45), 255, 2**31, 2**32 - 1])


def _row_offset(m: Model, rng: random.Random) -> None:
    r = rng.choice(m.rows)
    other = rng.choice(m.rows).offset
    r.offset = rng.choice([_number(rng), other, r.offset + 1, r.offset + 32, r.offset - 32])


def _row_list(m: Model, rng: random.Random) -> None:
    i = rng.randrange(len(m.rows))
    way = rng.randrange(3)
    if way == 0:
        del m.rows[i]
    elif way == 1:
        m.rows.insert(rng.randrange(len(m.rows)), copy.deepcopy(m.rows[i]))
    else:
        rng.shuffle(m.rows)


def _counts(m: Model, rng: random.Random) -> None:
    way = rng.randrange(3)
    if way == 0:
        m.n_keys = rng.choice([_number(rng), len(m.keys) - 1, len(m.keys) + 1])
    elif way == 1:
        m.n_rows = rng.choice([_number(rng), len(m.rows) - 1, len(m.rows) + 1])
    else:
        m.version = rng.choice([0, 1, 2, 3, 4, 0x03000000, 2**32 - 1])


def _lengths(m: Model, rng: random.Random) -> None:
    n = 2 * len(m.keys) + len(m.rows) + 400
    m.lies[rng.randrange(n)] = _number(rng)


def _special(m: Model, rng: random.Random) -> None:
    """Keys that decide much: alignment, parts, scaling, experts, ids of special tokens."""
    arch = next((k.value for k in m.keys if k.name == b"general.architecture"), b"llama")
    arch = arch if isinstance(arch, bytes) else b"llama"
    number, text = _number(rng), rng.choice(_TEXTS)
    m.keys.append(
        rng.choice(
            [
                Key(
                    b"general.alignment", 4, rng.choice([0, 1, 3, 8, 16, 24, 32, 64, 2**31, number])
                ),
                Key(b"general.alignment", rng.choice([0, 5, 8, 10]), 32),
                Key(b"split.count", rng.choice([2, 4, 6, 8, 10]), rng.choice([0, 1, 2, 3, number])),
                Key(b"split.no", 2, number),
                Key(b"split.tensors.count", 5, number),
                Key(arch + b".rope.scaling.type", 8, text),
                Key(arch + b".rope.scaling.factor", 6, rng.choice([0.0, -1.0, float("nan"), 1e30])),
                Key(arch + b".rope.freq_base", 6, rng.choice([0.0, -1.0, float("nan"), 1e30])),
                Key(arch + b".expert_count", 4, number),
                Key(arch + b".expert_used_count", 4, number),
                Key(arch + b".attention.key_length", 4, number),
                Key(arch + b".attention.value_length", 4, number),
                Key(arch + b".attention.sliding_window", 4, number),
                Key(arch + b".attention.head_count_kv", 9, (4, [number] * rng.randrange(600))),
                Key(arch + b".rope.dimension_count", 4, number),
                Key(arch + b".vocab_size", 4, number),
                Key(b"tokenizer.ggml.pre", 8, text),
                Key(b"tokenizer.chat_template", 8, text),
                Key(b"tokenizer.ggml.eot_token_id", 4, number),
                Key(b"tokenizer.ggml.add_eos_token", 7, 1),
                Key(b"tokenizer.ggml.precompiled_charsmap", 9, (0, [number] * rng.randrange(40))),
            ]
        )
    )


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
