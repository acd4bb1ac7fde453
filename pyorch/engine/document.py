"""Documents: a text is read once and kept in a file, which later sessions open at once.

Reading a long text is most of the wait on a CPU. A document keeps K and V of every position, and
the transposed copy of K, so that opening it maps the file into the cache and evaluates nothing.
`document_file` has the format, ggml_ops/llama/sparse-document.cpp the work in the cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import takewhile
from pathlib import Path

from pyorch import paths
from pyorch.attention.spec import parse_spec
from pyorch.engine import c_functions, document_file
from pyorch.engine.attention import info
from pyorch.engine.chat_template import ChatTemplate
from pyorch.engine.decoding import check_length, forget, prefill, rewind
from pyorch.engine.document_file import Document, Header
from pyorch.engine.model import Model, Session
from pyorch.engine.settings import Rope
from pyorch.engine.text import detokenize, tokenize
from pyorch.errors import SparqError
from pyorch.ggml import TensorType
from pyorch.models.content import content_hash
from pyorch.models.gguf_file import GGUFFile
from pyorch.models.new_file import check_space, new_file
from pyorch.progress import Progress, say, silent
from pyorch.text import printable

PIECE = 2048  # at least so many positions are read before they are written


@dataclass(frozen=True)
class Reading:
    """What is to be read: a text, and as what.

    form    "chat": as the beginning of a user's message, which a question completes; "plain": as it
            is, to be continued; "saved": a whole conversation, whose text stands elsewhere
    system  the system message before it
    """

    name: str
    text: str
    form: str = "chat"
    system: str = ""

    @property
    def opening(self) -> str:
        """The beginning of the message that asks about the text."""
        return self.text + "\n\n"

    def messages(self, question: str) -> list[dict[str, str]]:
        """The conversation that asks the question about the text."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, {"role": "user", "content": self.opening + question}]

    def tokens(self, of: Model | Session, template: ChatTemplate | None = None) -> list[int]:
        """What a model reads: all that comes before the question.

        Args:
            template: how a conversation is written; None is the model's own.

        Raises:
            SparqError: the chat template cannot take this text, or does not show all of it before
                the question, the same at each rendering.
        """
        if self.form == "plain":
            return tokenize(of, self.text, parse_special=True)
        # the questions differ in all that a template may count: both begin with the document alone
        template = template or ChatTemplate(of)
        both = {q: template.tokens(self.messages(q)) for q in ("a", "Is it so?\nWhy?")}
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(*both.values(), strict=False))
        before = [token for token, _ in pairs]
        rests = {q: detokenize(of, tokens[len(before) :]) for q, tokens in both.items()}
        if self.text.strip() not in template.render(self.messages("a")) or not all(
            rest.lstrip().startswith(q) for q, rest in rests.items()
        ):
            raise SparqError(
                f"{self.name}: the chat template changes or cuts what stands before a question",
                "--chat-template-file FILE takes another one",
            )
        return before


