"""Find the model that `--model NAME` means, and load it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from pyorch.attention.cost import layer_costs
from pyorch.attention.spec import AUTO_RATIO, AttentionSpec, parse_spec
from pyorch.cli.gpu import note_in_memory
from pyorch.cli.groups import given_on_command_line
from pyorch.cli.options import ContextOptions, LoadOptions, ModelOptions
from pyorch.cli.terminal import confirm, note, note_if_beyond
from pyorch.errors import SparqError
from pyorch.models import cards
from pyorch.models.geometry import geometry
from pyorch.models.gguf_file import GGUFFile, read_gguf
from pyorch.progress import progress_bar
from pyorch.text import human_bytes

if TYPE_CHECKING:
    from pyorch.engine import Document, Placement, Session, SessionOptions
    from pyorch.engine.chat_template import ChatTemplate
    from pyorch.engine.settings import Settings


REPLY_ROOM = 4096  # positions of a conversation after a document


def model_path(name: str, yes: bool = False, before: Callable[[], None] | None = None) -> Path:
    """The file that `--model NAME` means, as in `sparq-cpp pull`; one on the hub is downloaded
    after asking.

    Args:
        before: called before a question or a download.

    Raises:
        SparqError: there is no such model, it cannot be downloaded, or there is nobody to ask.
    """
    from pyorch.models import pull

    spec = pull.parse_spec(name)
    if spec is None:
        return Path(name)
    model = pull.find(spec, note)
    if model.complete:
        return model.path
    if before:
        before()
    n_bytes = model.missing_bytes  # 0 = a new revision with the old content
    what = f"{model.files[0].name} ({human_bytes(n_bytes)}) of {spec.repo}"
    confirm(
        f"Download {what}?",
        yes or not n_bytes,
        f"{what} is not downloaded",
        f"add --yes, or run sparq-cpp pull {name} first",
    )
    if yes and n_bytes:
        note(f"downloading {what}")
    return pull.fetch(model, note).path


def find_model(name: str, yes: bool, tools: tuple[str, ...] = ()) -> GGUFFile:
    """The header of the model that `--model NAME` means, which is downloaded if it is not here.

    What can fail at once comes first: the header of a file that is here, then the compiler, if the
    library or one of these programs of llama.cpp is not built; neither is built here.

    Raises:
        SparqError: as `model_path`; or the file is no model.
    """
    from pyorch import native

    return read_gguf(model_path(name, yes, lambda: native.check_compiler(tools)))


def prepare(
    name: str,
    yes: bool,
    options: SessionOptions,
    tools: tuple[str, ...] = (),
    documents: Sequence[Document] = (),
    load: LoadOptions | None = None,
) -> tuple[GGUFFile, Settings]:
    """Find the model as `find_model` does, and build the library and the tools. The options get
    room for each of the documents, and the types of its K and V, where the line says nothing else.

    Args:
        load: with these, attention is chosen where the options have none, and one line says so.

    Returns:
        The header, and the settings that the options give a session of this model.

    Raises:
        SparqError: as `find_model`; the options do not fit the model; or the build fails.
    """
    from pyorch import native
    from pyorch.engine.settings import settings_for

    file = find_model(name, yes, tools)
    for document in documents:
        options = _with_room(options, document, file)
    settings = settings_for(file, options)
    native.built(tools=tools)
    if load is not None and options.attention is None:
        in_memory = load.kv_offload is False or load.n_gpu_layers == 0
        on_gpu = bool(native.gpus()) and not (in_memory or load.rpc.workers)
        settings = _with_default(default_spec(name, file.path), file, settings, options, on_gpu)
    return file, settings


def default_spec(name: str, path: Path | None) -> AttentionSpec:
    """The attention of a model for which nobody chose one: that of the card that `--model NAME`
    names, or that knows the content of its file."""
    from pyorch.models.content import card_of

    word = name.split(":")[0].split("@")[0]
    is_card = word in cards.names() and path != Path(name)
    card = cards.load(word) if is_card else card_of(path) if path else None
    return spec_of(card)


def spec_of(card: cards.Card | None) -> AttentionSpec:
    """The attention of a model with this card, or with none, for which nobody chose one."""
    return parse_spec((card and card.settings) or f"sparq,ratio={AUTO_RATIO}")


def sparse_layers(settings: Settings, spec: AttentionSpec) -> tuple[int, int, str]:
    """How many layers with K and V are sparse in the end, of how many, and why the others not."""
    costs = layer_costs(settings.geo, spec, settings.n_ctx, *settings.element_bytes)
    reasons = sorted({c.split.reason for c in costs if c.split.dense})
    why = "; ".join(reasons) or "no layer has a plain KV cache"
    return sum(not c.split.dense for c in costs), len(costs), why


def _with_default(
    spec: AttentionSpec, file: GGUFFile, exact: Settings, options: SessionOptions, on_gpu: bool
) -> Settings:
    """The settings with this attention, if a token gains by it. What nobody asked for makes nothing
    fail and nothing slower. exact: those without it."""
    from pyorch.engine.settings import settings_for

    n, of, why = sparse_layers(exact, spec)
    if on_gpu:
        why = f"on a GPU few models gain; -a {spec} tries it"
    elif n:
        why = "the transposed K does not fit into the memory"
        with suppress(SparqError):
            settings = settings_for(file, replace(options, attention=spec))
            if settings.lacking <= exact.lacking:
                which = f" in {n} of {of} layers" if n < of else ""
                where = f"from {spec.min_ctx} positions on, by default"
                note(f"attention {spec}{which}, {where}; --ratio 1 is exact", "dim")
                return settings
    note(f"attention is exact: {why}", "dim")
    return exact if on_gpu else replace(exact, spec=AttentionSpec("dense"))


def model_title(path: Path) -> str:
    """A model's file for people: its name, after the title of the card that knows its content."""
    from pyorch.models.content import card_of

    card = card_of(path)
    return f"{card.title} ({path.name})" if card else path.name


