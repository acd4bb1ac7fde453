"""The methods once more, from their papers: loops over positions, double precision.

Imports nothing of this project. Each oracle is one layer of one sequence: `choose(q, k)` says what
the token with query q (n_head, d) may read, of the keys k (n, n_head_kv, d) so far with its own, as
one set per KV head; `follow(read)` is told what was really read, in case rounding decided a tie
otherwise (`margin`: how near the choice was to another, relative to the score at the cut).
"""

from __future__ import annotations

import math

import numpy as np

Sets = list[set[int]]


def softmax(x):
    x = [float(v) for v in x]
    top = max(x)
    e = [math.exp(v - top) if v > -math.inf else 0.0 for v in x]
    total = sum(e)
    return [v / total for v in e]


def best(scores: dict[int, float], k: int) -> tuple[set[int], float]:
    """The k positions with the largest scores (ties: the lower one), and the margin."""
    order = sorted(scores, key=lambda p: (-scores[p], p))
    margin = math.inf
    if 0 < k < len(order):
        inside, outside = scores[order[k - 1]], scores[order[k]]
        margin = (inside - outside) / max(abs(inside), 1e-30)
    return set(order[:k]), margin


class Oracle:
    """What the oracles share: k_of(n) positions at n positions; scores per head."""

    def __init__(self, n_head: int, n_head_kv: int, k_of, scale: float) -> None:
        self.n_head, self.n_head_kv, self.k_of, self.scale = n_head, n_head_kv, k_of, scale
        self.group = n_head // n_head_kv
        self.margin = math.inf

    def heads_of(self, h: int) -> range:
        return range(h * self.group, (h + 1) * self.group)

    def scores(self, q, k, head: int, positions=None) -> dict[int, float]:
        """softmax of a query head over `positions` (all)."""
        positions = range(len(k)) if positions is None else sorted(positions)
        q, k = q[head].astype(np.float64), k[:, head // self.group].astype(np.float64)
        return dict(
            zip(positions, softmax([q @ k[p] * self.scale for p in positions]), strict=True)
        )

    def summed(self, h: int, scores) -> dict[int, float]:
        """What scores(head) gives, summed over the query heads of a KV head."""
        total: dict[int, float] = {}
        for head in self.heads_of(h):
            for p, s in scores(head).items():
                total[p] = total.get(p, 0.0) + s
        return total

    def best(self, scores: dict[int, float], k: int) -> set[int]:
        chosen, margin = best(scores, k)
        self.margin = min(self.margin, margin)
        return chosen

    def alpha(self, q, k, head: int, cells: set[int]) -> float:
        """The share of attention on what was read, as the method believes it to be."""
        scores = self.scores(q, k, head)
        return sum(scores[p] for p in cells)

    def prompt(self, queries, k) -> None:
        """The queries (n, n_head, d) and keys of all positions before the first `choose`."""

    def choose(self, q, k) -> Sets:
        raise NotImplementedError

    def follow(self, read: Sets) -> None:
        self.margin = math.inf


class Exact(Oracle):
    """The largest scores, summed over the query heads of a KV head."""

    def choose(self, q, k) -> Sets:
        every = (self.summed(h, lambda x: self.scores(q, k, x)) for h in range(self.n_head_kv))
        return [self.best(total, self.k_of(len(k))) for total in every]


class Window(Oracle):
    """The first positions and the newest ones."""

    def __init__(self, *args, sinks: int) -> None:
        super().__init__(*args)
        self.sinks = sinks

    def choose(self, q, k) -> Sets:
        n = len(k)
        budget = min(self.k_of(n), n)
        chosen = {n - 1}
        for p in range(min(self.sinks, n)):
            if len(chosen) < budget:
                chosen.add(p)
        for p in reversed(range(n)):
            if len(chosen) < budget:
                chosen.add(p)
        return [chosen] * self.n_head_kv


class TopOfV(Oracle):
    """FlexGen: the token's own position and the largest scores of the others."""

    def choose(self, q, k) -> Sets:
        out = []
        last = len(k) - 1
        for h in range(self.n_head_kv):
            total = self.summed(h, lambda x: self.scores(q, k, x))
            del total[last]
            out.append(self.best(total, self.k_of(len(k)) - 1) | {last})
        return out


class Projected(Oracle):
    """Scores from k projected with matrix (n_head_kv, d, rank), kept as f16."""

    def __init__(self, *args, matrix, sinks: int) -> None:
        super().__init__(*args)
        self.matrix, self.sinks = matrix.astype(np.float64), sinks

    def choose(self, q, k) -> Sets:
        n, out = len(k), []
        budget = min(self.k_of(n), n)
        local = max(budget // 4, 1)
        always = set(range(n - local, n)) | set(range(min(self.sinks, budget - local)))
        for h in range(self.n_head_kv):
            total = self.summed(h, lambda x: dict(enumerate(self.guess(q, k, x))))
            rest = {p: s for p, s in total.items() if p not in always}
            out.append(always | self.best(rest, budget - len(always)))
        return out

    def guess(self, q, k, head: int) -> list[float]:
        m = self.matrix[head // self.group]
        kept = [(x @ m).astype(np.float16).astype(float) for x in k[:, head // self.group]]
        return softmax([(q[head] @ m) @ x * self.scale for x in kept])

    def alpha(self, q, k, head: int, cells: set[int]) -> float:
        guess = self.guess(q, k, head)
        return sum(guess[p] for p in cells)


class Components(Projected):
    """Scores from the `rank` components of K in which |q| is largest, summed over the group."""

    def __init__(self, *args, rank: int, tau: str, sinks: int) -> None:
        Oracle.__init__(self, *args)
        self.rank, self.tau, self.sinks = rank, tau, sinks

    def guess(self, q, k, head: int) -> list[float]:
        h, d = head // self.group, q.shape[1]
        size = [sum(abs(float(q[i, c])) for i in self.heads_of(h)) for c in range(d)]
        parts = sorted(range(d), key=lambda c: (-size[c], c))[: self.rank]
        x, every = q[head].astype(float), k[:, h].astype(float)
        kept = sum(abs(x[c]) for c in parts) / sum(abs(v) for v in x)
        # the papers' temperatures, over the sqrt(d) that the scale stands for
        tau = {"eq9": math.sqrt(d * kept), "sqrt-d": math.sqrt(d), "sqrt-r": math.sqrt(self.rank)}
        factor = self.scale * math.sqrt(d) / tau[self.tau]
        return softmax([sum(x[c] * row[c] for c in parts) * factor for row in every])


class ExactPages(Oracle):
    """The pages of `page` positions with the most attention, and the token's own page."""

    def __init__(self, *args, page: int) -> None:
        super().__init__(*args)
        self.page = page

    def choose(self, q, k) -> Sets:
        n, out = len(k), []
        n_full = (n - 1) // self.page
        own = set(range(n_full * self.page, n))
        m = max(self.k_of(n) - len(own), 0) // self.page
        for h in range(self.n_head_kv):
            chosen = self.best(self.summed(h, lambda x: self.pages(q, k, x, n_full)), m)
            out.append(own | {p * self.page + i for p in chosen for i in range(self.page)})
        return out

    def pages(self, q, k, head: int, n_full: int) -> dict[int, float]:
        """The scores of the full pages."""
        total = dict.fromkeys(range(n_full), 0.0)
        for cell, score in self.scores(q, k, head).items():
            if cell < n_full * self.page:
                total[cell // self.page] += score
        return total


class Pages(ExactPages):
    """Whole pages by the softmax of `score(q, a, b)`, of two vectors that `parts` makes of the keys
    of a page, kept as f16."""

    def __init__(self, *args, page: int, parts, score) -> None:
        super().__init__(*args, page=page)
        self.parts, self.score = parts, score

    def pages(self, q, k, head: int, n_full: int) -> dict[int, float]:
        bounds = []
        for p in range(n_full):
            keys = k[p * self.page : (p + 1) * self.page, head // self.group].astype(float)
            a, b = (x.astype(np.float16).astype(float) for x in self.parts(keys))
            bounds.append(self.score(q[head].astype(float), a, b) * self.scale)
        return dict(enumerate(softmax(bounds))) if bounds else {}


def quest_parts(keys):
    return np.array([min(c) for c in keys.T]), np.array([max(c) for c in keys.T])


def quest_score(q, least, most):
    return sum(max(x * a, x * b) for x, a, b in zip(q, least, most, strict=True))


def mean_std_parts(keys):
    mean = sum(keys) / len(keys)
    return mean, np.sqrt(sum((x - mean) ** 2 for x in keys) / len(keys))


def mean_std_score(q, mean, std):
    return sum(x * m + abs(x) * s for x, m, s in zip(q, mean, std, strict=True))


class Evicting(Oracle):
    """A cache per KV head; local_of(k): how many of the newest stay whatever their sum.

    `weigh` gives what is added to the sums; here, as for H2O, the attention itself.
    """

    def __init__(self, *args, local_of) -> None:
        super().__init__(*args)
        self.local_of, self.step = local_of, 0

    def weigh(self, q, k, head: int, cells: set[int]) -> dict[int, float]:
        return self.scores(q, k, head, cells)

    def prompt(self, queries, k) -> None:
        n = len(k)
        self.sums = [dict.fromkeys(range(n), 0.0) for _ in range(self.n_head_kv)]
        for row in range(n):
            self.add(queries[row], k, [set(range(row + 1))] * self.n_head_kv)
        self.gone: Sets = [set() for _ in range(self.n_head_kv)]

    def add(self, q, k, cells: Sets) -> None:
        for head in range(self.n_head):
            h = head // self.group
            for p, w in self.weigh(q, k, head, cells[h]).items():
                self.sums[h][p] += w

    def choose(self, q, k) -> Sets:
        n, out = len(k), []
        self.step += 1
        budget = min(self.k_of(n), n)
        local = set(range(n - self.local_of(budget), n))
        for h in range(self.n_head_kv):
            self.sums[h][n - 1] = 0.0
            if len(self.sums[h]) <= budget:
                out.append(set(self.sums[h]))
                continue
            old = {p: s for p, s in self.sums[h].items() if p not in local}
            out.append(local | self.best(old, budget - len(local)))
        self.last = q, k
        return out

    def follow(self, read: Sets) -> None:
        for h, cells in enumerate(read):
            assert not cells & self.gone[h], "a position came back"
            self.gone[h] |= set(self.sums[h]) - cells
            self.sums[h] = {p: s for p, s in self.sums[h].items() if p in cells}
        self.add(*self.last, read)
        super().follow(read)


class Keyformer(Evicting):
    """noise(head, position); the temperature is 1 in the prompt and 2 from `tokens` on."""

    def __init__(self, *args, local_of, noise, tokens: int) -> None:
        super().__init__(*args, local_of=local_of)
        self.noise, self.tokens = noise, tokens

    def weigh(self, q, k, head: int, cells: set[int]) -> dict[int, float]:
        tau = 1 + min(self.step / self.tokens, 1)
        x, keys = q[head].astype(float), k[:, head // self.group].astype(float)
        logits = [(x @ keys[p] * self.scale + self.noise(head, p)) / tau for p in sorted(cells)]
        return dict(zip(sorted(cells), softmax(logits), strict=True))


class SparseWindow(Oracle):
    """ALISA: rows[i] is what row i gave to each position, summed over all heads."""

    def prompt(self, queries, k) -> None:
        self.rows: list[dict[int, float]] = []
        for row in range(len(k)):
            self.add(queries[row], k, set(range(row + 1)))

    def add(self, q, k, cells: set[int]) -> None:
        row = dict.fromkeys(cells, 0.0)
        for head in range(self.n_head):
            for p, w in self.scores(q, k, head, cells).items():
                row[p] += w
        self.rows.append(row)

    def choose(self, q, k) -> Sets:
        n = len(k)
        budget = min(self.k_of(n), n)
        newest = set(range(n - (budget - budget // 2), n))
        total = {p: 0.0 for p in range(n) if p not in newest}
        for row in self.rows[max(n - 1 - max(budget // 2, 1), 0) :]:
            for p, w in row.items():
                if p in total:
                    total[p] += w
        self.last = q, k
        return [newest | self.best(total, budget // 2)] * self.n_head_kv

    def follow(self, read: Sets) -> None:
        assert all(cells == read[0] for cells in read)
        self.add(*self.last, read[0])
        super().follow(read)
