"""The options that commands share, in groups.

A command takes a group as a decorator, `@context_options`, and gets its values as one object in the
keyword argument `context`. A command with many options of its own makes such a group for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from pyorch.attention.spec import (
    BUDGETS,
    MEAN_V,
    METHODS,
    SHADOWS,
    AttentionSpec,
    parse_spec,
)
from pyorch.cli.groups import group, on_the_line, option, renamed, several, takes
from pyorch.cli.log import show_log
from pyorch.cli.types import (
    POSITIONS,
    POSITIVE,
    SOME_POSITIONS,
    THREADS,
    Endpoint,
    File,
    Name,
    Number,
    Ratio,
    Text,
)
from pyorch.errors import SparqError
from pyorch.ggml import CACHE_TYPES, NUMA, ROPE_SCALING

if TYPE_CHECKING:
    from pyorch.engine import Rope, Sampling

# ---- the model ----


def model_option(required: bool = True) -> Any:
    """The field of `--model`, which the variable SPARQ_MODEL stands in for."""
    return option(
        "--model",
        "-m",
        required=required,
        type=File(),
        envvar="SPARQ_MODEL",
        metavar="FILE|SPEC",
        help="GGUF model: a file, a card's name or hf:org/repo, as in `sparq-cpp pull`.",
    )


def yes_option() -> Any:
    return option("--yes", is_flag=True, help="Download or write models without asking.")


@dataclass(frozen=True)
class ModelOptions:
    """The model. `cli.loading` finds its file."""

    model: str = model_option()
    yes: bool = yes_option()


model_options = takes(model=ModelOptions)


# ---- the context ----


def ctx_option(default: str) -> Any:
    """The field of `--ctx`; `default` says what a command does without it."""
    return option(
        "--ctx",
        "-c",
        type=SOME_POSITIONS,
        help=f"Size of the context in positions.  [default: {default}]",
    )


@dataclass(frozen=True)
class ContextOptions:
    """The size of a context. None is the engine's default."""

    ctx: int | None = ctx_option("the model's own, at most 8192")
    threads: int | None = option(
        "--threads", "-t", type=THREADS, help="Number of threads.  [default: all cores]"
    )


@dataclass(frozen=True)
class CacheOptions:
    """The types of K and V in the cache."""

    cache_type_k: str = option(
        "-ctk",
        "--cache-type-k",
        type=Name(*CACHE_TYPES),
        default="f16",
        help="Type of K in the cache.  [default: f16]",
    )
    cache_type_v: str = option(
        "-ctv",
        "--cache-type-v",
        type=Name(*CACHE_TYPES),
        default="f16",
        help="Type of V in the cache.  [default: f16]",
    )


@dataclass(frozen=True)
class RopeOptions:
    """The settings of RoPE. None is the model's own."""

    rope_scaling: str | None = option(
        "--rope-scaling",
        type=Name(*ROPE_SCALING),
        help="How to stretch a context beyond the training.  [default: the model's own]",
    )
    rope_scale: float | None = option(
        "--rope-scale", type=POSITIVE, help="Stretch the context by this factor."
    )
    rope_freq_base: float | None = option(
        "--rope-freq-base", type=POSITIVE, help="The base of RoPE's frequencies."
    )
    rope_freq_scale: float | None = option(
        "--rope-freq-scale", type=POSITIVE, help="The same as 1 / --rope-scale."
    )
    yarn_orig_ctx: int | None = option(
        "--yarn-orig-ctx",
        type=SOME_POSITIONS,
        help="YaRN: positions that the model was trained on.  [default: the model's own]",
    )
    yarn_ext_factor: float | None = option(
        "--yarn-ext-factor",
        type=Number(float, 0),
        help="YaRN: the share of extrapolation; 0 only interpolates.  [default: 1 with yarn]",
    )
    yarn_attn_factor: float | None = option(
        "--yarn-attn-factor", type=Number(float, 0), help="YaRN: a factor on attention's logits."
    )
    yarn_beta_fast: float | None = option(
        "--yarn-beta-fast", type=POSITIVE, help="YaRN: extrapolate from this many rotations on."
    )
    yarn_beta_slow: float | None = option(
        "--yarn-beta-slow", type=POSITIVE, help="YaRN: interpolate up to this many rotations."
    )

    def settings(self) -> Rope | None:
        """The object that the engine takes; None if no option was given.

        Raises:
            SparqError: one scale is given in two ways.
        """
        from pyorch.engine import Rope

        if self.rope_scale is not None and self.rope_freq_scale is not None:
            raise SparqError(
                "--rope-scale and --rope-freq-scale say the same thing",
                "give one of them",
                exit_code=2,
            )
        rope = Rope(
            scaling=self.rope_scaling,
            freq_base=self.rope_freq_base,
            freq_scale=1 / self.rope_scale if self.rope_scale else self.rope_freq_scale,
            yarn_orig_ctx=self.yarn_orig_ctx,
            yarn_ext_factor=self.yarn_ext_factor,
            yarn_attn_factor=self.yarn_attn_factor,
            yarn_beta_fast=self.yarn_beta_fast,
            yarn_beta_slow=self.yarn_beta_slow,
        )
        return rope if rope.given else None


