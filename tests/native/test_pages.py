"""The pages of documents, without a model: ggml_ops/llama/sparse-pages.cpp compiled alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pyorch import paths
from pyorch.native import probe, source

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are dropped on Linux")

MAIN = r"""
#include "sparse-pages.h"
#include "llama-impl.h"
#include <sys/mman.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <new>

void llama_log_internal(ggml_log_level, const char *, ...) {}

static size_t n_new; // bytes
void * operator new(size_t n)   { n_new += n; return malloc(n); }
void * operator new[](size_t n) { n_new += n; return malloc(n); }

int main(int, char ** argv) {
    const size_t page = sysconf(_SC_PAGESIZE), n = 64;
    FILE * file = fopen(argv[1], "w+");
    const std::vector<char> content(2*n*page, 'x');
    fwrite(content.data(), 1, content.size(), file);
    fflush(file);
    const int fd = fileno(file);
    const int n_map = 200;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    char * at = (char *) mmap(nullptr, n_map*n*page, PROT_READ | PROT_WRITE, flags, -1, 0);

    llama_sparse_pages pages;
    pages.set_limit(1 << 30);
    n_new = 0;
    for (int i = 0; i < n_map; ++i) {
        if (!pages.map(at + i*n*page, n*page, fd, 0)) {
            return 1;
        }
    }
    printf("%zu\n", n_new/(n_map*n)); // bytes for each page
    pages.want(at, 4*n*page);
    printf("%ld\n", (long) (pages.read_counts().held/page));
    // in the middle of one, over the end of one and the begin of another, over several
    const int over[][2] = { { 10, 20 }, { 60, 70 }, { 60, 200 }, { 0, 256 } };
    for (const auto & [from, to] : over) {
        const size_t n_page = to - from > 2*n ? 2*n : to - from; // of the file
        pages.map(at + from*page, n_page*page, fd, 0);
        printf("%ld\n", (long) (pages.read_counts().held/page));
    }
    pages.want(at, 4*n*page);
    printf("%ld %ld\n", (long) (pages.read_counts().held/page), (long) pages.read_counts().wanted);
    pages.unmap();
    printf("%ld %d\n", (long) pages.read_counts().held, at[0] + at[n*page] + pages.is_limited());
}
"""


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory, native_lib_dir: Path) -> list[str]:
    pin = source.read_pin()
    where = source.locate(pin)
    if not where.path.exists():
        pytest.skip("the source of the build is no longer in the cache")
    folder = tmp_path_factory.mktemp("pages")
    for name in ("src", "include", "ggml/include"):
        source.unpack(where, f"{pin.folder}/{name}", folder / name)
    (folder / "main.cpp").write_text(MAIN)
    ops = paths.data("ggml_ops")
    argv = [probe.need_compiler().cxx, "-std=c++17", "-w", f"-I{ops}", f"-I{ops}/llama"]
    argv += [f"-I{folder}/{name}" for name in ("src", "include", "ggml/include")]
    argv += [folder / "main.cpp", f"{ops}/llama/sparse-pages.cpp", "-o", folder / "main"]
    argv += [f"-L{native_lib_dir}", "-lggml-base", f"-Wl,-rpath,{native_lib_dir}"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    out = subprocess.run([folder / "main", folder / "file"], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    return out.stdout.split("\n")


def test_a_document_more_costs_its_own_pages(lines: list[str]) -> None:
    """Not a copy of the records of all pages that were there before."""
    assert 12 <= int(lines[0]) < 24


def test_what_is_held_follows_the_documents(lines: list[str]) -> None:
    """A page that another document takes is one that is not in memory."""
    assert lines[1:6] == ["256", "246", "236", "118", "68"]
    assert lines[6:8] == ["256 444", "0 0"]
