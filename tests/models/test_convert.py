"""convert: the real converter (slow), our own code around it (quick)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import CONFIG, make_weights, write_checkpoint
from hub_server import REPO, Hub
from tiny import write_tiny_gguf

from pyorch import children, engine, paths, system
from pyorch.errors import SparqError
from pyorch.models import convert, convert_env
from pyorch.models.gguf_file import read_gguf
from pyorch.progress import say

SPARSE = "sparq,rank=8,topk=24,min_ctx=0"


@pytest.fixture(scope="session")
def python() -> list[str]:
    """The converter's environment; made here if it is not in the cache."""
    return convert_env.python(say)


@pytest.mark.slow
def test_a_converted_model_decodes(tmp_path: Path, python: list[str]) -> None:
    """What it computes is for llama.cpp's converter to test."""
    checkpoint = convert.read_checkpoint(write_checkpoint(tmp_path / "model"))
    assert checkpoint.n_weights == sum(w.size for w in make_weights().values())
    convert.check_architecture(checkpoint)
    out = tmp_path / "model.gguf"
    scripts = convert_env.scripts()
    convert.convert(checkpoint, out, "f32", python=python, scripts=scripts)
    assert read_gguf(out).metadata["general.name"] == "Model"
    tokens = list(map(int, np.random.default_rng(1).integers(5, 250, 120)))
    with engine.load(out, n_ctx=256, n_threads=1, attention=SPARSE) as s:
        text = "Hello, world! 3.14"
        assert engine.detokenize(s, engine.tokenize(s, text, add_special=False)).strip() == text
        engine.prefill(s, tokens[:-1])
        engine.reset_counters(s)
        engine.decode(s, tokens[-1])
        assert np.isfinite(engine.logits(s)).all()
        assert engine.info(s).counter("calls_sparse") == CONFIG["num_hidden_layers"]


# ---- our own code around a converter that is a few lines ----

FAKE = """\
import json, os, shutil, sys, time
from pathlib import Path
folder, out = Path(sys.argv[1]), sys.argv[sys.argv.index("--outfile") + 1]
seen = {"files": sorted(p.name for p in folder.iterdir()), "name": folder.name}
seen["env"] = {k: v for k, v in os.environ.items() if k.startswith(("HF_", "TRANSFORMERS_"))}
Path(os.environ["FAKE_SEEN"]).write_text(json.dumps(seen))
out = out.replace("{{", "{").replace("}}", "}")
data = Path(os.environ["FAKE_GGUF"]).read_bytes()
Path(out).write_bytes(data[: len(data) // 2])
for i in (0, 50):
    sys.stderr.write(f"\\rWriting: {i:3d}%|###   | 1.0M/2.0M [00:00<00:00, 1Mbyte/s]")
sys.stderr.write("\\n")
exec(os.environ.get("FAKE_DO", ""))
Path(out).write_bytes(data)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a converter that writes half a file, does FAKE_DO, then writes the whole."""
    folder = tmp_path / "scripts"
    (folder / "conversion").mkdir(parents=True)
    (folder / convert_env.SCRIPT).write_text(FAKE)
    table = 'TEXT_MODEL_MAP: dict[str, str] = {\n    "LlamaForCausalLM": "llama",\n}\n'
    (folder / "conversion" / "__init__.py").write_text(table)
    monkeypatch.setenv("FAKE_GGUF", str(write_tiny_gguf(tmp_path / "fake.gguf", n_layer=1)))
    monkeypatch.setenv("FAKE_SEEN", str(tmp_path / "seen.json"))
    monkeypatch.setattr(convert_env, "scripts", lambda: folder)
    monkeypatch.setattr(convert_env, "python", lambda agree: [sys.executable])
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two shards."""
    return write_checkpoint(tmp_path / "My-Model")


def test_what_the_converter_sees(
    fake: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither code nor pickles of the model's folder, nor the hub."""
    for name in ("evil.py", "pytorch_model.bin", "x.pt", "README.md", "chat_template.jinja"):
        (folder / name).write_text("x")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HF_HUB_CACHE", "/somewhere")
    steps: list[tuple[int, int]] = []
    out = tmp_path / "a {b}.gguf"
    file = convert.convert(
        convert.read_checkpoint(folder),
        out,
        python=[sys.executable],
        scripts=fake,
        progress=lambda *a: steps.append(a),
    )
    assert file.arch == "llama" and read_gguf(out).n_bytes == file.n_bytes
    assert sorted(set(steps)) == [(0, 100), (50, 100)] and steps == sorted(steps)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["name"] == "My-Model"
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    assert {*shards, "config.json", "tokenizer.model", "chat_template.jinja"} <= {*seen["files"]}
    assert not {"evil.py", "pytorch_model.bin", "x.pt"} & {*seen["files"]}
    assert seen["env"].keys() == {"HF_HUB_OFFLINE", "HF_HOME", "TRANSFORMERS_OFFLINE"}
    assert "secret" not in str(seen) and not Path(seen["env"]["HF_HOME"]).exists()


