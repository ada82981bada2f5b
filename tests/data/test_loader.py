"""ElasticLoader: a stock DataLoader while nobody fails; every sample exactly once when members come and go."""

from __future__ import annotations

import gc
import json
import multiprocessing
import random
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

from lightning_cann.data import ElasticLoader, Piece
from lightning_cann.errors import ConfigurationError

torch.set_num_threads(1)


class Noisy(Dataset):
    """Index, and a random number as an augmentation would draw it."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        return index, torch.rand(()).item()


class Batched(Noisy):
    def __getitems__(self, indices: list[int]):
        return [(i, float(len(indices))) for i in indices]


class NeedsInit(Noisy):
    """Works only where ``worker_init_fn`` ran."""

    ready = False

    def __getitem__(self, index: int):
        assert self.ready, "worker_init_fn did not run in this process"
        return index, 0.0


def make_ready(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None and info.id == worker_id
    info.dataset.ready = True


WORKERS = [
    pytest.param({}, id="0"),
    pytest.param({"num_workers": 2}, id="2"),
    pytest.param({"num_workers": 2, "persistent_workers": True}, id="2-persistent"),
]


def elastic(rank: int, world: int, data: Dataset, *, seed: int = 3, limit=None, audit=True, **kwargs) -> ElasticLoader:
    kwargs = {"batch_size": 2, "shuffle": True, **kwargs}
    return ElasticLoader(DataLoader(data, **kwargs), rank=rank, world_size=world, seed=seed, limit=limit, audit=audit)


def flat(batch) -> list[list[float]]:
    return [part.tolist() for part in batch]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_healthy_is_stock_to_the_random_number(workers: dict, shuffle: bool) -> None:
    data, world, rank = Noisy(24), 3, 1
    sampler = DistributedSampler(data, world, rank, shuffle=shuffle, seed=3)
    stock = DataLoader(data, batch_size=3, sampler=sampler, **workers)
    ours = elastic(rank, world, data, batch_size=3, shuffle=shuffle, **workers)
    seen: list[list] = []
    for loader in (stock, ours):
        torch.manual_seed(11)
        record: list = []
        for epoch in range(2):
            (sampler if loader is stock else loader).set_epoch(epoch)
            assert len(loader) == 3
            for batch in loader:
                record.append(flat(batch))
                if loader is ours:
                    assert (loader.current_weight, loader.current.shard) == (1, rank)
                    assert len(loader) == 3
                    ours.ledger.commit(range(world))
        record.append(torch.get_rng_state().tolist())
        seen.append(record)
    assert seen[0] == seen[1]
    ours.close()


def test_persistent_workers_are_kept_over_epochs_and_ended_by_close() -> None:
    ours = elastic(0, 2, Noisy(8), num_workers=1, persistent_workers=True)
    before = set(multiprocessing.active_children())
    pids = []
    for epoch in range(3):
        ours.set_epoch(epoch)
        for _ in ours:
            pids.append({p.pid for p in set(multiprocessing.active_children()) - before})
            ours.ledger.commit((0, 1))
    assert len(pids[0]) == 1 and all(p == pids[0] for p in pids)
    ours.close()
    assert set(multiprocessing.active_children()) == before


def test_dropping_the_loader_ends_its_workers_without_garbage_collection() -> None:
    before = set(multiprocessing.active_children())
    gc.disable()
    try:
        ours = elastic(0, 1, Noisy(8), num_workers=1)
        next(iter(ours))
        assert set(multiprocessing.active_children()) != before
        del ours
        assert set(multiprocessing.active_children()) == before
    finally:
        gc.enable()


@pytest.mark.parametrize("workers", WORKERS)
def test_failures_leave_every_sample_exactly_once(workers: dict) -> None:
    """Three logical ranks; 2 dies in a window, 1 dies and is replaced; two epochs; 23 samples: uneven everywhere."""
    data, world = Noisy(23), 3
    members = {r: elastic(r, world, data, **workers) for r in range(world)}
    for epoch in range(2):
        for loader in members.values():
            loader.set_epoch(epoch)
            iter(loader)
        trained: Counter[int] = Counter()
        step = 0
        while members[0].ledger.remaining():
            basis = tuple(sorted(members))
            for loader in members.values():
                loader.ledger.begin(basis)
            batches = {}
            for _ in range(1 + step % 2):
                for r, loader in members.items():
                    batch = next(loader)
                    batches.setdefault(r, []).append((loader.current_weight, batch[0].tolist()))
            if epoch == 0 and step == 0:
                members.pop(2).close()
            if epoch == 0 and step == 1:
                members.pop(1).close()
            counted = tuple(r for r in basis if r in members)
            for r in counted:
                for weight, indices in batches[r]:
                    trained.update(indices if weight else ())
            answers = [loader.ledger.commit(counted) for loader in members.values()]
            assert all(a == answers[0] for a in answers)
            if epoch == 0 and step == 2:
                state = json.loads(json.dumps(members[0].state_dict()))
                members[1] = elastic(1, world, data, **workers)
                members[1].load_state_dict(state, keep_window=True)
                iter(members[1])
            step += 1
        assert trained == Counter(range(23))
        for loader in members.values():
            assert loader.ledger.unconsumed() == []
            assert len(loader) == loader.ledger.rounds
            with pytest.raises(StopIteration):
                next(loader)
    for loader in members.values():
        loader.close()


@pytest.mark.parametrize("seed", range(25))
def test_random_failures(seed: int) -> None:
    rng = random.Random(seed)
    world, length = rng.randint(1, 5), rng.randint(0, 60)
    data = Batched(length)

    def start(r: int, donor: ElasticLoader | None = None) -> ElasticLoader:
        loader = elastic(r, world, data, batch_size=4, drop_last=False, shuffle=bool(length))
        if donor is not None:
            loader.load_state_dict(json.loads(json.dumps(donor.state_dict())), keep_window=True)
        iter(loader)
        return loader

    members = {r: start(r) for r in range(world)}
    trained: Counter[int] = Counter()
    while next(iter(members.values())).ledger.remaining():
        basis = tuple(sorted(members))
        got: dict[int, list[int]] = {r: [] for r in basis}
        for loader in members.values():
            loader.ledger.begin(basis)
        for _ in range(rng.randint(1, 3)):
            for r, loader in members.items():
                indices, sizes = next(loader)
                assert sizes.tolist() == [len(indices)] * len(indices), "loaded by __getitems__"
                if loader.current_weight:
                    got[r] += indices.tolist()
        computing = set(basis)
        while rng.random() < 0.4:
            r = rng.randrange(world)
            if r not in members:
                members[r] = start(r, next(iter(members.values())))
            elif len(computing) > 1 and r in computing:
                del members[r]
                computing.discard(r)
        if rng.random() < 0.1:
            for loader in members.values():
                loader.ledger.abandon()
            continue
        for r in computing:
            trained.update(got[r])
        for loader in members.values():
            loader.ledger.commit(computing)
    assert trained == Counter(range(length))


@pytest.mark.parametrize("workers", WORKERS[:2])
def test_abandoned_window_gives_the_same_batches_again(workers: dict) -> None:
    ours = elastic(0, 2, Noisy(24), **workers)
    it = iter(ours)
    first = [next(it)[0].tolist() for _ in range(2)]
    ours.ledger.abandon()
    assert [next(it)[0].tolist() for _ in range(2)] == first
    ours.ledger.commit((0, 1))
    assert next(it)[0].tolist() == list(ours.plan.batch(0, 2))
    ours.close()


def test_survivors_read_adopted_batches_ahead_with_workers() -> None:
    """After the view change settles, adopted batches come from workers again, as forecast."""
    ours = elastic(0, 3, NeedsInit(36), num_workers=2, worker_init_fn=make_ready)
    it = iter(ours)
    next(it)
    ours.ledger.commit((0,))  # 1 and 2 are gone for good
    shards = []
    for _ in it:
        shards.append(ours.current.shard)
        ours.ledger.commit((0,))
    assert shards == [0] * 5 + [1, 2] * 6
    assert ours.ledger.rounds == 18


class Counting(Noisy):
    """Counts the reads of every sample, workers' included."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.reads = torch.zeros(length, dtype=torch.int32).share_memory_()

    def __getitem__(self, index: int):
        self.reads[index] += 1
        return index, 0.0


