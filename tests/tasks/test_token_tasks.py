"""Every task can be solved from what the row shows, and only by that: solvers that read the ids score 1, guesses score
chance."""

from __future__ import annotations

import pytest
import torch

from solvers import CASES
from titanmem.tasks import TOKEN_TASKS
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
