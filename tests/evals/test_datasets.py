"""Tasks on published data: prompts as in the paper, judging, and what is wrong with a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_server import Hub
from huggingface_hub import constants
from parrot import Parrot

from pyorch import engine, evals
from pyorch.errors import SparqError
from pyorch.evals import data, qa, wikitext
from pyorch.evals.decode import Decoder, Example
from pyorch.evals.task import Setup

CTX = 4096


@pytest.fixture(scope="module")
def session(native_lib_dir: Path, tiny: Path) -> Iterator[engine.Session]:
    with engine.load(tiny, n_ctx=CTX, n_threads=1) as s:
        yield s


def write(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def lines(path: Path, rows: list[Any]) -> Path:
    return write(path, "\n".join(map(json.dumps, rows)))


def first(name: str, session: engine.Session, file: Path, n: int = 1, **kw: Any) -> list[Example]:
    setup = Setup(session, CTX, data=file, **kw)
    return list(islice(evals.tasks()[name].examples(setup), n))


def question(n: int, answers: list[str]) -> dict[str, Any]:
    return {
        "id": f"q{n}",
        "question": f"What is {n}?",
        "answers": [{"text": a, "answer_start": 0} for a in answers],
    }


@pytest.fixture
def squad(tmp_path: Path) -> Path:
    """Ten paragraphs, two questions on each."""
    articles = [
        {
            "title": f"Town_{i}",
            "paragraphs": [
                {
                    "context": f"Town {i} has {i} towers.",
                    "qas": [question(2 * i, [f"{i} towers", f"{i}"]), question(2 * i + 1, ["x"])],
                }
            ],
        }
        for i in range(10)
    ]
    return write(tmp_path / "dev.json", {"version": "1.1", "data": articles})


def test_squad_prompt(session: engine.Session, squad: Path) -> None:
    examples = first("squad", session, squad, 20)
    assert sorted(e.id for e in examples) == sorted(f"q{i}" for i in range(20))
    places = set()
    for e in examples:
        town, shot = int(e.id[1:]) // 2, int(e.id[1:]) ^ 1
        *contexts, instruction, q1, a1, q2, a2 = engine.detokenize(session, e.prompt).split("\n")
        assert len(contexts) == len(set(contexts)) == 8
        mine = f"Title: Town {town}. Background: Town {town} has {town} towers."
        places.add(contexts.index(mine))
        assert instruction == (
            f"From what you've just read about Town {town}, please answer the following questions."
        )
        shortest = "x" if shot % 2 else str(town)
        assert (q1, a1) == (f"Question: What is {shot}?", f"Answer: {shortest}")
        assert (q2, a2) == (f"Question: What is {e.id[1:]}?", "Answer:")
        longest = max(e.answers, key=len)
        assert e.max_tokens == min(len(longest) + 5, 30)  # a byte is a token
    assert len(places) > 3


@pytest.mark.parametrize("confusion", [3, None])
def test_squad_asks_about_the_paragraphs_of_one_text(
    session: engine.Session, squad: Path, confusion: int | None
) -> None:
    examples = first("squad", session, squad, 12, questions=3, confusion=confusion)
    assert [e.about["text"] for e in examples] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    for text in range(4):
        asked = [e for e in examples if e.about["text"] == text]
        split = [engine.detokenize(session, e.prompt).split("\n") for e in asked]
        paragraphs = split[0][:-5]
        assert all(x[:-5] == paragraphs for x in split)
        assert len(set(paragraphs)) == len(paragraphs) == (4 if confusion else 10)
        towns = [int(e.id[1:]) // 2 for e in asked]
        assert len(set(towns)) == 3
        for town, x in zip(towns, split, strict=True):
            assert f"Title: Town {town}. Background: Town {town} has {town} towers." in paragraphs
            assert x[-2] != x[-4]  # the example is another question
    if confusion:  # 2 texts and a half before a paragraph comes again
        used = [
            p
            for i in (0, 3)
            for p in engine.detokenize(session, examples[i].prompt).split("\n")[:4]
        ]
        assert len(set(used)) == 8


def test_squad_rows_of_the_hub_are_the_same_questions(
    session: engine.Session, squad: Path, tmp_path: Path
) -> None:
    rows = [
        {
            "id": q["id"],
            "title": a["title"],
            "context": p["context"],
            "question": q["question"],
            "answers": {"text": [x["text"] for x in q["answers"]], "answer_start": [0]},
        }
        for a in json.loads(squad.read_text())["data"]
        for p in a["paragraphs"]
        for q in p["qas"]
    ]
    flat = lines(tmp_path / "flat.jsonl", rows)
    assert first("squad", session, flat, 20) == first("squad", session, squad, 20)


@pytest.mark.parametrize(
    ("reply", "answers", "right"),
    [
        (" 1978\nQuestion: What", ("1978",), True),
        (" The Eiffel Tower.", ("Eiffel tower",), True),
        (" Eiffel", ("the Eiffel",), True),
        (' "Paris", of course', ("Paris",), True),
        (" in Paris", ("Paris",), False),
        (" 197", ("1978",), False),
        ("", ("a",), False),
        (" London", ("Paris", "London"), True),
    ],
)
def test_exact_match(reply: str, answers: tuple[str, ...], right: bool) -> None:
    assert qa.matches(reply, answers) is right


def test_an_answer_is_scored_as_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    e = Example("x", [1, 2], 7, ("Fresno",))
    for reply, want in ((" Fresno, California", 1), (" California", 0)):
        parrot = Parrot(reply.encode())
        outcome = qa.score(Decoder(parrot.install(monkeypatch)), e)
        assert (outcome.score, outcome.reply) == (want, reply[:7])
        assert parrot.asked[0] == 2 and len(parrot.asked) == 7


def trivia(n: int, size: int = 5000) -> dict[str, Any]:
    return {
        "question_id": f"t{n}",
        "question": f"Who is {n}?",
        "answer": {"aliases": [f"Ann {n}", f"A. {n}"]},
        "search_results": {"search_context": ["short", "w" * size, "v" * 9000]},
    }


def test_triviaqa_takes_a_result_of_the_right_length(
    session: engine.Session, tmp_path: Path
) -> None:
    file = lines(tmp_path / "t.jsonl", [trivia(0), trivia(1, 100), trivia(2)])
    examples = first("triviaqa", session, file, 5)
    assert sorted(e.id for e in examples) == ["t0", "t2"]
    for e in examples:
        text = engine.detokenize(session, e.prompt)
        assert text == "w" * 5000 + f"\nQuestion: Who is {e.id[1]}?\nAnswer:"
        assert e.answers == (f"Ann {e.id[1]}", f"A. {e.id[1]}")
    assert first("triviaqa", session, lines(tmp_path / "s.jsonl", [trivia(1, 100)])) == []


def test_cnn_dailymail(
    session: engine.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rouge_score")
    article = {"id": "a", "article": "A cat sat. " * 400, "highlights": "A cat sat on the mat ."}
    short = {"id": "b", "article": "A cat sat.", "highlights": "A cat."}
    file = write(tmp_path / "c.json", [article, short])
    (e,) = first("cnn_dailymail", session, file, 5)
    text = engine.detokenize(session, e.prompt)
    assert text == "Article: " + article["article"] + "\nSummary:"
    assert e.max_tokens == len(article["highlights"])
    task = evals.tasks()["cnn_dailymail"]
    # longest common subsequence of words 5: precision 5/5, recall 5/6
    for reply, want in (("cats sat on the mat", 10 / 11), ("A cat sat on the mat .", 1), ("no", 0)):
        decoder = Decoder(Parrot(reply.encode()).install(monkeypatch))
        assert task.score(decoder, e).score == pytest.approx(want)


def test_squality_asks_all_questions_of_a_story(
    session: engine.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share the story, which is read once; one that does not fit is left out."""
    pytest.importorskip("rouge_score")

    def ask(number: int, *responses: str) -> dict[str, Any]:
        texts = [{"response_text": r} for r in responses]
        return {"question_text": f"Q{number}?", "question_number": number, "responses": texts}

    story = {
        "document": "A cat sat. " * 20,
        "questions": [ask(1, "A cat sat.", "It sat."), ask(2, "x")],
    }
    long = {"document": "A cat sat. " * 4000, "questions": [ask(1, "x")]}
    file = lines(tmp_path / "dev.jsonl", [long, story])
    one, two = first("squality", session, file, 5)
    text = engine.detokenize(session, one.prompt)
    assert text == "Story: " + story["document"].strip() + "\n\nQuestion: Q1?\nAnswer:"
    assert (one.about, two.about) == ({"text": 0}, {"text": 0})
    task = evals.tasks()["squality"]
    # "it sat": two of two words of the second reference, two of three of the first
    decoder = Decoder(Parrot(b"It sat").install(monkeypatch))
    assert task.score(decoder, one).score == pytest.approx(1)
    assert first("squality", session, lines(tmp_path / "long.jsonl", [long])) == []


