"""Options: few, with one meaning each, and the line wins over the variables."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pyorch.cli import COMMANDS, _name_variables, cli
from pyorch.cli import eval as evaluate
from pyorch.cli import options as opt
from pyorch.cli.calibrate import SearchOptions
from pyorch.cli.eval import MethodOptions
from pyorch.cli.groups import takes
from pyorch.engine import Sampling
from pyorch.errors import SparqError
from pyorch.evals import tasks


def commands() -> dict[str, click.Command]:
    """Every command and subcommand, by its name."""
    found: dict[str, click.Command] = {}
    for verb in COMMANDS:
        found[verb] = command = cli.get_command(click.Context(cli), verb)
        if isinstance(command, click.Group):
            found |= {f"{verb} {name}": c for name, c in command.commands.items()}
    return found


def test_every_name_of_a_file_may_begin_with_the_home_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The shell leaves `--model=~/x`, and a variable in quotes, as they are."""
    monkeypatch.setenv("HOME", "/home/me")
    named = re.compile(r"FILE|DIR|TEXT\.\.\.|^(IN|OUT|TO)$")
    for verb, command in commands().items():
        for param in (p for p in command.params if named.search(p.metavar or "")):
            if "TASK=" not in (param.metavar or ""):  # eval splits it first
                value = param.type.convert("~/x", param, None)
                assert value in ("/home/me/x", ["/home/me/x"]), f"{verb} {param.name}"
    given = evaluate._data(("wikitext=~/x",), [tasks()["wikitext"]])
    assert given == {"wikitext": Path("/home/me/x")}


@pytest.mark.parametrize(
    ("variables", "line", "wanted"),
    [
        ("RATIO=1/4", "-a topk,k=512", "topk,topk=512"),
        ("ATTN=topk,k=512", "--ratio 1/4", "sparq,ratio=1/4"),
        ("BUDGET=ramp ATTN=off", "--ratio 1/4", "sparq,ratio=1/4,budget=ramp"),
        ("RATIO=1/4 BUDGET=ramp", "-a dense", "dense"),
        ("RATIO=1/4", "--budget ramp", "sparq,ratio=1/4,budget=ramp"),
        ("RATIO=1/4 ATTN=off", "", "--ratio would change nothing"),
        ("", "--ratio 1/4 -a off", "--ratio would change nothing"),
    ],
)
def test_the_line_wins_over_variables(
    monkeypatch: pytest.MonkeyPatch, variables: str, line: str, wanted: str
) -> None:
    @click.command()
    @opt.attention_options
    def command(attention: opt.AttentionOptions) -> None:
        click.echo(attention.spec())

    _name_variables(command, "SPARQ_CHAT")
    for variable in variables.split():
        monkeypatch.setenv(*f"SPARQ_CHAT_{variable}".split("=", 1))
    result = CliRunner().invoke(command, line.split())
    assert wanted in (str(result.exception) if result.exception else result.stdout.splitlines())


def test_a_way_that_others_can_read_is_refused_unless_it_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near, far = opt.RpcOptions(["192.168.0.9:1"]), opt.RpcOptions(["8.8.8.8:50052"])
    assert near.allowed() == ["192.168.0.9:1"]
    with pytest.raises(SparqError, match=r"8\.8\.8\.8") as refused:
        far.allowed()
    assert "SPARQ_RPC_INSECURE=1" in refused.value.hint
    monkeypatch.setenv("SPARQ_RPC_INSECURE", "1")
    assert far.allowed() == ["8.8.8.8:50052"]


@pytest.mark.parametrize("verb", ["chat", "generate", "serve"])
def test_help_begins_with_what_people_set_first(verb: str) -> None:
    command = commands()[verb]
    names = [p.name for p in command.params]
    assert "RANGE" not in command.get_help(click.Context(command)), "a word of click's"
    order = [names.index(x) for x in ("model", "ratio", "ctx", "cache_type_k", "n_gpu_layers")]
    assert order == sorted(order) and names.index("workers") > len(names) - 4


def test_no_variable_stands_in_for_two_options() -> None:
    named = Counter(
        p.envvar[0]
        for command in commands().values()
        for p in command.params
        if isinstance(p, click.Option) and p.envvar
    )
    assert set(named.values()) == {1}
    assert not [name for name in named if name.endswith(("_YES", "_ALL", "_FORCE", "_INSECURE"))]


@pytest.mark.parametrize(
    "kind",
    [opt.ContextOptions, opt.LoadOptions, opt.SamplingOptions, SearchOptions, MethodOptions],
)
def test_a_group_made_by_hand_has_the_defaults_of_the_command_line(kind: type) -> None:
    seen = []

    @click.command()
    @takes(group=kind)
    def command(group: object) -> None:
        seen.append(group)

    assert CliRunner().invoke(command, [], catch_exceptions=False).exit_code == 0
    assert seen == [kind()]
    assert repr(seen) == repr([kind()])  # 1 and 1.0, () and [] are not the same


def test_sampling_has_the_defaults_of_the_engine() -> None:
    assert opt.SamplingOptions().settings(Sampling().temp) == Sampling()
