"""`sparq-cpp serve`: OpenAI's API over HTTP, by our build of llama.cpp's llama-server."""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from pyorch import native, paths, system
from pyorch.attention.placement import layers_on_gpu
from pyorch.attention.spec import AttentionSpec
from pyorch.cli import gpu, served_documents, supervise
from pyorch.cli import options as opt
from pyorch.cli.groups import Option, option, takes
from pyorch.cli.loading import (
    model_title,
    note_if_weights_exceed,
    placement,
    prepare,
    session_options,
    sparse_layers,
)
from pyorch.cli.supervise import Child
from pyorch.cli.terminal import note, note_if_beyond, shows_log
from pyorch.cli.types import File
from pyorch.errors import SparqError
from pyorch.ggml import MAX_SEQUENCES
from pyorch.models.geometry import geometry, layer_weights
from pyorch.models.gguf_file import GGUFFile
from pyorch.models.memory import check_more
from pyorch.native import page
from pyorch.text import printable

if TYPE_CHECKING:
    from pyorch.engine import Document
    from pyorch.engine.settings import Settings

PROGRAM = "llama-server"

# What a careful operator would not have by default. `-- --slots` and the like turn it on again.
_SAFE = (
    # GET /slots shows everybody what the others are doing.
    "--no-slots",
    # By default it lets any web page that the user visits ask 127.0.0.1 and read the replies.
    "--cors-origins",
    "localhost",
    # By default who sends half a request, or stops reading a reply, holds a thread for an hour.
    "--timeout",
    "60",
)
# The variables that llama-server takes options from: one left over from elsewhere may open a door.
_FOREIGN = ("LLAMA_", "AIP_", "SPARQ_")
_KEPT = "SPARQ_PROMPT_ON_CPU"  # which no option of ours stands for

