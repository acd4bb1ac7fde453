"""The options that commands share, and the values they stand for.

A command takes groups of options as decorators (`@model_options` ...) and passes its keyword
arguments to `attention_from`, `sampling_from` and `open_session`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyorch.attention.spec import (
    BUDGETS,
    MEAN_V,
    METHODS,
    SHADOWS,
    AttentionSpec,
    parse_ratio,
    parse_spec,
)
from pyorch.errors import SparqError, nearest
from pyorch.ggml import CACHE_TYPES
from pyorch.models import cards
from pyorch.progress import progress_bar

if TYPE_CHECKING:
    from pyorch.engine import AttentionInfo, Rope, Sampling, Session
    from pyorch.models.pull import Model


class Ratio(click.ParamType):
    """1/8, 0.125 or 12.5%."""

    name = "ratio"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        return value if isinstance(value, float) else parse_ratio(str(value))


class Number(click.ParamType):
    """A number with bounds, refused in one line that names the option and the value."""

    def __init__(self, kind: type, low: float, high: float = float("inf")) -> None:
        self.kind, self.low, self.high = kind, low, high
        self.name = "integer" if kind is int else "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        option = max(param.opts, key=len) if param else "value"
        what = "a whole number" if self.kind is int else "a number"
        try:
            number = self.kind(value)
        except ValueError:
            raise SparqError(f"{option} {value!r} is not {what}", exit_code=2) from None
        if not self.low <= number <= self.high:
            bound = f"at least {self.low}"
            bound += f" and at most {self.high}" if self.high < float("inf") else ""
            raise SparqError(f"{option} {value} is out of range", f"it is {bound}", exit_code=2)
        return number


THREADS = Number(int, 1, 512)  # ggml's limit
LAYERS = Number(int, 1, 512)  # llama.cpp's limit
POSITIONS = Number(int, 0, 10**9)  # the library's limit
SOME_POSITIONS = Number(int, 1, 10**9)


class Name(click.ParamType):
    """One of a few names; a wrong one is answered with the nearest."""

    name = "name"

    def __init__(self, *names: str) -> None:
        self.names = names

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        if value not in self.names:
            raise nearest(max(param.opts, key=len) if param else "name", str(value), self.names)
        return str(value)

    def get_metavar(self, param: Any, ctx: Any = None) -> str:
        return f"[{'|'.join(self.names)}]"


def group(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


yes_option = click.option("--yes", is_flag=True, help="Download or write models without asking.")
model_options = group(
    click.option(
        "--model",
        "-m",
        required=True,
        envvar="SPARQ_MODEL",
        metavar="FILE|SPEC",
        help="GGUF model: a file, a card's name or hf:org/repo, as in `sparq-cpp pull`.",
    ),
    yes_option,
)
gpu_option = click.option(
    "-ngl",
    "--n-gpu-layers",
    type=POSITIONS,
    help="Number of layers on the GPU.  [default: all, if there is one]",
)
context_options = group(
    click.option(
        "--ctx",
        "-c",
        type=SOME_POSITIONS,
        help="Size of the context in positions.  [default: the model's own, at most 8192]",
    ),
    click.option("--threads", "-t", type=THREADS, help="Number of threads.  [default: all cores]"),
)
cache_options = group(
    click.option(
        "-ctk",
        "--cache-type-k",
        type=Name(*CACHE_TYPES),
        default="f16",
        help="Type of K in the cache.  [default: f16]",
    ),
    click.option(
        "-ctv",
        "--cache-type-v",
        type=Name(*CACHE_TYPES),
        default="f16",
        help="Type of V in the cache.  [default: f16]",
    ),
)
numa_option = click.option(
    "--numa",
    type=Name("distribute", "isolate", "numactl"),
    help="Placement on NUMA nodes, as in llama.cpp.",
)
POSITIVE = Number(float, 1e-9, 1e9)
rope_options = group(
    click.option(
        "--rope-scaling",
        type=Name("none", "linear", "yarn"),
        help="How to stretch a context beyond the training.  [default: the model's own]",
    ),
    click.option("--rope-scale", type=POSITIVE, help="Stretch the context by this factor."),
    click.option("--rope-freq-base", type=POSITIVE, help="The base of RoPE's frequencies."),
    click.option("--rope-freq-scale", type=POSITIVE, help="The same as 1 / --rope-scale."),
    click.option(
        "--yarn-orig-ctx",
        type=SOME_POSITIONS,
        help="YaRN: positions that the model was trained on.  [default: the model's own]",
    ),
    click.option(
        "--yarn-ext-factor",
        type=Number(float, 0),
        help="YaRN: the share of extrapolation; 0 only interpolates.  [default: 1 with yarn]",
    ),
    click.option(
        "--yarn-attn-factor", type=Number(float, 0), help="YaRN: a factor on attention's logits."
    ),
    click.option(
        "--yarn-beta-fast", type=POSITIVE, help="YaRN: extrapolate from this many rotations on."
    ),
    click.option(
        "--yarn-beta-slow", type=POSITIVE, help="YaRN: interpolate up to this many rotations."
    ),
)


def renamed(old: str, *new: str) -> Callable[[Any], Any]:
    """A hidden option that refuses an old spelling in one line, which names the new one.

    An old name may not quietly take on a new meaning, and `--topk` is one letter away from
    llama.cpp's `--top-k`.
    """

    def refuse(ctx: Any, param: Any, value: Any) -> None:
        if value is not None:
            raise SparqError(f"{old} is now {new[0]}", " or ".join(new), exit_code=2)

    return click.option(old, hidden=True, expose_value=False, is_eager=True, callback=refuse)


# old -> new, wherever settings of attention are given
_ATTENTION_RENAMED = {
    "--attention": ("-a SPEC",),
    "--method": ("--attn-method",),
    "--rank": ("--attn-rank",),
    "--topk": ("--attn-topk, SparQ's k", "--top-k, how many tokens sampling chooses from"),
    "--local": ("--attn-local",),
    "--sinks": ("--attn-sinks",),
    "--mean-v": ("--attn-mean-v",),
    "--shadow-type": ("--attn-shadow",),
    "--min-ctx": ("--attn-min-ctx",),
}
renamed_attention = group(*(renamed(old, *new) for old, new in _ATTENTION_RENAMED.items()))

SPEC_OPTION = ("-a", "--attn")  # `-a SPEC` is the one long form, in every command
attention_options = group(
    click.option(
        *SPEC_OPTION,
        metavar="SPEC",
        help="All settings of attention as one line: sparq,ratio=1/8,mean_v=on.",
    ),
    click.option(
        "--ratio",
        type=Ratio(),
        help="Read this share of dense attention's bytes: 1/8, 0.125 or 12.5%.  [default: all]",
    ),
    click.option(
        "--attn-method",
        type=Name(*METHODS),
        help="Method that decides what attention reads.  [default: sparq with a setting, else off]",
    ),
    click.option(
        "--attn-rank", type=SOME_POSITIONS, help="SparQ's r: components used for the scores."
    ),
    click.option(
        "--attn-topk", type=SOME_POSITIONS, help="SparQ's k: positions that attention reads."
    ),
    click.option(
        "--attn-local",
        type=POSITIONS,
        help="Always read this many of the newest positions.  [default: k/4]",
    ),
    click.option(
        "--attn-sinks",
        type=POSITIONS,
        help="Always read this many of the first positions.  [default: 4]",
    ),
    click.option(
        "--attn-mean-v",
        type=Name(*MEAN_V),
        help="Add the mean of V for what is not read; auto is on for MHA.  [default: auto]",
    ),
    click.option(
        "--budget",
        type=Name(*BUDGETS),
        help="Spread of the bytes over the layers.  [default: uniform]",
    ),
    click.option(
        "--attn-shadow",
        type=Name(*SHADOWS),
        help="Type of the transposed K; fewer bits allow more components.  [default: q4]",
    ),
    click.option(
        "--attn-min-ctx",
        type=POSITIONS,
        help="Use exact dense attention up to this many positions.  [default: 1024]",
    ),
    renamed_attention,
)
sampling_options = group(
    click.option("--temp", type=Number(float, 0), help="Temperature of sampling; 0 is greedy."),
    click.option(
        "--top-k",
        type=POSITIONS,
        default=40,
        show_default=True,
        help="Sample from this many likeliest tokens; 0 is all.",
    ),
    click.option(
        "--top-p",
        type=Number(float, 0, 1),
        default=0.95,
        show_default=True,
        help="Sample from the likeliest tokens with this total probability.",
    ),
    click.option(
        "--min-p",
        type=Number(float, 0, 1),
        default=0.05,
        show_default=True,
        help="Drop tokens below this share of the best one's probability.",
    ),
    click.option(
        "--repeat-penalty",
        type=Number(float, 1e-3, 1e3),
        default=1.0,
        help="Make the last 64 tokens less likely by this factor.  [default: 1, no change]",
    ),
    click.option(
        "--seed",
        type=Number(int, 0, 2**32 - 1),
        help="Seed of sampling.  [default: a new one each time]",
    ),
)


class _OnStderr(logging.Handler):
    """Lines of a log, as they come."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(record.getMessage(), err=True)