def test_view_change_does_not_read_own_batches_twice() -> None:
    data = Counting(24)
    ours = elastic(0, 2, data, batch_size=1, shuffle=False, num_workers=1, limit=12)
    it = iter(ours)
    members: tuple[int, ...] = (0, 1)
    for step in range(12):
        next(it)
        assert ours.current == (0, step)
        members = (0,) if step % 2 else (0, 1)  # a view change after every step
        ours.ledger.commit((0, 1) if step % 2 else (0,))
        ours.ledger.begin(members)
    ours.ledger.abandon()
    ours.close()
    assert data.reads[::2].tolist() == [1] * 12


def test_stale_read_ahead_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 7 reads ahead as the only helper of shard 0; then six more take all that it has read."""
    world, n = 8, 30
    ours = elastic(7, world, Noisy(world * n), batch_size=1, shuffle=False, num_workers=1)
    it = iter(ours)

    def steps(members: range, count: int) -> None:
        for _ in range(count):
            ours.ledger.begin(members)
            next(it)
            assert ours.current_weight == 1
            ours.ledger.commit(members)

    steps(range(1, 8), n)
    assert {p.shard for p in ours.ledger.unconsumed()} == {0}
    steps(range(7, 8), 1)
    missed = []
    load = ours._load_here
    monkeypatch.setattr(ours, "_load_here", lambda piece: missed.append(piece) or load(piece))
    steps(range(1, 8), 4)
    assert missed == [(0, 22)], "one miss, then the forecast of the new view is read ahead"
    ours.close()


def test_repeat_has_weight_zero_and_needs_no_worker_init_here() -> None:
    """10 samples, 4 ranks, batches of 1: the last of 3 rounds has no batch for ranks 2 and 3."""
    ours = elastic(3, 4, NeedsInit(10), batch_size=1, num_workers=2, worker_init_fn=make_ready)
    weights, indices = [], []
    for batch in ours:
        weights.append(ours.current_weight)
        indices.append(batch[0].item())
        batch.clear()  # users change batches in place
        ours.ledger.commit(range(4))
    assert weights == [1, 1, 0]
    assert indices[2] == indices[1]


def test_unpredicted_batch_is_loaded_where_worker_init_ran() -> None:
    """A window that is padded beyond the end of the data: no forecast has its second repeat."""
    ours = elastic(1, 2, NeedsInit(1), batch_size=1, num_workers=1, worker_init_fn=make_ready)
    state = torch.get_rng_state()
    it = iter(ours)
    assert not torch.equal(state, torch.get_rng_state()), "the stock draw of base_seed"
    state = torch.get_rng_state()
    assert [next(it)[0].item() for _ in range(2)] == [0, 0]
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("workers", WORKERS[:2])
def test_empty_own_shard_still_gets_a_batch_to_repeat(workers: dict) -> None:
    ours = elastic(2, 3, Noisy(2), batch_size=1, shuffle=False, **workers)
    got = []
    for batch in ours:
        got.append((batch[0].tolist(), ours.current_weight))
        ours.ledger.commit(range(3))
    assert got == [([0], 0)]


def test_epoch_does_not_end_while_a_window_is_open() -> None:
    ours = elastic(0, 2, Noisy(4), batch_size=1, shuffle=False)
    it = iter(ours)
    assert [next(it)[0].item() for _ in range(2)] == [0, 2]
    assert ours.ledger.unassigned() == 0
    next(it)
    assert ours.current_weight == 0 and len(ours) == 3
    ours.ledger.commit((0,))  # rank 1 died: its two batches come back
    assert sorted(next(it)[0].item() for _ in range(2)) == [1, 3]
    assert ours.current_weight == 1
    ours.ledger.commit((0,))
    with pytest.raises(StopIteration):
        next(it)


def test_loop_that_never_commits_is_told() -> None:
    ours = elastic(0, 1, Batched(1), batch_size=1)
    with pytest.raises(RuntimeError, match="never committed"):
        for _ in ours:
            pass


def test_batch_that_was_not_read_ahead_is_loaded_alike_by_anyone_and_draws_nothing() -> None:
    values = []
    for rank in (0, 1):
        ours = elastic(rank, 3, Noisy(12), num_workers=1)
        torch.manual_seed(rank)
        it = iter(ours)
        state = torch.get_rng_state()
        for _ in range(2):  # own batches; then, alone in the view, batch 1 of shard 2 that no forecast had
            next(it)
        ours.ledger.commit((rank,))
        next(it)
        assert ours.current.shard != rank
        values.append(flat(ours._load_here(Piece(2, 1))))
        assert torch.equal(state, torch.get_rng_state())
        ours.close()
    assert values[0] == values[1]


def test_passes_without_set_epoch_and_a_loaded_end() -> None:
    ours = elastic(0, 1, Noisy(4))

    def one_pass(loader: ElasticLoader) -> list[list[int]]:
        got = []
        for batch in loader:
            got.append(batch[0].tolist())
            loader.ledger.commit((0,))
        return got

    first = one_pass(ours)
    assert len(first) == 2
    other = elastic(0, 1, Noisy(4))
    other.load_state_dict(ours.state_dict())
    assert one_pass(other) == [], "the epoch of the loaded state is finished"
    assert one_pass(other) == one_pass(ours) == first
    ours.set_epoch(1)
    assert len(one_pass(ours)) == 2 and ours.ledger.epoch == 1


def test_state_of_another_dataset_is_refused() -> None:
    state = elastic(0, 2, Noisy(12)).state_dict()
    with pytest.raises(ConfigurationError, match="same dataset, batch size and limit"):
        elastic(0, 2, Noisy(16)).load_state_dict(state)


def test_state_of_another_order_is_refused() -> None:
    state = elastic(0, 2, Noisy(12), seed=1).state_dict()
    with pytest.raises(ConfigurationError, match="another order"):
        elastic(0, 2, Noisy(12), seed=2).load_state_dict(state)


def test_limit_and_epoch_changes_are_refused_in_the_middle() -> None:
    ours = elastic(0, 2, Noisy(16), limit=3)
    assert len(ours) == 3
    ours.set_limit(2)
    assert len(ours) == 2
    next(iter(ours))
    with pytest.raises(RuntimeError, match="has begun"):
        ours.set_limit(None)
    with pytest.raises(RuntimeError, match="open window"):
        ours.set_epoch(1)
    ours.set_epoch(0)
    ours.ledger.commit((0, 1))
    ours.set_epoch(1)
    assert len(ours) == 2 and ours.ledger.epoch == 1


def test_attributes_are_the_users() -> None:
    data = Noisy(16)
    ours = elastic(1, 2, data, batch_size=4)
    assert (ours.dataset, ours.batch_size, ours.num_workers, ours.drop_last) == (data, 4, 0, False)
    assert ours.batch_sampler.batch_size == 4
    assert [i for b in ours.batch_sampler for i in b] == list(ours.sampler)
    assert (len(ours.batch_sampler), len(ours.sampler)) == (2, 8)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = ours.nonsense
    with pytest.raises(ConfigurationError, match="rank=2"):
        elastic(2, 2, data)
    with pytest.raises(ConfigurationError, match="batch_size=None"):
        elastic(0, 2, data, batch_size=None, shuffle=False)


@pytest.mark.parametrize("workers", WORKERS)
def test_set_epoch_in_the_middle_drops_what_was_read_ahead(workers: dict) -> None:
    ours = elastic(0, 2, Noisy(40), **workers)
    next(iter(ours))
    ours.ledger.commit((0, 1))
    ours.set_epoch(1)
    for k in range(3):
        assert next(ours)[0].tolist() == ours.plan.batch(0, k)
    ours.close()


def test_lightnings_set_epoch_arrives() -> None:
    utilities = pytest.importorskip("lightning.fabric.utilities.data")
    ours = elastic(0, 2, Noisy(8))
    utilities._set_sampler_epoch(ours, 4)
    assert ours.epoch == 4 and ours.ledger.epoch == 4


def test_worker_exception_reaches_the_loop_and_the_loader_goes_on() -> None:
    class Bad(Noisy):
        def __getitem__(self, index: int):
            if index == 2:
                raise KeyError("broken sample")
            return index, 0.0

    ours = elastic(0, 1, Bad(8), batch_size=1, shuffle=False, num_workers=2)
    it = iter(ours)
    got = []
    for _ in range(8):
        try:
            got.append(next(it)[0].item())
        except KeyError:
            got.append(-1)
        ours.ledger.commit((0,))
    assert got == [0, 1, -1, 3, 4, 5, 6, 7]


def test_a_checkpoint_inside_a_window_gives_its_batches_back() -> None:
    ours = elastic(0, 1, Noisy(16))
    batches = iter(ours)
    next(batches)
    ours.ledger.commit([0])
    next(batches)  # a window is open now
    other = elastic(0, 1, Noisy(16))
    other.load_state_dict(ours.state_dict())
    assert not other.ledger.window_open
    assert other.ledger.unassigned() == ours.ledger.unassigned() + 1
