"""ShardLedger: exactly once, whatever dies and whenever; all replicas agree; as few rounds as possible."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cann.data import Piece, ShardLedger


def fresh(world_size: int, lengths: list[int]) -> ShardLedger:
    ledger = ShardLedger(world_size, audit=True)
    ledger.reset(0, lengths)
    return ledger


def newcomer(donor: ShardLedger) -> ShardLedger:
    ledger = ShardLedger(donor.world_size, audit=True)
    ledger.load_state_dict(json.loads(json.dumps(donor.state_dict())))
    return ledger


def every_piece(lengths: tuple[int, ...]) -> list[Piece]:
    return [Piece(s, b) for s, n in enumerate(lengths) for b in range(n)]


class Job:
    """One replica of the ledger per live member; every call goes to all, and all must answer the same."""

    def __init__(self, world_size: int, lengths: list[int]) -> None:
        self.replicas = {r: fresh(world_size, lengths) for r in range(world_size)}
        self.world_size = world_size
        self.own: dict[int, list[int]] = {r: [] for r in range(world_size)}

    @property
    def live(self) -> tuple[int, ...]:
        return tuple(sorted(self.replicas))

    def call(self, name: str, *args):
        answers = {r: getattr(ledger, name)(*args) for r, ledger in self.replicas.items()}
        first = next(iter(answers.values()))
        assert all(a == first for a in answers.values()), (name, answers)
        return first

    def any(self) -> ShardLedger:
        return next(iter(self.replicas.values()))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_exactly_once_under_random_failures(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 6), "W")
    lengths = data.draw(st.lists(st.integers(0, 8), min_size=world, max_size=world), "lengths")
    job = Job(world, lengths)
    faults = 0  # bounded, so that the test ends

    def maybe_fault(computing: set[int]) -> None:
        """A death or a join; ``computing`` loses who died: its replacement has not computed the window."""
        nonlocal faults
        while faults < 12 and data.draw(st.integers(0, 3), "fault?") == 0:
            faults += 1
            rank = data.draw(st.integers(0, world - 1), "who")
            if rank not in job.replicas:
                job.replicas[rank] = newcomer(job.any())
            elif len(job.replicas) > 1:
                del job.replicas[rank]
                computing.discard(rank)

    while job.any().remaining():
        # The donor hands the newcomer its state at any time: here in front of the window, below inside it.
        maybe_fault(set())
        basis = job.live
        job.call("begin", basis)
        computing = set(basis)
        taken: dict[int, list[Piece]] = {r: [] for r in basis}
        for _ in range(data.draw(st.integers(1, 4), "window")):
            free = job.any().unassigned()
            dealt = job.call("assign")
            assert sum(p is not None for p in dealt.values()) == min(len(basis), free)
            for rank, piece in dealt.items():
                if piece is not None:
                    taken[rank].append(piece)
            maybe_fault(computing)
        # Without a survivor of the whole window nobody holds its gradients.
        if not computing or (faults < 12 and data.draw(st.integers(0, 5), "abandon?") == 0):
            faults += 1
            job.call("abandon")
            continue
        counted = tuple(sorted(computing))
        expected = tuple(r for r in basis if r in counted and taken[r])
        assert job.call("contributors", counted) == expected
        before = job.any().remaining()
        assert job.call("rounds_left", counted) == -(-(before - sum(len(taken[r]) for r in expected)) // len(counted))
        assert job.call("commit", counted) == expected
        assert job.any().remaining() == before - sum(len(taken[r]) for r in expected)
        for rank in expected:
            job.own[rank] += [p.batch for p in taken[rank] if p.shard == rank]
        states = [ledger.state_dict() for ledger in job.replicas.values()]
        assert all(s == states[0] for s in states)
        assert sorted([*job.any().consumed, *job.any().unconsumed()]) == every_piece(job.any().lengths)

    assert sorted(job.any().consumed) == every_piece(job.any().lengths)
    for own in job.own.values():
        assert own == sorted(set(own)), "an owner goes through its shard in increasing order"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_rounds_are_minimal_without_failures(lengths: list[int], data: st.DataObject) -> None:
    members = data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1))
    ledger = fresh(len(lengths), lengths)
    bound = -(-sum(lengths) // len(members))
    assert ledger.rounds_left(members) == bound
    while ledger.remaining():
        ledger.begin(members)
        ledger.assign()
        assert ledger.rounds + ledger.rounds_left() == bound
        ledger.commit(members)
    assert ledger.rounds == bound


def test_no_failure_is_plain_sharding() -> None:
    ledger = fresh(3, [4, 4, 4])
    for k in range(0, 4, 2):
        ledger.begin()
        for j in (k, k + 1):
            assert ledger.assign() == {r: Piece(r, j) for r in range(3)}
        assert ledger.commit((0, 1, 2)) == (0, 1, 2)
    assert ledger.remaining() == 0 and ledger.rounds == 4


def test_uneven_shards_leave_someone_idle_only_when_nothing_is_free() -> None:
    ledger = fresh(2, [2, 1])
    ledger.begin()
    assert ledger.assign() == {0: (0, 0), 1: (1, 0)}
    assert ledger.assign() == {0: (0, 1), 1: None}
    assert ledger.assign() == {0: None, 1: None}
    assert ledger.counts((0, 1)) == {0: 2, 1: 1}


def test_dead_owner_returns_its_front_and_helper_returns_a_hole() -> None:
    ledger = fresh(3, [6, 0, 0])
    ledger.begin()
    assert ledger.assign() == {0: (0, 0), 1: (0, 5), 2: (0, 4)}
    assert ledger.commit((0, 2)) == (0, 2)  # helper 1 died: batch 5 is a hole above the back
    assert ledger.unconsumed() == [(0, 1), (0, 2), (0, 3), (0, 5)]
    ledger.begin((0, 2))
    assert ledger.assign() == {0: (0, 1), 2: (0, 5)}
    assert ledger.commit((2,)) == (2,)  # the owner died: batch 1 is the front again
    assert ledger.front(0) == 1
    ledger.begin((0, 2))  # its replacement
    assert ledger.assign() == {0: (0, 1), 2: (0, 3)}
    assert ledger.commit((0, 2)) == (0, 2)
    assert ledger.unconsumed() == [(0, 2)]


def test_helper_takes_the_highest_hole_so_the_owner_stays_in_order() -> None:
    ledger = fresh(4, [6, 0, 0, 0])
    ledger.begin()
    assert ledger.assign() == {0: (0, 0), 1: (0, 5), 2: (0, 4), 3: (0, 3)}
    assert ledger.assign() == {0: (0, 1), 1: (0, 2), 2: None, 3: None}
    ledger.commit((0, 3))
    assert ledger.state_dict()["holes"] == [[0, [4, 5]]]
    ledger.begin((0, 1))
    assert ledger.assign() == {0: (0, 2), 1: (0, 5)}
    assert ledger.assign() == {0: (0, 4), 1: None}
    ledger.commit((0,))
    ledger.begin()
    assert ledger.assign() == {0: (0, 5)}


def test_shard_with_most_left_is_helped_and_ties_go_to_the_lowest() -> None:
    ledger = fresh(4, [0, 3, 3, 5])
    ledger.begin((0, 1))
    assert ledger.assign() == {0: (3, 4), 1: (1, 0)}
    assert ledger.assign() == {0: (3, 3), 1: (1, 1)}
    assert ledger.assign() == {0: (2, 2), 1: (1, 2)}  # 2 and 3 have three each
    assert ledger.assign() == {0: (3, 2), 1: (2, 1)}


def test_last_batch_of_a_living_owner_is_not_taken_from_it() -> None:
    ledger = fresh(2, [0, 1])
    ledger.begin()
    assert ledger.assign() == {0: None, 1: (1, 0)}


def test_newcomer_inside_a_window_knows_it() -> None:
    ledger = fresh(2, [3, 3])
    ledger.begin()
    ledger.assign()
    other = newcomer(ledger)
    assert other.assign() == ledger.assign()
    assert other.commit((0,)) == ledger.commit((0,)) == (0,)
    assert other.state_dict() == ledger.state_dict()
    assert ledger.members == (0,)


def test_forecast_is_what_will_be_dealt() -> None:
    ledger = fresh(3, [2, 5, 4])
    ledger.begin((0, 2))
    ledger.assign()
    predicted = {r: list(ledger.forecast(r)) for r in (0, 2)}
    seen: dict[int, list[Piece | None]] = {0: [], 2: []}
    while ledger.unassigned():
        for rank, piece in ledger.assign().items():
            seen[rank].append(piece)
    assert seen == predicted
    assert predicted[2][-1] is None or predicted[0][-1] is not None


def test_misuse_is_refused() -> None:
    ledger = fresh(2, [1, 1])
    with pytest.raises(RuntimeError, match="begin"):
        ledger.assign()
    with pytest.raises(ValueError, match=r"0\.\.1"):
        ledger.begin((0, 2))
    ledger.begin()
    with pytest.raises(RuntimeError, match="open already"):
        ledger.begin()
    with pytest.raises(RuntimeError, match="open window"):
        ledger.reset(1, [1, 1])
    with pytest.raises(ValueError, match="at least one"):
        ledger.commit(())
    assert ledger.window_open, "a refused call changes nothing"
    with pytest.raises(ValueError, match="does not fit"):
        ShardLedger(3).load_state_dict(ledger.state_dict())
    with pytest.raises(ValueError, match="audit"):
        ShardLedger(2, audit=True).load_state_dict({**ledger.state_dict(), "consumed": None})
