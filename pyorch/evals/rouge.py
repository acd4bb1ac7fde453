"""Judges summaries by ROUGE-L (SparQ, G.1.3: F, stemmed)."""

from __future__ import annotations

from functools import cache
from typing import Any

from pyorch import paths
from pyorch.errors import SparqError
from pyorch.evals.decode import Decoder
from pyorch.evals.example import Example, Outcome

MAX_TOKENS = 128


@cache
def scorer() -> Any:
    """The scorer of the package rouge-score.

    Raises:
        SparqError: the package is missing. A task asks for it first, before hours of work.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError:
        raise SparqError(
            "ROUGE needs the package rouge-score", paths.install_command("eval")
        ) from None
    return RougeScorer(["rougeL"], use_stemmer=True)


def score(decoder: Decoder, example: Example) -> Outcome:
    """F of the reference that the answer is nearest to."""
    said = decoder.answer(example).decode("utf-8", errors="replace")
    scores = [scorer().score(answer, said)["rougeL"].fmeasure for answer in example.answers]
    return Outcome(max(scores), said)