_ON_STDERR = _OnStderr()


def _show_log(ctx: Any, param: Any, verbose: bool) -> bool:
    log = logging.getLogger("pyorch.llama")
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    (log.addHandler if verbose else log.removeHandler)(_ON_STDERR)
    return verbose


verbose_option = click.option(
    "-v", "--verbose", is_flag=True, callback=_show_log, help="Show llama.cpp's messages."
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout."
)


def attention_from(options: Mapping[str, Any]) -> AttentionSpec | None:
    """The settings that a command's keyword arguments ask for; None = none asked for.

    Raises:
        SparqError: values out of range, or some that exclude each other.
    """
    names = {n: n for n in ("ratio", "budget")}
    names |= {n: f"attn_{n}" for n in ("rank", "topk", "local", "sinks", "mean_v", "shadow")}
    names["min_ctx"] = "attn_min_ctx"
    given = {n: options[o] for n, o in names.items() if options.get(o) is not None}
    line, method = options.get("attn"), options.get("attn_method")
    whole = line is not None  # an empty one is refused, not left out
    beside = [names[n] for n in given] + (["attn_method"] if whole and method else [])
    if beside and (whole or method in ("dense", "off")):
        what = "-a has all settings" if whole else f"--attn-method {method} reads everything"
        raise SparqError(
            f"{what}: --{beside[0].replace('_', '-')} has no place beside it",
            "-a sparq,ratio=1/8,mean_v=on" if whole else "use --attn-method sparq or topk",
            exit_code=2,
        )
    if line is not None:
        return parse_spec(line)
    return AttentionSpec(method or "sparq", **given) if method or given else None


