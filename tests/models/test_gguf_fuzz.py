"""Damaged GGUF files end in a `SparqError` or a model that runs: no crash, no hang, no 1 GiB.

The reader sees them all; llama.cpp sees what the reader lets through, in a child process. A crash
there is a fault of the reader. The minimal cases of what was found are at the end.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf_faults as faults
import pytest
import tiny
from gguf_faults import Key, Model

from pyorch.errors import SparqError
from pyorch.models.geometry import geometry
from pyorch.models.gguf_file import read_gguf

pytestmark = pytest.mark.usefixtures("native_lib_dir")

LIMIT_S = 2.0  # of CPU, for a file of 100 KB
OUTCOMES = ("read refused", "run refused", "run ok")
SIZES: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_head_kv": 1, "n_ff": 32, "n_ctx": 64}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("base")
    return faults.parse(tiny.write(folder / "a.gguf", "llama", **SIZES))


class Child:
    """The process of gguf_faults.py; it is started again when it has died."""

    def __init__(self, errors: Path) -> None:
        self.errors = errors
        self.process: Any = None

    def __call__(self, path: Path) -> tuple[float, str]:
        if self.process is None:
            env = {**os.environ, "GGML_NO_BACKTRACE": "1", "SPARQ_MEMORY_LIMIT": str(1 << 30)}
            pipe = subprocess.PIPE
            with self.errors.open("wb") as errors:
                self.process = subprocess.Popen(
                    [sys.executable, faults.__file__],
                    stdin=pipe, stdout=pipe, stderr=errors, text=True, env=env,
                )  # fmt: skip
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        if line := self.process.stdout.readline():
            seconds, _, answer = line.rstrip("\n").partition(" ")
            return float(seconds), answer
        return 0.0, f"CRASH {self.close()}: {self.errors.read_text(errors='replace')[-400:]}"

    def close(self) -> int:
        process, self.process = self.process, None
        if process is None:
            return 0
        process.communicate(timeout=60)
        return int(process.returncode)


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    one = Child(tmp_path / "errors")
    yield one
    one.close()


def fuzz(base: Model, seeds: range, path: Path, child: Child) -> None:
    path.write_bytes(base.pack())
    assert child(path)[1] == "run ok"
    bad, seen = [], Counter[str]()
    for seed in seeds:
        path.write_bytes(faults.mutate(base, seed))
        seconds, answer = child(path)
        outcome = answer.partition(":")[0]
        seen[outcome] += 1
        if outcome not in OUTCOMES or seconds > LIMIT_S:
            bad.append((seed, seconds, answer[:300]))
    assert not bad
    for outcome in OUTCOMES:  # else the files are all good, or all hopeless
        assert seen[outcome] > len(seeds) / 50, seen


FIRST = int(os.environ.get("SPARQ_FUZZ_SEED", "100000"))


@pytest.mark.parametrize("pre", ["", "gpt-2"], ids=["sentencepiece", "bpe"])
@pytest.mark.parametrize(
    "seeds",
    [range(120), pytest.param(range(FIRST, FIRST + 10000), marks=pytest.mark.slow)],
    ids=["quick", "all"],
)
def test_damaged_files(pre: str, seeds: range, tmp_path: Path, child: Child) -> None:
    path = tiny.save(tiny.make("llama", **SIZES), tmp_path / "m.gguf", pre=pre)
    fuzz(faults.parse(path), seeds, path, child)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gemma2", "gpt-oss", "gptneox", "mpt", "qwen3", "deepseek2"])
def test_damaged_files_of_other_architectures(arch: str, tmp_path: Path, child: Child) -> None:
    model = faults.parse(tiny.write(tmp_path / "a.gguf", arch, **SIZES))
    fuzz(model, range(50000, 50500), tmp_path / "m.gguf", child)


# ---- single lies ----


Change = Callable[[Model], object]


def _key(name: str, kind: int, value: object) -> Change:
    def change(m: Model) -> None:
        m.keys = [k for k in m.keys if k.name != name.encode()]
        m.keys.append(Key(name.encode(), kind, value))

    return change


def _row(i: int, **changes: object) -> Change:
    return lambda m: vars(m.rows[i]).update(changes)


def _token(i: int, text: bytes) -> Change:
    def change(m: Model) -> None:
        next(k for k in m.keys if k.name == b"tokenizer.ggml.tokens").value[1][i] = text

    return change


def _lie(**changes: object) -> Change:
    return lambda m: vars(m).update(changes)


NAN = float("nan")
LIES: dict[str, tuple[Change, str]] = {
    "many keys": (_lie(n_keys=2**40), "keys in"),
    "negative keys": (_lie(n_keys=2**64 - 1), "keys in"),
    "many tensors": (_lie(n_rows=2**61), "tensors and"),
    "endless string": (_lie(lies={0: 2**63}), "pass the end of the file"),
    "endless string, overflow": (_lie(lies={1: 2**64 - 1}), "pass the end of the file"),
    "key twice": (lambda m: m.keys.append(m.keys[0]), "is there twice"),
    "key of control characters": (_key("a\x1b[2J", 4, 0), "unusable name"),
    "key without a name": (_key("", 4, 0), "unusable name"),
    "unknown type of a value": (_key("a", 13, 0), "unknown value type 13"),
    "array of arrays": (_key("a", 9, (9, [])), "array of unsupported type 9"),
    "alignment 0": (_key("general.alignment", 4, 0), "not a power of 2"),
    "alignment 24": (_key("general.alignment", 4, 24), "not a power of 2"),
    "alignment as u64": (_key("general.alignment", 10, 32), "not a power of 2"),
    "tensor twice": (lambda m: _row(1, name=m.rows[0].name)(m), "is there twice"),
    "tensor with a path": (_row(0, name=b"a\n/../x"), "unusable name"),
    "tensor with a long name": (_row(0, name=b"a" * 64), "unusable name"),
    "5 dimensions": (_row(0, dims=[1] * 5), "has 5 dimensions"),
    "empty tensor": (_row(0, dims=[0, 4]), "cannot have the shape"),
    "negative size": (_row(0, dims=[2**64 - 1, 1]), "cannot have the shape"),
    "overflowing size": (_row(0, dims=[2**32, 2**32]), "cannot have the shape"),
    "half a block": (_row(0, dims=[33, 260], kind=8), "cannot have the shape"),
    "unknown type of a tensor": (_row(0, kind=4), "unknown type 4"),
    "overlapping tensors": (_row(1, offset=0), "where .* is its place"),
    "offset beyond the file": (_row(1, offset=2**40), "where .* is its place"),
    "larger than the file": (_row(-1, dims=[64, 2**20]), "truncated"),
    "split.count is a list": (_key("split.count", 9, (4, [2])), "split.count is"),
    "split.count is text": (_key("split.count", 8, b"2"), "split.count is"),
    "no architecture": (_key("general.architecture", 8, b"\x1b[2J"), "no general.architecture"),
    "2**31 layers": (_key("llama.block_count", 4, 2**31 - 1), "block_count is not a usable"),
    # what follows ended the process in llama.cpp, or would have
    "no layers": (_key("llama.block_count", 4, 0), "block_count cannot be 0"),
    "experts in use": (_key("llama.expert_used_count", 4, 2), "expert_used_count cannot be 2"),
    "experts unused": (_key("llama.expert_count", 4, 2), "expert_used_count cannot be None"),
    "expert groups": (_key("llama.expert_group_count", 4, 1), "expert_group_count cannot be 1"),
    "scaling": (_key("llama.rope.scaling.type", 8, b"x"), "rope.scaling.type cannot be 'x'"),
    "epsilon": (_key("llama.attention.layer_norm_rms_epsilon", 6, -1.0), "cannot be -1.0"),
    "epsilon NaN": (_key("llama.attention.layer_norm_rms_epsilon", 6, NAN), "cannot be nan"),
    "token twice": (_token(9, b"<0x05>"), "260 tokens, but 259 different"),
    "byte missing": (_token(9, b"x!"), "stands for the byte <0x06>"),
    "encoder": (_key("general.architecture", 8, b"neo-bert"), "neo-bert writes no text"),
    "bert": (_key("tokenizer.ggml.model", 8, b"bert"), "vocabulary of BERT"),
    "alignment 16": (_key("general.alignment", 4, 16), "aligned to less than 32|its place"),
    "odd RoPE": (_key("llama.rope.dimension_count", 4, 31), "rope.dimension_count is 31"),
    "RoPE beyond the head": (_key("llama.rope.dimension_count", 4, 64), "dimension_count is 64"),
    "longer keys": (_key("llama.attention.key_length", 4, 33), "shape of blk.0.attn_k.weight"),
    "longer values": (_key("llama.attention.value_length", 4, 64), "of blk.0.attn_output.weight"),
    "norm of integers": (_row(2, kind=26), "cannot be i32"),
    "matrix of integers": (_row(1, kind=26), "cannot be i32"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_refused(base: Model, tmp_path: Path, name: str) -> None:
    change, message = LIES[name]
    m = copy.deepcopy(base)
    change(m)
    path = tmp_path / "m.gguf"
    path.write_bytes(m.pack())
    with pytest.raises(SparqError, match=message) as e:
        geometry(read_gguf(path))
    assert str(e.value).isprintable()


@pytest.mark.parametrize(
    ("key", "lies", "message"),
    [
        (Key(b"a", 9, (8, [])), {1: 2**36}, "68719476736 strings"),
        (Key(b"a", 8, b""), {1: 2**35}, "64 MiB of metadata"),
    ],
)
def test_a_file_of_1_tb_that_holds_nothing(
    tmp_path: Path, key: Key, lies: dict[int, int], message: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(Model([key], [], b"", lies=lies).pack())
    os.truncate(path, 1 << 40)
    with pytest.raises(SparqError, match=message):
        read_gguf(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(SparqError, match="not a plain file"):
        read_gguf(tmp_path / "m.gguf")


def test_split_files_that_lie(split: Path) -> None:
    paths = sorted(split.parent.glob("split-*.gguf"))
    parts = [faults.parse(path) for path in paths]
    for i, kind, name, value in (
        (1, 2, "split.no", 0),
        (1, 2, "split.count", 7),
        (0, 5, "split.tensors.count", 99),
    ):
        bad = copy.deepcopy(parts[i])
        _key(name, kind, value)(bad)
        paths[i].write_bytes(bad.pack())
        with pytest.raises(SparqError, match=paths[i].name):
            read_gguf(split)
        paths[i].write_bytes(parts[i].pack())
    assert len(read_gguf(split).tensors) == sum(len(part.rows) for part in parts)
    with pytest.raises(SparqError, match=paths[1].name):  # not the first
        read_gguf(paths[1])
    paths[1].write_bytes(parts[0].pack())
    with pytest.raises(SparqError, match=split.name):
        read_gguf(split)
