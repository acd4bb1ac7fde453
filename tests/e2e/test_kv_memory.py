"""--kv-memory: documents larger than the memory they may take give the same bits."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama import python_environment
from test_documents import SPARSE, continued, opened, reading

from pyorch import engine
from pyorch.attention.bytes import cache_bytes, shadow_bytes
from pyorch.attention.spec import parse_spec
from pyorch.engine.settings import cache_type, settings_for
from pyorch.errors import SparqError
from pyorch.models.geometry import geometry
from pyorch.models.gguf_file import read_gguf

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are dropped on Linux")
N_TEXT = 3801
MAPPED = {"n_sequences": 40, "n_ctx": 4096}  # a cache that is large enough for pages of a file
LIMIT = 320 << 10
SPECS = ["dense", SPARSE, "topk,topk=64,min_ctx=0", f"{SPARSE},prompt=sparse"]


@pytest.fixture(scope="module")
def book(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("documents") / "book.kv"
    with engine.load(tiny, attention=SPARSE, n_ctx=MAPPED["n_ctx"]) as s:
        engine.read_document(s, path, reading(N_TEXT))
    return path


def documents(session: engine.Session) -> dict[str, Any]:
    found: dict[str, Any] = engine.info(session).raw["documents"]
    return found


def mapped(path: Path) -> list[tuple[int, int]]:
    """The addresses where pages of a file lie in this process: from, to."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [re.match(r"(\w+)-(\w+) ", line) for line in lines if line.endswith(str(path))]
    return [(int(m[1], 16), int(m[2], 16)) for m in found if m]