def sampling_from(options: Mapping[str, Any], default_temp: float) -> Sampling:
    from pyorch.engine import Sampling

    temp = options.get("temp")
    return Sampling(
        temp=default_temp if temp is None else temp,
        top_k=options["top_k"],
        top_p=options["top_p"],
        min_p=options["min_p"],
        repeat_penalty=options["repeat_penalty"],
        seed=options.get("seed"),
    )


def rope_from(options: Mapping[str, Any]) -> Rope | None:
    """The settings of RoPE that `@rope_options` ask for; None = the model's own.

    Raises:
        SparqError: one scale is given in two ways.
    """
    from pyorch.engine import Rope

    scale, freq_scale = options.get("rope_scale"), options.get("rope_freq_scale")
    if scale is not None and freq_scale is not None:
        raise SparqError(
            "--rope-scale and --rope-freq-scale say the same thing", "give one of them", exit_code=2
        )
    names = (*(f"yarn_{x}" for x in ("ext_factor", "attn_factor", "beta_fast", "beta_slow")),)
    rope = Rope(
        scaling=options.get("rope_scaling"),
        freq_base=options.get("rope_freq_base"),
        freq_scale=freq_scale if scale is None else 1 / scale,
        yarn_orig_ctx=options.get("yarn_orig_ctx"),
        **{name: options.get(name) for name in names},
    )
    return rope if rope.given else None


def note_if_beyond(n_ctx: int, n_ctx_train: int) -> None:
    """Say that a context is longer than the model was trained on, where that is allowed."""
    if n_ctx_train and n_ctx > n_ctx_train:
        note(
            f"note: context {n_ctx} is beyond the {n_ctx_train} positions this model was trained"
            " on; the text may get worse",
            "yellow",
        )


def model_file(options: Mapping[str, Any]) -> Path:
    """The file of the model that `@model_options` name; one on the hub is loaded, after asking."""
    return model_path(str(options["model"]), bool(options.get("yes")))


def model_path(name: str, yes: bool = False) -> Path:
    """The file that `--model NAME` means, see `sparq-cpp pull`; one on the hub is loaded, after
    asking.

    Raises:
        SparqError: nothing of that name, it cannot be loaded, or there is nobody to ask.
    """
    from pyorch.models import pull
    from pyorch.text import human_bytes

    spec = pull.parse_spec(name)
    if spec is None:
        return Path(name)
    model = pull.find(spec, note)
    if model.complete:
        return model.path
    n_bytes = model.missing_bytes  # 0 = a new revision with the old content
    what = f"{model.files[0].name} ({human_bytes(n_bytes)}) of {spec.repo}"
    confirm(
        f"Download {what}?",
        yes or not n_bytes,
        f"{what} is not here",
        f"download it with --yes, or before: sparq-cpp pull {name}",
    )
    return fetch_model(model).path