def test_gsm8k_asks_after_as_many_worked_examples_as_fit(
    session: engine.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All questions follow the same ones, and none of these is asked."""
    answer = "It is 1,000+{0}=<<1000+{0}={1}>>{1:,}.\n#### {1:,}"
    ask = "1,000 and {}?"
    rows = [{"question": ask.format(i), "answer": answer.format(i, 1000 + i)} for i in range(200)]
    one, two, *more = first("gsm8k", session, lines(tmp_path / "test.jsonl", rows), 200)
    shots, _, asked = engine.detokenize(session, one.prompt).rpartition("Question: ")
    n_shot = shots.count("Question: ")
    assert n_shot + 2 + len(more) == 200 and len(one.prompt) > CTX - 600
    assert engine.detokenize(session, two.prompt).startswith(shots) and asked not in shots
    assert f"It is 1,000+{one.id}" not in shots and "<<" not in shots
    score = evals.tasks()["gsm8k"].score
    right = int(one.answers[0])
    for reply, want in ((f"####  ${right:,}.", 1), (f"so {right}", 0), (f"\n\n#### {right}", 0)):
        decoder = Decoder(Parrot(reply.encode()).install(monkeypatch))
        out = score(decoder, replace(one, prompt=[0]))
        assert out.score == want
        assert reply[0] == "\n" or out.more["tokens"] == len(reply) + 1


WIKI = " = One fort = \n" + " The hill is old ." * 500 + "\n = = Site = = \n" + " A site ." * 20
WIKI += "\n = Short = \n A page ."


def test_wikitext_cuts_pages_and_ends_before_white_space(
    session: engine.Session, tmp_path: Path
) -> None:
    file = write(tmp_path / "wiki.valid.raw", WIKI)
    assert [p[:12] for p in wikitext.articles(file)] == [" = One fort ", " = Short = \n"]
    setup = Setup(session, 7000, data=file)
    (e,) = islice(wikitext.examples(setup), 5)
    read, scored = engine.detokenize(session, e.prompt), engine.detokenize(session, e.forced)
    assert WIKI.startswith(read + scored) and len(read) >= 6000 and scored[0] == " "
    assert len(e.forced) == e.about["chars"] == 256  # bytes; at most 256 tokens
    # a shorter context reads less and gives the same number of characters
    (e,) = first("wikitext", session, file, 5)
    assert len(e.prompt) + len(e.forced) <= CTX and len(e.prompt) > 0.85 * CTX
    rows = lines(tmp_path / "w.jsonl", [{"text": x + "\n"} for x in WIKI.split("\n")])
    assert wikitext.articles(rows)[0] == wikitext.articles(file)[0]


def test_wikitext_bits_are_those_of_one_dense_pass(session: engine.Session, tmp_path: Path) -> None:
    """Teacher-forced steps against all logits of one batch, in f64."""
    tokens = engine.tokenize(session, "The hill is old, and the site is older.")
    n = 12
    e = Example("x", tokens[:n], len(tokens) - n, (), tuple(tokens[n:]), {"chars": 27})
    engine.rewind(session, 0)
    engine.set_attention(session, "off")
    engine.prefill(session, e.prompt[:-1])
    got = wikitext.score(Decoder(session), e).score
    nats = 0.0
    for i in range(n, len(tokens)):
        engine.rewind(session, 0)
        engine.prefill(session, tokens[:i])
        x = engine.logits(session).astype(np.float64)
        nats += math.log(np.exp(x - x[tokens[i]]).sum())
    assert got == pytest.approx(nats / math.log(2) / 27, rel=2e-3)


SQUAD = {"id": "q", "title": "T", "context": "C", "question": "Q?", "answers": {"text": ["x"]}}
STORY = {"document": "A cat.", "questions": [{"question_text": "Q", "question_number": 1}]}


@pytest.mark.parametrize(
    ("task", "content", "fault"),
    [
        ("squad", None, "rows.json"),
        ("squad", "{not json\n", "line 1"),
        ("squad", "[1, 2]", "rows.json"),
        ("squad", '{"data": []}', "rows.json"),
        ("squad", '{"a": 1}\n{"b"\n', "line 2"),
        ("squad", '{"a": 1}', "'id'"),
        ("squad", b"\x89PNG\0", "rows.json"),
        ("squad", SQUAD | {"answers": {"text": []}}, "question q"),
        ("squad", SQUAD | {"answers": ["x"]}, "'text'"),
        ("triviaqa", trivia(1) | {"answer": {"aliases": [" "]}}, "question t1"),
        ("triviaqa", trivia(1) | {"answer": "Paris"}, "'aliases'"),
        ("triviaqa", trivia(1) | {"search_results": ["x"]}, "'search_context'"),
        ("cnn_dailymail", {"id": "a", "article": "x" * 5000, "highlights": ""}, "article a"),
        ("squality", STORY, "'responses'"),
        ("gsm8k", {"question": "1?", "answer": "1"}, "####"),
    ],
)
def test_wrong_data_are_named_in_one_line(
    session: engine.Session, tmp_path: Path, task: str, content: Any, fault: str
) -> None:
    if task in ("cnn_dailymail", "squality"):
        pytest.importorskip("rouge_score")
    file = tmp_path / "rows.json"
    if content is not None:
        raw = json.dumps([content]) if isinstance(content, dict) else content
        file.write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    with pytest.raises(SparqError, match=fault) as e:
        first(task, session, file)
    assert "\n" not in e.value.message and e.value.hint


def test_a_data_set_of_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is downloaded once, the files of the split alone; then it is there without a network."""
    name = "plain_text/validation-00000-of-00001.parquet"
    hub.kind, (hub.repo, _) = "dataset", data.HUB["squad"]
    hub.files = {"plain_text/train-00000.parquet": b"x", "README.md": b"x"}
    with pytest.raises(SparqError, match="none of plain_text/validation") as e:
        data.rows("squad", None)
    assert e.value.hint.startswith("--data FILE")
    monkeypatch.setattr(data, "_read", lambda file: [{"content": file.read_bytes()}])
    hub.files[name] = b"rows"
    for offline in (False, False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        assert data.rows("squad", None) == [{"content": b"rows"}]
    assert hub.fetched() == [name.rpartition("/")[2]]
    for name in ("triviaqa", "squality"):  # not in the cache; no download
        with pytest.raises(SparqError, match="trivia_qa|squality") as e:
            data.rows(name, None)
        assert "--data" in e.value.hint


def test_parquet(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    file.write_bytes(b"no parquet")
    with pytest.raises(SparqError, match="x.parquet"):
        data.rows("squad", file)
    parquet, pyarrow = (pytest.importorskip(x) for x in ("pyarrow.parquet", "pyarrow"))
    parquet.write_table(pyarrow.Table.from_pylist([SQUAD]), file)
    assert data.rows("squad", file) == [SQUAD]