def resident(path: Path) -> int:
    """Bytes of the file that are in memory, where they are mapped."""
    libc, total = ctypes.CDLL(None), 0
    for a, b in mapped(path):
        seen = (ctypes.c_ubyte * ((b - a) // mmap.PAGESIZE))()
        assert libc.mincore(ctypes.c_void_p(a), ctypes.c_size_t(b - a), seen) == 0
        total += mmap.PAGESIZE * int((np.frombuffer(seen, np.uint8) & 1).sum())
    return total


@pytest.mark.parametrize("spec", SPECS)
def test_a_limit_changes_no_bit(tiny: Path, book: Path, spec: str) -> None:
    with engine.load(tiny, attention=spec, **MAPPED) as s:
        n_mapped = opened(s, book)
        wanted, logits = continued(s, s.tokens)
        assert documents(s) == dict.fromkeys(("limit", "held", "wanted", "read"), 0)
    assert n_mapped > 4 * LIMIT
    with book.open("rb") as file:  # no page of it is in memory
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with engine.load(tiny, attention=spec, kv_memory=LIMIT, **MAPPED) as s:
        opened(s, book)
        found, found_logits = continued(s, s.tokens)
        about, in_memory = documents(s), resident(book)
        n_tokens = engine.info(s).counter("steps")
        if spec != "dense":
            assert engine.info(s).sparse_share == 1
    assert found == wanted
    assert np.array_equal(found_logits, logits)
    assert about["limit"] == LIMIT
    assert about["read"] > n_mapped, "pages came in again"
    one = n_mapped / s.geometry.n_layer  # what a layer may read beyond the limit
    assert 0 < about["held"] <= LIMIT + one
    # the system reads some together, and groups that are not sealed are read unannounced
    assert in_memory <= about["held"] + 64 * mmap.PAGESIZE < n_mapped, "the others are dropped"
    if spec == "dense":  # comes back to a page when all others were read
        assert about["read"] > 0.75 * n_mapped * n_tokens


def test_a_part_stays_that_every_token_reads(tiny: Path, book: Path) -> None:
    """Exact attention reads all in turns: what was read the longest ago is what comes next."""
    with engine.load(tiny, attention="dense", kv_memory=1 << 30, **MAPPED) as s:
        n_mapped = opened(s, book)
    with engine.load(tiny, attention="dense", kv_memory=int(0.7 * n_mapped), **MAPPED) as s:
        opened(s, book)
        continued(s, s.tokens)
        engine.reset_counters(s)
        continued(s, s.tokens)
        kept = 1 - documents(s)["read"] / documents(s)["wanted"]
    assert 0.5 < kept < 0.75


def test_room_for_all_reads_each_page_once(tiny: Path, book: Path) -> None:
    with engine.load(tiny, attention=SPARSE, kv_memory=1 << 30, **MAPPED) as s:
        n_mapped = opened(s, book)
        continued(s, s.tokens)
        about = documents(s)
        assert about["read"] == about["held"] == n_mapped, "the prompt has read all"
        assert about["wanted"] > 2 * n_mapped
        engine.reset_counters(s)
        continued(s, s.tokens)
        assert documents(s)["read"] == 0 < documents(s)["wanted"]


def test_another_document_over_the_first(tiny: Path, book: Path, tmp_path: Path) -> None:
    """A shorter one, and the first once more: no page is counted twice."""
    with engine.load(tiny, attention=SPARSE, n_ctx=MAPPED["n_ctx"]) as s:
        engine.read_document(s, tmp_path / "short.kv", reading(2500, seed=2))
    with engine.load(tiny, attention=SPARSE, kv_memory=1 << 30, **MAPPED) as s:
        long = opened(s, book)
        wanted = continued(s, s.tokens)
        short = opened(s, tmp_path / "short.kv")
        continued(s, s.tokens)
        assert documents(s)["held"] <= long
        assert opened(s, book) == long > short
        again = continued(s, s.tokens)
        assert documents(s)["held"] <= long
    assert again[0] == wanted[0] and np.array_equal(again[1], wanted[1])


def test_what_was_written_over_a_document_stays(tiny: Path, book: Path) -> None:
    """Positions that were rewound, and read anew, lie in pages of the file, and are not lost."""
    found = []
    for limit in (None, LIMIT):
        with engine.load(tiny, attention=SPARSE, kv_memory=limit, **MAPPED) as s:
            opened(s, book)
            engine.rewind(s, 600)
            engine.prefill(s, reading(700, seed=3).tokens(s))
            found.append(continued(s, s.tokens)[1])
    assert np.array_equal(*found)


@pytest.mark.parametrize(("share", "wanted"), [(0.5, 0.5), (0.01, 1 / 16), (1.0, None)])
def test_what_stays_of_a_document_that_does_not_fit(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, share: float, wanted: float | None
) -> None:
    file, f16 = read_gguf(tiny), cache_type("f16")
    mapped = cache_bytes(geometry(file), 4000, f16, f16)
    rest = sum(t.n_bytes for t in file.tensors)
    rest += cache_bytes(geometry(file), 4096, f16, f16) - mapped
    rest += shadow_bytes(geometry(file), 4096, parse_spec(SPARSE))
    limit = rest + int(share * mapped)
    monkeypatch.setattr("pyorch.models.memory.available_memory", lambda: limit)
    found = settings_for(file, n_ctx=4096, attention=SPARSE, n_mapped=4000).fits
    assert found == (wanted if wanted is None else pytest.approx(wanted * mapped, abs=1))


@pytest.mark.parametrize("spec", [None, "off"])
def test_llama_cpp_s_attention_has_no_limit(tiny: Path, spec: str | None) -> None:
    with pytest.raises(SparqError, match="attention of ours"):
        engine.load(tiny, attention=spec, kv_memory=LIMIT)


# mmap() that refuses new memory over what is there, once refuse() was called
REFUSES = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/mman.h>
static int is_refused;
void refuse(void) { is_refused = 1; }
void * mmap(void * at, size_t n, int prot, int flags, int fd, off_t offset) {
    void * (*next)(void *, size_t, int, int, int, off_t) = dlsym(RTLD_NEXT, "mmap");
    if (is_refused && (flags & MAP_FIXED) && (flags & MAP_ANONYMOUS)) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return next(at, n, prot, flags, fd, offset);
}
"""
CLEARS = """
import ctypes, sys
from pathlib import Path
from test_kv_memory import MAPPED, SPARSE, engine, mapped, opened
book = Path(sys.argv[1])
with engine.load(Path(sys.argv[2]), attention=SPARSE, **MAPPED) as s:
    opened(s, book)
    spans = mapped(book)
    ctypes.CDLL(None).refuse()
    s.lib.llama_memory_clear(s.memory, True)
    assert mapped(book) == spans, "the pages of the file are still there"
    left = sum(ctypes.string_at(a, b - a).count(0) - (b - a) for a, b in spans)
    print(len(spans), left)
"""


def test_a_cleared_cache_holds_no_document(tiny: Path, book: Path, tmp_path: Path) -> None:
    """Also where the system has no new memory for it: its pages were given back, and came again."""
    (tmp_path / "refuses.c").write_text(REFUSES)
    library = tmp_path / "refuses.so"
    argv = ["cc", "-shared", "-fPIC", str(tmp_path / "refuses.c"), "-o", str(library), "-ldl"]
    subprocess.run(argv, check=True)
    argv = [sys.executable, "-c", CLEARS, str(book), str(tiny)]
    env = python_environment(LD_PRELOAD=str(library))
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    n_span, left = map(int, done.stdout.split())
    assert n_span > 0 and left == 0