def confirm(question: str, yes: bool, otherwise: str, hint: str) -> None:
    """Ask on the terminal; without one, and without --yes, fail with `otherwise` and `hint`."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise SparqError(otherwise, hint)
    click.confirm(question, abort=True, err=True)


def fetch_model(model: Model, quiet: bool = False) -> Model:
    """Download and check a model, with bars on a terminal only."""
    from pyorch.models import pull

    if quiet:
        model = pull.download(model)
        pull.check(model, lambda done, total: None)
        return model
    with progress_bar("downloading", of_bytes=True) as progress:
        model = pull.download(model, progress, note)
    with progress_bar("checking", of_bytes=True) as progress:
        pull.check(model, progress)
    return model


def open_session(options: Mapping[str, Any], attention: AttentionSpec | None) -> Session:
    """Load the model that the options name, with a bar if it takes long."""
    from pyorch import engine, native

    path = model_file(options)
    native.built()
    card = str(options["model"]).split(":")[0].split("@")[0]
    if attention is None and card in cards.names() and path != Path(options["model"]):
        note(f"attention is exact; for {card} try --ratio {cards.load(card).ratio}", "dim")
    with progress_bar("loading the model") as progress:
        session = engine.load(
            path,
            rope=rope_from(options),
            n_ctx=options.get("ctx"),
            n_threads=options.get("threads"),
            n_gpu_layers=options.get("n_gpu_layers"),
            type_k=options.get("cache_type_k", "f16"),
            type_v=options.get("cache_type_v", "f16"),
            numa=options.get("numa") or "",
            attention=attention,
            progress=progress,
        )
    note_if_beyond(session.n_ctx, session.geometry.n_ctx_train)
    return session


def note(text: str, style: str = "") -> None:
    """One line on stderr, after what was printed so far; coloured only on a terminal and without
    NO_COLOR."""
    from rich.console import Console

    sys.stdout.flush()
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, style=style, markup=False)


def note_if_busy() -> None:
    """What else runs, or ran in the last minute, makes times long and uneven: say so."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 4:
        text = f"note: this machine is busy (load {load:.1f} on {cores} cores): times will be off"
        note(text, "yellow")


def info_if_ours(session: Session) -> AttentionInfo | None:
    """The library's account, or None while attention is llama.cpp's own."""
    return info_of(session.lib, session.ctx)


def info_of(lib: Any, ctx: Any) -> AttentionInfo | None:
    """The same of any context. lib: the module of C functions, ctx: llama.cpp's pointer."""
    from pyorch.engine import sparse

    if not sparse.is_ours(lib):
        return None
    info = sparse.get_info(lib, ctx)
    return info if info.method != "off" else None


def why_dense(wanted: AttentionSpec | None, info: AttentionInfo) -> str:
    """What to say when something sparse was asked for and a layer is left to llama.cpp, or every
    token so far was exact; else ""."""
    if wanted is None or not wanted.sparse:
        return ""
    if not info.dense_reasons:
        if info.counter("calls_sparse") or not info.counter("steps"):
            return ""
        what = f"up to min_ctx {wanted.min_ctx} positions, or k covers them all"
        return f"note: attention was exact throughout: {what}"
    n = len(info.layers) - info.layers_sparse
    which = f"{n} of {len(info.layers)} layers are" if info.layers_sparse else "attention is"
    return f"note: {which} dense: {'; '.join(info.dense_reasons)}"


def print_json(value: Any) -> None:
    """One JSON object on stdout."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def run_summary(session: Session, info: AttentionInfo | None) -> dict[str, Any]:
    """Speed and attention of a run, for --json and for the line on stderr."""
    t = session.timings
    out: dict[str, Any] = {
        "prefill_tokens": t.prefill_tokens,
        "prefill_s": round(t.prefill_s, 4),
        "decode_tokens": len(t.decode_s),
        "decode_s": round(sum(t.decode_s), 4),
        "decode_tokens_per_s": round(t.decode_rate, 2),
        "decode_tokens_per_s_median": round(t.decode_rate_median, 2),
        "attention": dict(info.raw) if info else None,
    }
    if info:
        n = max(info.counter("steps"), 1)
        out["attention_bytes_per_token"] = info.counter("bytes_read") // n
        out["attention_bytes_per_token_dense"] = info.counter("bytes_dense") // n
        out["share_sparse"] = round(info.sparse_share, 4)
    return out


def summary_line(summary: Mapping[str, Any]) -> str:
    """`run_summary` in one line."""
    from pyorch.text import human_bytes

    parts = [f"prefill {summary['prefill_tokens']} tokens in {summary['prefill_s']:.2f} s"]
    if not summary["decode_tokens"]:
        return parts[0]
    parts.append(f"decode {summary['decode_tokens_per_s']:.1f} tokens/s")
    if summary.get("share_sparse"):
        read, dense = (
            summary["attention_bytes_per_token"],
            summary["attention_bytes_per_token_dense"],
        )
        parts.append(f"attention {human_bytes(read)}/token of {human_bytes(dense)}")
        parts.append(f"{100 * summary['share_sparse']:.1f} % of calls sparse")
    elif "share_sparse" in summary:
        parts.append("attention exact throughout")
    return ", ".join(parts)
