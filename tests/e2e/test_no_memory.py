"""No exception leaves a C function: where memory is short, each of ours says so."""

from __future__ import annotations

import ctypes
import json
import sys
from ctypes import c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from tempfile import TemporaryFile

import pytest
import tiny as tiny_models
from c_library import compiled
from llama import Context, Model, bindings, from_child

SPEC = b"sparq,rank=8,topk=64,min_ctx=0"
N = 256


def main(path: Path) -> None:
    """For each function how many of its allocations failed, and what it said: one line of JSON."""
    lib, preloaded = bindings()._lib, ctypes.CDLL(None)
    fail = preloaded.fail_new
    fail.restype, fail.argtypes = ctypes.c_long, [ctypes.c_long]
    err, size = ctypes.create_string_buffer(1024), c_size_t(1024)
    with Model(path) as model, Context(model, n_ctx=1024) as ctx, TemporaryFile() as file:
        at, seq, n = c_void_p(ctx.handle), c_int32(0), c_uint32(N)
        mass = (c_double * model.n_layer)()
        where = seq, c_int32(file.fileno()), c_uint64(0), n
        ctx.set_sparse(SPEC.decode())
        assert ctx.decode([(5 + i % 90, i, 0) for i in range(N)]) == 0
        _, kind = ctx.document("kind")

        def cases():
            yield "llama_sparse_attn_parse", c_int32, (SPEC, err, size)
            yield "llama_sparse_attn_keys", c_int32, (err, size)
            for spec in (SPEC + b",shadow=q8", SPEC):
                yield "llama_set_sparse_attn", c_int32, (at, spec, err, size)
            yield "llama_set_sparse_attn_seq", c_int32, (at, seq, b"dense", err, size)
            yield "llama_get_sparse_attn_info", c_int32, (at, None, c_size_t(0))
            yield "llama_get_sparse_attn_seq_info", c_int32, (at, seq, None, c_size_t(0))
            yield "llama_sparse_attn_default", c_int32, (SPEC * 10,)
            lib.llama_sparse_attn_default(None)
            assert ctx.seq_rm(0, N - 1) and ctx.decode([(7, N - 1, 0)]) == 0  # a group waits
            yield "llama_sparse_attn_seal", c_int64, (at,)
            yield "llama_sparse_attn_check", c_int64, (at,)
            yield "llama_sparse_document_bytes", c_int64, (at, n, err, size)
            yield "llama_sparse_document_kind", c_int64, (at, err, size)
            yield "llama_sparse_document_write", c_int64, (at, *where, c_uint32(0), n, err, size)
            yield "llama_sparse_document_write_shadow", c_int64, (at, *where, err, size)
            assert ctx.seq_rm(0)
            args = at, *where, n, c_char_p(kind), err, size
            yield "llama_sparse_document_open", c_int64, args
            yield "llama_sparse_measure_begin", c_void_p, (at,)
            assert ctx.decode([(7, N, 0)], "all") == 0

        found = {}
        for name, kind_of, args in cases():
            function, results = getattr(lib, name), []
            function.restype = kind_of
            for i in range(10_000):
                fail(i)
                result = function(*args)
                if not fail(-1):
                    break
                bad = result is None if kind_of is c_void_p else result < 0
                results.append(bad)
                if name.endswith("open") and not bad:  # K is transposed by the next token
                    assert ctx.seq_rm(0)
            if name == "llama_sparse_measure_begin":
                lib.llama_sparse_measure_end(c_void_p(result), mass)
            ok = result is not None if kind_of is c_void_p else result >= 0
            said = err.value.decode() if args[-1] is size else ""
            found[name] = {"works": ok, "said": said, "failed": results}
        # new settings need other buffers, for which there is no memory
        preloaded.fail_buffers(True)
        results = [lib.llama_set_sparse_attn(at, b"topk,topk=8,min_ctx=0", err, size) < 0]
        said, more = err.value.decode(), [(7, N + 1, 0)]
        results.append(ctx.decode(more) < 0)
        preloaded.fail_buffers(False)
        works = ctx.decode(more) == 0 and ctx.info()["spec"].startswith("sparq")
        found["llama_decode"] = {"works": works, "said": said, "failed": results}
    print(json.dumps(found))


@pytest.mark.skipif(sys.platform != "linux", reason="preloads a library")
def test_no_memory_is_an_error(tmp_path: Path) -> None:
    model = tiny_models.write(tmp_path / "m.gguf", "llama", n_layer=2)
    library = compiled(Path(__file__).with_name("fail_new.cpp"), tmp_path / "fail_new.so")
    found = from_child(__file__, model, LD_PRELOAD=str(library))
    for name, result in found.items():
        assert result["works"], f"{name} works once there is memory: {result['said']}"
    said = {name for name, result in found.items() if any(result["failed"])}
    assert set(found) == said, "each of them allocates something"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