def numa_option() -> Any:
    return option(
        "--numa",
        type=Name(*NUMA),
        help="Placement on NUMA nodes, as in llama.cpp.",
    )


def repack_option() -> Any:
    return option(
        "-nr",
        "--no-repack",
        is_flag=True,
        help="Use the weights as they are in the file: prompts may be read faster, and replies "
        "decoded slower.",
    )


def gpu_option() -> Any:
    return option(
        "-ngl",
        "--n-gpu-layers",
        type=POSITIONS,
        help="Number of layers on the GPU, or on the workers of --rpc.  [default: all]",
    )


@dataclass(frozen=True)
class WorkerOptions:
    """The other machines that hold layers of the model."""

    workers: list[str] = several(
        "--rpc", of=Endpoint(), text="HOST:PORT of machines that run `sparq-cpp worker`."
    )
    tensor_split: list[float] = several(
        "-ts",
        "--tensor-split",
        of=Number(float, 0),
        text="How they share the layers, say 3,1.  [default: as their free memory]",
    )
    rpc_insecure: bool = option(
        "--rpc-insecure",
        is_flag=True,
        help="Send the text and the weights, readable, through networks that are not private.",
    )

    def allowed(self) -> Sequence[str]:
        """The machines.

        Raises:
            SparqError: the way to one is open to others.
        """
        from pyorch.engine.machines import reach

        for endpoint in self.workers:
            host, _, port = endpoint.partition(":")
            if reach(host) == "public" and not self.rpc_insecure:
                raise SparqError(
                    f"--rpc {endpoint}: everybody on the way could read the text and change it",
                    f"ssh -N -L {port}:127.0.0.1:{port} {host}, then --rpc 127.0.0.1:{port}; "
                    "or --rpc-insecure",
                    exit_code=2,
                )
        return self.workers