@pytest.mark.parametrize(
    ("do", "fault"),
    [
        ("raise OSError(28, 'No space left on device')", "disk is full"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("raise KeyError('hidden_size')", "hidden_size"),
        ("sys.exit(3)", "failed"),
        ("Path(out).write_bytes(b''); sys.exit(0)", "partial"),
        ("sys.exit(0)", "partial"),  # half a file
    ],
)
def test_a_failed_conversion_leaves_nothing(
    fake: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, do: str, fault: str
) -> None:
    monkeypatch.setenv("FAKE_DO", do)
    out = tmp_path / "out" / "m.gguf"
    out.parent.mkdir()
    checkpoint = convert.read_checkpoint(folder)
    with pytest.raises(SparqError, match=fault) as e:
        convert.convert(checkpoint, out, python=[sys.executable], scripts=fake)
    assert "\n" not in e.value.message
    assert not list(out.parent.iterdir())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_conversion(
    fake: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    out, partial = tmp_path / "m.gguf", tmp_path / "m.gguf.partial"
    code = f"""if True:
        import sys
        from pathlib import Path
        from pyorch.models import convert
        c = convert.read_checkpoint(Path({str(folder)!r}))
        python, scripts = [sys.executable], Path({str(fake)!r})
        convert.convert(c, Path({str(out)!r}), python=python, scripts=scripts)
    """
    monkeypatch.setenv("FAKE_DO", "time.sleep(600)")
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    while not (partial.exists() and partial.stat().st_size):
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(how)
    assert child.wait(timeout=60) != 0
    assert not out.exists()
    monkeypatch.setenv("FAKE_DO", "")
    checkpoint = convert.read_checkpoint(folder)
    if how is signal.SIGINT:
        assert not partial.exists()
    else:
        lock = os.open(partial, os.O_RDWR)
        system.lock(lock, wait=True)  # until its converter has ended, which may write
        os.close(lock)
    convert.convert(checkpoint, out, python=[sys.executable], scripts=fake)
    assert read_gguf(out).arch == "llama" and not partial.exists()


def _edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


SHARD = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
# what a shard may hold is for safetensors to refuse: one fault tells that it is asked
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "no config.json"),
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "config is text": (lambda f: (f / "config.json").write_text("{"), "config.json"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "config.json"),
    "deep config": (lambda f: (f / "config.json").write_text("[" * 99999), "config.json"),
    "no architecture": (lambda f: _edit_config(f, architectures=None), "architecture"),
    "no shards": (lambda f: [p.unlink() for p in f.glob("*.safetensors")], "model.*safetensors"),
    "shard missing": (lambda f: (f / SHARD).unlink(), SHARD),
    "shard cut": (lambda f: os.truncate(f / SHARD, 9999), SHARD),
    "index with a path": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"a": "../b.safetensors"}}'),
        "../b.safetensors",
    ),
    "index of text": (lambda f: (f / INDEX).write_text('{"weight_map": "x"}'), INDEX),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_no_checkpoint(folder: Path, name: str) -> None:
    damage, fault = FAULTS[name]
    convert.read_checkpoint(folder)
    damage(folder)
    with pytest.raises(SparqError, match=fault) as e:
        convert.read_checkpoint(folder)
    assert e.value.hint and "\n" not in e.value.message


