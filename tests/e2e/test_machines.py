"""Layers on other machines: the bits of one process, the greeting, and what a lost worker does."""

from __future__ import annotations

import ctypes
import functools
import http.client
import json
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import tiny as tiny_models
from link import Link
from link import local_worker as worker
from llama import from_child

from pyorch import engine
from pyorch.attention.placement import split_layers
from pyorch.engine import document_file, machines
from pyorch.errors import SparqError
from pyorch.models import synth

HERE = Path(__file__).parent
SPARQ = "sparq,rank=8,topk=64,min_ctx=0"
N_LAYER, N_PROMPT, N_DECODE, N_BATCH = 4, 600, 40, 512  # of away.py
N_WORKERS = 3


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("workers")
    with ExitStack() as stack:
        yield [stack.enter_context(worker(folder / f"{i}.log"))[0] for i in range(N_WORKERS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp("m") / "m.gguf", "llama", n_layer=N_LAYER)


@pytest.fixture(scope="module")
def run() -> Callable[..., dict[str, Any]]:
    """run(model, spec, workers, other options of away.py)."""

    @functools.cache
    def go(model: Path, spec: str, workers: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
        text = json.dumps({"spec": spec, "workers": workers, **options})
        return from_child(HERE / "away.py", model, text)

    return go


# ---- the bits of one process ----

VARIANTS = {
    "sparq": (SPARQ, {}),
    "sequences": (SPARQ, {"n_sequences": 3}),
    "q8_0": (SPARQ, {"type_k": "q8_0", "type_v": "q8_0"}),
    "f16 shadow, mean of V": (SPARQ + ",mean_v=on,shadow=f16", {}),
    "f32 prompt": (SPARQ + ",prompt=f32", {}),
    "topk": ("topk,k=64,min_ctx=0", {}),
    "dense": ("dense", {}),
    "short": ("sparq", {}),  # below min_ctx: our exact attention, as on one CPU
    "shifts": (SPARQ, {"n_decode": 1000, "shift": True}),  # which move K, and seal it anew
}


PLACES: dict[str, tuple[int, dict[str, Any]]] = {  # workers, and what goes to them
    "two": (2, {"tensor_split": (1, 3)}),
    "kv here": (1, {"kv_offload": False}),
    "three": (3, {"tensor_split": (5, 1, 2)}),
    "some layers here": (3, {"tensor_split": (1, 1, 1), "n_gpu_layers": 3}),
}


@pytest.mark.parametrize(
    ("place", "name"),
    [(p, v) for p in PLACES for v in VARIANTS if p in ("two", "kv here") or v == "sparq"],
)
def test_bits_and_counters_are_those_of_one_process(
    place: str, name: str, model: Path, workers: list[str], run
) -> None:
    """Prompt and replies run where K lies, layer by layer as `explain` says."""
    (n, where), (spec, options) = PLACES[place], VARIANTS[name]
    got = run(model, spec, tuple(workers[:n]), **where, **options)
    want = run(model, spec, **options)
    assert got["bits"] == want["bits"]
    info, counters = got["info"], got["info"]["counters"]
    assert counters == want["info"]["counters"] and counters["calls_prefill"] > 0
    parts = [range(N_LAYER), range(0)]
    if place != "kv here":
        parts = split_layers(N_LAYER, where["tensor_split"], where.get("n_gpu_layers"))
        assert info["layers"] == want["info"]["layers"]
    n_token = options.get("n_decode", N_DECODE) * options.get("n_sequences", 1)
    n_token *= name not in ("dense", "short")
    devices = sorted(info["devices"], key=lambda x: x["name"])  # CPU, RPC0, ..
    for device, part in zip(devices, parts, strict=True):
        n_here = sum(il < N_LAYER for il in part)
        assert device["calls_sparse"] == n_token * n_here
        assert (device["bytes_read"] > 0) == (n_here > 0)
    assert sum(x["bytes_read"] for x in devices) == counters["bytes_read"]
    assert sum(x["shadow_bytes"] for x in devices) == info["shadow_bytes"]


def test_windows(workers: list[str], tmp_path: Path, run) -> None:
    """Prompts of layers with a sliding window are ours too, on the worker that holds them."""
    model = tiny_models.write(tmp_path / "m.gguf", "gemma3", n_layer=N_LAYER)
    got, want = run(model, SPARQ, tuple(workers[:2])), run(model, SPARQ)
    assert (got["bits"], got["info"]["counters"]) == (want["bits"], want["info"]["counters"])


def test_weights_of_few_bits(workers: list[str], tmp_path: Path, run) -> None:
    """A worker takes them as they are, and so does --no-repack."""
    shape = synth.Shape(4, 256, 4, 2, 64, 256, 288, n_ctx=4096)
    synth.write(path := tmp_path / "q4.gguf", shape, "q4_k_m")
    got = run(path, SPARQ, (workers[0],))
    assert got["bits"] == run(path, SPARQ, repack=False)["bits"]


@pytest.mark.parametrize("what", ["restore", "document"])
def test_what_was_saved(what: str, model: Path, workers: list[str], tmp_path: Path, run) -> None:
    """K and V come from the workers, and go back to them: sealed anew, or with the shadow."""
    got = run(model, SPARQ, tuple(workers[:2]), **{what: str(tmp_path / "there")})
    want = run(model, SPARQ, **{what: str(tmp_path / "here")})
    assert got["bits"] == want["bits"]


# ---- who is sent what ----


def test_no_other_worker_is_sent_our_op(
    model: Path, workers: list[str], tmp_path: Path, run
) -> None:
    """One of llama.cpp's own keeps its layers to llama.cpp's attention; the others' are sparse."""
    with worker(tmp_path / "log", stock=True) as (foreign, _):
        assert not machines.runs_sparse(engine.library(), machines.ask(foreign))
        assert machines.runs_sparse(engine.library(), machines.ask(workers[0]))
        got = run(model, SPARQ, (workers[0], foreign), tensor_split=(1, 1))
    states = [layer["state"] for layer in got["info"]["layers"]]
    assert "sparse" in states and "dense" in states
    reasons = {layer["reason"] for layer in got["info"]["layers"]} - {""}
    assert reasons == {"on a worker without our sparse attention"}
    counters = got["info"]["counters"]
    assert counters["calls_sparse"] == N_DECODE * states.count("sparse")
    assert counters["calls_stock"] > 0


# ---- faults ----


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.mark.parametrize("text", ["", ":1", "a:b", "a:0", "a:70000", "a:1:2", "::1", "[::1]:50052"])
def test_no_endpoint(text: str) -> None:
    with pytest.raises(SparqError):
        machines.parse_endpoint(text)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", "not a worker"),
        (b"", "not a worker"),
        (struct.pack("<Q4B24x", 28, 6, 0, 0, 0), "version 6"),
        (None, "does not answer"),  # it is busy with another program
    ],
)
def test_no_worker(answer: bytes | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else, an older one, or one that has no time."""
    monkeypatch.setattr(machines, "_ANSWER_S", 0.2 if answer is None else 10)
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:

        def reply() -> None:
            one, _ = server.accept()
            stack.enter_context(one)
            one.recv(64)
            if answer is not None:
                one.sendall(answer)
                one.close()

        threading.Thread(target=reply, daemon=True).start()
        with pytest.raises(SparqError, match=reason) as e:
            machines.ask(f"127.0.0.1:{server.getsockname()[1]}")
        assert e.value.hint


def test_nobody_there() -> None:
    assert not machines.answers("::1:50052")
    with pytest.raises(SparqError, match="no worker answers"):
        machines.ask(f"127.0.0.1:{closed_port()}")


def cli(*args: object) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "pyorch", *map(str, args)]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True)


def dies_when(it: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    """Kill it as soon as that is so."""

    def watch() -> None:
        while process.poll() is None and not it():
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


@pytest.mark.parametrize(
    ("n_bytes", "n_words"), [(50_000, 800), (1_500_000, 800), (0, 400)], ids=["load", "prompt", ""]
)
def test_a_lost_worker(n_bytes: int, n_words: int, tiny: Path, tmp_path: Path) -> None:
    """One line, exit code 1, and no wait: while weights come, in a prompt, or a reply."""
    with worker(tmp_path / "log") as (endpoint, process), Link(endpoint) as link:
        if n_bytes:
            dies_when(lambda: link.n_sent >= n_bytes, process)
        line = ["generate", "-m", tiny, "--rpc", link.endpoint, "-a", SPARQ, "-n", 1500]
        child = cli(*line, "-p", "word " * n_words)
        if not n_bytes:
            assert child.stdout is not None
            child.stdout.read(1)  # the first token
            process.send_signal(signal.SIGKILL)
        started = time.monotonic()
        _, err = child.communicate(timeout=60)
        assert time.monotonic() - started < 30
    assert child.returncode == 1, err
    lines = [line for line in err.splitlines() if line.startswith(("error:", "hint:"))]
    assert len(lines) == 2 and "worker" in lines[0], err
    assert "Traceback" not in err and "ggml-rpc.cpp" not in err


VANISHED = """
ip link set lo up
"$0" -m pyorch worker --port 50099 -t 1 &
worker=$!
until "$0" -m pyorch generate -m "$1" --rpc 127.0.0.1:50099 -n 1 -p a &>"$2"; do sleep 0.2; done
: >"$2"
"$0" -m pyorch generate -m "$1" --rpc 127.0.0.1:50099 -n 4000 -p a -a dense >"$2" &
reply=$!
until [[ -s $2 ]]; do sleep 0.1; done
ip link set lo down
wait $reply
code=$?
kill $worker
exit $code
"""


@pytest.mark.slow
def test_a_vanished_host(demo_model: Path, tmp_path: Path) -> None:
    """No packet comes back any more, not even a refusal: the time-outs of the connection."""
    apart = ["unshare", "-rn"]
    if not shutil.which("unshare") or subprocess.run([*apart, "ip", "link"]).returncode:
        pytest.skip("no network namespace can be made here")
    argv = [*apart, "bash", "-c", VANISHED, sys.executable, demo_model, tmp_path / "out"]
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "error: the worker at 127.0.0.1:50099 is gone" in done.stderr


@contextmanager
def connection() -> Iterator[tuple[Callable[[bytes], int], socket.socket]]:
    """The RPC backend's send() of one end, and the other end."""
    send = engine.library().lib._lib.ggml_sparse_rpc_send
    send.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
    send.restype = ctypes.c_int64
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        engine.library().lib._lib.ggml_sparse_rpc_keep_alive(near.fileno())
        yield lambda data: send(near.fileno(), data, len(data)), far


@pytest.mark.slow
def test_a_worker_that_reads_nothing_for_long_is_waited_for() -> None:
    """As one that computes. After 20 s the system would take it for gone, although it answers."""
    data, n_sent, n_read = b"x" * (32 << 20), 0, 0
    with connection() as (send, far):

        def read() -> None:
            nonlocal n_read
            time.sleep(26)
            with suppress(OSError):  # it was reset
                while n_read < len(data):
                    n_read += len(far.recv(1 << 20))

        reader = threading.Thread(target=read)
        reader.start()
        while n_sent < len(data):
            n = send(data[n_sent:])
            assert n > 0, f"after {n_sent} bytes"
            n_sent += n
        reader.join()
    assert n_read == len(data)


def test_a_worker_that_closed_its_side_is_lost() -> None:
    """Although its system goes on acknowledging what nobody reads."""
    with connection() as (send, far):
        far.shutdown(socket.SHUT_WR)
        signal.alarm(30)  # a wait that does not end fails
        while (n := send(b"x" * (1 << 20))) > 0:
            pass
        signal.alarm(0)
        assert n == -1


@pytest.mark.parametrize(
    "line",
    [
        "generate -m MODEL -p x -a off --rpc 8.8.8.8",
        "generate -m MODEL -p x -a off --rpc 127.0.0.1:PORT",
        "explain -m MODEL --rpc 127.0.0.1:PORT",
        "worker --host 0.0.0.0",
        "worker --host ::1 --insecure",
    ],
)
def test_refusals(line: str, tiny: Path) -> None:
    words = line.replace("MODEL", str(tiny)).replace("PORT", str(closed_port()))
    child = cli(*words.split())
    out, err = child.communicate(timeout=60)
    assert child.returncode in (1, 2) and not out
    assert [x.split(":")[0] for x in err.strip().splitlines()] == ["error", "hint"]


def line_with(text: str, child: subprocess.Popen[str]) -> str:
    """What it says when it is ready."""
    assert child.stderr is not None
    while text not in (line := child.stderr.readline()):
        assert line, "it has ended"
    return line


def test_the_command(tiny: Path) -> None:
    """`worker` says when it is ready, serves one program after the other, and ends at a signal."""
    port = closed_port()
    child = cli("worker", "--port", port, "-t", 1)
    assert f"127.0.0.1:{port}" in line_with("--rpc", child)
    for _ in range(2):
        done = cli("generate", "-m", tiny, "--rpc", f"127.0.0.1:{port}", "-n", 4, "-p", "a")
        _, err = done.communicate(timeout=120)
        assert done.returncode == 0, err
    taken = cli("worker", "--port", port)
    _, err = taken.communicate(timeout=60)
    assert taken.returncode == 1 and "another program" in err
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=20)
    assert child.returncode == 0


