"""llama-server as the benchmarks ask it: stock's with its two attentions, and ours."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import commands

from pyorch import children, engine, native
from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.bench import records
from pyorch.cli.types import Number
from pyorch.errors import SparqError
from pyorch.evals.texts import read_texts
from pyorch.models.content import content_hash

HOST = "127.0.0.1"
READY_S = 600  # that a server may load its model
Times = list[float]  # of the tokens of a reply, seconds since it was asked for


@dataclass(frozen=True)
class Case:
    """A kind of server. `model` is a hash; `spec` is off in both of stock's. The sizes of batches
    are llama-server's own where none are given."""

    model: str
    library: str
    flash_attn: bool
    spec: AttentionSpec
    n_slot: int
    n_prompt: int
    n_gen: int
    n_threads: int
    n_rounds: int
    n_batch: int = records.where_given(2048)  # tokens that a slot reads between those of the others
    n_ubatch: int = records.where_given(512)  # tokens that are evaluated together


def cases(specs: Sequence[AttentionSpec], **common: Any) -> list[Case]:
    """Stock's two, then ours with each of `specs`."""
    off = AttentionSpec("off")
    stock = [Case(library="stock", flash_attn=fa, spec=off, **common) for fa in (False, True)]
    return stock + [Case(library="sparq", flash_attn=True, spec=s, **common) for s in specs]


def measurement(
    n_prompt: int, n_gen: int, specs: Sequence[str], *own: Any
) -> Callable[[Callable[..., None]], click.Command]:
    """A command with the options of all measurements of servers, by default these, and its own.

    It is called with `path` and `book`, the model and the text; `common`, fields of the cases;
    `specs`, `folder`, `force`, and its own options.
    """
    number = partial(click.option, show_default=True)
    shared = (
        click.option("--model", "-m", metavar="FILE", required=True, help="GGUF model to serve."),
        click.option("--text", metavar="FILE", required=True, help="A book, long enough."),
        number("-p", "--n-prompt", type=Number(int, 2), default=n_prompt),
        number("-n", "--n-gen", type=Number(int, 4), default=n_gen),
        click.option(
            "-a",
            "--attn",
            "specs",
            multiple=True,
            default=specs,
            callback=lambda _, __, given: [parse_spec(x) for x in given],
            help=f"Our settings, one server each.  [default: {' and '.join(specs)}]",
        ),
        click.option("-t", "--threads", type=Number(int, 1), help="[default: all cores]"),
        commands.samples(5),
        commands.OUT,
        commands.FORCE,
    )

    def decorate(body: Callable[..., None]) -> click.Command:
        def given(
            model: str,
            text: str,
            n_prompt: int,
            n_gen: int,
            threads: int | None,
            samples: int,
            **options: Any,
        ) -> None:
            path = Path(model)
            common = {
                "model": content_hash(path),
                "n_prompt": n_prompt,
                "n_gen": n_gen,
                "n_threads": threads or engine.usable_cores(),
                "n_rounds": samples,
            }
            book = "\n\n".join(read_texts([Path(text)]))
            body(path=path, book=book, common=common, **options)

        given.__doc__ = body.__doc__
        return commands.command(*shared, *own)(given)

    return decorate


