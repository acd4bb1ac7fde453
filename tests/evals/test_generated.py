"""The generated tasks: their examples, and what they make of an answer."""

from __future__ import annotations

import re
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from parrot import Parrot

from pyorch import engine, evals
from pyorch.errors import SparqError
from pyorch.evals import needle, repetition, texts
from pyorch.evals.decode import Decoder, Example
from pyorch.evals.task import Setup
from pyorch.evals.texts import read_texts

pytestmark = pytest.mark.usefixtures("native_lib_dir")

CTX = 2048
GENERATED = [t for t in evals.tasks().values() if not t.data and t.family != "answers"]


@pytest.fixture(scope="module")
def setup(tiny: Path, book: Path):
    with engine.load(tiny, n_ctx=CTX, n_threads=1) as session:
        yield Setup(session, CTX, texts=read_texts([book]))


def first(name: str, setup: Setup, n: int = 4) -> list[Example]:
    return list(islice(evals.tasks()[name].examples(setup), n))


@pytest.mark.parametrize("task", GENERATED, ids=lambda t: t.name)
def test_examples_fit_repeat_and_fill_the_context(task: Any, setup: Setup) -> None:
    examples = list(islice(task.examples(setup), 6))
    assert list(islice(task.examples(setup), 6)) == examples
    sizes = [len(e.prompt) + e.max_tokens for e in examples]
    assert max(sizes) <= CTX
    if task.name != "needle":  # which has its own lengths
        assert min(sizes) > 0.9 * CTX
    assert len({tuple(e.prompt) for e in examples}) == 6
    assert all(e.prompt[0] == 1 for e in examples)  # the begin token
    other = Setup(setup.session, CTX, seed=2, texts=setup.texts)
    assert next(task.examples(other)).prompt != examples[0].prompt


@pytest.mark.parametrize("task", GENERATED, ids=lambda t: t.name)
def test_the_right_answer_gets_the_full_score_and_a_wrong_one_none(
    task: Any, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    if task.reference:
        return
    e = first(task.name, setup, 1)[0]
    best = len(e.answers[0]) if task.name == "repetition" else 1
    for reply, want in (((" ".join(e.answers)), best), ("~" * 40, 0)):
        with monkeypatch.context() as patch:
            session = Parrot(reply.encode()).install(patch)
            assert task.score(Decoder(session), e).score == want


@pytest.mark.parametrize("questions", [1, 3])
def test_passage_is_in_its_context(setup: Setup, questions: int) -> None:
    """Which several passages share."""
    some = Setup(setup.session, CTX, texts=setup.texts, questions=questions)
    passages = first("repetition", some, 6)
    contexts = []
    for e in passages:
        prose, cue = setup.text(e.prompt[1:]).rsplit("\n\n", 1)
        assert len(cue) == repetition.CUE and cue.startswith(" ")
        assert cue + e.answers[0] in prose
        assert len(e.answers[0]) == e.max_tokens == repetition.CHARS
        contexts.append(prose)
    assert [e.about["text"] for e in passages] == [i // questions for i in range(6)]
    assert [contexts.index(x) for x in contexts] == [i // questions * questions for i in range(6)]
    assert len({tuple(e.prompt) for e in passages}) == 6


@pytest.mark.parametrize(
    ("reply", "right"), [("abcdef", 6), ("abcXef", 3), ("Xbcdef", 0), ("abé", 2), ("abc", 3)]
)
def test_repetition_counts_characters_until_the_first_mistake(
    monkeypatch: pytest.MonkeyPatch, reply: str, right: int
) -> None:
    expected = "abèdef" if "é" in reply else "abcdef"
    parrot = Parrot(reply.encode())
    e = Example("x", [1, 2], 20, (expected,))
    outcome = repetition.score(Decoder(parrot.install(monkeypatch)), e)
    assert outcome.score == right
    # no step after the first mistake, and none after the end
    assert len(parrot.asked) <= len(expected[: right + 1].encode()) + (reply == "abc")


def test_needle_is_at_its_depth(setup: Setup) -> None:
    cells = first("needle", setup, 11 * 8)
    assert {e.about["depth"] for e in cells} == {round(i / 10, 4) for i in range(11)}
    assert len({(e.about["length"], e.about["depth"]) for e in cells}) == len(cells) / 8 * len(
        {e.about["length"] for e in cells}
    )
    for e in cells[:12]:
        text = setup.text(e.prompt[1:])
        assert text.count(needle.NEEDLE) == 1 and text.endswith(needle.QUESTION + needle.CUE)
        before = text.index(needle.NEEDLE)
        hay = len(text) - len(needle.NEEDLE + needle.QUESTION + needle.CUE)
        assert before / hay == pytest.approx(e.about["depth"], abs=0.02)
        assert len(e.prompt) + e.max_tokens == pytest.approx(e.about["length"], abs=6)
    for lengths in ([64], [CTX + 1]):
        with pytest.raises(SparqError, match="--lengths"):
            next(needle.examples(Setup(setup.session, CTX, texts=["x y"], lengths=lengths)))


@pytest.mark.parametrize(("name", "alone"), [("single_3", True), ("multikey_3", False)])
def test_niah_hides_the_value_once(name: str, alone: bool, setup: Setup) -> None:
    for e in first(f"niah_{name}", setup, 3):
        text = setup.text(e.prompt[1:])
        needles = re.findall(r"special magic uuids for (\S+) is: (\S+)\.", text)
        (key,) = [key for key, value in needles if (value,) == e.answers]
        assert text.count(key) == 3, "needle, question, cue"
        assert (len(needles) == 1) == alone


def test_niah_many_asks_ten_questions_about_each_text(setup: Setup) -> None:
    examples = first("niah_many", setup, 20)
    assert [e.about["text"] for e in examples] == [0] * 10 + [1] * 10
    for i in (0, 10):
        texts = [setup.text(e.prompt[1:]) for e in examples[i : i + 10]]
        hay = {t.partition("\nWhat ")[0] for t in texts}
        assert len(hay) == 1
        needles = re.findall(r"special magic (\w+) for (\S+) is: (\S+)\.", hay.pop())
        assert len(needles) == 12 and len({key for _, key, _ in needles}) == 9
        for e, text in zip(examples[i : i + 10], texts, strict=True):
            question = text.partition("\nWhat ")[2]
            numbers = {x for _, key, x in needles if key in question}
            assert numbers == set(e.answers)
        assert [len(e.answers) for e in examples[i : i + 10]] == [1] * 8 + [4, 4]


@pytest.mark.parametrize("name", ["niah_many", "repetition"])
def test_the_right_answer_is_given_token_by_token(name: str, setup: Setup) -> None:
    for e, plain in zip(first(f"answers_{name}", setup, 10), first(name, setup, 10), strict=True):
        assert (e.prompt, e.answers, e.about) == (plain.prompt, plain.answers, plain.about)
        answer = setup.text(list(e.forced)).strip()
        assert ", ".join(plain.answers).strip().startswith(answer) and len(answer) > 6
        assert len(e.forced) == e.max_tokens <= 32


def test_vt_chain_leads_to_the_value(setup: Setup) -> None:
    for e in first("vt", setup):
        text = setup.text(e.prompt[1:]).rpartition("Memorize and track")[2]
        value = re.search(r"assigned the value (\d+) in", text)[1]
        assigned = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text))
        order = [n for n, _ in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text)]
        assert order == list(e.answers) and len(order) == 5
        for name in e.answers:
            while name in assigned:
                name = assigned[name]
            assert name == value