def test_a_document_goes_on_after_a_lost_worker(tiny: Path, tmp_path: Path) -> None:
    """What was read until then is kept, and the next worker gets it."""
    text, kept = tmp_path / "text.txt", tmp_path / "text.kv"
    text.write_text("abcdefgh " * 380, "utf-8")
    partial = tmp_path / "text.kv.partial"
    line = ["read", text, "-m", tiny, "-o", kept, "-a", SPARQ, "--plain"]

    with worker(tmp_path / "log") as (endpoint, process), Link(endpoint, rate=2e7) as link:
        child = cli(*line, "--rpc", link.endpoint)
        dies_when(lambda: n_read(partial), process)
        _, err = child.communicate(timeout=120)
    assert child.returncode == 1 and "worker" in err, err
    n = n_read(partial)
    assert 0 < n < 3420
    with worker(tmp_path / "log2") as (endpoint, _):
        child = cli(*line, "--rpc", endpoint, "--json")
        out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    assert json.loads(out)["tokens"] == 3421 and not partial.exists()


def n_read(partial: Path) -> int:
    try:
        return document_file.load(partial, whole=False).n_read
    except (SparqError, OSError):
        return 0


def test_explain(workers: list[str], tmp_path: Path) -> None:
    """What each machine holds adds up to the whole; of experts memory holds all, a token reads
    some."""
    model = tiny_models.write(tmp_path / "m.gguf", "gpt-oss", n_layer=N_LAYER)
    line = ["explain", "-m", model, "-a", SPARQ, "-c", 2048, "--rpc", ",".join(workers[:2])]
    child = cli(*line, "-ts", "3,1", "-ngl", 4, "--json")
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    found = json.loads(out)
    rows = found["machines"]
    assert [x["layers"] for x in rows] == [[0, 1], [1, 4], [4, 5]]
    assert sum(x["cache"] for x in rows) == found["kv_memory"]
    assert sum(x["shadow"] for x in rows) == found["shadow_memory"]
    token = found["weight_bytes_per_token"] + found["attention_bytes_per_token"]
    assert sum(x["read"] for x in rows) == pytest.approx(token, abs=len(rows) * N_LAYER)
    assert all(x["sparse"] and x["free"] > 2**28 for x in rows)
    assert rows[1]["weights"] > rows[1]["read"]
    assert found["bandwidth"] > 1e8, "bytes per second, as measured"


