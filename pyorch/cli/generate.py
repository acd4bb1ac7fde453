"""`sparq-cpp generate`: continue a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyorch.attention.spec import AttentionSpec
from pyorch.cli import options as opt
from pyorch.cli import streams
from pyorch.cli.loading import open_document, open_session
from pyorch.cli.summary import summary_of, why_dense
from pyorch.cli.templates import TemplateOptions, template_options
from pyorch.cli.terminal import note, print_json
from pyorch.cli.types import File, Text
from pyorch.errors import SparqError
from pyorch.progress import progress_bar
from pyorch.text_file import read_text

if TYPE_CHECKING:
    from pyorch.engine import Document, Sampling, Session


@click.command()
@opt.model_argument
@opt.model_options
@click.option("-p", "--prompt", type=Text(), metavar="TEXT", help="The text to continue.")
@click.option(
    "-f",
    "--file",
    type=File(),
    metavar="FILE",
    help="Read the text from a file, or from stdin if FILE is -.",
)
@opt.tokens_option(128, "")
@opt.attention_options
@opt.context_options
@opt.sampling_options
@opt.document_option
@template_options
@opt.json_option
@opt.verbose_option
@opt.load_options
def command(
    model: opt.ModelOptions,
    prompt: str | None,
    file: str | None,
    tokens: int,
    document_names: tuple[str, ...],
    context: opt.ContextOptions,
    load: opt.LoadOptions,
    attention: opt.AttentionOptions,
    sampling: opt.SamplingOptions,
    templates: TemplateOptions,
    as_json: bool,
) -> None:
    """Continue a text.

    The continuation goes to stdout, speed and notes to stderr. The text is used as it is, without a
    chat template: the names of control tokens in it, such as <|im_end|>, are these tokens, as in
    llama.cpp. Decoding is greedy unless --temp is given. After a --document that was read for a
    chat the text is a question about it, in which such names are text, and the model's answer
    follows.
    """
    from pyorch import engine
    from pyorch.engine import document_file

    text, spec = _prompt(prompt, file), attention.spec()
    if len(document_names) > 1:
        raise SparqError("generate takes one --document", "leave out the others", 2)
    documents = [document_file.named(name) for name in document_names]
    if not any(d.form == "chat" for d in documents):
        templates.check_unused("the text is used as it is")
    with open_session(model, spec, context, load, documents=documents) as session:
        engine.check_text(session, text, session.n_ctx)
        if file != "-" and streams.text_waits():
            note("note: what comes through the pipe is not used: -f - would read it", "yellow")
        words, ends = _after(session, documents[0], text, templates) if documents else (text, [])
        settings = sampling.settings(0.0)
        _generate(session, words, spec, settings, tokens, [*ends, *sampling.stop], as_json=as_json)


def _after(
    session: Session, document: Document, text: str, templates: TemplateOptions
) -> tuple[list[int], list[str]]:
    """Open the document. Returns the tokens of it and of the text, and what ends the answer."""
    from pyorch import engine
    from pyorch.engine.text import inner

    if document.form != "chat":
        open_document(session, document)
        return session.tokens + inner(session.model, text, parse_special=True), []
    template, reading = templates.template(session), engine.reading_of(document)
    open_document(session, document, template, reading.messages("a"))
    return template.tokens(reading.messages(text)), template.stop


def _generate(
    session: Session,
    prompt: str | list[int],
    attention: AttentionSpec | None,
    sampling: Sampling,
    max_tokens: int,
    stop: list[str],
    *,
    as_json: bool,
) -> None:
    from pyorch import engine

    if isinstance(prompt, str):
        prompt = engine.tokenize(session, prompt, parse_special=True)
    sampling = sampling.drawn()
    pieces = []
    with progress_bar("reading the prompt", of="tokens") as progress:
        for piece in engine.generate(
            session,
            prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop,
            progress=progress,
        ):
            pieces.append(piece)
            if not as_json:
                print(piece, end="", flush=True)
    finish, summary = pieces[-1].finish, summary_of(session)
    if not as_json:
        print()
    if summary.info and (why := why_dense(attention, summary.info)):
        note(why, "yellow")
    if finish == "context":
        note(f"note: the context is full ({session.n_ctx} positions); raise --ctx")
    if as_json:
        text, tokens = "".join(map(str, pieces)), [piece.token for piece in pieces]
        reply = {"text": text, "tokens": tokens, "finish": finish, "seed": sampling.seed}
        print_json({**reply, **summary.json()})
    else:
        note(summary.line(), "dim")


def _prompt(text: str | None, file: str | None) -> str:
    if (text is None) == (file is None):
        what = "no prompt" if text is None else "two prompts"
        raise SparqError(what, "-p TEXT, -f FILE, or -f - for what comes through a pipe", 2)
    if file is None:
        prompt = text or ""
    elif file == "-":
        prompt = streams.stdin_text()
    else:
        prompt = read_text(Path(file))
    if not prompt:
        raise SparqError("the prompt is empty", "give at least one character", exit_code=2)
    return prompt
