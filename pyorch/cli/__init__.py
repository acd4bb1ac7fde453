"""The command `sparq-cpp`. One module per verb, imported only when that verb runs."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from functools import cache
from typing import NoReturn, cast

import click

from pyorch import __version__, native
from pyorch.cli import streams
from pyorch.errors import SparqError, nearest

# verb -> (module below pyorch.cli, one line for --help). The module holds `command`.
COMMANDS = {
    "chat": ("chat", "Chat with a model in the terminal."),
    "generate": ("generate", "Continue a text."),
    "read": ("read", "Read a text once and keep it."),
    "documents": ("documents", "List, show, check or remove what was read."),
    "serve": ("serve", "Serve OpenAI's API over HTTP."),
    "worker": ("worker", "Hold layers of a model for another machine."),
    "explain": ("explain", "Show what attention reads at a ratio and a length."),
    "calibrate": ("calibrate", "Measure which k and rank each layer needs."),
    "models": ("models", "List, show or remove models."),
    "pull": ("pull", "Download a model and check it."),
    "convert": ("convert", "Convert a safetensors model to GGUF."),
    "quantize": ("quantize", "Quantise a GGUF model."),
    "demo": ("demo", "Let a small model complete sentences out of a long story."),
    "bench": ("bench", "Measure speed beside llama.cpp's."),
    "eval": ("eval", "Measure what sparse attention costs in quality."),
    "build": ("build", "Build the patched llama.cpp library."),
    "clean": ("clean", "Show what the cache holds, and remove it."),
    "doctor": ("doctor", "Say what is built and what this machine can do."),
}


class LazyGroup(click.Group):
    """Knows the names of its commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command:
        if name not in COMMANDS:
            raise nearest("command", name, COMMANDS)
        return _command(name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@cache
def _command(verb: str) -> click.Command:
    module = importlib.import_module(f"pyorch.cli.{COMMANDS[verb][0]}")
    command = cast(click.Command, module.command)
    _name_variables(command, f"SPARQ_{verb.upper()}")
    return command


# they remove, overwrite, download or open a door, so a variable that is left over sets none of them
_TYPED = ("YES", "ALL", "FORCE", "INSECURE")


def _name_variables(command: click.Command, prefix: str) -> None:
    """Give every option an environment variable, named after its longest name. click would use the
    name of the parameter, which users do not see. `eval run` is what `eval` alone does. Help shows
    each default, unless its text does, and N for a number."""
    for param in command.params:
        if isinstance(param, click.Option):
            param.show_default = "[default: " not in (param.help or "")
            if param.type.name.split()[0] in ("integer", "float"):
                param.metavar = param.metavar or "N"
            name = max(param.opts, key=len).strip("-").replace("-", "_").upper()
            if name in _TYPED:
                continue
            shared = [param.envvar] if isinstance(param.envvar, str) else param.envvar or []
            param.envvar = [f"{prefix}_{name}", *shared]
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            _name_variables(inner, prefix if name == "run" else f"{prefix}_{name.upper()}")


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@click.version_option(__version__, prog_name="sparq-cpp")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """llama.cpp with sparse attention for decoding (SparQ, top-k), on ordinary GGUF models."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """Entry point of `sparq-cpp`."""
    run(cli, prog_name="sparq-cpp")


def run(command: click.Command, prog_name: str | None = None) -> NoReturn:
    """Run a command; an error becomes two lines on stderr and an exit code, and so does a death by
    a signal in the library."""
    native.reports_crashes = True
    streams.prepare()
    try:
        status = command(standalone_mode=False, prog_name=prog_name)
        sys.stdout.flush()
        sys.exit(status if isinstance(status, int) else 0)
    except SparqError as error:
        fail(error.message, error.hint, error.exit_code)
    except click.ClickException as error:
        message, hint = error.format_message(), ""
        if isinstance(error, click.UsageError) and error.ctx is not None:
            hint = f"{error.ctx.command_path} --help"
            if getattr(getattr(error, "param", None), "name", "") == "model":
                hint = "a file, org/repo of the hub, or a name that `sparq-cpp models` lists"
            if isinstance(error, click.NoSuchOption):
                options = (p for p in error.ctx.command.params if isinstance(p, click.Option))
                names = [name for p in options for name in getattr(p, "names", p.opts)]
                message, hint = error.message, nearest("", error.option_name, names).hint
                if error.ctx.info_name == "serve":
                    hint += f" If it is llama-server's: sparq-cpp serve ... -- {error.option_name}"
        if isinstance(error, click.BadParameter) and isinstance(error.param, click.Argument):
            error.param_hint = str(error.param.metavar or error.param.name).strip("[].")
            message = error.format_message()
        fail(message, hint, error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        if not error.filename:  # of a stream: what is left in it is not tried again
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        if isinstance(error, BrokenPipeError):  # the reader of our output is gone
            sys.exit(1)
        where = f"{error.filename}: " if error.filename else ""
        hint = "check that it exists, and its permissions"
        if error.errno == errno.ENOSPC:
            hint = "free some disk space, or write elsewhere"
        fail(f"{where}{error.strerror or error}", hint, 1)


def fail(message: str, hint: str, exit_code: int) -> NoReturn:
    """Print an error in the only form that this program uses, and exit."""
    click.secho("error: ", fg="red", bold=True, nl=False, err=True)
    click.echo(message, err=True)
    if hint:
        click.secho("hint: ", fg="yellow", nl=False, err=True)
        click.echo(hint, err=True)
    sys.exit(exit_code)
