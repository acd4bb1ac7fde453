"""Key-value retrieval (Lost in the Middle, arXiv 2307.03172, section 3): one of many random pairs.

Prompt and match follow the paper: the value of one 128-bit key of a JSON object has to occur in
the answer.
"""

from __future__ import annotations

from functools import partial

from pyorch.evals import niah, ruler
from pyorch.evals.decode import Example
from pyorch.evals.task import Setup, Task, endless

ASK = (
    "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    'JSON data:\n{data}\n\nKey: "{key}"'
)
CUE = "\nCorresponding value:"
SPARE = 8  # tokens of the answer besides the value


def example(setup: Setup, i: int) -> Example:
    rng, n_pairs = setup.rng(i), max(setup.ctx // 16, 2)
    pairs = [(niah.draw("uuid", rng), niah.draw("uuid", rng)) for _ in range(n_pairs)]
    place = rng.random()  # where the wanted pair stands
    max_tokens = max(len(setup.tokens(f' "{v}"')) for _, v in pairs) + SPARE

    def prompt(n: int) -> list[int]:
        data = "{" + ",\n ".join(f'"{k}": "{v}"' for k, v in pairs[:n]) + "}"
        return setup.prompt(ASK.format(data=data, key=pairs[int(place * n)][0]), CUE)

    n = ruler.largest(setup, "key_value: two pairs", (2, len(pairs)), prompt, max_tokens)
    at = int(place * n)
    about = {"pairs": n, "depth": round(at / (n - 1), 3)}
    return Example(str(i), prompt(n), max_tokens, (pairs[at][1],), about=about)


TASKS = (
    Task(
        "key_value",
        "the value of one of many random keys",
        "found",
        endless(example),
        partial(ruler.score, stop=("\n",)),
        options=("chat",),
        proportion=True,
        percent=True,
    ),
)
