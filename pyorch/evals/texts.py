"""Books to take passages and haystacks from, and words for generated tasks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pyorch.errors import SparqError
from pyorch.progress import say
from pyorch.text import printable
from pyorch.text_file import read_text

SHOWN = 5  # names of what a folder holds and is left out
LARGEST = 8 << 20  # characters of all books, which are tokenised in some seconds
TOKEN = 16  # characters: the mean of no text has more


def read_texts(names: Sequence[Path], n_tokens: int = 0) -> list[str]:
    """Read books: each name is a file, or a folder of *.txt; a note names what else a folder holds.
    Project Gutenberg's frame is cut off.

    Of books that are longer than `LARGEST` together, each ends after its share; a note says where.

    Args:
        n_tokens: each keeps that many, if it has them.

    Raises:
        SparqError: there is nothing to read, or nothing in a file.
    """
    files = [file for name in names for file in (_in(name) if name.is_dir() else [name])]
    if not files:
        raise SparqError(f"no *.txt in {', '.join(map(str, names))}", "--text FILE or DIR")
    texts = [_body(read_text(f, "--text FILE or DIR")) for f in files]
    if empty := [f for f, text in zip(files, texts, strict=True) if not text]:
        raise SparqError(f"{empty[0]}: there is no text in it", "--text FILE or DIR")
    if sum(map(len, texts)) > LARGEST:
        n = max(LARGEST // len(texts), TOKEN * n_tokens)
        for f in (f for f, text in zip(files, texts, strict=True) if len(text) > n):
            say(f"{printable(str(f))}: only its first {n} characters are used")
        texts = [text[:n] for text in texts]
    return texts


def _in(folder: Path) -> list[Path]:
    files = sorted(folder.iterdir())
    if left := [printable(path.name) for path in files if path.suffix != ".txt"]:
        some = ", ".join(left[:SHOWN]) + ", ..." * (len(left) > SHOWN)
        say(f"{printable(folder)}: {len(left)} left out (not *.txt): {some}")
    return [path for path in files if path.suffix == ".txt"]


def _body(text: str) -> str:
    start = re.search(r"^\*\*\* ?START OF .*$", text, re.M)
    end = re.search(r"^\*\*\* ?END OF .*$", text, re.M)
    return text[start.end() if start else 0 : end.start() if end else len(text)].strip()


def haystack(
    books: Sequence[Sequence[int]], n: int, rng: np.random.Generator
) -> tuple[list[int], list[int]]:
    """`n` tokens of a book from a random place on, and their stretch, as `Example.about` has it; a
    shorter book is repeated."""
    number = int(rng.integers(len(books)))
    book = books[number]
    at = int(rng.integers(max(len(book) - n, 0) + 1))
    return [book[(at + i) % len(book)] for i in range(n)], [number, at, at + n]


# RULER draws keys from a package's list of 3,000 adjectives and 6,800 nouns
_ADJECTIVES = """
able aged amber ample arid azure bald bitter blank bleak blunt bold brave brief bright brisk
brittle broad bronze calm candid careful cheap chief civil clean clever cold coral cosmic crisp
cruel curly damp daring dark dear deep dense dim distant dizzy drab dry dull dusty eager early
easy elder empty equal even exact faint fair fancy fast feral fierce final firm flat fluffy foggy
fond formal frail frank fresh frosty full funny gentle giant glad gloomy golden grand grave gray
great green grim gross handy happy harsh hasty heavy hidden high hollow honest huge humble hungry
icy idle inner ivory jolly keen kind lame large late lazy lean level light limp little lively
local lone loud loyal lucky lush mad major mellow merry mild minor misty modern moist mute narrow
neat noble noisy novel oblong odd olive orange oval pale patient plain polite prime proud pure
quaint quick quiet rapid rare raw ready regal rich rigid ripe rough round royal rude rustic sad
safe scarlet sharp shiny short shy silent silver simple sleepy slim slow small smooth sober soft
solid sour spare stale steady steep stern stiff strange strict strong sturdy sudden sunny super
sweet swift tall tame tender thick thin tidy tiny tired tough true twin ugly upper urban vague
vast vivid warm wary weak weary wet wide wild wise witty wooden worthy young zany
"""
_NOUNS = """
acorn actor alley anchor ankle apple apron arch arrow atlas attic badge baker banjo barn barrel
basin basket beach beacon beard beaver bell bench berry bicycle blanket boat bonnet bottle bowl
branch bread brick bridge broom brush bucket buffalo bugle button cabin cable camel candle canoe
canyon carpet castle cave cellar chain chair chalk cherry chest chimney circle citrus clock cloud
coast coat coffee coin collar comet compass copper corner cotton cousin cradle crane creek cricket
crown crystal curtain cushion daisy dancer desk diary dinner doctor donkey door dragon drawer drum
eagle easel elbow engine falcon farmer feather fence ferry field finger flag flame flower flute
forest fountain fox frame garden gate ghost glacier glove goose grape gravel guitar hammer harbor
harp hat hawk hedge helmet hill hinge honey hook horse hotel hunter island ivy jacket jar jewel
judge jungle kettle key kitchen kite knife ladder lake lamp lantern lawyer leaf lemon letter
library lion lizard locket magnet mango map marble market mask meadow melon mirror moon motor
mountain museum napkin nephew nest needle north notebook ocean onion orchard otter oven owl oyster
paddle page palace panda paper parrot pasture peach pearl pebble pencil pepper piano pigeon pillow
pilot pine pirate planet plate plum pocket poet pond potato prairie prince puddle puppet quarry
queen quilt rabbit radio raft rail rain raven ribbon rice river road robin rocket roof rope rose
saddle sailor salad salmon sand scarf school seed shadow sheep shelf ship shoe shovel sister
sketch sled snail soldier song spider spoon spring squash stable star statue stone store storm
stove street sugar swan table tailor teacher temple tent thread throne thumb tiger tile toast
tower train tree trumpet tulip tunnel turtle uncle valley vase velvet village violin wagon wall
walnut water weaver whale wheel whistle willow window winter wolf wrist yard zebra
"""
ADJECTIVES, NOUNS = _ADJECTIVES.split(), _NOUNS.split()
