"""EpochPlan: DistributedSampler's indices where it does not pad, and the user's own samplers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_cann.data import make_order, shard_indices, transferable
from lightning_cann.data.order import isolated_rng


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("length", "drop_last"), [(24, False), (24, True), (26, True), (3, True)])
def test_indices_are_distributed_samplers(shuffle: bool, length: int, drop_last: bool) -> None:
    for epoch in range(3):
        for rank in range(4):
            stock = DistributedSampler(
                range(length), num_replicas=4, rank=rank, shuffle=shuffle, seed=7, drop_last=drop_last
            )
            stock.set_epoch(epoch)
            ours = shard_indices(length, 4, rank, seed=7, shuffle=shuffle, drop_last=drop_last, epoch=epoch)
            assert ours == list(stock)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("length", [0, 1, 11, 25])
def test_batches_are_cut_without_padding(length: int, drop_last: bool) -> None:
    loader = DataLoader(list(range(length)), batch_size=3, drop_last=drop_last, shuffle=bool(length))
    plan = make_order(loader, 4, seed=1).draw(2)
    seen = []
    for s in range(4):
        shard = shard_indices(length, 4, s, seed=1, shuffle=True, drop_last=False, epoch=2)
        stock = list(BatchSampler(shard, 3, drop_last))
        assert list(plan.shard(s)) == stock
        assert plan.lengths[s] == len(stock)
        seen += [i for batch in stock for i in batch]
        with pytest.raises(IndexError):
            plan.batch(s, plan.lengths[s])
    if not drop_last:
        assert sorted(seen) == list(range(length))
    assert len(seen) == len(set(seen))


def test_limit_is_per_shard() -> None:
    order = make_order(DataLoader(list(range(22)), batch_size=2), 3, seed=0)
    assert order.draw(0).lengths == (4, 4, 4)
    assert order.draw(0, limit=3).lengths == (3, 3, 3)


def test_users_distributed_sampler_brings_its_settings() -> None:
    data = list(range(26))
    sampler = DistributedSampler(data, num_replicas=9, rank=5, shuffle=True, seed=42, drop_last=True)
    plan = make_order(DataLoader(data, batch_size=2, sampler=sampler), 4, seed=0).draw(3)
    for s in range(4):
        stock = DistributedSampler(data, num_replicas=4, rank=s, shuffle=True, seed=42, drop_last=True)
        stock.set_epoch(3)
        assert [i for batch in plan.shard(s) for i in batch] == list(stock)
    assert sampler.epoch == 3


class EpochSampler(Sampler):
    def __init__(self, length: int) -> None:
        self.length, self.epochs = length, []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self):
        yield from (torch.randperm(self.length).tolist())[:: random.choice([1, -1])]

    def __len__(self) -> int:
        return self.length


def wrapped_samplers():
    return {
        "own": EpochSampler(12),
        "weighted": WeightedRandomSampler([1.0] * 12, 20),
        "own generator": WeightedRandomSampler([1.0] * 12, 20, generator=torch.Generator()),
        "subset": SubsetRandomSampler([1, 5, 7, 8]),
        "replacement": RandomSampler(range(12), replacement=True, num_samples=15),
    }


@pytest.mark.parametrize("name", wrapped_samplers())
def test_wrapped_sampler_is_equal_on_all_members_and_draws_nothing(name: str) -> None:
    member, late = wrapped_samplers()[name], wrapped_samplers()[name]
    member_order = make_order(DataLoader(list(range(12)), batch_size=2, sampler=member), 2, seed=5)
    torch.manual_seed(1)
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    plans = [member_order.draw(e) for e in range(4)]
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    # A newcomer begins in epoch 3, with other random numbers behind it.
    torch.manual_seed(99)
    newcomer = make_order(DataLoader(list(range(12)), batch_size=2, sampler=late), 2, seed=5).draw(3)
    assert newcomer.digest() == plans[3].digest()
    assert [list(newcomer.shard(s)) for s in (0, 1)] == [list(plans[3].shard(s)) for s in (0, 1)]
    assert plans[2].digest() != plans[3].digest()
    other = make_order(DataLoader(list(range(12)), batch_size=2, sampler=late), 2, seed=6).draw(3)
    if name != "subset":  # four samples have few orders
        assert other.digest() != newcomer.digest()
    if name == "own":
        assert member.epochs == [0, 1, 2, 3]


class Buckets(Sampler):
    """A batch sampler with batches of uneven size over an inner sampler."""

    def __init__(self, sampler) -> None:
        self.sampler = sampler

    def __iter__(self):
        order = list(self.sampler)
        yield from (order[:1], order[1:4], order[4:6], order[6:])

    def __len__(self) -> int:
        return 4


def test_batch_sampler_is_strided_by_batches() -> None:
    inner = EpochSampler(10)
    plan = make_order(DataLoader(list(range(10)), batch_sampler=Buckets(inner)), 3, seed=0).draw(2)
    assert plan.lengths == (2, 1, 1)
    assert [len(b) for b in plan.shard(0)] == [1, 4]
    assert [len(b) for b in plan.shard(1)] == [3]
    assert sorted(i for s in range(3) for b in plan.shard(s) for i in b) == list(range(10))
    assert inner.epochs == [2]


def test_isolated_rng_restores_after_an_error() -> None:
    before = torch.get_rng_state()
    with pytest.raises(KeyError), isolated_rng(1, 2):
        torch.rand(3)
        raise KeyError
    assert torch.equal(before, torch.get_rng_state())


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class OwnIter(DataLoader):
    def __iter__(self):
        return iter(())


class NoLength:
    def __getitem__(self, i):
        return i


class Endless(Sampler):
    def __iter__(self):
        return iter(int, 1)


class OwnShards(EpochSampler):
    num_replicas = 2


class OwnOrder(DistributedSampler):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (lambda: DataLoader(range(4)), None),
        (lambda: DataLoader(range(4), batch_sampler=Buckets(EpochSampler(4))), None),
        (lambda: [1, 2], "not a torch"),
        (lambda: DataLoader(Stream()), "IterableDataset"),
        (lambda: DataLoader(range(4), batch_size=None), "batch_size=None"),
        (lambda: OwnIter(range(4)), "own __iter__"),
        (lambda: DataLoader(NoLength(), sampler=EpochSampler(3)), "NoLength has no length"),
        (lambda: DataLoader(range(4), sampler=Endless()), "may never end"),
        (lambda: DataLoader(range(4), sampler=OwnShards(4)), "cuts shards by itself"),
        (lambda: DataLoader(range(4), sampler=OwnOrder(range(4), 2, 0)), "own order"),
        (
            lambda: DataLoader(range(4), batch_sampler=Buckets(DistributedSampler(range(4), 2, 0))),
            "give it all samples",
        ),
    ],
)
def test_transferable_says_why_not(loader, reason: str | None) -> None:
    said = transferable(loader())
    assert said is None if reason is None else reason in said
