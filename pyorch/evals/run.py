"""Runs tasks: every method on the same examples, one record each, kept at once.

A prompt is read once, exactly, and once more for methods that read prompts in another way; then for
each method the cache goes back to that state, its last token is decoded with the method, and so is
all that follows. Examples whose prompts begin alike follow each other, whatever their task, and
what they share is read once. Recorded examples are left out, so an interrupted run continues where
it was.

The file of a task holds three kinds of lines. A *setting* is everything that the scores depend on
except the example and the method (model, context, seed, data, library), with the environment; all
other lines name their setting. A line for each method says how many examples were asked for, so
that a reader sees what an interrupted run lacks, and one for each example holds its score.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyorch import engine, native, paths
from pyorch.attention.saved import resolve
from pyorch.attention.spec import AttentionSpec
from pyorch.errors import SparqError
from pyorch.evals.decode import Decoder, Example, Outcome, log_softmax
from pyorch.evals.methods import EXACT, Runner
from pyorch.evals.series import Series, bench_of, make
from pyorch.evals.task import Setup, Task
from pyorch.measure import records
from pyorch.measure.records import Record
from pyorch.models.content import content_hash, file_hash
from pyorch.policies import OFF, Method
from pyorch.progress import Progress, Report
from pyorch.text import printable

_SHARED = 256  # prompts that share so many tokens are taken to share a text


@dataclass(frozen=True)
class EvalPlan:
    """The plan of a run. The others of `methods` are compared with the first.

    setup    the fields of `Setup` that all tasks share
    data     task -> its file
    options  those of the sessions, but for their attention
    document  what all prompts begin with
    """

    model: Path
    tasks: Sequence[Task]
    methods: Sequence[Method]
    n: int
    setup: Mapping[str, Any]
    data: Mapping[str, Path]
    options: engine.SessionOptions
    placement: engine.Placement = engine.Placement()
    document: engine.Document | None = None


def run(
    plan: EvalPlan, folder: Path, preparing: Progress, progress: Report, *, force: bool = False
) -> list[Series]:
    """Measure what the files in `folder` lack; return all that the plan asks for.

    Args:
        preparing: called with (tasks whose examples are ready, total).
        progress: called with (answers so far, those in all, what is done at the moment).

    Raises:
        SparqError: data, sizes or settings are wrong, or a sparse method never ran sparse.
    """
    methods = list(dict.fromkeys(plan.methods))
    # a calibrated method stands for the settings that were found for this model
    resolved = (resolve(m, plan.model) if isinstance(m, AttentionSpec) else m for m in methods)
    meanings = dict(zip(methods, map(str, resolved), strict=True))
    env = records.environment({"sparq": native.lib_dir()})
    model = about_model(plan.model)
    with Runner(
        plan.model,
        methods,
        recall=any(t.reference == OFF for t in plan.tasks),
        placement=plan.placement,
        document=plan.document,
        **vars(plan.options),
    ) as runner:
        work: list[_Work] = []
        for i, task in enumerate(plan.tasks):
            preparing(i, len(plan.tasks))
            work.append(_prepare(plan, task, runner.session, model, meanings, env, folder))
        preparing(1, 1)
        todo = _by_prefix([(w, i, lacking) for w in work for i, lacking in w.begin(force).items()])
        done, total = 0, sum(len(lacking) for _, _, lacking in todo)

        def reading(n: int, of: int) -> None:
            progress(done, total, f"{n} of {of} tokens read")

        for w, i, lacking in todo:
            for method, result in _measure(runner, w.task, w.examples[i], lacking, reading):
                records.append(w.file, w.record(i, method, result))
                done += 1
                progress(done, total, "")
    series = [s for w in work for s in w.series()]
    for s in series:
        s.refuse_idle()
    return series


@dataclass(frozen=True)
class _Work:
    """One task: its examples, its file, and the keys of its records.

    The key of a record changes if the task's code makes a different example.
    """

    task: Task
    file: Path
    header: Record  # the setting
    examples: list[Example]
    meanings: Mapping[Method, str]
    keys: Mapping[Method, Sequence[str]]  # the keys of each method, by example

    def begin(self, force: bool) -> dict[int, list[Method]]:
        """Make sure that the file has the setting. Returns what it lacks: example -> methods.

        What changed code adds makes all of the setting that of changed code, for good.
        """
        before = records.load(self.file)
        known = {} if force else before
        todo = {
            i: [m for m, keys in self.keys.items() if keys[i] not in known]
            for i in range(len(self.examples))
        }
        todo = {i: methods for i, methods in todo.items() if methods}
        setting = before.get(self.header["key"])
        if not setting or (todo and self.header["env"]["dirty"] > setting["env"]["dirty"]):
            with suppress(OSError):  # which the next line tells
                paths.private(self.file.parent)
                self.file.touch(0o600)  # answers may recite somebody's text
                self.file.chmod(0o600)  # also where an earlier version wrote it
            records.append(self.file, self.header)
        for method in self.keys:
            plan = self._asked(method)
            if known.get(plan["key"]) != plan:
                records.append(self.file, plan)
        return todo

    def series(self) -> list[Series]:
        known = records.load(self.file)
        return [
            make(self.header, method, [known[key] for key in keys])
            for method, keys in self.keys.items()
        ]

    def _about(self, method: Method) -> Record:
        return {
            "schema": records.SCHEMA,
            "setting": self.header["key"],
            "method": str(method),
            "meaning": self.meanings[method],
        }

    def _asked(self, method: Method) -> Record:
        """The line that says how many examples a method is asked for; the last one counts."""
        case = {"method": self.meanings[method]}
        key = records.key("asked", case, self.header["key"])
        return self._about(method) | {"key": key, "asked": len(self.examples)}

    def record(self, i: int, method: Method, result: Record) -> Record:
        e = self.examples[i]
        of = {"key": self.keys[method][i], "i": i, "id": e.id}
        return self._about(method) | of | result | {"about": dict(e.about)}


_Todo = tuple[_Work, int, list[Method]]  # a task, the number of its example, what this lacks


def _by_prefix(todo: Sequence[_Todo]) -> list[_Todo]:
    """The same in an order in which prompts that begin with the same tokens follow each other."""
    first: dict[tuple[int, ...], int] = {}

    def place(x: _Todo) -> tuple[int, list[int]]:
        prompt = x[0].examples[x[1]].prompt
        return first.setdefault(tuple(prompt[:_SHARED]), len(first)), prompt

    return sorted(todo, key=place)


def about_model(path: Path) -> Record:
    """The record of a model: its name, and a hash of all its files."""
    return {"name": printable(path.name), "hash": content_hash(path)}


def _prepare(
    plan: EvalPlan,
    task: Task,
    session: engine.Session,
    model: Record,
    meanings: Mapping[Method, str],
    env: records.Environment,
    folder: Path,
) -> _Work:
    data = plan.data.get(task.name)
    setup = Setup(session=session, **plan.setup, data=data)
    examples = list(itertools.islice(task.examples(setup), plan.n))
    _check_room(task, examples, setup.ctx)
    texts = [] if task.data else [hashlib.sha256(t.encode()).hexdigest()[:16] for t in setup.texts]
    read_by = f"{EXACT.method},prompt={EXACT.prompt}"
    case = {
        "task": task.name,
        "model": model,
        "ctx": setup.ctx,
        "seed": setup.seed,
        "options": {name: getattr(setup, name) for name in task.options},
        "data": file_hash(data) if data else task.data,
        "texts": texts,
        "type_k": plan.options.type_k,
        "type_v": plan.options.type_v,
        "read_by": plan.document.attention if plan.document else read_by,
        "threads": plan.options.n_threads or engine.usable_cores(),
        **_where(plan.placement),
        **({"rope": rope.values} if (rope := plan.options.rope) else {}),
        **({"document": f"{plan.document.text_crc:08x}"} if plan.document else {}),
    }
    case = json.loads(json.dumps(case))
    bench = bench_of(task.name)
    file, stamp = folder / f"{task.name}.jsonl", env["stamps"]["sparq"]
    setting, kind = records.key(bench, case, stamp), records.kind_of(env)
    first = records.load(file).get(setting)
    if first and records.kind_of(first["env"]) != kind:  # another machine began this file
        case |= {"machine": kind}
        setting = records.key(bench, case, stamp)
    header = {"schema": records.SCHEMA, "key": setting, "bench": bench}
    header |= {"version": records.version_of(bench), "case": case, "env": env}
    asked = [{"asked": [e.prompt, e.answers, e.forced, e.max_tokens]} for e in examples]
    digests = [records.key(setting, a, "") for a in asked]
    keys = {
        m: [records.key(setting, {"i": i, "method": text}, d) for i, d in enumerate(digests)]
        for m, text in meanings.items()
    }
    return _Work(task, file, header, examples, meanings, keys)


def _check_room(task: Task, examples: Sequence[Example], ctx: int) -> None:
    if not examples:
        raise SparqError(
            f"{task.name}: nothing in the data has the sizes that it asks about within --ctx {ctx}",
            "a larger --ctx or other --data: docs/evals.md says which",
        )
    sizes = [len(e.prompt) + e.max_tokens for e in examples]
    over = [n for n in sizes if n > ctx]
    if over:
        raise SparqError(
            f"{task.name}: {len(over)} of {len(examples)} examples do not fit: up to {max(over)} "
            f"positions, --ctx is {ctx}",
            f"--ctx {-(-max(over) // 64) * 64}",
            exit_code=2,
        )


def _measure(
    runner: Runner, task: Task, example: Example, methods: Sequence[Method], reading: Progress
) -> Iterator[tuple[Method, Record]]:
    """Yields each method with its result, in order and as soon as it is there."""
    n = len(example.prompt) - 1
    alone = task.reference == OFF  # then llama.cpp reads the prompt too
    reference = None

    def forced(s: engine.Session) -> list[np.ndarray]:
        return list(Decoder(s).forced(example))

    def score(s: engine.Session) -> Outcome:
        return task.score(Decoder(s, reference), example)

    def groups() -> Iterator[tuple[AttentionSpec | None, Sequence[Method]]]:
        if alone:
            yield OFF, [m for m in methods if m == OFF]
        yield None, [m for m in methods if not (alone and m == OFF)]

    for by, group in groups():
        compared = task.reference if task.reference == (by or EXACT) else None
        readers = [*group, compared] if compared else group
        if readers:
            runner.read(example.prompt[:n], readers, alone, by, reading)
        if compared:
            reference = log_softmax(np.stack(runner.decode(compared, n, forced).result))
        for method in group:
            done = runner.decode(method, n, score, recall=alone)
            more = {"mass_read": done.masses} if alone else {}
            yield (
                method,
                {
                    "score": done.result.score,
                    "said": done.result.reply,
                    "more": {**done.result.more, **more},
                    "seconds": done.seconds,
                    "counters": done.counters,
                },
            )


def _where(placement: engine.Placement) -> dict[str, Any]:
    """What a record says of the place of a model, if it is not the usual: of workers the number,
    since they are the same at another address."""
    known: dict[str, Any] = {
        "n_gpu_layers": placement.n_gpu_layers,
        "numa": placement.numa or None,
        "n_workers": len(placement.workers) or None,
        "repack": None if placement.repack else False,
        "kv_offload": placement.kv_offload,
        "tensor_split": placement.tensor_split or None,
    }
    return {name: value for name, value in known.items() if value is not None}