@dataclass(frozen=True)
class LoadOptions:
    """How the model is loaded, and what its context is made with; its size is a ContextOptions."""

    rope: RopeOptions = field(default_factory=RopeOptions)
    n_gpu_layers: int | None = gpu_option()
    rpc: WorkerOptions = field(default_factory=WorkerOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    numa: str | None = numa_option()
    no_repack: bool = repack_option()


context_options = takes(context=ContextOptions)
cache_options = takes(cache=CacheOptions)
rope_options = takes(rope=RopeOptions)
load_options = takes(load=LoadOptions)


# ---- attention ----

# old -> new, in all commands with settings of attention
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


@dataclass(frozen=True)
class AttentionOptions:
    """The settings of attention; None means not given.

    Only the line of `-a` has min_k, gpu_min_mb, top_p, cap, k_layers, rank_layers, prompt and
    prompt_p, which few users need and a calibration sets.
    """

    attn: str | None = option(
        *SPEC_OPTION,
        metavar="SPEC",
        help="All settings of attention as one line: sparq,ratio=1/8,mean_v=on.",
    )
    ratio: float | None = option(
        "--ratio",
        type=Ratio(),
        help="Read this share of dense attention's bytes: 1/8, 0.125 or 12.5%.  [default: all]",
    )
    attn_method: str | None = option(
        "--attn-method",
        type=Name(*METHODS),
        help="Method that decides what attention reads.  [default: sparq with a setting, else off]",
    )
    attn_rank: int | None = option(
        "--attn-rank", type=SOME_POSITIONS, help="SparQ's r: components used for the scores."
    )
    attn_topk: int | None = option(
        "--attn-topk", type=SOME_POSITIONS, help="SparQ's k: positions that attention reads."
    )
    attn_local: int | None = option(
        "--attn-local",
        type=POSITIONS,
        help="Always read this many of the newest positions.  [default: k/4]",
    )
    attn_sinks: int | None = option(
        "--attn-sinks",
        type=POSITIONS,
        help="Always read this many of the first positions.  [default: 4]",
    )
    attn_mean_v: str | None = option(
        "--attn-mean-v",
        type=Name(*MEAN_V),
        help="Add the mean of V for what is not read; auto is on.  [default: auto]",
    )
    budget: str | None = option(
        "--budget",
        type=Name(*BUDGETS),
        help="Spread of the bytes over the layers; flat reads next to the same at any length."
        "  [default: uniform]",
    )
    attn_shadow: str | None = option(
        "--attn-shadow",
        type=Name(*SHADOWS),
        help="Type of the transposed K; fewer bits allow more components.  [default: q4]",
    )
    attn_min_ctx: int | None = option(
        "--attn-min-ctx",
        type=POSITIONS,
        help="Use exact dense attention up to this many positions.  [default: 1024]",
    )

    def spec(self) -> AttentionSpec | None:
        """The settings that the options describe; None = no option was given.

        Raises:
            SparqError: values are out of range, or exclude each other.
        """
        given = {name: value for name, value in vars(self).items() if value is not None}
        alone = {"attn", *(["attn_method"] if self.attn_method in ("dense", "off") else [])}
        if said := on_the_line(given):  # it displaces variables that exclude it
            gone = given.keys() - said if said & alone else alone - said
            given = {name: value for name, value in given.items() if name not in gone}
        line, method = given.pop("attn", None), given.pop("attn_method", None)
        whole = line is not None  # an empty line is refused, not ignored
        beside = [*given, *(["attn_method"] if whole and method else [])]
        if beside and (whole or method in ("dense", "off")):
            what = "-a has all settings" if whole else f"--attn-method {method} reads everything"
            raise SparqError(
                f"{what}, so --{beside[0].replace('_', '-')} would change nothing",
                "-a sparq,ratio=1/8,mean_v=on" if whole else "use --attn-method sparq or topk",
                exit_code=2,
            )
        if line is not None:
            return parse_spec(line)
        if not (method or given):
            return None
        return AttentionSpec(
            method or "sparq", **{name.removeprefix("attn_"): x for name, x in given.items()}
        )


attention_options = group(takes(attention=AttentionOptions), renamed_attention)


# ---- sampling ----


@dataclass(frozen=True)
class SamplingOptions:
    """The settings of sampling, by llama.cpp's names."""

    temp: float | None = option(
        "--temp", type=Number(float, 0), help="Temperature of sampling; 0 is greedy."
    )
    top_k: int = option(
        "--top-k",
        type=POSITIONS,
        default=40,
        show_default=True,
        help="Sample from this many likeliest tokens; 0 is all.",
    )
    top_p: float = option(
        "--top-p",
        type=Number(float, 0, 1),
        default=0.95,
        show_default=True,
        help="Sample from the likeliest tokens with this total probability.",
    )
    min_p: float = option(
        "--min-p",
        type=Number(float, 0, 1),
        default=0.05,
        show_default=True,
        help="Drop tokens below this share of the best one's probability.",
    )
    repeat_penalty: float = option(
        "--repeat-penalty",
        type=Number(float, 1e-3, 1e3),
        default=1.0,
        help="Make the last 64 tokens less likely by this factor.  [default: 1, no change]",
    )
    seed: int | None = option(
        "--seed",
        type=Number(int, 0, 2**32 - 1),
        help="Seed of sampling.  [default: a new one each time]",
    )

    def settings(self, default_temp: float) -> Sampling:
        """The object that the engine takes."""
        from pyorch.engine import Sampling

        return Sampling(
            temp=default_temp if self.temp is None else self.temp,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            seed=self.seed,
        )


sampling_options = group(
    takes(sampling=SamplingOptions),
    click.option(
        "-r",
        "--reverse-prompt",
        "--stop",
        "stop",
        type=Text(),
        multiple=True,
        metavar="TEXT",
        help="End where the model writes this text, which is not shown; it may be repeated.",
    ),
)


# ---- output ----


verbose_option = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    expose_value=False,
    callback=lambda ctx, param, verbose: show_log(verbose),
    help="Show llama.cpp's messages.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout."
)


# ---- documents ----


document_option = group(
    click.option(
        "--document",
        "documents",
        type=File(),
        multiple=True,
        metavar="FILE",
        help="Begin with what `sparq-cpp read` has read: a file, or its name in `documents list`.",
    ),
)
