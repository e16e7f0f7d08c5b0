"""Every task can be solved from what the row shows, and only by that: solvers that read the ids score 1, guesses score
chance."""

from __future__ import annotations

import pytest
import torch

from solvers import CASES
from titanmem.tasks import TOKEN_TASKS, open_task
from titanmem.tasks.base import IGNORED, accuracy, generator_of


@pytest.mark.parametrize(("task", "level", "solve"), CASES, ids=[task.name for task, _, _ in CASES])
def test_a_solver_scores_one_and_guessing_scores_chance(task, level, solve):
    ids, targets = task.batch(64, level, generator_of(1))
    assert ids.shape == targets.shape == (64, level["length"])
    assert 0 <= int(ids.min()) <= int(ids.max()) < task.vocab_size
    right, asked = accuracy(torch.tensor([solve(task, row) for row in ids.tolist()]), targets)
    assert int(asked.min()) >= 1
    assert torch.equal(right, asked)

    answers = targets[targets != IGNORED].unique()
    guesses = answers[torch.randint(0, len(answers), targets.shape, generator=generator_of(2))]
    right, asked = accuracy(guesses, targets)
    share, chance = (right.sum() / asked.sum()).item(), task.chance(level)
    assert abs(share - chance) < 4 * (chance * (1 - chance) / int(asked.sum())) ** 0.5 + 0.02


@pytest.mark.parametrize(("task", "level", "solve"), CASES, ids=[task.name for task, _, _ in CASES])
def test_rows_are_a_function_of_the_generator(task, level, solve):
    first, same, other = (task.batch(4, level, generator_of(*numbers)) for numbers in ((3, 1), (3, 1), (3, 2)))
    assert torch.equal(first.ids, same.ids)
    assert torch.equal(first.targets, same.targets)
    assert not torch.equal(first.ids, other.ids)


def test_every_task_has_a_solver():
    assert {task.name for task, _, _ in CASES} == set(TOKEN_TASKS)


@pytest.mark.parametrize(("task", "level", "solve"), CASES, ids=[task.name for task, _, _ in CASES])
def test_levels_that_are_none_are_named(task, level, solve):
    for wrong in ({}, {**level, "length": "64"}, {**level, "length": -2}):
        with pytest.raises(ValueError, match=f"a level of {task.name} has a length"):
            task.check(wrong)
    if "pairs" in level:
        with pytest.raises(ValueError, match=r"recall does not understand the level \{'length': 48\}: 'pairs'"):
            task.check({"length": 48})


@pytest.mark.parametrize(("task", "level", "solve"), CASES, ids=[task.name for task, _, _ in CASES])
def test_a_level_says_nothing_that_its_task_does_not_know(task, level, solve):
    task.check(level)
    with pytest.raises(ValueError, match=f"a level of {task.name} has no setting 'foo'"):
        task.check({**level, "foo": 1})


def test_levels_that_ask_nothing_are_refused():
    with pytest.raises(ValueError, match=r"of 100 rows of mad-fuzzy-recall .* none asks anything"):
        open_task("mad-fuzzy-recall").check({"length": 1})
    for level, says in (({"questions": 0}, "questions must be"), ({"questions": -1}, "questions must be")):
        with pytest.raises(ValueError, match=says):
            open_task("recall").check({"length": 64, "pairs": 4, **level})
    with pytest.raises(ValueError, match="tokens must be at least 1"):
        open_task("mad-selective-copy").check({"length": 64, "tokens": 0})


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("recall", {"vocab_size": 0}), ("mad-fuzzy-recall", {"vocab_size": 4}), ("mad-fuzzy-recall", {"keys": 9}),
        ("mad-fuzzy-recall", {"longest": 0}), ("mad-noisy-recall", {"noise_size": 0}),
        ("mad-noisy-recall", {"share": 1.0}), ("mad-selective-copy", {"vocab_size": 0}),
        ("mad-memorisation", {"vocab_size": 1}), ("mad-compression", {"vocab_size": 0}), ("parity", {"vocab_size": 2}),
        ("s5", {"size": 3}), ("mad-recall", {"vocab_size": 8.0}),
    ],
)  # fmt: skip
def test_settings_without_rows_are_refused(name, settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        open_task(name, **settings)
