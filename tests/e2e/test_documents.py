"""Documents: what is opened is what was read, bit for bit, and a bad file leaves nothing behind."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_int32, c_uint32, c_uint64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny as tiny_models
from cases import GROUP
from llama import Context, Model, from_child
from quick import pairwise
from test_engine import n_wrong, seal
from tiny import text_of, write_tiny_gguf

from pyorch import engine, paths
from pyorch.engine import document, document_file
from pyorch.errors import SparqError

SPARSE = "sparq,rank=8,topk=64,min_ctx=0"
N_TEXT = 1337  # tokens: neither whole groups, nor runs, nor batches
# with so many sequences the buffer of the cache is large enough for pages of a file
MAPPED = {"n_sequences": 96, "n_ctx": 1536}


def reading(n: int = N_TEXT, seed: int = 1) -> engine.Reading:
    return engine.Reading("letters", text_of(n - 1, seed), "plain")  # and the begin token


def opened(session: engine.Session, path: Path) -> int:
    return engine.open_document(session, document_file.load(path))


def open_as(s: engine.Session, d: engine.Document, seq: int = 0, **more: Any) -> None:
    """Open it by the C function, as a sequence, or with another kind or length."""
    of = {"n_read": d.n_tokens, "kind": d.kind} | more
    with d.path.open("rb") as f:
        where = f.fileno(), d.image_at, d.n_tokens, of["n_read"], of["kind"].encode()
        document._call(s, "open", seq, *where)
    s.tokens = document_file.content(d)[0]


Continuation = tuple[list[int], np.ndarray]


def continued(session: engine.Session, tokens: list[int] | None = None) -> Continuation:
    """What follows the document: tokens, and the logits after them."""
    prompt = [*(tokens or session.tokens), 100, 101, 102]
    pieces = engine.generate(session, prompt, max_tokens=70, ignore_eog=True)
    return [p.token for p in pieces], engine.logits(session)


def prefilled(model: Path, n: int = N_TEXT, then: str = "", **options: Any) -> Continuation:
    """What follows the text where it was read as a prompt, in the same batches; with the settings
    `then` from there on."""
    with engine.load(model, **options) as s:
        engine.prefill(s, reading(n).tokens(s), ends=False)
        if then:
            engine.set_attention(s, then)
        return continued(s)


def same(a: Continuation, b: Continuation) -> bool:
    return a[0] == b[0] and np.array_equal(a[1], b[1])


@pytest.fixture(scope="module")
def book(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A document of the tiny model."""
    path = tmp_path_factory.mktemp("documents") / "book.kv"
    with engine.load(tiny, attention=SPARSE) as s:
        engine.read_document(s, path, reading())
    return path


# ---- what is opened is what was read ----


# architectures, with their layers here; all but llama have windows or recurrent layers
LAYERS = {"llama": 2, "gemma3": 12, "gpt-oss": 4, "lfm2": 4}


def other(folder: Path, arch: str) -> Path:
    return tiny_models.write(folder / f"{arch}.gguf", arch, n_layer=LAYERS[arch])


@pairwise(
    arch=list(LAYERS),
    spec=["off", "dense", SPARSE, "topk,topk=64,min_ctx=0"],
    options={"copied": {}, "mapped": MAPPED},
)
def test_opened_is_as_read(tmp_path: Path, arch: str, spec: str, options: dict[str, int]) -> None:
    """The logits are those of reading anew in the same batches."""
    path, book = other(tmp_path, arch), tmp_path / "d.kv"
    wanted = prefilled(path, then=spec, attention=SPARSE, **options)
    with engine.load(path, attention=SPARSE, n_ctx=1536) as s:
        engine.read_document(s, book, reading())
    with engine.load(path, attention=spec, **options) as s:
        mapped = opened(s, book)
        assert (mapped > 0) == (options is MAPPED and sys.platform == "linux")
        if spec == SPARSE and arch == "llama":
            assert engine.info(s).counter("groups_sealed") == 0, "it was sealed when it was read"
            assert seal(s) == 0
        engine.reset_counters(s)
        assert same(continued(s), wanted)
        assert s.timings.prefill_tokens == 3, "nothing of the document is read again"
        if spec == SPARSE and arch == "llama":
            assert engine.info(s).sparse_share == 1 and n_wrong(s) == 0