def read_document(
    session: Session,
    path: Path,
    reading: Reading,
    template: ChatTemplate | None = None,
    *,
    force: bool = False,
    progress: Progress = silent,
) -> Document:
    """Read a text and write it to a document. What an earlier, interrupted call has read of the
    same text is not read again; `progress` then begins there.

    Args:
        template: how a conversation is written; None is the model's own, which states the time of
            the interrupted call.

    Raises:
        SparqError: as `new_file`; the text does not fit the context, the disk is full, or the
            model's cache cannot be kept. What was read stays in `PATH.partial`.
    """
    template = template or ChatTemplate(session, now=begun(path, reading))
    tokens = reading.tokens(session, template)
    check_length(session, len(tokens))
    header, raw = _header(session, reading, tokens, template)
    n_there = _partial(path).stat().st_size if _partial(path).is_file() else 0
    check_space(path.absolute().parent, header.n_bytes - n_there, "the document")
    with new_file(path, force, resumable=True, private=True) as (partial, fd):
        n = _continued(session, partial, fd, header)
        if n == 0:
            forget(session)  # pages of a file that is made shorter must not be read
            document_file.create(fd, header, raw)
        step = max(PIECE // session.n_batch, 1) * session.n_batch
        while n < len(tokens):
            piece = tokens[n : n + step]
            progress(n, len(tokens))
            done = lambda *_: progress(len(session.tokens), len(tokens))  # noqa: E731
            prefill(session, piece, progress=done, ends=False)
            _write_rows(session, path, fd, header, n, n + len(piece))
            n += len(piece)
            os.fsync(fd)
            document_file.set_read(fd, n)
        _finish(session, path, fd, header)
    return document_file.load(path)


def keep_document(
    session: Session,
    path: Path,
    reading: Reading,
    template: ChatTemplate | None = None,
    tokens: Sequence[int] | None = None,
) -> None:
    """Write what a session has read already: its cache begins with the tokens of `reading`, or with
    those that are given. A document that is there is replaced. template: how its conversation is
    written; None is the model's own.

    Raises:
        SparqError: it does not; as `read_document` otherwise.
    """
    template = template or ChatTemplate(session)
    tokens = list(tokens or reading.tokens(session, template))
    if session.tokens[: len(tokens)] != tokens:
        raise SparqError("the cache does not begin with this text")
    header, raw = _header(session, reading, tokens, template)
    check_space(path.absolute().parent, header.n_bytes, "the document")
    with new_file(path, force=True, private=True) as (_, fd):
        document_file.create(fd, header, raw)
        _write_rows(session, path, fd, header, 0, len(tokens))
        _finish(session, path, fd, header)


def must_be_kept_first(session: Session) -> bool:
    """Whether a text can be kept only while nothing else was read after it: layers that are
    recurrent or have a window have forgotten its end then.

    Raises:
        SparqError: the model's cache cannot be kept.
    """
    return document_file.has_state(_call(session, "kind")[1])


def open_document(session: Session, of: Document) -> int:
    """Give a session what was read, in place of what it holds. Its tokens are then the document's.

    Returns:
        the bytes of K and V that are pages of the file; the others were copied.

    Raises:
        SparqError: another model has read it, or with other settings; the context is too small; or
            the file is damaged. The session holds what it held then, or nothing if the file
            cannot be read to its end.
    """
    check_model(of, session.model.file, session.rope, session.n_ctx, session.types)
    tokens, _ = document_file.content(of)
    rewind(session, 0)
    try:
        with of.path.open("rb") as file:
            mapped = _open(session, file.fileno(), of, of.n_tokens)
    except OSError as e:
        raise SparqError(f"{of.path}: {e.strerror or e}") from None
    session.tokens = tokens
    return mapped


def begun(path: Path, reading: Reading) -> datetime | None:
    """The time that an interrupted reading of the same text states; None if there is none."""
    try:
        document = document_file.load(_partial(path), whole=False)
        return document.when if reading_of(document) == reading else None
    except SparqError:
        return None


def difference(
    read: Sequence[int], tokens: Sequence[int], text: Callable[[Sequence[int]], str]
) -> str:
    """Where a prompt leaves what was read: "" if one begins with the other, or else a phrase that
    says how many tokens they share, and what comes then.

    Args:
        text: makes the text of tokens, control tokens included.
    """
    n = next((i for i, (a, b) in enumerate(zip(read, tokens, strict=False)) if a != b), None)
    if n is None:
        return ""
    was, now = text(read[n : n + 8]), text(tokens[n : n + 8])
    return f"{n} of {len(read)} tokens can be used: {now!r} comes where {was!r} was read"


def kept_path(session: Session, reading: Reading, template: ChatTemplate | None = None) -> Path:
    """Where a text that `/read` has read is kept: the name follows from all that its K and V do,
    but for the time that a template states, which is in the file.

    Raises:
        SparqError: the model's cache cannot be kept.
    """
    rows = _call(session, "kind")[1].partition("\n")[0]
    about = [
        content_hash(session.model.file),
        rows,
        str(parse_spec(info(session).spec).of_prompt),
        reading.system,
        reading.text,
        *([template.identity] if template and template.identity else []),
    ]
    digest = hashlib.sha256("\0".join(about).encode("utf-8", errors="replace"))
    return paths.kept_texts() / f"{digest.hexdigest()[:16]}{document_file.SUFFIX}"


def make_room(limit: int) -> None:
    """Remove what `/read` has kept, the longest unused first, until it takes `limit` bytes."""
    kept = document_file.documents_in(paths.kept_texts())
    used = sorted(((p.stat().st_mtime, p.stat().st_size, p) for p in kept), reverse=True)
    total = 0
    for _, n_bytes, path in used:
        total += n_bytes
        if total > limit:
            path.unlink(missing_ok=True)


def reading_of(of: Document) -> Reading:
    """What was read. `ChatTemplate(model, now=of.when)` writes a conversation that begins with it.

    Raises:
        SparqError: the file is damaged.
    """
    return Reading(of.name, document_file.content(of)[1], of.form, of.system)


def _header(
    session: Session, reading: Reading, tokens: Sequence[int], template: ChatTemplate
) -> tuple[Header, bytes]:
    if not tokens:
        raise SparqError(f"{reading.name}: there is nothing to read", "give a text")
    raw, n_text = document_file.packed(tokens, reading.text)
    header = Header(
        printable(reading.name),
        printable(session.path.name),
        content_hash(session.model.file),
        str(session.rope),
        _call(session, "kind")[1],
        info(session).spec,
        reading.form,
        reading.system,
        len(tokens),
        n_text,
        zlib.crc32(raw),
        _call(session, "bytes", len(tokens))[0],
        stated_time=template.stated_time,
    )
    return header, raw


def _partial(path: Path) -> Path:
    """Where an interrupted reading is, which `new_file` has named."""
    return path.with_name(path.name + ".partial")


def _continued(session: Session, partial: Path, fd: int, header: Header) -> int:
    """Open what an interrupted reading has left, and return the number of its positions."""
    if os.fstat(fd).st_size == 0:
        return 0
    try:
        document = document_file.load(partial, whole=False)
        if document.n_read == 0:
            return 0
        if not asdict(header).items() <= asdict(document).items():
            raise SparqError(f"{partial}: of another text, model or settings")
        tokens, _ = document_file.content(document)
        forget(session)
        # without the transposed K, of which any part may be there
        rows, _, _ = document.kind.partition("\n")
        _open(session, fd, replace(document, kind=rows), document.n_read)
    except SparqError as error:
        say(f"{error.message}: it is read from the beginning")
        return 0
    session.tokens = tokens[: document.n_read]
    return document.n_read


def check_model(
    of: Document, file: GGUFFile, rope: Rope, n_ctx: int, types: tuple[TensorType, TensorType]
) -> None:
    """Refuse a document in a context of another model, with other rotations or other types of K and
    V, or too short.

    Raises:
        SparqError: it is one.
    """
    if of.model_hash != content_hash(file):
        hint = "K and V are of one model: take that one, or read the text again"
        raise SparqError(f"{of.path}: read by another model, {of.model}", hint)
    if of.rope != str(rope):
        rope_then = of.rope or "the model's own"
        raise SparqError(f"{of.path}: read with other rotations: {rope_then}", "--rope-* as then")
    if of.types != (names := (types[0].name, types[1].name)):
        type_k, type_v = of.types
        raise SparqError(
            f"{of.path}: it has K and V in {type_k}/{type_v}, and the context in {'/'.join(names)}",
            f"--cache-type-k {type_k} --cache-type-v {type_v}, as then",
        )
    if of.n_tokens > n_ctx:
        raise SparqError(
            f"{of.path} has {of.n_tokens} tokens, but the context has {n_ctx} positions",
            f"--ctx {of.n_tokens + 1024} or more",
        )


def _write_rows(session: Session, path: Path, fd: int, header: Header, a: int, b: int) -> None:
    """Write K and V of positions [a, b)."""
    _call(session, "write", 0, fd, header.image_at, header.n_tokens, a, b, path=path)


def _finish(session: Session, path: Path, fd: int, header: Header) -> None:
    _call(session, "write_shadow", 0, fd, header.image_at, header.n_tokens, path=path)
    document_file.finish(fd, header)


def _open(session: Session, fd: int, of: Document, n_read: int) -> int:
    try:
        where = of.image_at, of.n_tokens, n_read, of.kind.encode()
        return _call(session, "open", 0, fd, *where, path=of.path)[0]
    except SparqError:
        forget(session)
        raise


def _call(
    session: Session, name: str, *values: int | bytes, path: Path | None = None
) -> tuple[int, str]:
    """Call `llama_sparse_document_NAME`, which ggml_ops/llama/llama-sparse.h explains. Returns what
    it returned and wrote as text.

    Raises:
        SparqError: it failed, with the file `path`; or it is a stock library.
    """
    function = getattr(c_functions.ours(session.lib), f"llama_sparse_document_{name}")
    text = ctypes.create_string_buffer(4096)
    with session.library.call() as call:
        n = function(session.ctx, *values, text, len(text))
    call.raise_if_it_came()
    output = text.value.decode("utf-8", errors="replace")
    if n < 0:
        message, _, hint = output.partition("\n")
        hint = hint or "what was read is kept: fix this, then run it again" * name.startswith(
            "write"
        )
        raise SparqError(f"{path}: {message}" if path else message, hint)
    return n, output
