"""What people type into a chat in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from pyorch import paths
from pyorch.cli.terminal import note

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession


def typed_lines(commands: Mapping[str, bool], keeps: bool) -> Iterator[bytes]:
    """Yields what is typed until Enter; a pasted text with line feeds is one line.

    Args:
        commands: those that begin with /, and whether the name of a file follows.
        keeps: whether later chats can recall the lines.
    """
    session = _session(commands, keeps)
    while True:
        try:
            line = session.prompt("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            note("/exit or Ctrl-D leaves", "dim")
            continue
        yield line.encode(sys.stdin.encoding, errors="surrogateescape")


def _session(commands: Mapping[str, bool], keeps: bool) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    file, files, keys = (
        paths.cache() / "chat_history",
        PathCompleter(expanduser=True),
        KeyBindings(),
    )
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))

    class History(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):
                if keeps:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.touch(0o600)
                    super().store_string(string.encode("utf-8", "replace").decode())

    class Names(Completer):
        def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
            name, blank, rest = document.text_before_cursor.partition(" ")
            if not blank:
                yield from (Completion(c, -len(name)) for c in commands if c.startswith(name))
            elif commands.get(name):
                yield from files.get_completions(Document(rest), event)

    return PromptSession(
        history=History(str(file)),
        completer=Names(),
        complete_while_typing=False,
        key_bindings=keys,
        # the replies may go to a file, and nothing else is to go there
        output=create_output(sys.stdout if sys.stdout.isatty() else sys.stderr),
    )
