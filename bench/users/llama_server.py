"""llama-server as it is asked: stock's with its two attentions, and ours."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from bench.options import BookOptions, number_option, specs_option
from pyorch import children, native
from pyorch.attention.spec import AttentionSpec
from pyorch.errors import SparqError
from pyorch.measure.turns import OFF, Side

HOST = "127.0.0.1"
READY_S = 600  # that a server may take to load its model
Times = list[float]  # of the tokens of a reply, seconds since it was asked for


@dataclass(frozen=True, kw_only=True)
class ServerOptions(BookOptions):
    n_slot: int = number_option("--slots", default=8, text="Users.")
    n_prompt: int = number_option("-p", "--n-prompt", default=4096, low=2)
    n_gen: int = number_option("-n", "--n-gen", default=64, low=4)
    n_rounds: int = number_option("--samples", default=5)
    attn: tuple[AttentionSpec, ...] = specs_option("dense", "sparq,ratio=1/8")


@dataclass(frozen=True, kw_only=True)
class ServerCase(Side):
    """A kind of server. `model` is a hash."""

    model: str
    n_slot: int
    n_prompt: int
    n_gen: int
    n_threads: int
    n_rounds: int

    @property
    def name(self) -> str:
        return self.place.replace("stock", "llama.cpp") if self.library == "stock" else self.label


@dataclass
class Server:
    """A server that runs, and the prompts of its slots."""

    case: ServerCase
    port: int
    prompts: list[list[int]]

    def ask(self, slot: int, n_gen: int) -> tuple[Times, dict[str, Any]]:
        """When the tokens of a reply came, and its timings."""
        body = {
            "prompt": self.prompts[slot],
            "id_slot": slot,
            "n_predict": n_gen,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        started, times, last = time.perf_counter(), [], {}
        with request(self.port, "/completion", body) as answer:
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line[6:])
                if event["stop"]:
                    last = event["timings"]
                else:
                    times.append(time.perf_counter() - started)
        return times, last

    def all_slots(self, n_gen: int) -> list[tuple[Times, dict[str, Any]]]:
        with ThreadPoolExecutor(self.case.n_slot) as pool:
            return list(pool.map(lambda i: self.ask(i, n_gen), range(self.case.n_slot)))


def request(port: int, path: str, body: object = None) -> Any:
    """The answer to a request, which is a POST with a body.

    Raises:
        SparqError: the server did not answer 200.
    """
    data = None if body is None else json.dumps(body).encode()
    asked = Request(f"http://{HOST}:{port}{path}", data, {"Content-Type": "application/json"})
    try:
        return build_opener(ProxyHandler({})).open(asked, timeout=3600)
    except HTTPError as e:
        raise SparqError(f"the server answered {e.code}: {e.read()[:200]!r}") from None


@contextmanager
def running(case: ServerCase, model: Path, log: Path) -> Iterator[int]:
    """A server of this kind: its port.

    Raises:
        SparqError: it did not start; the message has the end of its log.
    """
    with socket.create_server((HOST, 0)) as s:
        port = s.getsockname()[1]
    n_ctx = -(-(case.n_prompt + case.n_gen + 1) // 256) * 256 * case.n_slot
    folder = native.built(case.library == "stock", ("llama-server",))
    argv = [folder / "llama-server", "-m", model, "--host", HOST, "--port", port, "-c", n_ctx]
    argv += ["-np", case.n_slot, "-t", case.n_threads, "-fa", "on" if case.flash_attn else "off"]
    argv += ["--no-kv-unified", "--cache-ram", 0, "--no-warmup"]
    if case.spec != OFF:
        argv += ["--sparse-attn", case.spec]
    with (
        log.open("wb") as out,
        children.running(children.bound(list(map(str, argv))), stdout=out, stderr=out) as process,
    ):
        if not children.wait_until(process, lambda: _answers(port), seconds=READY_S):
            code = process.poll()
            how = "did not answer" if code is None else children.ended(code)
            raise SparqError(f"llama-server {how}: {log.read_text(errors='replace')[-500:]}")
        yield port


def _answers(port: int) -> bool:
    """Whether the server has loaded its model: 503 says not yet, and at first nobody listens."""
    try:
        with request(port, "/health"):
            return True
    except (OSError, SparqError):
        return False


def prompts(port: int, book: str, case: ServerCase) -> list[list[int]]:
    """A piece of the book for each slot; they differ from the first token on."""
    with request(port, "/tokenize", {"content": book}) as answer:
        tokens = json.load(answer)["tokens"]
    need = case.n_slot * case.n_prompt
    if len(tokens) < need:
        raise SparqError(f"the text has {len(tokens)} tokens", f"{need} are needed", 2)
    return [tokens[i : i + case.n_prompt] for i in range(0, need, case.n_prompt)]


def check(case: ServerCase, timings: Sequence[dict[str, Any]]) -> None:
    """Raises:
    SparqError: a reply of ours was not, in every layer that is ours, what its setting says.
    """
    kind = "sparse" if case.spec.sparse else "dense"
    for t in timings if case.library == "sparq" else ():
        read = t.get("sparse_attn", {})
        n, calls = read.get("steps", 0), read.get(f"calls_{kind}", 0)
        if n < case.n_gen - 1 or calls < max(n, 1) or calls % n:
            raise SparqError(f"a reply of {case.spec} did not run {kind}: {read}")
