"""The options that commands share, in groups.

A command takes a group as a decorator, `@context_options`, and gets its values as one object in the
keyword argument `context`. A command with many options of its own makes such a group for itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import click

from pyorch.attention.spec import AUTO_RATIO, BUDGETS, AttentionSpec, parse_spec, ratio_text
from pyorch.cli.groups import F, Option, given_on_command_line, option, several, takes
from pyorch.cli.terminal import show_log
from pyorch.cli.types import (
    POSITIONS,
    POSITIVE,
    SOME_POSITIONS,
    THREADS,
    Endpoint,
    File,
    Number,
    Ratio,
    Text,
)
from pyorch.errors import SparqError
from pyorch.ggml import CACHE_TYPES, NUMA, ROPE_SCALING

if TYPE_CHECKING:
    from pyorch.engine import Rope, Sampling

# ---- the model ----


model_argument = click.argument("name", required=False, metavar="[MODEL]", expose_value=False)


class ModelOption(Option):
    """`--model NAME`, or NAME alone where the command has `model_argument`. `serve` has it in front
    of what it passes on."""

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, Any]:
        more = opts.get("more")
        words = [opts.get("name"), *(more[:1] if isinstance(more, tuple) else ())]
        word = next((x for x in words if isinstance(x, str)), "-")
        if not word.startswith("-"):
            if self.name in opts:
                raise SparqError(f"two models: {opts[self.name]}, {word}", "name one", exit_code=2)
            opts = {**opts, "model": word}
        return super().consume_value(ctx, opts)


def model_option(required: bool = True) -> Any:
    """The field of `--model`, which the variable SPARQ_MODEL stands in for."""
    return option(
        "--model",
        "-m",
        cls=ModelOption,
        aliases=("-hf", "-hfr", "--hf-repo"),
        required=required,
        type=File(),
        envvar="SPARQ_MODEL",
        metavar="FILE|SPEC",
        help="GGUF model, also without -m: a file, a card's name or org/repo.",
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
        aliases=("--ctx-size",),
        type=SOME_POSITIONS,
        help=f"Size of the context in positions.  [default: {default}]",
    )


@dataclass(frozen=True)
class ContextOptions:
    """The size of a context. None is the engine's default."""

    ctx: int | None = ctx_option("the model's own, at most 8192")
    threads: int | None = option(
        "--threads", "-t", type=THREADS, help="Number of threads.  [default: one per core]"
    )


def cache_option(name: str) -> Any:
    kind, text = click.Choice(CACHE_TYPES), f"Type of {name.upper()} in the cache."
    return option(f"-ct{name}", f"--cache-type-{name}", type=kind, default="f16", help=text)


@dataclass(frozen=True)
class CacheOptions:
    """The types of K and V in the cache."""

    cache_type_k: str = cache_option("k")
    cache_type_v: str = cache_option("v")


@dataclass(frozen=True)
class RopeOptions:
    """The settings of RoPE. None is the model's own."""

    rope_scaling: str | None = option(
        "--rope-scaling",
        type=click.Choice(ROPE_SCALING),
        help="How to stretch a context beyond the training.  [default: the model's own]",
    )
    rope_scale: float | None = option(
        "--rope-scale", type=POSITIVE, help="Stretch the context by this factor."
    )
    yarn_orig_ctx: int | None = option(
        "--yarn-orig-ctx",
        type=SOME_POSITIONS,
        help="YaRN: positions that the model was trained on.  [default: the model's own]",
    )
    rope_freq_base: float | None = option(
        "--rope-freq-base", type=POSITIVE, help="RoPE's base.  [default: the model's own]"
    )

    def settings(self) -> Rope | None:
        """The object that the engine takes; None if no option was given."""
        from pyorch.engine import Rope

        scale = 1 / self.rope_scale if self.rope_scale else None
        rope = Rope(self.rope_scaling, scale, self.yarn_orig_ctx, self.rope_freq_base)
        return rope if rope.values else None