# what llama-server has in other words than we -> our option
_OTHERS = {
    "-m": "--model-url -mu --docker-repo -dr --hf-file -hff --models-dir --models-preset",
    "--api-key-file": "--api-key",
    "--ctx, the positions of each slot": "--kv-unified -kvu --no-kv-unified -no-kvu"
    " --kv-unified-per-slot",
    "-a SPEC, which needs flash attention": "--sparse-attn --flash-attn -fa",
    "--no-repack": "--repack",
    "--rope-scale": "--rope-freq-scale",
}
_ONE_OF_A_MODEL = re.compile(r"--(embd|fim|gpt-oss|vision)-.*-(default|spec)")  # and of its port


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens, and whom it answers."""

    host: str = option("--host", default="127.0.0.1", help="Address to listen on.")
    port: int = option(
        "--port",
        type=click.IntRange(0, 65535),
        default=8080,
        help="Port to listen on; 0 takes any free one.",
    )
    parallel: int = option(
        "--parallel",
        "-np",
        type=click.IntRange(1, MAX_SEQUENCES),
        default=4,
        help="Answer this many requests at once, each with --ctx positions.",
    )
    api_key_file: str | None = option(
        "--api-key-file",
        type=File(),
        help="Refuse requests without a key from this file (one per line).",
    )
    insecure: bool = option(
        "--insecure", is_flag=True, help="Let other machines in, even without keys."
    )


@click.command()
@opt.model_options
@opt.attention_options
@opt.context_options
@takes(server=ServerOptions)
@opt.document_option
@opt.verbose_option
@opt.load_options
@click.argument("more", nargs=-1, type=click.UNPROCESSED, metavar="[MODEL] [-- OPTIONS]")
def command(
    model: opt.ModelOptions,
    server: ServerOptions,
    document_names: tuple[str, ...],
    context: opt.ContextOptions,
    load: opt.LoadOptions,
    attention: opt.AttentionOptions,
    more: tuple[str, ...],
) -> None:
    """Answer OpenAI's API (/v1/chat/completions, /v1/completions) with sparse attention.

    llama.cpp's llama-server answers, several requests at once; what stands after -- are further
    options of it. It is built when it is first needed. A prompt that begins with what a --document
    has read is not read again.
    """
    from pyorch.engine import document_file

    more = more[1:] if more and not more[0].startswith("-") else more  # the model
    _check_more(more)
    keys = _keys(server.api_key_file) if server.api_key_file is not None else []
    options = session_options(attention.spec(), context, load, server.parallel)
    options = replace(options, swa_full="--swa-full" in served_documents.names(more))
    documents = [document_file.named(name) for name in document_names]
    with supervise.reserved(server.host, server.port) as (address, port):
        if not (keys or ipaddress.ip_address(address.partition("%")[0]).is_loopback):
            if not server.insecure:
                what = f"--host {server.host} would let other machines in without a key"
                hint = "--api-key-file FILE requires one; --insecure does without"
                raise SparqError(what, hint, exit_code=2)
            note("note: whoever reaches this address can use it", "yellow")
        file, settings = prepare(model.model, model.yes, options, (PROGRAM,), documents, load)
    # a name without commas, at which llama-server would cut it, and in UTF-8, as its replies are
    name = file.path.name if Path(model.model).exists() else model.model
    alias = printable(name).replace(",", "_")
    _serve(Served(file, settings, alias, address, port, keys, load, documents), more)


def _check_more(more: Sequence[str]) -> None:
    """Refuse what is no option, and options of llama-server that we set. A value, which may be a
    key, is not in the message."""
    if more and not more[0].startswith("-"):
        hint = f"options of {PROGRAM} stand after --: sparq-cpp serve MODEL -- --metrics"
        raise SparqError(f"serve takes no argument {more[0]!r}", hint, exit_code=2)
    options = [p for p in command.params if isinstance(p, Option) and p.name != "attn"]
    ours_of = {name: max(p.opts, key=len) for p in options for name in p.names}
    ours_of |= {name: ours for ours, names in _OTHERS.items() for name in names.split()}
    for name in sorted(served_documents.names(more)):
        if ours := ours_of.get(name) or "-m" * bool(_ONE_OF_A_MODEL.fullmatch(name)):
            raise SparqError(f"{name} after -- would contradict ours", f"use {ours}", exit_code=2)


def _keys(name: str) -> list[str]:
    """The keys in a file; a pipe is one, too."""
    make = f"one key a line, for example: (umask 077; openssl rand -hex 32 > {name})"
    try:
        with paths.expanded(name).open("rb") as file:
            lines = file.read().decode("utf-8").split("\n")
            mode = os.fstat(file.fileno()).st_mode
    except (OSError, UnicodeDecodeError) as e:
        raise SparqError(f"{name}: {getattr(e, 'strerror', None) or e}", make) from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise SparqError(f"{name} holds no key", make)
    # llama-server would take them for a part of the key
    if keys[0].startswith("\ufeff") or any(key != key.strip() for key in keys):
        raise SparqError(f"{name}: a key has blanks or a byte order mark at its ends", make)
    if mode & 0o044:
        note(f"note: others on this machine can read {name}: chmod 600 {name}", "yellow")
    return keys


@dataclass(frozen=True)
class Served:
    """A model as clients see it. keys: they need one of these, if there are any; documents: what
    has been read before."""

    file: GGUFFile
    settings: Settings
    alias: str
    address: str
    port: int
    keys: Sequence[str]
    load: opt.LoadOptions
    documents: Sequence[Document] = ()


class Account:
    """What ran, by the log: llama-server says it of each reply, our library at the end."""

    _REPLY = re.compile(r"\| +eval time = .*/ +(\d+) tokens")

    def __init__(self) -> None:
        self.tokens = self.sparse = self.exact = 0
        self.left: set[str] = set()  # why attention was left to llama.cpp
        self.opened = 0  # prompts that began with a document
        self.unused: set[str] = set()  # why others did not

    def read(self, line: str) -> None:
        _, _, calls = line.partition("sparse attention calls: ")
        _, _, document = line.partition("sparse document: ")
        if calls.startswith("{"):
            n = json.loads(calls)
            self.sparse, self.exact = self.sparse + n["sparse"], self.exact + n["exact"]
            self.left |= n["left"].keys()
        elif document.startswith("used "):
            self.opened += 1
        elif document and document not in self.unused:  # the prompt is read as if there were none
            self.unused.add(document)
            note(f"note: document {document}", "yellow")
        elif reply := self._REPLY.search(line):
            self.tokens += int(reply[1])

    def report(self, spec: AttentionSpec) -> None:
        """Report it, if anything was asked. Without calls nobody knows, as with `-- -lv 0`."""
        if not self.tokens:
            return
        calls = self.sparse + self.exact
        if spec.sparse and not self.sparse and (calls or self.left):
            why = "; ".join(sorted(self.left))
            why = why or f"up to min_ctx {spec.min_ctx} positions, or k covers them all"
            note(f"note: attention was exact throughout: {why}", "yellow")
        text = f"{self.tokens} tokens decoded"
        if calls:
            text += f", {100 * self.sparse / calls:.1f} % of their attention calls sparse"
        note(text, "dim")


def _serve(served: Served, more: Sequence[str]) -> None:
    from pyorch.engine.document import check_model

    file, settings = served.file, served.settings
    for document in served.documents:
        check_model(document, file, settings.rope, settings.n_ctx, settings.types)
    spec = settings.spec or AttentionSpec("off")
    place = placement(served.load)
    if (place.n_gpu_layers or place.tensor_split) and not place.workers:
        from pyorch import engine

        engine.library().check_gpu(place.n_gpu_layers, place.tensor_split)
    note_if_beyond(settings.n_ctx, geometry(file).n_ctx_train)
    note_if_weights_exceed(file, settings, served.load)
    n, of, why = sparse_layers(settings, spec)
    if spec.sparse and (n < of or not of):
        what = f"{of - n} of {of} layers are exact at {settings.n_ctx} positions"
        note(f"note: {what}: {why}", "yellow")
    program = native.lib_dir(tools=(PROGRAM,)) / system.program(PROGRAM)
    in_memory = _kv_in_memory(served)
    adapted = any(name.startswith("--lora") for name in served_documents.names(more))
    env = {k: v for k, v in os.environ.items() if k == _KEPT or not k.startswith(_FOREIGN)}
    env |= native.waiting() | in_memory | {"SPARQ_NO_CONFIG": "1"}
    for config in ("/etc", os.environ.get("XDG_CONFIG_HOME") or "~/.config"):
        file_of_options = os.path.expanduser(f"{config}/llama.cpp/config.ini")
        if os.path.exists(file_of_options):
            note(f"note: {file_of_options} is not read: its options stand after --", "yellow")
    account = Account()
    with ExitStack() as stack:
        files = TemporaryDirectory(prefix="sparq-serve-")  # which it reads when it begins
        folder = Path(stack.enter_context(files))
        ui = page.find()
        shown = ["--path", str(ui)] if ui else []
        options, variables = served_documents.passed_on(file, served.documents, more, folder)
        line = [*_arguments(served, folder, adapted), *_SAFE, *shown, *options, *more]
        child = Child([str(program), *line], env | variables, account.read, shows_log())
        stack.enter_context(child)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(served.address, served.address)
        if child.wait_ready(lambda: _answers(host, served.port), "loading the model"):
            files.cleanup()
            n = settings.n_sequences
            slots = f" in each of {n} slots" if n > 1 else ""
            note(f"{model_title(file.path)}, attention {spec}, {settings.n_ctx} positions{slots}")
            url = f"[{served.address}]" if ":" in served.address else served.address
            n_read = served_documents.n_usable(
                served.documents, host, served.port, next(iter(served.keys), ""), more
            )
            if n_read:
                note(f"documents: {n_read} tokens were read before")
            also = ", the page is at /" if ui else ""
            note(f"http://{url}:{served.port}/v1 is ready{also}; Ctrl-C ends it")
            child.wait_end()
    if child.killed:
        note(f"note: {PROGRAM} was killed: {child.killed}", "yellow")
    account.report(spec)
    if served.documents and account.tokens:
        note(f"prompts that began with a document: {account.opened}", "dim")


def _kv_in_memory(served: Served) -> dict[str, str]:
    """The variable that tells llama-server of which layers K and V stay in memory, if any do not
    fit on the GPU beside the weights, or gain by it."""
    from pyorch.engine.library import free_on

    load, geo = served.load, geometry(served.file)
    if load.kv_offload is not None or load.rpc.workers or load.n_gpu_layers == 0:
        return {}
    if not native.gpus():
        return {}
    cache, layers = served.settings, layers_on_gpu(geo.n_layer, load.n_gpu_layers)
    gpus, rates = gpu.apart(partial(gpu.asked, cache.spec, cache.n_threads))
    weights = layer_weights(served.file, geo.n_layer, used=False)
    free = free_on(gpus) - sum(weights[il] for il in (*layers, geo.n_layer))
    in_memory = cache.in_memory(free, layers, rates)
    if in_memory or rates:
        note(gpu.in_memory_text(cache, in_memory, rates), "yellow")
    if not in_memory:
        return {}
    if native.has_gpu_memory():
        sizes = cache.layer_bytes()
        check_more(served.file.path, "cache beside the GPU's", sum(sizes[il] for il in in_memory))
    return {"SPARQ_KV_IN_MEMORY": ",".join(map(str, in_memory))}


def _arguments(served: Served, folder: Path, adapted: bool) -> list[str]:
    """The line of llama-server, but for the options that are passed on; folder: for files that it
    reads when it begins; adapted: these options have a LoRA adapter."""
    settings = served.settings
    type_k, type_v = settings.types
    values: dict[str, object] = {
        "--model": served.file.path,
        "--alias": os.fsdecode(served.alias.encode()),  # in UTF-8, whatever names of files are in
        "--host": served.address,
        "--port": served.port,
        "--parallel": settings.n_sequences,
        # llama-server divides it over the slots
        "--ctx-size": settings.n_ctx * settings.n_sequences,
        "--threads": settings.n_threads,
        # Of llama-server's own 2048 tokens every reply would wait while a slot reads its prompt.
        "--batch-size": settings.n_batch,
        "--ubatch-size": settings.n_batch,
        "--cache-type-k": type_k.name,
        "--cache-type-v": type_v.name,
        "--sparse-attn": settings.spec or "off",
        "--flash-attn": "on",  # sparse attention needs it
        # The context is given and fits; llama.cpp would load the model twice to find that out.
        "--fit": "off",
        # MiB of earlier prompts: its own 8 GiB, or half of what is left. It does not know with
        # which adapters a prompt was read.
        "--cache-ram": 0 if adapted else min(8192, max(settings.left, 0) // 2 >> 20),
        "--verbosity": 4,  # our library says what ran sparse at this level
    }
    load, rope = served.load, settings.rope
    optional = {
        "--rope-scaling": rope.scaling,
        "--rope-freq-scale": rope.freq_scale,
        "--yarn-orig-ctx": rope.yarn_orig_ctx,
        "--rope-freq-base": rope.freq_base,
        "--numa": load.numa,
        "--n-gpu-layers": load.n_gpu_layers,
        "--device": "none" if load.n_gpu_layers == 0 else None,  # or prompts would go there
        "--rpc": ",".join(load.rpc.workers) or None,
        "--tensor-split": ",".join(map(str, load.rpc.tensor_split)) or None,
    }
    values |= {name: value for name, value in optional.items() if value is not None}
    line = [str(word) for pair in values.items() for word in pair]
    line += ["--no-kv-offload"] * (load.kv_offload is False)
    line += ["--no-repack"] * (load.no_repack or settings.lacking > 0)
    # in one cache for all a long request takes the room of the others, and each reads all cells
    line.append("--no-kv-unified")
    if served.keys:
        # A file of its own, because a pipe is read once. Twice, because it logs the last letters of
        # a key if there is only one.
        (keys := folder / "keys").write_text("\n".join(served.keys), "utf-8", newline="")
        line += ["--api-key-file", str(keys)] * 2
    # It would copy the document of each slot that is idle, whenever another slot begins.
    line += ["--no-cache-idle-slots"] * bool(served.documents)
    return line


def _answers(host: str, port: int) -> bool:
    """Whether the server has its model: until then it answers everything with 503."""
    with closing(http.client.HTTPConnection(host, port, timeout=2)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status != 503
        except (OSError, http.client.HTTPException):
            return False