def test_eval_and_bench(demo_model: Path, workers: list[str], tmp_path: Path) -> None:
    """Stock and ours over the same workers, one program after the other."""
    where = ("-m", demo_model, "--rpc", ",".join(workers[:2]), "-a", "sparq,ratio=1/8,min_ctx=0")
    child = cli("eval", "needle", "--ctx", 1024, "-n", 1, *where, "--out", tmp_path / "eval")
    _, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    first = json.loads((tmp_path / "eval" / "needle.jsonl").read_text().splitlines()[0])
    assert first["case"]["n_workers"] == 2
    child = cli("bench", *where, "-d", 600, "-n", 2, "-r", 2, "-o", "json", "--out", tmp_path)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    rows = json.loads(out)
    assert {r["library"] for r in rows} == {"stock", "sparq"}
    assert all(r["n_workers"] == 2 and r["backends"] == "RPC" for r in rows)


def test_a_lost_worker_of_a_server(server_dir: Path, tiny: Path, tmp_path: Path) -> None:
    with worker(tmp_path / "log") as (endpoint, process):
        child = cli("serve", "-m", tiny, "--rpc", endpoint, "--port", 0, "-a", SPARQ)
        url = re.search(r"http://\S+", line_with("is ready", child))
        process.send_signal(signal.SIGKILL)
        assert url
        body = json.dumps({"prompt": "a", "n_predict": 4}).encode()
        with suppress(OSError, http.client.HTTPException):
            urllib.request.urlopen(f"{url[0]}/completions", body, timeout=60)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert re.search("^error: llama-server", err, re.M), err
    assert "ggml-rpc.cpp" not in err
