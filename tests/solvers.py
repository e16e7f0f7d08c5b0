"""Solvers of the token tasks: they read ids as a person would."""

from __future__ import annotations

from titanmem.tasks.mad import Compression, FuzzyRecall, InContextRecall, Memorisation, NoisyRecall, SelectiveCopy
from titanmem.tasks.recall import Recall
from titanmem.tasks.tracking import Parity, Permutations


def recall(task, row):
    """The value that followed the first of two equal keys."""
    half, table, found = task.vocab_size // 2, {}, []
    for now, then in zip(row, [*row[1:], 0], strict=True):
        if now < half and now not in table:
            table[now] = then
        found.append(table.get(now, 0))
    return found


def pairs(task, row):
    table, found = {}, []
    for now, then in zip(row, [*row[1:], 0], strict=True):
        if now < task.half and now not in table:
            table[now] = then
        found.append(table.get(now, 0))
    return found


def fuzzy(task, row):
    """Cut the row into runs of key tokens and value tokens."""
    table, found, t = {}, [0] * len(row), 0
    while t < len(row) and row[t] != task.pad:
        key, begin = (), t
        while row[t] < task.half:
            key, t = (*key, row[t]), t + 1
        value = []
        while t < len(row) and task.half <= row[t] < 2 * task.half:
            value.append(row[t])
            t += 1
        for i, token in enumerate(table.get(key, [])):
            found[begin + len(key) - 1 + i] = token
        table[key] = value
    return found


def copy(task, row):
    shown = iter([token for token in row if token < task.content])
    return [next(shown) if token == task.mark else 0 for token in row]


def decompress(task, row):
    half = row.index(task.summary_id)
    return [0] * half + row[:half]


def memorised(task, row):
    return [0, *(int(task.table[now]) if now < task.half else 0 for now in row[:-1])]


def parity(task, row):
    return [sum(row[: t + 1]) % 2 for t in range(len(row))]


def product(task, row):
    from itertools import permutations

    every = list(permutations(range(5)))
    now, found = tuple(range(5)), []
    for token in row:
        now = tuple(every[token][i] for i in now)
        found.append(every.index(now))
    return found


CASES = [
    (Recall(64), {"length": 48, "pairs": 6}, recall),
    (InContextRecall(), {"length": 64}, pairs),
    (NoisyRecall(), {"length": 64}, pairs),
    (FuzzyRecall(), {"length": 96}, fuzzy),
    (SelectiveCopy(), {"length": 64, "tokens": 16}, copy),
    (Compression(), {"length": 32}, decompress),
    (Memorisation(64), {"length": 64}, memorised),
    (Parity(), {"length": 40}, parity),
    (Permutations(), {"length": 24}, product),
]
