"""The programs of llama.cpp with --sparse-attn: that it ran sparse, as the library counts."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from server import clean, complete, serving
from tiny import text_of, write_tiny_gguf

from pyorch import engine, native
from pyorch.native import build

pytestmark = pytest.mark.slow  # it builds them

SPARSE = "sparq,rank=8,topk=64,min_ctx=0"
N_LAYER = 2  # of the model `tiny`
TRACE = ("-lv", 4)  # with what ran sparse; that nothing did is a warning
CALLS = re.compile(r'sparse attention calls: .*"sparse": (\d+)')
SAID = re.compile("graphs reused|cleaning up before exit")  # after the last token, by either


@pytest.fixture(scope="module")
def tools() -> Path:
    return Path(os.environ.get("SPARQ_TEST_LIB_DIR") or native.built(tools=build.TOOLS))


def run(tools: Path, *args: object, **env: str) -> subprocess.CompletedProcess[str]:
    program, *rest = map(str, args)
    return subprocess.run(
        [str(tools / program), *rest],
        env=clean() | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
    )


def run_to(last: re.Pattern[str], tools: Path, *args: object) -> subprocess.CompletedProcess[str]:
    """Again while the log lacks this line: the end of a program cuts off what llama.cpp's logger, a
    thread, has not written by then; on a busy machine once in ten times."""
    for _ in range(10):
        done = run(tools, *args)
        if last.search(done.stderr):
            break
    return done


def calls(text: str) -> int:
    """Sparse calls, in the line that a context logs at its end."""
    return int(CALLS.findall(text)[-1])


def greedy(model: Path, spec: str | None) -> str:
    """What the engine says after `text_of(400)`, in twelve tokens."""
    with engine.load(model, n_threads=1, attention=spec) as s:
        pieces = engine.generate(s, text_of(400), max_tokens=12, ignore_eog=True)
        return "".join(map(str, pieces))


def test_llama_bench_has_the_settings_of_the_environment(tools: Path, tiny: Path) -> None:
    """It has no option of ours: a context that SPARQ_ATTN is refused for, here of three layers,
    ends it."""
    args = ("llama-bench", "-m", tiny, "-p", 0, "-n", 5, "-d", 300, "-r", 2, "-t", 1)
    assert run(tools, *args, SPARQ_ATTN=SPARSE).returncode == 0
    done = run(tools, *args, SPARQ_ATTN="sparq,rank=8,k_layers=64:64:64,min_ctx=0")
    assert done.returncode == 1 and "failed to create context" in done.stderr


@pytest.mark.parametrize("program", ["llama-cli", "llama-server"])
def test_a_bad_spec_is_an_error(tools: Path, tiny: Path, program: str) -> None:
    done = run(tools, program, "-m", tiny, "--sparse-attn", "spraq,ratio=1/8")
    assert done.returncode == 1 and "spraq" in done.stderr and "--sparse-attn" in done.stderr


@pytest.mark.parametrize("spec", [SPARSE, "off", None])
@pytest.mark.parametrize("program", ["llama-completion", "llama-cli"])
def test_programs_run_sparse(tools: Path, tiny: Path, program: str, spec: str | None) -> None:
    """Greedy; the first of twelve tokens comes from the prompt. Without the chat template that
    llama-cli uses, the text is that of the engine with the same setting."""
    option = ("--sparse-attn", spec) if spec else ()
    line = ("-m", tiny, "-p", text_of(400), "-n", 12, "-t", 1, "--temp", 0, "--ignore-eos")
    plain = program == "llama-completion"
    line += ("-no-cnv", "--no-display-prompt") if plain else ("--single-turn",)
    done = run_to(CALLS if spec == SPARSE else SAID, tools, program, *line, *TRACE, *option)
    assert done.returncode == 0, done.stderr
    if spec == SPARSE:
        assert calls(done.stderr) == 11 * N_LAYER
    else:
        assert not CALLS.search(done.stderr)
    assert not plain or done.stdout.startswith(greedy(tiny, spec).strip())


@pytest.mark.parametrize("by", ["option", "variable"])
def test_a_draft_does_not_inherit_the_spec(
    tools: Path, tiny: Path, tmp_path: Path, by: str
) -> None:
    """k of each of the two layers, which a draft of three layers would refuse."""
    draft = write_tiny_gguf(tmp_path / "draft.gguf", n_layer=3)
    spec = "sparq,rank=8,k_layers=64:64,min_ctx=0"
    log = tmp_path / "log"
    line = ("-m", tiny, "-md", draft, "-t", 1, "-c", 2048, *TRACE)
    line += ("--sparse-attn", spec) if by == "option" else ()
    env = {} if by == "option" else {"SPARQ_ATTN": spec}
    with serving(tools, log, *line, **env) as url:
        assert complete(url, text_of(400))["tokens_predicted"] == 20
    said = log.read_text(errors="replace")
    assert len(CALLS.findall(said)) <= 1 and "k_layers has" not in said


def test_perplexity_needs_single_tokens(tools: Path, tiny: Path, tmp_path: Path) -> None:
    """It evaluates batches, as in prefill, which stay dense: with a warning. `-b 1` decodes."""
    (tmp_path / "text").write_text(text_of(800))
    base = ("-m", tiny, "-f", tmp_path / "text", "-c", 256, "-t", 1, "--sparse-attn", SPARSE)
    batches = run_to(CALLS, tools, "llama-perplexity", *base)
    assert batches.returncode == 0 and calls(batches.stderr) == 0
    assert re.search(r'W sparse attention calls: .*"sparse": 0,', batches.stderr)
    single = run_to(CALLS, tools, "llama-perplexity", *base, "-b", 1, "-ub", 1, *TRACE)
    assert single.returncode == 0 and calls(single.stderr) > 700, "half of each window"

    def perplexity(done: subprocess.CompletedProcess[str]) -> str:
        return re.findall(r"PPL = ([\d.]+)", done.stdout + done.stderr)[-1]

    assert perplexity(batches) != perplexity(single)
