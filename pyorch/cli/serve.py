"""`sparq-cpp serve`: OpenAI's API over HTTP, by llama-cpp-python's own server."""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyorch import paths
from pyorch.attention.spec import AttentionSpec
from pyorch.cli import options as opt
from pyorch.cli.loading import ready, session_options, shown
from pyorch.cli.log import shows_log
from pyorch.cli.summary import info_of, why_dense
from pyorch.cli.terminal import note, note_if_beyond
from pyorch.cli.types import Number
from pyorch.errors import SparqError
from pyorch.ggml import NUMA
from pyorch.models.geometry import geometry
from pyorch.models.gguf_file import read_gguf

if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse
    from llama_cpp import Llama

    from pyorch.engine.settings import Settings

NEEDED = ("uvicorn", "fastapi", "pydantic_settings", "sse_starlette", "starlette_context", "yaml")
# llama.cpp takes these settings of YaRN from the model; the server's own defaults differ
_OF_THE_MODEL = {"yarn_attn_factor": -1.0, "yarn_beta_fast": -1.0, "yarn_beta_slow": -1.0}
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@click.command()
@opt.model_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=Number(int, 0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on; 0 takes any free one.",
)
@click.option("--api-key", metavar="KEY", help="Refuse requests without this key.")
@opt.context_options
@opt.load_options
@opt.attention_options
@opt.verbose_option
def command(
    model: opt.ModelOptions,
    host: str,
    port: int,
    api_key: str | None,
    context: opt.ContextOptions,
    load: opt.LoadOptions,
    attention: opt.AttentionOptions,
) -> None:
    """Answer OpenAI's API (/v1/chat/completions, /v1/completions) with sparse attention.

    It answers one request at a time: the next one waits, or ends a reply that is streaming. It
    needs the extra `server`: pip install 'sparq-cpp[server]'.
    """
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        raise SparqError(
            f"serve needs what is not installed: {', '.join(lacking)}",
            paths.install_command("server"),
        )
    from pyorch.engine.settings import checked

    options = session_options(attention.spec(), context, load)
    with _listen(host, port) as listener:
        path = ready(model.model, model.yes, options)
        file = read_gguf(path)
        settings = checked(file, **options)
        note_if_beyond(settings.n_ctx, geometry(file).n_ctx_train)
        alias = path.name if Path(model.model).exists() else model.model
        _serve(Served(path, alias, settings, load, api_key), listener)


@dataclass(frozen=True)
class Served:
    """A model as clients see it. They know it as `alias`, and need the key if there is one."""

    path: Path
    alias: str
    settings: Settings
    load: opt.LoadOptions
    api_key: str | None


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as e:
        hint = "--host takes an address of this machine, 127.0.0.1 or 0.0.0.0"
        if e.errno == errno.EADDRINUSE:
            hint = "another program listens there: --port 0 takes a free one"
        reason = str(e.strerror or e).partition(" (while")[0]
        raise SparqError(f"cannot listen on {host}:{port}: {reason}", hint) from None


async def _no_json(_: Request, error: Exception) -> JSONResponse:
    """Answer to a body that is no JSON, for which the server itself has a traceback only."""
    from fastapi.responses import JSONResponse

    error_of = {"message": f"the body is not JSON: {error}", "type": "invalid_request_error"}
    return JSONResponse({"error": error_of}, 400)


def _serve(served: Served, listener: socket.socket) -> None:
    import uvicorn

    from pyorch import engine

    spec = served.settings.attention or AttentionSpec("off")
    os.environ["SPARQ_ATTN"] = str(spec)  # the library reads it

    library = engine.library()
    library.check_gpu(served.load.n_gpu_layers)
    host, port = listener.getsockname()[:2]
    app, llama = _application(served, host, port)
    if (info := info_of(library.lib, llama._ctx.ctx)) and (why := why_dense(spec, info)):
        note(why, "yellow")
    if host not in LOOPBACK and not served.api_key:
        note("note: whoever reaches this address can use it; --api-key KEY asks for one", "yellow")
    place = f"[{host}]" if ":" in host else host
    note(f"{shown(served.path)}, attention {spec}, {served.settings.n_ctx} positions")
    note(f"http://{place}:{port}/v1 is ready (all calls: /docs); Ctrl-C ends it")

    level = "info" if shows_log() else "warning"
    with suppress(KeyboardInterrupt):
        uvicorn.Server(uvicorn.Config(app, log_level=level)).run(sockets=[listener])
    if info := info_of(library.lib, llama._ctx.ctx):
        share = f"{100 * info.sparse_share:.1f} % of their attention calls sparse"
        note(f"{info.counter('steps')} tokens decoded, {share}", "dim")


def _application(served: Served, host: str, port: int) -> tuple[FastAPI, Llama]:
    """llama-cpp-python's server with the model loaded, and its `Llama`, whose context lives as long
    as somebody holds it.

    Raises:
        SparqError: the model cannot be loaded.
    """
    from llama_cpp.server import app as server
    from llama_cpp.server.settings import ModelSettings, ServerSettings

    settings, n_gpu_layers, numa = served.settings, served.load.n_gpu_layers, served.load.numa
    type_k, type_v = settings.types
    model = ModelSettings(
        model=str(served.path),
        model_alias=served.alias,
        n_ctx=settings.n_ctx,
        **{**_OF_THE_MODEL, **settings.rope.params},
        n_threads=settings.n_threads,
        n_threads_batch=settings.n_threads,
        n_gpu_layers=-1 if n_gpu_layers is None else n_gpu_layers,  # the server's default is none
        type_k=type_k.number,
        type_v=type_v.number,
        numa=NUMA[numa] if numa else 0,
        flash_attn=True,  # sparse attention needs it
        logits_all=False,  # otherwise it keeps n_ctx times the vocabulary in memory
        verbose=shows_log(),
    )
    try:
        app = server.create_app(
            server_settings=ServerSettings(host=host, port=port, api_key=served.api_key),
            model_settings=[model],
        )
    except (ValueError, RuntimeError) as e:
        hint = "run with -v to see llama.cpp's own messages"
        raise SparqError(f"{served.path}: {e}", hint) from None
    app.add_exception_handler(ValueError, _no_json)
    return app, server._llama_proxy()
