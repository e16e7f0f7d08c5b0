"""Rows: every token once, the same rows on any number of ranks, labels that stay within their document."""

from __future__ import annotations

import pickle
from itertools import islice

import pytest
import torch
from corpus import all_documents, make_shards

from titanmem.data.loader import Rows, StepRows, held_out_rows, open_loader, shuffled

SIZES = [5, 33, 2, 64, 17, 8, 90, 3, 41, 16, 7, 120, 29, 2, 55, 31]
LAYOUTS = [(16, 1), (16, 4), (32, 16), (8, 8)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    made = make_shards(tmp_path_factory.mktemp("loader"), SIZES, 150)
    assert len(made.shards) > 3
    return made


def read(rows, first, count):
    held = [rows[i] for i in range(first, first + count)]
    return {name: torch.stack([row[name] for row in held]) for name in held[0]}


def split_documents(rows, epoch=0):
    """The documents of an epoch, put together from its rows by their numbers: ids and labels of each."""
    found = {}
    for i in range(epoch * rows.rows_per_epoch, (epoch + 1) * rows.rows_per_epoch):
        row = rows[i]
        for name, ids, label in zip(*(row[k].tolist() for k in ("documents", "ids", "labels")), strict=True):
            found.setdefault(name, []).append((ids, label))
    return found


@pytest.mark.parametrize(("length", "align"), LAYOUTS)
@pytest.mark.parametrize("carry", [False, True])
def test_every_token_of_an_epoch_is_served_once(shards, length, align, carry):
    rows = Rows(shards, length=length, align=align, carry=carry, seed=3)
    for epoch in (0, 2):
        held = read(rows, epoch * rows.rows_per_epoch, rows.rows_per_epoch)
        served = held["ids"][held["ids"] != shards.end]
        expected = torch.tensor([t for d in all_documents(shards) for t in d if t != shards.end])
        assert torch.equal(served.sort().values, expected.sort().values)
        labelled = held["labels"][held["labels"] != -100]
        assert torch.equal(
            labelled.sort().values, torch.tensor([t for d in all_documents(shards) for t in d[1:]]).sort().values
        )


@pytest.mark.parametrize(("length", "align"), LAYOUTS)
def test_labels_never_cross_documents(shards, length, align):
    rows = Rows(shards, length=length, align=align, carry=True, reset=True)
    found = split_documents(rows, epoch=1)
    want = sorted(tuple(d) for d in all_documents(shards))
    got = []
    for pairs in found.values():
        ids, labels = zip(*pairs, strict=True)
        size = ids.index(shards.end) + 1  # a document ends with the end id; what follows is padding
        assert set(ids[size:]) <= {shards.end}
        assert labels == (*ids[1:size], *[-100] * (len(ids) - size + 1))
        assert len(ids) < size + max(align, length)
        got.append(ids[:size])
    assert sorted(got) == want


@pytest.mark.parametrize(("length", "align"), LAYOUTS)
def test_documents_start_on_multiples_of_align(shards, length, align):
    rows = Rows(shards, length=length, align=align, reset=True)
    held = read(rows, 0, rows.rows_per_epoch)["documents"]
    row, place = torch.nonzero(held[:, 1:] != held[:, :-1], as_tuple=True)
    assert len(row) > 3 or length == 8
    assert torch.all((place + 1) % align == 0)


def test_document_numbers_are_used_once(shards):
    rows = Rows(shards, length=16, reset=True)
    epochs = [set(split_documents(rows, epoch)) for epoch in range(3)]
    assert all(len(names) == len(SIZES) for names in epochs)
    assert len(set.union(*epochs)) == 3 * len(SIZES)
    assert min(set.union(*epochs)) == 0
    assert all("documents" not in Rows(shards, length=16, carry=carry)[0] for carry in (False, True))


def test_the_order_changes_with_seed_and_epoch_and_with_nothing_else(shards, tmp_path):
    rows = Rows(shards, length=16, seed=1)
    count = rows.rows_per_epoch
    first, second = read(rows, 0, count)["ids"], read(rows, count, count)["ids"]
    assert not torch.equal(first, second)
    assert not torch.equal(first, read(Rows(shards, length=16, seed=2), 0, count)["ids"])
    again = pickle.loads(pickle.dumps(rows))
    backwards = torch.stack([again[i]["ids"] for i in reversed(range(count))]).flip(0)
    assert torch.equal(first, backwards)
    rows = Rows(make_shards(tmp_path, SIZES, 10**6), length=16, carry=True)  # the order within one shard
    assert rows[0]["ids"].tolist() != rows[rows.rows_per_epoch]["ids"].tolist()
    assert shuffled(8, 1, 2, 3).tolist() == [1, 3, 7, 5, 2, 0, 4, 6]


def test_without_shuffling_rows_are_the_files_in_order(shards):
    rows = Rows(shards, length=16, shuffle=False)
    served = read(rows, 0, -(-shards.shards[0].tokens // 16))["ids"].flatten()
    assert served[: shards.shards[0].tokens].tolist() == shards.read(0, 0, shards.shards[0].tokens).tolist()


def steps(shards, count, world=1, **settings):
    """Batches of `count` steps, those of all ranks put together."""
    loaders = [open_loader(shards, batch=4, length=16, rank=r, world=world, **settings) for r in range(world)]
    ranks = [list(islice(loader, count)) for loader in loaders]
    return [
        {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        for batches in zip(*ranks, strict=True)
    ]


def assert_same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        assert all(torch.equal(x[name], y[name]) for name in x)


@pytest.mark.parametrize("carry", [False, True])
def test_rows_are_the_same_whatever_the_world_size(shards, carry):
    count = 3 * Rows(shards, length=16).rows_per_epoch // 4  # into the third epoch
    one = steps(shards, count, carry=carry, reset=True)
    assert_same(one, steps(shards, count, world=2, carry=carry, reset=True))
    assert_same(one, steps(shards, count, world=4, carry=carry, reset=True))
    assert_same(one[7:], steps(shards, count - 7, carry=carry, reset=True, first_step=7))
    assert_same(one[:5], steps(shards, 5, carry=carry, reset=True, workers=2))


def test_lanes_follow_each_other_across_rows(shards):
    rows = Rows(shards, length=16, carry=True)
    sampler = StepRows(rows.rows_per_epoch, 4, 0, 1, carry=True)
    goes_on = 0
    for step in range(sampler.lane_rows - 1):
        for now, then in zip(sampler.rows(step), sampler.rows(step + 1), strict=True):
            assert then == now + 1
            label = rows[now]["labels"][-1]
            if label != -100:
                goes_on += 1
                assert rows[then]["ids"][0] == label
    assert goes_on > 5
    epoch = sampler.rows(sampler.lane_rows)
    assert epoch == [rows.rows_per_epoch + b * sampler.lane_rows for b in range(4)]


def test_pieces_cut_every_row(shards):
    (whole,), (cut,) = steps(shards, 1, reset=True, align=4), steps(shards, 1, reset=True, align=4, pieces=4)
    assert cut["ids"].shape == (16, 4)
    for name in whole:
        assert torch.equal(cut[name].reshape(4, 16), whole[name])


def test_opening_a_loader_leaves_the_random_state_alone(shards):
    before = torch.get_rng_state()
    next(iter(open_loader(shards, batch=2, length=16)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_held_out_rows_are_the_longest_documents_from_their_beginning(shards, count):
    held = held_out_rows(shards, 40, count)
    longest = sorted(all_documents(shards), key=len, reverse=True)[:count]
    assert held["ids"].shape == held["labels"].shape == (count, 40)
    for ids, labels, document in zip(held["ids"].tolist(), held["labels"].tolist(), longest, strict=True):
        padding = 40 - len(document)
        assert ids == (document + [shards.end] * padding)[:40]
        assert labels == (document[1:] + [-100] * (padding + 1))[:40]
    with pytest.raises(ValueError, match=r"count must lie in \[1, 16\]"):
        held_out_rows(shards, 40, 17)


def test_faults_say_what_to_change(shards):
    for make, text in [
        (lambda: Rows(shards, length=10, align=4), "align 4 must divide length 10"),
        (lambda: Rows(shards, length=8)[-1], "numbered from 0"),
        (
            lambda: open_loader(shards, batch=3, length=8, world=2),
            "batch 3 must be a multiple of the number of ranks, 2",
        ),
        (lambda: open_loader(shards, batch=2, length=8, rank=2, world=2), r"rank must lie in \[0, 2\)"),
        (lambda: open_loader(shards, batch=999, length=8, carry=True), "lower the batch or the length"),
        (lambda: open_loader(shards, batch=1, length=8, pieces=2, carry=True), "use one of both"),
        (lambda: open_loader(shards, batch=1, length=8, pieces=3), "pieces 3 must divide length 8"),
        (lambda: open_loader(shards, batch=1, length=8, pieces=4, align=4), "align 4 must divide length 2"),
    ]:
        with pytest.raises(ValueError, match=text):
            make()