def numa_option() -> Any:
    return option(
        "--numa",
        type=click.Choice(NUMA),
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


def gpu_option(where: str = "on the GPU, or on the workers of --rpc") -> Any:
    return option(
        "-ngl",
        "--n-gpu-layers",
        aliases=("--gpu-layers",),
        type=POSITIONS,
        help=f"Number of layers {where}.  [default: all]",
    )


def kv_option(default: str = "for as many layers as fit, and a note says of how many") -> Any:
    return option(
        "-kvo/-nkvo",
        "--kv-offload/--no-kv-offload",
        default=None,
        help="K and V on the GPU with the weights, or in memory: for contexts that do not fit "
        f"there.  [default: on the GPU {default}]",
    )


@dataclass(frozen=True)
class RpcOptions:
    """The other machines that hold layers of the model."""

    workers: list[str] = several(
        "--rpc", of=Endpoint(), text="HOST:PORT of machines that run `sparq-cpp worker`."
    )
    tensor_split: list[float] = several(
        "-ts",
        "--tensor-split",
        of=Number(0),
        text="How they share the layers, say 3,1.  [default: as their free memory]",
    )

    def allowed(self) -> Sequence[str]:
        """The machines. With SPARQ_RPC_INSECURE=1 the text and the weights may go through networks
        that are not private, where others can read them.

        Raises:
            SparqError: the way to one is open to others.
        """
        from pyorch.engine.machines import reach

        for endpoint in self.workers:
            host, _, port = endpoint.partition(":")
            if reach(host) == "public" and os.environ.get("SPARQ_RPC_INSECURE") != "1":
                raise SparqError(
                    f"--rpc {endpoint}: everybody on the way could read the text and change it",
                    f"ssh -N -L {port}:127.0.0.1:{port} {host}, then --rpc 127.0.0.1:{port}; "
                    "or SPARQ_RPC_INSECURE=1",
                    exit_code=2,
                )
        return self.workers


@dataclass(frozen=True)
class LoadOptions:
    """How the model is loaded, and what its context is made with; its size is a ContextOptions."""

    cache: CacheOptions = field(default_factory=CacheOptions)
    rope: RopeOptions = field(default_factory=RopeOptions)
    no_repack: bool = repack_option()
    numa: str | None = numa_option()
    n_gpu_layers: int | None = gpu_option()
    kv_offload: bool | None = kv_option()
    rpc: RpcOptions = field(default_factory=RpcOptions)


context_options = takes(context=ContextOptions)
cache_options = takes(cache=CacheOptions)
load_options = takes(load=LoadOptions)


# ---- attention ----

SPEC_OPTION = ("-a", "--attn")  # `-a SPEC` is the one long form, in every command


@dataclass(frozen=True)
class AttentionOptions:
    """The settings of attention; None means not given. All others stand in the line of `-a`."""

    attn: str | None = option(
        *SPEC_OPTION,
        metavar="SPEC",
        help="All settings of attention as one line: sparq,ratio=1/8,shadow=q8; topk,k=512; dense.",
    )
    ratio: float | None = option(
        "--ratio",
        type=Ratio(),
        help="Read this share of dense attention's bytes: 1/8, 0.125 or 12.5%; 1 is exact."
        f"  [default: that of the model's card, else {ratio_text(AUTO_RATIO)}]",
    )
    budget: str | None = option(
        "--budget",
        type=click.Choice(BUDGETS),
        help="Spread of the bytes over the layers; flat reads about the same amount at any length."
        "  [default: uniform]",
    )

    def spec(self) -> AttentionSpec | None:
        """The settings that the options describe; None = no option was given.

        Raises:
            SparqError: values are out of range, or exclude each other.
        """
        values = {name: value for name, value in vars(self).items() if value is not None}
        if typed := given_on_command_line(values):  # it displaces variables that exclude it
            excluded = values.keys() - typed if "attn" in typed else {"attn"}
            values = {name: value for name, value in values.items() if name not in excluded}
        line = values.pop("attn", None)
        if line is None:  # an empty line is refused, not ignored
            return AttentionSpec("sparq", **values) if values else None
        for name in values:
            hint = "-a sparq,ratio=1/8,budget=ramp"
            raise SparqError(f"-a has all settings, so --{name} would change nothing", hint, 2)
        return parse_spec(line)


attention_options = takes(attention=AttentionOptions)


# ---- sampling ----


@dataclass(frozen=True)
class SamplingOptions:
    """The settings of sampling, by llama.cpp's names."""

    temp: float | None = option(
        "--temp",
        aliases=("--temperature",),
        type=Number(0),
        help="Temperature of sampling; 0 is greedy.",
    )
    top_k: int = option(
        "--top-k",
        type=POSITIONS,
        default=40,
        help="Sample from this many likeliest tokens; 0 is all.",
    )
    top_p: float = option(
        "--top-p",
        type=Number(0, 1),
        default=0.95,
        help="Sample from the likeliest tokens with this total probability.",
    )
    min_p: float = option(
        "--min-p",
        type=Number(0, 1),
        default=0.05,
        help="Drop tokens below this share of the best one's probability.",
    )
    repeat_penalty: float = option(
        "--repeat-penalty",
        type=Number(1e-3, 1e3),
        default=1.0,
        help="Make the last 64 tokens less likely by this factor.  [default: 1, no change]",
    )
    seed: int | None = option(
        "--seed",
        type=click.IntRange(0, 2**32 - 1),
        help="Seed of sampling.  [default: a new one each time]",
    )
    stop: Sequence[str] = option(
        "-r",
        "--reverse-prompt",
        "--stop",
        type=Text(),
        multiple=True,
        metavar="TEXT",
        help="End where the model writes this text, which is not shown; it may be repeated.",
    )

    def settings(self, default_temp: float) -> Sampling:
        """The object that the engine takes."""
        from pyorch.engine import Sampling

        values = {f.name: getattr(self, f.name) for f in fields(Sampling)}
        return Sampling(**{**values, "temp": default_temp if self.temp is None else self.temp})


sampling_options = takes(sampling=SamplingOptions)


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


# ---- what chat and generate share ----


def tokens_option(default: int | None, what: str) -> Callable[[F], F]:
    return click.option(
        "-n",
        "--tokens",
        cls=Option,
        aliases=("--predict", "--n-predict"),
        type=click.IntRange(1),
        default=default,
        help=f"Generate at most this many tokens{what}.",
    )


document_option = click.option(
    "--document",
    "document_names",
    type=File(),
    multiple=True,
    metavar="FILE",
    help="Begin with what `sparq-cpp read` has read: a file, or its name in `documents list`.",
)
