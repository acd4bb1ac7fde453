"""`sparq-cpp chat`: talk to a model in the terminal, or through a pipe."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyorch import paths
from pyorch.attention.spec import AttentionSpec, parse_ratio
from pyorch.cli import conversation, streams
from pyorch.cli import options as opt
from pyorch.cli.conversation import LEFT_FREE, Chat
from pyorch.cli.line_editor import typed_lines
from pyorch.cli.loading import model_title, open_session
from pyorch.cli.summary import devices, summary_of, why_dense
from pyorch.cli.templates import TemplateOptions, note_system, template_options
from pyorch.cli.terminal import note, print_json
from pyorch.cli.types import File
from pyorch.errors import SparqError
from pyorch.progress import progress_bar, say
from pyorch.system import ENDING, handled
from pyorch.text_file import LARGEST, decoded, raw_lines, read_text

if TYPE_CHECKING:
    from pyorch.engine import Sampling

HELP = """\
/read FILE    put a text before the next message, after those of earlier /read; it is kept, and
              not read a second time
/document F   a new conversation about a text that sparq-cpp read has kept; alone: list them
/stats        speed and attention of the last reply
/ratio 1/4    sparse attention from the next reply on
/dense        exact attention from the next reply on
/clear        begin a new conversation
/save FILE    write the conversation to a new file, or to the one it was saved to or resumed from;
              --resume FILE continues it. /save FILE kv: at once
/exit         leave (also Ctrl-D); chat --resume last goes on
//...         a message that begins with a slash
Ctrl-C stops a reply, or the reading of a message, which is then dropped. Pressed again, it
stops the program. Alt-Enter begins a line, Tab completes, arrow keys bring back messages.