def session_options(
    attention: AttentionSpec | None,
    context: ContextOptions,
    load: LoadOptions,
    n_sequences: int = 1,
) -> SessionOptions:
    """The options of a session, in the engine's form."""
    from pyorch import native
    from pyorch.engine.settings import Placement, SessionOptions

    place = Placement(load.n_gpu_layers, load.kv_offload, workers=load.rpc.workers)
    return SessionOptions(
        n_ctx=context.ctx,
        n_threads=context.threads,
        type_k=load.cache.cache_type_k,
        type_v=load.cache.cache_type_v,
        attention=attention,
        rope=load.rope.settings(),
        n_sequences=n_sequences,
        n_away=place.n_away(native.has_gpu_memory()),
    )


def placement(load: LoadOptions) -> Placement:
    """Where the layers go, in the engine's form. Losing a worker ends the program, in one line.

    Raises:
        SparqError: a worker is not here, or the way to it is open to others.
    """
    from pyorch import engine
    from pyorch.engine import machines

    if workers := load.rpc.allowed():
        machines.on_loss(engine.library(), workers, _lost)
        for endpoint in workers:
            if not machines.runs_sparse(engine.library(), machines.ask(endpoint)):
                why = "runs no sparse attention of this version: its layers stay exact"
                note(f"note: {endpoint} {why}", "yellow")
    return engine.Placement(
        n_gpu_layers=load.n_gpu_layers,
        kv_offload=load.kv_offload,
        placed=note_in_memory,
        workers=workers,
        tensor_split=load.rpc.tensor_split,
        numa=load.numa or "",
        repack=not load.no_repack,
    )


def _lost(reason: str) -> NoReturn:
    """End the program, from a thread of llama.cpp's, which would abort."""
    sys.stdout.flush()
    click.echo(f"\nerror: {reason}", err=True)
    click.echo("hint: check the worker's output, then restart it: sparq-cpp worker", err=True)
    sys.stderr.flush()
    os._exit(1)


def _with_room(options: SessionOptions, document: Document, file: GGUFFile) -> SessionOptions:
    """The options of a session with what a document needs, but for those that were given."""
    from pyorch.engine import DEFAULT_CTX

    needed = document.n_tokens + REPLY_ROOM
    if not given_on_command_line(["ctx"]):
        trained = geometry(file).n_ctx_train
        limit = needed if options.rope else trained or needed
        least = max(min(needed, limit), document.n_tokens)
        n_ctx = max(options.n_ctx or min(DEFAULT_CTX, limit), least)
        options = replace(options, n_ctx=n_ctx)
    if not given_on_command_line(["cache_type_k", "cache_type_v"]):
        type_k, type_v = document.types
        options = replace(options, type_k=type_k, type_v=type_v)
    return options


def on_gpu(load: LoadOptions) -> bool:
    """Whether a GPU of this machine holds layers."""
    from pyorch import engine

    return engine.library().has_gpu and load.n_gpu_layers != 0


def note_if_weights_exceed(file: GGUFFile, settings: Settings, load: LoadOptions) -> None:
    """Say what it costs where the weights do not fit into the memory beside the cache."""
    from pyorch.models.memory import weight_bytes

    if (n := settings.lacking) and not on_gpu(load):
        total = weight_bytes(file)
        note(
            f"note: {human_bytes(n)} of the weights do not fit into the memory, so a token may "
            f"read up to {human_bytes(total)} from the disk, in {total / 1e9:.1f} s at 1 GB/s",
            "yellow",
        )


def open_document(
    session: Session,
    document: Document,
    template: ChatTemplate | None = None,
    messages: Sequence[dict[str, str]] = (),
) -> bool:
    """Open a document in a session.

    Args:
        template, messages: a conversation that is to begin with it, and then states its time.

    Returns:
        whether the conversation begins with what was read. If not, the difference is told.
    """
    from pyorch import engine
    from pyorch.engine.chat_template import clock

    engine.open_document(session, document)
    if template is None:
        return True
    template.now = document.when or clock()
    words = partial(engine.detokenize, session, special=True)
    if not (why := engine.difference(session.tokens, template.tokens(messages), words)):
        return True
    template.now = clock()
    if document.needs_whole:
        why = f"{why}, and windows and recurrent layers know its end alone; all is read now"
        note(f"note: {document.name} is not used: {why}", "yellow")
    else:
        note(f"note: {document.name}: only {why}; the rest is read now", "yellow")
    note("hint: use the chat template that it was read with, or read it again", "yellow")
    return False


def open_session(
    model: ModelOptions,
    attention: AttentionSpec | None,
    context: ContextOptions,
    load: LoadOptions,
    n_sequences: int = 1,
    documents: Sequence[Document] = (),
) -> Session:
    """Load the model that the options name, with a bar if it takes long. The session has what
    `prepare` gives it for documents, and its attention where there is None."""
    from pyorch import engine

    n_mapped = min((d.n_tokens for d in documents), default=0)  # one of them is open
    options = replace(session_options(attention, context, load, n_sequences), n_mapped=n_mapped)
    file, settings = prepare(model.model, model.yes, options, documents=documents, load=load)
    note_if_weights_exceed(file, settings, load)
    with progress_bar("loading the model") as progress:
        session = engine.load(file, progress=progress, settings=settings, **vars(placement(load)))
    note_if_beyond(session.n_ctx, session.geometry.n_ctx_train)
    return session