def test_the_command(
    native_lib_dir: Path, fake: Path, folder: Path, run: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    code, out, err = run("convert", folder)
    assert (code, err) == (0, "") and out.startswith("My-Model.gguf: ")
    for args, wrong, fault in (
        ((folder,), 2, "--force"),
        ((folder, "--outtype", "q9", "--out", "x.gguf"), 2, "q8_0"),
        (("hf:org/repo:Q8_0",), 2, "org/repo"),
    ):
        code, _, err = run("convert", *args)
        assert code == wrong and fault in err
    assert run("convert", folder, "--force", "--outtype", "f16")[0] == 0
    whole = Path(os.environ["FAKE_GGUF"]).read_bytes()
    monkeypatch.setenv("FAKE_GGUF", str(tmp_path / "of-another-config"))
    Path("of-another-config").write_bytes(whole.replace(b"blk.0.ffn_up", b"blk.7.ffn_up"))
    code, _, err = run("convert", folder, "--out", "x.gguf")
    assert code == 1 and str(folder) in err and "blk.0.ffn_up" in err and "config.json" in err
    _edit_config(folder, architectures=["EvilForCausalLM"])
    code, _, err = run("convert", folder, "--out", "x.gguf")
    assert code == 1 and "EvilForCausalLM" in err and not Path("x.gguf").exists()
    monkeypatch.setattr(system, "IS_WINDOWS", True)
    code, _, err = run("convert", folder, "--out", "x.gguf")
    assert code == 2 and "Windows" in err and "hint:" in err


def test_a_repository(
    fake: Path, folder: Path, hub: Hub, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hub.files = {p.name: p.read_bytes() for p in folder.iterdir()}
    hub.files |= {"evil.py": b"x", "pytorch_model.bin": b"x", "onnx/config.json": b"x"}
    code, _, err = run("convert", f"hf:{REPO}")
    assert code == 1 and "to download" in err and "--yes" in err
    code, out, err = run("convert", f"hf:{REPO}", "--yes")
    assert code == 0, err
    assert out.startswith("repo.gguf: ")
    loaded = {path.rpartition("/")[2] for verb, path, *_ in hub.log if "/resolve/" in path}
    assert "config.json" in loaded and not loaded & {"evil.py", "pytorch_model.bin"}
    assert not any("onnx" in path for _, path, *_ in hub.log)
    assert json.loads((tmp_path / "seen.json").read_text())["name"] == "repo"
    hub.files = {"a.gguf": b"x", "config.json": b"{}"}
    hub.commit = "f" * 40
    code, _, err = run("convert", f"hf:{REPO}", "--yes", "--out", "y.gguf")
    assert code == 1 and "no safetensors" in err


# ---- the environment ----


LEGACY = "requirements-convert_legacy_llama.txt"


class FakePip:
    """In place of the commands that make the environment; it fails at its third."""

    def __init__(self) -> None:
        self.runs: list[list[str]] = []
        self.fails: Callable[[], int] = lambda: 0

    def __call__(self, argv: list[str], **_: Any) -> children.Done:
        self.runs.append(argv)
        if argv[1:4] == ["-I", "-m", "venv"]:
            (Path(argv[4]) / "bin").mkdir(parents=True)
        code = self.fails() if "transformers==4.57.6" in argv else 0
        return children.Done(argv, code, "", "ERROR: no index\n" * code)


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    scripts, pip = tmp_path / "s", FakePip()
    (scripts / "requirements").mkdir(parents=True)
    for name, text in (
        (LEGACY, "numpy~=2.2.6\n\ntransformers==4.57.6\n"),
        (
            LEGACY.replace("legacy_llama", "hf_to_gguf"),
            "--extra-index-url https://x/cpu\n# why\ntorch==2.11.0\n",
        ),
    ):
        (scripts / "requirements" / name).write_text(text)
    monkeypatch.setenv("SPARQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPARQ_CONVERT_PYTHON", raising=False)
    monkeypatch.setattr(convert_env, "scripts", lambda: scripts)
    monkeypatch.setattr(children, "run", pip)
    return pip


def agree(what: str) -> None:
    assert "torch" in what


def test_the_environment_is_made_once(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = convert_env.python(agree)
    _, torch, rest, _ = pip.runs
    assert torch[-3:-1] == ["--extra-index-url", "https://x/cpu"] and "torch" in torch[-1]
    assert "--extra-index-url" not in rest and rest[-2:] == ["numpy~=2.2.6", "transformers==4.57.6"]
    assert all("--only-binary" in run for run in (torch, rest)), "no code runs"
    assert convert_env.python(agree) == argv and len(pip.runs) == 4
    folder = Path(argv[0]).parent.parent
    (folder / "ready").unlink()  # as if it had been interrupted
    (folder / "half").touch()
    assert convert_env.python(agree) == argv
    assert not (folder / "half").exists() and len(pip.runs) == 8
    (convert_env.scripts() / "requirements" / LEGACY).write_text("numpy~=9.0")
    assert convert_env.python(agree) != argv, "other needs are another environment"


def interrupt() -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("fails", "error"), [(lambda: 1, SparqError), (interrupt, KeyboardInterrupt)]
)
def test_a_failure_or_a_no_leaves_no_environment(
    pip: FakePip, fails: Callable[[], int], error: type[BaseException]
) -> None:
    pip.fails = fails
    with pytest.raises(error):
        convert_env.python(agree)

    def refuse(what: str) -> None:
        raise SparqError(what, "--yes")

    with pytest.raises(SparqError, match="torch"):
        convert_env.python(refuse)
    assert [p.name for p in (paths.cache() / "convert").iterdir()] == ["lock"]