@dataclass
class Server:
    """A server that runs, and the prompts of its slots."""

    case: Case
    port: int
    prompts: list[list[int]]

    def ask(
        self, slot: int, n_gen: int, go_on: Callable[[Times], bool] = lambda _: True
    ) -> tuple[Times, dict[str, Any]]:
        """When the tokens of a reply came, and its timings. It is cancelled, and has none, once
        `go_on` says no."""
        body = {
            "prompt": self.prompts[slot],
            "id_slot": slot,
            "n_predict": n_gen,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        started, times, last = time.perf_counter(), [], {}
        for event in events(self.port, body):
            if event["stop"]:
                last = event["timings"]
            else:
                times.append(time.perf_counter() - started)
            if not go_on(times):
                break
        return times, last

    def all_slots(self, n_gen: int) -> list[tuple[Times, dict[str, Any]]]:
        with ThreadPoolExecutor(self.case.n_slot) as pool:
            return list(pool.map(lambda i: self.ask(i, n_gen), range(self.case.n_slot)))


@contextmanager
def request(port: int, path: str, body: object = None) -> Iterator[http.client.HTTPResponse]:
    """The answer to a request, which is a POST with a body.

    Raises:
        SparqError: the server did not answer 200.
    """
    connection = http.client.HTTPConnection(HOST, port, timeout=3600)
    try:
        text = None if body is None else json.dumps(body)
        head = {"Content-Type": "application/json"}
        connection.request("POST" if text else "GET", path, text, head)
        with connection.getresponse() as answer:
            if answer.status != 200:
                raise SparqError(f"the server answered {answer.status}: {answer.read()[:200]!r}")
            yield answer
    finally:
        connection.close()


def events(port: int, body: object) -> Iterator[dict[str, Any]]:
    with request(port, "/completion", body) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


@contextmanager
def running(case: Case, model: Path, log: Path, *more: object) -> Iterator[int]:
    """A server of this kind, with `more` options: its port.

    Raises:
        SparqError: it did not start; the message has the end of its log.
    """
    with socket.create_server((HOST, 0)) as s:
        port = s.getsockname()[1]
    n_ctx = -(-(case.n_prompt + case.n_gen + 1) // 256) * 256 * case.n_slot
    folder = native.built(case.library == "stock", ("llama-server",))
    argv = [folder / "llama-server", "-m", model, "--host", HOST, "--port", port, "-c", n_ctx]
    argv += ["-b", case.n_batch, "-ub", case.n_ubatch]
    argv += ["-np", case.n_slot, "-t", case.n_threads, "-fa", "on" if case.flash_attn else "off"]
    argv += ["--no-kv-unified", "--cache-ram", 0, "--no-warmup", *more]
    if case.spec.method != "off":
        argv += ["--sparse-attn", case.spec]
    with log.open("wb") as out:
        process = subprocess.Popen([str(a) for a in argv], stdout=out, stderr=out)
        try:
            _wait(process, port, log)
            yield port
        finally:
            children.stop(process, 60)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with request(port, "/health"):
                return
        except (OSError, SparqError):  # not yet: 503, or nobody listens
            time.sleep(0.2)
    code = process.poll()
    how = "did not answer" if code is None else children.ended(code)
    raise SparqError(f"llama-server {how}: {log.read_text(errors='replace')[-500:]}")


def prompts(port: int, book: str, case: Case) -> list[list[int]]:
    """A piece of the book for each slot; they differ from the first token on."""
    with request(port, "/tokenize", {"content": book}) as answer:
        tokens = json.load(answer)["tokens"]
    need = case.n_slot * case.n_prompt
    if len(tokens) < need:
        raise SparqError(f"the text has {len(tokens)} tokens", f"{need} are needed", 2)
    return [tokens[i : i + case.n_prompt] for i in range(0, need, case.n_prompt)]


def check(case: Case, timings: Sequence[dict[str, Any]]) -> None:
    """Raises:
    SparqError: a reply of ours was not, in every layer that is ours, what its setting says.
    """
    kind = "sparse" if case.spec.sparse else "dense"
    for t in timings if case.library == "sparq" else ():
        read = t.get("sparse_attn", {})
        n, calls = read.get("steps", 0), read.get(f"calls_{kind}", 0)
        if n < case.n_gen - 1 or calls < max(n, 1) or calls % n:
            raise SparqError(f"a reply of {case.spec} did not run {kind}: {read}")


def name_of(case: Case) -> str:
    return f"llama.cpp -fa {int(case.flash_attn)}" if case.library == "stock" else str(case.spec)
