"""Continue a prompt, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pyorch.engine.decoding import align, check_length, decode, prefill
from pyorch.engine.model import Session
from pyorch.engine.sampling import Sampling, sampler
from pyorch.engine.text import TextStream, check_text, is_eog, tokenize
from pyorch.errors import SparqError
from pyorch.progress import Progress


@dataclass(frozen=True)
class Piece:
    """One step of `generate`.

    `text` is empty while a character is incomplete or a possible stop string is held back.
    `finish` is set on the last piece only, and says why it is the last: `eog` (the model ended),
    `stop` (a stop string), `length` (max_tokens), `context` (no room is left) or `interrupted`
    (`token` is -1 if it was stopped before the first).
    """

    token: int
    text: str
    finish: str = ""

    def __str__(self) -> str:
        return self.text


def generate(
    session: Session,
    prompt: Sequence[int] | str,
    *,
    max_tokens: int = 256,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    ignore_eog: bool = False,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Iterator[Piece]:
    """Prefill what the cache lacks of `prompt`, then yield one piece per token.

    Args:
        prompt: tokens, or a text, in which the names of control tokens are text.
        max_tokens: the most tokens to generate.
        sampling: how a token is chosen; None takes the most likely one.
        stop: texts that end the generation; they are not part of it.
        ignore_eog: continue when the model wants to end.
        progress, should_stop: as for `prefill`; `should_stop` is asked before each token too.

    Raises:
        SparqError: the prompt is empty or does not fit, or the library failed.
    """
    if isinstance(prompt, str):
        check_text(session, prompt, session.n_ctx)
        prompt = tokenize(session, prompt)
    if not prompt:
        raise SparqError("the prompt is empty", "give at least one token")
    check_length(session, len(prompt))
    prefill(session, align(session, prompt), progress=progress, should_stop=should_stop)
    if len(session.tokens) < len(prompt):
        yield Piece(-1, "", "interrupted")
        return
    stream = TextStream(session, stop)
    with sampler(session, sampling or Sampling()) as sample:
        for i in range(max_tokens):
            token = sample()
            if is_eog(session, token) and not ignore_eog:
                yield Piece(token, stream.rest(), "eog")
                return
            text, met_stop = stream.add(token)
            if met_stop:
                yield Piece(token, text, "stop")
                return
            finish = ""
            if i + 1 == max_tokens:
                finish = "length"
            elif len(session.tokens) >= session.n_ctx:
                finish = "context"
            elif should_stop is not None and should_stop():
                finish = "interrupted"
            yield Piece(token, text + (stream.rest() if finish else ""), finish)
            if finish:
                return
            decode(session, token)