def test_a_text_that_does_not_fit_is_not_begun(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused at once, not after the minutes that what fits would take."""
    monkeypatch.setattr(document, "PIECE", 256)
    with engine.load(tiny, n_ctx=1024, n_batch=256, attention=SPARSE) as s:
        with pytest.raises(SparqError, match="1337 tokens.* 1024 positions"):
            engine.read_document(s, tmp_path / "d.kv", reading())
        assert not s.tokens and not list(tmp_path.iterdir())


@pairwise(
    types=[("q8_0", "q8_0"), ("q4_0", "f16"), ("f32", "bf16")],
    shadow=["q4", "q8", "f16"],
    n=[64, 100, 1536],
)
def test_types_and_lengths(
    tiny: Path, tmp_path: Path, types: tuple[str, str], shadow: str, n: int
) -> None:
    """Lengths of less than a group, and such that fill the cache of the one who reads."""
    spec = f"sparq,rank=8,topk=16,min_ctx=0,shadow={shadow}"
    options = {"type_k": types[0], "type_v": types[1], "attention": spec}
    with engine.load(tiny, n_ctx=max(n, 256), **options) as s:
        engine.read_document(s, tmp_path / "d.kv", reading(n))
    with engine.load(tiny, n_ctx=2048, **options) as s:
        opened(s, tmp_path / "d.kv")
        assert same(continued(s), prefilled(tiny, n, n_ctx=2048, **options))


@pytest.mark.parametrize("read_with", ["off", "topk", "sparq,shadow=q8", "sparq,mean_v=off"])
def test_another_transposed_k_is_made_anew(tiny: Path, tmp_path: Path, read_with: str) -> None:
    with engine.load(tiny, attention=read_with) as s:
        engine.read_document(s, tmp_path / "d.kv", reading())
    with engine.load(tiny, attention=SPARSE) as s:
        opened(s, tmp_path / "d.kv")
        assert engine.info(s).counter("groups_sealed") > 0
        assert same(continued(s), prefilled(tiny, then=SPARSE, attention=read_with))


def test_the_file_stays_as_it_is(tiny: Path, book: Path) -> None:
    """What is written to mapped pages stays in memory, and is gone with the document."""
    before = book.read_bytes()
    with engine.load(tiny, attention=SPARSE, **MAPPED) as s:
        fresh = continued(s, reading(N_TEXT, seed=2).tokens(s))
        assert opened(s, book) > 0
        engine.rewind(s, 600)
        engine.prefill(s, [99] * 700)
        opened(s, book)  # over its own pages, which were written
        again = continued(s)
        opened(s, book)
        assert same(continued(s), again)
        engine.rewind(s, 0)
        assert same(continued(s, reading(N_TEXT, seed=2).tokens(s)), fresh)
    assert book.read_bytes() == before
    document_file.verify(document_file.load(book))


def test_a_copy_of_a_sequence_that_waits_does_not_overwrite_a_document(
    tiny: Path, book: Path
) -> None:
    """llama.cpp copies a stream of its own only when it decodes next."""
    replies = []
    for copies in (False, True):
        with engine.load(tiny, attention=SPARSE, n_ctx=4096, n_sequences=2) as s:
            if copies:
                s.lib.llama_memory_seq_cp(s.memory, 1, 0, -1, -1)
            open_as(s, document_file.load(book))
            replies.append(continued(s))
    assert same(*replies)


@pytest.mark.parametrize("n", [64, 100, 600, N_TEXT])
@pytest.mark.parametrize("shadow", ["q4", "q8", "f16"])
def test_a_document_holds_nothing_else(tiny: Path, tmp_path: Path, shadow: str, n: int) -> None:
    """Its bytes are those that an empty context writes, although more was read and removed."""
    files = [tmp_path / f"{name}.kv" for name in ("clean", "removed")]
    for path in files:
        spec = f"sparq,rank=8,topk=64,min_ctx=0,shadow={shadow}"
        with engine.load(tiny, attention=spec, n_ctx=4096) as s:
            engine.prefill(s, reading(n).tokens(s), ends=False)
            if path is files[1]:
                private = [*s.tokens, *np.random.default_rng(3).integers(97, 123, 1200).tolist()]
                engine.prefill(s, private, ends=False)
                seal(s)
                engine.rewind(s, n)
            document.keep_document(s, path, reading(n))
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("shadow", ["q4", "q8", "f16"])
def test_a_document_holds_nothing_of_another_sequence(
    tiny: Path, tmp_path: Path, shadow: str
) -> None:
    """Whose cells lie beside its own in a cache that sequences share."""
    images, n = [], 600
    for beside in (False, True):
        with Model(tiny) as model, Context(model, n_ctx=4096, n_seq=2) as ctx:
            ctx.set_sparse(f"sparq,rank=8,topk=64,min_ctx=0,shadow={shadow}")
            assert ctx.decode([(97 + i * i % 26, i, 0) for i in range(n)], "none") == 0
            if beside:
                assert ctx.decode([(97 + i * 7 % 26, i, 1) for i in range(1200)], "none") == 0
            ctx.seal()
            path = tmp_path / f"{beside}"
            with path.open("wb") as file:
                where = c_int32(0), c_int32(file.fileno()), c_uint64(0), c_uint32(n)
                ctx.document("write", *where, c_uint32(0), c_uint32(n))
                ctx.document("write_shadow", *where)
            images.append(path.read_bytes())
            assert ctx.seal() >= 0 and ctx.check_shadow() == 0
    assert images[0] == images[1]


def test_what_no_document_can_be(tiny: Path, tmp_path: Path) -> None:
    """Positions behind its end would overwrite what follows them in the file. Of a text of which
    nothing is read yet, nothing is written."""
    with engine.load(tiny, n_ctx=1024, attention=SPARSE) as s, (tmp_path / "f").open("wb") as file:
        where = 0, file.fileno(), 0
        document._call(s, "write", *where, 64, 0, 0)
        assert not (tmp_path / "f").stat().st_size
        engine.prefill(s, reading(900).tokens(s), ends=False)
        for a, b in ((0, 65), (64, 65), (20, 10)):
            with pytest.raises(SparqError, match=f"no positions {a} to {b}"):
                document._call(s, "write", *where, 64, a, b)
        document._call(s, "write", *where, 64, 0, 64)
        for shadow in ("q4", "f16"):
            engine.set_attention(s, f"{SPARSE},shadow={shadow}")
            for call in (("bytes", 0), ("write", *where, 0, 0, 0), ("write_shadow", *where, 0)):
                with pytest.raises(SparqError, match="at least one position"):
                    document._call(s, *call)


@pytest.mark.parametrize("n_sequences", [1, 2])
def test_what_a_document_cannot_be_opened_as(tiny: Path, book: Path, n_sequences: int) -> None:
    """A sequence that is not there, or up to positions that it has not."""
    of, options = document_file.load(book), {"n_sequences": n_sequences}
    with engine.load(tiny, attention=SPARSE, n_ctx=1536 * n_sequences, **options) as s:
        for seq in (-1, n_sequences, 7):
            with pytest.raises(SparqError, match=f"no sequence {seq}"):
                open_as(s, of, seq)
        for n in (0, N_TEXT + 1):
            with pytest.raises(SparqError, match=f"1337 positions .* {n}$"):
                open_as(s, of, n_read=n)


def test_a_list_of_documents_with_wrong_numbers(book: Path, tmp_path: Path) -> None:
    """What is no line of one, and what the file cannot hold, is left out and told."""
    good = document_file.listed([document_file.load(book)])
    path, _, kind = good.splitlines()
    wrong = ("3 x 65536", "", "4294967295 0 0", "1337 0 18446744073709551615", "-3 0 65536")
    lines = "".join(f"{path}\n{numbers}\n{kind}\n" for numbers in wrong)
    (tmp_path / "list").write_text(lines + good)
    found = from_child("-c", _LISTED, SPARQ_DOCUMENTS=str(tmp_path / "list"))
    assert found == [True, len(wrong)]


_LISTED = """
import ctypes, json, resource
from llama import bindings, log_text
has_documents = bindings()._lib._Z26llama_sparse_has_documentsv  # as C++ names it
has_documents.restype = ctypes.c_bool
resource.setrlimit(resource.RLIMIT_AS, (8 << 30,) * 2)  # 4294967295 tokens are 16 GiB
print(json.dumps([has_documents(), log_text().count("cannot be read")]))
"""


def test_another_layout_is_another_transposed_k(tiny: Path, book: Path) -> None:
    """Of an older or newer library: K and V are used, and K is transposed anew, from them."""
    whole = document_file.load(book)
    kind, layout = whole.kind.rsplit(",layout=", 1)
    wanted = prefilled(tiny, attention=SPARSE)
    for other in (kind, f"{kind},layout={int(layout) + 1}"):
        with engine.load(tiny, attention=SPARSE) as s:
            open_as(s, whole, kind=other)
            assert engine.info(s).counter("groups_sealed") == N_TEXT // GROUP * s.geometry.n_layer
            assert same(continued(s), wanted)


# ---- interrupted ----


def interrupt(done: int, _: int) -> None:
    if done >= 640:
        raise KeyboardInterrupt


def test_another_text_begins_anew(tiny: Path, tmp_path: Path) -> None:
    path, seen = tmp_path / "d.kv", []
    with engine.load(tiny, attention=SPARSE, n_batch=64) as s:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(document, "PIECE", 256)
            engine.read_document(s, path, reading(), progress=interrupt)
        other = reading(seed=3)
        engine.read_document(s, path, other, progress=lambda a, _: seen.append(a))
        assert seen[0] == 0
        opened(s, path)
        assert s.tokens == other.tokens(s)


@contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """No file of this process may be larger: to it, the disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_disk_that_is_full_anywhere(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of the file is there, the next reading goes on or begins anew, and ends with the
    same bytes."""
    monkeypatch.setattr(document, "PIECE", 512)
    path = tmp_path / "d.kv"
    with engine.load(tiny, attention=SPARSE, n_batch=256) as s:
        size = engine.read_document(s, path, reading()).n_bytes
        whole = path.read_bytes()
        for most in range(0, size, size // 30):
            path.unlink()
            with largest_file(most), pytest.raises(SparqError, match="too large|full"):
                engine.read_document(s, path, reading())
            assert not path.exists()
            engine.read_document(s, path, reading())
            assert path.read_bytes() == whole, most
        opened(s, path)


# ---- bad files ----


def changed(at: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:at] + value + raw[at + len(value) :]


BAD = {
    "empty": lambda raw: b"",
    "foreign": changed(0, b"GGUF"),
    "version": changed(8, b"\x63"),
    "header": changed(40, b"\0\0"),
    "progress": changed(document_file._PROGRESS_AT, b"\xff"),
    "text": changed(document_file.ALIGN + 4 * N_TEXT + 5, b"\0"),
    "tokens": changed(document_file.ALIGN + 5, b"\x07"),
    "cut": lambda raw: raw[:-1000],
    "cut in the text": lambda raw: raw[: document_file.ALIGN + 50],
    "longer": lambda raw: raw + b"x",
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(tiny: Path, book: Path, tmp_path: Path, case: str) -> None:
    (bad := tmp_path / "bad.kv").write_bytes(BAD[case](book.read_bytes()))
    with engine.load(tiny, attention=SPARSE) as s:
        with pytest.raises(SparqError, match=r"bad\.kv"):
            opened(s, bad)
        assert s.tokens == []
        opened(s, book)
        assert len(s.tokens) == N_TEXT


def test_a_damaged_reading_begins_anew(tiny: Path, book: Path, tmp_path: Path) -> None:
    whole, path = book.read_bytes(), tmp_path / "d.kv"
    with engine.load(tiny, attention=SPARSE) as s:
        for case, damage in BAD.items():
            (tmp_path / "d.kv.partial").write_bytes(damage(whole))
            engine.read_document(s, path, reading(), force=True)
            assert path.read_bytes() == whole, case


def test_verify_finds_a_changed_byte(book: Path, tmp_path: Path) -> None:
    d = document_file.load(book)
    bad = tmp_path / "bad.kv"
    for at in (d.image_at, d.n_bytes - 1, d.checksums_at):
        raw = bytearray(book.read_bytes())
        raw[at] ^= 1
        bad.write_bytes(raw)
        with pytest.raises(SparqError, match="not what was written"):
            document_file.verify(document_file.load(bad))


def test_another_model_or_other_settings(tiny: Path, book: Path, tmp_path: Path) -> None:
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=5)
    turned = {"rope": engine.Rope("linear", freq_scale=0.5)}
    for model, options, fault in (
        (other, {}, "another model"),
        (tiny, turned, "rotations"),
        (tiny, {"type_k": "q8_0"}, "f16/f16"),
        (tiny, {"n_ctx": 1024}, "1337 tokens"),
    ):
        with engine.load(model, **options) as s, pytest.raises(SparqError, match=fault):
            opened(s, book)


def test_rotations_of_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of V, and by the other table of a model that has one for long contexts."""
    two = tiny_models.make("llama", head_dim=64)
    two.keys |= {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 1600}
    for name, factor in (("long", 2), ("short", 1)):
        two.tensors[f"rope_factors_{name}.weight"] = np.full(32, factor, np.float32)
    path = tiny_models.save(two, tmp_path / "m.gguf")
    options = {"type_v": "q8_0", "n_ctx": 1400}
    with engine.load(path, **options) as s:
        engine.read_document(s, tmp_path / "d.kv", reading())
    with engine.load(path, **options) as s:
        opened(s, tmp_path / "d.kv")
    for n_ctx, disabled in ((1400, "1"), (2000, "0")):
        monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", disabled)
        then = options | {"n_ctx": n_ctx}
        with engine.load(path, **then) as s, pytest.raises(SparqError, match=r"d\.kv"):
            opened(s, tmp_path / "d.kv")


# ---- layers with a window, and recurrent ones ----


@pytest.mark.parametrize(
    "options", [{"n_batch": 1024}, {"n_batch": 64}, {"swa_full": True}], ids=str
)
@pytest.mark.parametrize("arch", ["gemma3", "gpt-oss"])
def test_windows_in_a_cache_of_another_size(
    tmp_path: Path, arch: str, options: dict[str, int]
) -> None:
    """They lie in other cells there, so sums are in another order."""
    path = other(tmp_path, arch)
    with engine.load(path, n_ctx=1536, attention=SPARSE) as s:
        engine.read_document(s, tmp_path / "d.kv", reading())
    with engine.load(path, n_ctx=1536, attention=SPARSE, **options) as s:
        opened(s, tmp_path / "d.kv")
        engine.prefill(s, [100, 101, 102])
        near = engine.logits(s)
    with engine.load(path, n_ctx=1536, attention=SPARSE) as s:
        opened(s, tmp_path / "d.kv")
        engine.prefill(s, [100, 101, 102])
        wanted = engine.logits(s)
        engine.rewind(s, 0)
        engine.prefill(s, [100, 101, 102])
        assert np.abs(engine.logits(s) - wanted).max() > 0.5, "the text matters"
    np.testing.assert_allclose(near, wanted, atol=0.02)


def test_an_interrupted_reading_of_recurrent_layers_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one piece, and after two: the states lie in two places in turn. What was written of a
    third one, and not noted, is not used."""
    monkeypatch.setattr(document, "PIECE", 256)
    path, options = other(tmp_path, "lfm2"), {"n_ctx": 1536, "n_batch": 256, "attention": SPARSE}
    with engine.load(path, **options) as s:
        whole = engine.read_document(s, tmp_path / "whole.kv", reading())
        wanted = continued(s)
    write = document_file.set_read
    for at in (0, 256, 512):

        def dies(fd: int, n_read: int, *more: int, at: int = at) -> None:
            if n_read > at:
                raise KeyboardInterrupt
            write(fd, n_read, *more)

        with monkeypatch.context() as m, engine.load(path, **options) as s:
            m.setattr(document_file, "set_read", dies)
            with pytest.raises(KeyboardInterrupt):
                engine.read_document(s, tmp_path / "d.kv", reading())
    with engine.load(path, **options) as s:
        found = engine.read_document(s, tmp_path / "d.kv", reading())
        assert s.timings.prefill_tokens == N_TEXT - 512
    with engine.load(path, **options) as s:
        opened(s, found.path)
        assert same(continued(s), wanted)
    assert (found.kind, found.n_bytes) == (whole.kind, whole.n_bytes)


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    with engine.load(other(tmp_path, "lfm2"), n_ctx=1536) as s:
        found = engine.read_document(s, tmp_path / "d.kv", reading())
        raw = bytearray(found.path.read_bytes())
        rows = len(raw) - found.image_bytes
        at = raw.index(N_TEXT.to_bytes(8, "little"), rows)  # what stands before the state
        raw[at + 100] ^= 1
        found.path.write_bytes(raw)
        engine.prefill(s, [1, 2, 3])
        with pytest.raises(SparqError, match="windows or recurrent layers after 1337"):
            opened(s, found.path)
        assert not s.tokens
        with pytest.raises(SparqError, match="damaged"):
            document_file.verify(found)


def test_recurrent_layers_are_kept_at_the_end_only(tmp_path: Path) -> None:
    with engine.load(other(tmp_path, "lfm2"), n_ctx=1536) as s:
        engine.prefill(s, [*reading().tokens(s), 100, 101])
        with pytest.raises(SparqError, match="beyond the end of the document"):
            engine.keep_document(s, tmp_path / "d.kv", reading())
        assert not list(tmp_path.glob("*.kv*")), "nothing is left"


def test_a_model_without_attention(tmp_path: Path) -> None:
    path = tiny_models.write(tmp_path / "mamba.gguf", "mamba")
    with engine.load(path) as s, pytest.raises(SparqError, match="layers of attention"):
        engine.read_document(s, tmp_path / "d.kv", reading(200))
    assert not list(tmp_path.glob("*.kv*")), "nothing is left"


# ---- what a chat keeps ----


def test_room_is_made_for_what_is_kept(
    tiny_chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "kept_texts", lambda: tmp_path / "texts")
    with engine.load(tiny_chat, attention=SPARSE) as s:
        for i in range(3):
            text = engine.Reading("t", reading(300, seed=i).text)
            path = engine.kept_path(s, text)
            engine.rewind(s, 0)
            engine.prefill(s, text.tokens(s))
            path.parent.mkdir(exist_ok=True)
            engine.keep_document(s, path, text)
            os.utime(path, (i, i))
        size = path.stat().st_size
        with pytest.raises(SparqError, match="does not begin with this text"):
            engine.keep_document(s, tmp_path / "x.kv", engine.Reading("t", "other"))
    engine.make_room(2 * size)
    assert len(list(path.parent.iterdir())) == 2 and path.exists()
    engine.make_room(0)
    assert not list(path.parent.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and sets glibc's malloc")
def test_pages_of_a_document_are_given_back(tiny: Path, book: Path) -> None:
    """When the cache is cleared, and before its memory goes back to an allocator that keeps it."""
    keeps = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    here = str(Path(__file__).parent)
    assert from_child("-c", _CLOSED, tiny, book, here, **keeps) == [True, False, True, False]


_CLOSED = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_documents import MAPPED, SPARSE, engine, opened
mapped = lambda: sys.argv[2] in Path("/proc/self/maps").read_text()
with engine.load(Path(sys.argv[1]), attention=SPARSE, **MAPPED) as s:
    opened(s, Path(sys.argv[2]))
    found = [mapped()]
    s.lib.llama_memory_clear(s.memory, True)
    found.append(mapped())
    opened(s, Path(sys.argv[2]))
    found.append(mapped())
print(json.dumps([*found, mapped()]))
"""