What is kept is for you alone, in {cache}:
texts/ has what /read read and the model's K and V of it, the longest unused removed beyond 8 GiB
(SPARQ_DOCUMENTS_LIMIT); `sparq-cpp documents` lists and removes them. chat_history has the lines
that were typed in a terminal, chat_last.json its last conversation. --no-keep keeps none."""

COMMANDS = {name: bool(of) for name, of in re.findall(r"^(/\w+)( F)?", HELP, re.MULTILINE)}
LAST = "chat_last.json"  # what `--resume last` continues, in our cache

ENDS = [number for number in ENDING if number != signal.SIGINT]  # as a terminal that closes
ROLES = ("system", "user", "assistant")


@click.command()
@opt.model_argument
@opt.model_options
@opt.attention_options
@opt.context_options
@opt.system_option
@opt.sampling_options
@opt.document_option
@click.option(
    "--resume",
    type=File(),
    metavar="FILE|last",
    help="Continue what /save wrote, or last: the last.",
)
@click.option("--commands", is_flag=True, help="Obey lines of a pipe that begin with /, too.")
@click.option("--no-keep", is_flag=True, help="Keep nothing of what is read and typed: see /help.")
@template_options
@opt.json_option
@opt.verbose_option
@opt.load_options
def command(
    model: opt.ModelOptions,
    system: str | None,
    resume: str | None,
    commands: bool,
    no_keep: bool,
    document_names: tuple[str, ...],
    context: opt.ContextOptions,
    load: opt.LoadOptions,
    attention: opt.AttentionOptions,
    sampling: opt.SamplingOptions,
    templates: TemplateOptions,
    as_json: bool,
) -> None:
    """Talk to a model, with its own chat template.

    In a terminal, /help lists the commands. From a pipe, each line is one message. Replies go to
    stdout; with --json each is one line of JSON.
    """
    piped = streams.stdin()  # what is wrong is refused before a model is loaded
    conversation.limit()
    spec = attention.spec()
    resume = str(paths.cache() / LAST) if resume == "last" else resume
    if resume and document_names:
        raise SparqError("--resume cannot be combined with --document", "give one of them", 2)
    messages = _resume(resume) if resume else []
    documents = conversation.load_all(document_names, system)
    saved = conversation.saved_beside(resume) if resume else []
    if system:  # it replaces the system message of a resumed conversation
        messages = [m for m in messages if m["role"] != "system"]
        messages.insert(0, {"role": "system", "content": system})
    with open_session(model, spec, context, load, documents=documents or saved) as session:
        template = templates.template(session)
        template.stop += sampling.stop
        if not template.builtin:
            note("note: this model has no chat template; a plain transcript is used", "yellow")
        chat = Chat(
            session,
            template,
            session.settings.spec or AttentionSpec(),
            sampling.settings(0.8),
            sampling.tokens,
            as_json,
            sys.stdin.isatty(),
            messages,
            documents=documents,
            keeps=not no_keep,
            files={Path(resume).resolve()} if resume else set(),
            chosen=spec is not None,
        )
        for document in saved:
            conversation.go_on(chat, document)
        if documents:
            conversation.open_in(chat, documents[0])
        note_system(template, chat.messages)
        if chat.interactive:
            with handled(lambda number, _: sys.exit(128 + number), ENDS):
                _loop(chat, typed_lines(COMMANDS, chat.keeps), commands=True)
        else:
            lines = iter(partial(piped.readline, LARGEST + 1), b"")
            _loop(chat, raw_lines(lines, "stdin"), commands)


def _loop(chat: Chat, lines: Iterable[bytes], commands: bool) -> None:
    if chat.interactive:
        note(
            f"{model_title(chat.session.path)}, attention {chat.spec}. /help lists the commands",
            "dim",
        )
        if n := sum(m["role"] != "system" for m in chat.messages):
            note(f"{n} messages of an earlier conversation", "dim")
    say_once = cache(say)  # once, not for each line
    source = "your message" if chat.interactive else "stdin"
    for line in filter(None, map(bytes.strip, lines)):
        is_command = re.match(rb"/[^/\s]", line) is not None
        if is_command and not commands:
            say_once("stdin: lines that begin with / are messages; --commands makes them commands")
        try:
            if not (is_command and commands):
                text = line[1:] if commands and line.startswith(b"//") else line
                _reply(chat, decoded(text, source, say_once))
                if chat.end:
                    sys.exit(128 + chat.end)
            elif not _run_command(chat, os.fsdecode(line)):  # it may have the name of a file
                return
        except KeyboardInterrupt:
            if chat.leaves or not chat.interactive:
                raise
            note("(stopped)", "dim")
        except SparqError as error:
            if not chat.interactive:
                raise
            note(f"error: {error.message}", "red")
            if error.hint:
                note(f"hint: {error.hint}", "yellow")


def _run_command(chat: Chat, line: str) -> bool:
    """Run a `/command`. Returns False if it ends the chat."""
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    if "\0" in line:
        raise SparqError("the command contains NUL bytes", "is the input UTF-8?", exit_code=2)
    if name in ("/read", "/ratio", "/save") and not argument:
        value = "1/4" if name == "/ratio" else "FILE"
        raise SparqError(f"{name} needs something after it", f"{name} {value}", 2)
    if name == "/help":
        note(HELP.format(cache=paths.cache()))
    elif name == "/read":
        conversation.read(chat, paths.expanded(argument))
    elif name == "/document":
        conversation.choose(chat, argument)
    elif name == "/stats":
        used, n_ctx = len(chat.session.tokens), chat.session.n_ctx
        note(f"attention {chat.spec}, context {used} of {n_ctx} positions")
        note(chat.summary.line() if chat.summary else "no reply yet")
        for line in devices(chat.summary.info) if chat.summary and chat.summary.info else ():
            note(line)
    elif name == "/clear":
        chat.begin()
        note("a new conversation", "dim")
    elif name == "/dense":
        _set_attention(chat, chat.sparse.of_prompt)
    elif name == "/ratio":
        _set_attention(chat, chat.sparse.at_ratio(parse_ratio(argument)))
    elif name == "/save":
        _save(chat, argument)
    elif name not in ("/exit", "/quit"):
        hint = f"/help lists the commands; to send it as a message, begin with /{name}"
        raise SparqError(f"unknown command {name}", hint, exit_code=2)
    return name not in ("/exit", "/quit")


def _set_attention(chat: Chat, spec: AttentionSpec) -> None:
    from pyorch import engine

    engine.set_attention(chat.session, spec)
    chat.spec, chat.chosen = spec, True
    if spec.sparse:
        chat.sparse = spec
    note(f"attention {spec}", "dim")


def _save(chat: Chat, name: str) -> None:
    from pyorch import engine

    with_kv = name.endswith(" kv")
    path = paths.expanded(name.removesuffix(" kv"))
    for file in (path, conversation.beside(path))[: 1 + with_kv]:
        if os.path.lexists(file) and path.resolve() not in chat.files:
            hint = "give another name: /save replaces only what this chat has saved or resumed"
            raise SparqError(f"{file}: exists already", hint, exit_code=2)
    _write(path, chat.messages)
    chat.files.add(path.resolve())
    if with_kv and chat.session.tokens:
        reading, kv = engine.Reading(path.name, "", "saved"), conversation.beside(path)
        engine.keep_document(chat.session, kv, reading, chat.template, chat.session.tokens)
    note(f"{len(chat.messages)} messages written to {path}", "dim")


def _write(path: Path, messages: Sequence[dict[str, str]]) -> None:
    from pyorch.models.new_file import new_file

    text = json.dumps({"messages": messages}, indent=2, ensure_ascii=False)
    with new_file(path, force=True, private=True) as (partial, _):
        # what UTF-8 cannot have becomes an escape of JSON
        partial.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


def _resume(name: str) -> list[dict[str, str]]:
    try:
        messages = json.loads(read_text(Path(name)))["messages"]
        # the content of others is a list of parts, and a transcript has no name for other roles
        if not all(isinstance(m["content"], str) and m["role"] in ROLES for m in messages):
            raise TypeError
        return [{"role": m["role"], "content": m["content"]} for m in messages]
    except (ValueError, KeyError, TypeError):
        hint = f"it takes a file written by /save, with the roles {', '.join(ROLES)}"
        raise SparqError(f"{name}: not a saved conversation", hint) from None


def _reply(chat: Chat, text: str) -> None:
    """Answer a message. If that fails the conversation is as it was before, but a text of /read
    moves to the next message."""
    from pyorch import engine

    engine.check_text(chat.session, text, chat.session.n_ctx)
    before = list(chat.messages), list(chat.read), chat.text
    chat.messages.append({"role": "user", "content": chat.text + text})
    chat.read += [chat.text] if chat.text else []
    chat.text = ""
    sampling = chat.sampling.drawn()
    is_answered = False
    try:
        prompt = _trimmed_prompt(chat)
        engine.reset_counters(chat.session)
        reply, finish = _stream(chat, prompt, sampling)
        is_answered = bool(reply) or finish != "interrupted"  # not if it was stopped in prefill
    finally:
        if not is_answered:
            chat.messages, chat.read, chat.text = before
    chat.summary = summary_of(chat.session)
    if is_answered:
        chat.messages.append({"role": "assistant", "content": reply})
        conversation.keep(chat)
        if chat.interactive and chat.keeps:
            with suppress(SparqError, OSError):  # a cache that cannot be written
                _write(paths.cache() / LAST, chat.messages)
    if chat.as_json:
        answer = {"reply": reply, "finish": finish, "seed": sampling.seed}
        print_json({**answer, **chat.summary.json()}, indent=None)
    if chat.interactive and is_answered:
        note(chat.summary.line(), "dim")
    # why the reply ended if the model did not end it, and why attention was dense
    if finish == "context":
        full = f"note: the context is full ({chat.session.n_ctx} positions)"
        note(f"{full}: /clear, or a larger --ctx next time", "yellow")
    if finish == "length" and chat.max_tokens is None:
        why = "it took half of the room that was left, and what was read has to stay"
        note(f"note: the reply was cut: {why}; -n allows more tokens", "yellow")
    info = chat.summary.info
    why = why_dense(chat.spec, info) if info and chat.chosen else ""
    if why and why != chat.dense_note:
        note(why, "yellow")
    chat.dense_note = why


def _trimmed_prompt(chat: Chat) -> list[int]:
    """The tokens of the conversation. If they leave no room for a reply, its oldest messages are
    dropped, those with a text of /read last. What stood behind them has to be read again, so half
    of the room is made free at once."""
    n_ctx, oldest = chat.session.n_ctx, chat.oldest()

    @cache
    def tokens(n_dropped: int) -> list[int]:
        return chat.template.tokens(chat.without(oldest[:n_dropped]))

    if len(tokens(0)) <= n_ctx // 2:
        return tokens(0)
    n_texts = sum(map(chat.has_text, oldest))
    room = n_ctx - len(tokens(len(oldest) - n_texts))  # the most that can be had beside the texts
    reply = min(room // 4, chat.max_tokens or n_ctx)
    if len(tokens(0)) + max(reply, LEFT_FREE) <= n_ctx:
        return tokens(0)
    most = n_ctx - max(room // 2, LEFT_FREE)
    n = bisect_left(range(len(oldest)), True, key=lambda n: len(tokens(n)) <= most)
    if n and len(tokens(n)) <= n_ctx:
        n_before, chat.messages = len(chat.messages), chat.without(oldest[:n])
        full = f"note: the context is full: the {n_before - len(chat.messages)} oldest messages"
        note(f"{full} were dropped, and what followed them is read again", "yellow")
    return tokens(n)


def _stream(chat: Chat, prompt: list[int], sampling: Sampling) -> tuple[str, str]:
    """Generate a reply and print it as it comes. Returns it, and the reason why it ended."""
    from pyorch import engine

    reply, finish = "", ""
    with _interruptible(chat) as stopped, progress_bar("reading", of="tokens") as progress:
        conversation.keep_first(chat, prompt, progress, stopped)
        pieces = engine.generate(
            chat.session,
            prompt,
            max_tokens=chat.most_tokens(len(prompt)),
            sampling=sampling,
            stop=chat.template.stop,
            progress=progress,
            should_stop=stopped,
        )
        for piece in pieces:
            text = piece.text if reply else piece.text.lstrip()
            reply, finish = reply + text, piece.finish
            if not (chat.as_json or chat.end):  # the terminal may be gone
                print(text, end="", flush=True)
    if not (chat.as_json or chat.end):
        print(flush=True)
    if finish == "interrupted":
        note("(stopped)" if reply else "(stopped, the message is dropped)", "dim")
    return reply, finish


@contextmanager
def _interruptible(chat: Chat) -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag, which the yielded function reads; a second Ctrl-C ends the program. So
    does the first one if nobody is there to say what comes next. A signal that ends an interactive
    chat stops its reply first."""
    flag = False

    def on_signal(number: int, _: object) -> None:
        nonlocal flag
        if number != signal.SIGINT:
            chat.end = number
        elif flag or not chat.interactive:
            chat.leaves = True
            raise KeyboardInterrupt
        flag = True

    with handled(on_signal, (signal.SIGINT, *(ENDS if chat.interactive else ()))):
        yield lambda: flag