def test_cwe_answers_are_the_most_common_words(setup: Setup) -> None:
    for e in first("cwe", setup):
        text = setup.text(e.prompt[1:]).rpartition("Below is")[2]
        counts = Counter(re.findall(r"\d+\. (\S+)", text.partition("\nQuestion")[0]))
        assert {w for w, n in counts.items() if n == 6} == set(e.answers)
        assert set(counts.values()) == {6, 1}


def test_fwe_answers_are_the_most_frequent_words(setup: Setup) -> None:
    for e in first("fwe", setup):
        text = setup.text(e.prompt[1:]).partition("coded words. ")[2].partition("\nQuestion")[0]
        counts = Counter(text.split()).most_common(5)
        assert counts[0][0] == "..." and tuple(w for w, _ in counts[1:4]) == e.answers
        assert counts[3][1] > counts[4][1]  # no tie for the third place


def test_key_value_asks_for_a_pair_that_is_there(setup: Setup) -> None:
    for e in first("key_value", setup):
        text = setup.text(e.prompt[1:])
        key = re.search(r'Key: "([^"]+)"\nCorresponding value:$', text)[1]
        assert f'"{key}": "{e.answers[0]}"' in text


@pytest.mark.parametrize("task", GENERATED, ids=lambda t: t.name)
def test_a_context_that_is_too_short_is_said_with_what_is_enough(task: Any, setup: Setup) -> None:
    small = Setup(setup.session, 120, texts=setup.texts)
    with pytest.raises(SparqError) as e:
        next(task.examples(small))
    enough = int(re.search(r"--ctx (\d+)", e.value.hint)[1])
    if enough <= CTX:
        next(task.examples(Setup(setup.session, enough, texts=setup.texts)))


def test_of_long_books_a_share_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(texts, "LARGEST", 100)
    for name, n in (("a", 999), ("b", 20)):
        (tmp_path / f"{name}.txt").write_text(name * n)
    assert list(map(len, read_texts([tmp_path]))) == [50, 20]
    assert "a.txt" in (err := capsys.readouterr().err) and "b.txt" not in err
    assert len(read_texts([tmp_path], n_tokens=30)[0]) >= 30 * 8


def test_chat_puts_prompts_through_the_template(tiny_chat: Path, tiny: Path, book: Path) -> None:
    with engine.load(tiny_chat, n_ctx=CTX, n_threads=1) as s:
        e = first("key_value", Setup(s, CTX, chat=True), 1)[0]
        text = engine.detokenize(s, e.prompt)
        assert text.startswith("<user>Extract") and text.endswith("<assistant>Corresponding value:")
        assert e.prompt[0] == 1 and e.prompt.count(1) == 1
    with (
        engine.load(tiny, n_ctx=256, n_threads=1) as s,
        pytest.raises(SparqError, match="no chat template"),
    ):
        Setup(s, 256, chat=True)


def test_read_texts_cuts_what_is_not_the_book(
    book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (body,) = read_texts([book.parent])
    assert "Licence" not in body and "More" not in body and len(body) > 5000
    (tmp_path / "old.txt").write_bytes(b"caf\xe9\r\nau lait")
    assert read_texts([tmp_path / "old.txt"]) == ["café\nau lait"]
    for name in ("a.md", "deeper"):
        (tmp_path / name).mkdir()
    assert read_texts([tmp_path]) == ["café\nau lait"]
    assert f"{tmp_path}: 2 left out (not *.txt): a.md, deeper\n" in capsys.readouterr().err
    with pytest.raises(SparqError, match=r"no \*\.txt"):
        read_texts([tmp_path / "x"][:0])
    with pytest.raises(SparqError, match="No such file"):
        read_texts([tmp_path / "absent.txt"])
