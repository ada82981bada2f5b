"""Who trains on which batch: the exactly-once book of one epoch.

Every member keeps a :class:`ShardLedger`.  It does no I/O and never talks: its state is a function of the calls
it gets, and all members make the same calls, so all ledgers are equal.  A *window* is one optimizer step:

    ledger.begin(members)          # basis: the members of the view in which the previous step committed
    ledger.assign()                # once per microbatch: logical rank -> (shard, batch) or None
    ledger.commit(counted)         # the step stands: what counted ranks had is consumed, the rest is free again

Assignments depend on committed state and basis only, so a view change in the middle of a window changes no
member's mind.  An owner takes its own shard from the front, in order (its DataLoader may read ahead); who has
nothing left of its own takes the *highest* free batch of the shard with the most left.  In a window an owner is
therefore always below every helper of its shard, which gives two properties without further bookkeeping: an owner
sees its own batches in increasing order, whatever fails, and every round uses ``min(members, free batches)``
batches, so the number of rounds is the least possible.

It does not know samples (``order.py``), load data (``loader.py``), or decide who is a member.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Piece", "ShardLedger"]

STATE_VERSION = 1


class Piece(NamedTuple):
    """Batch number ``batch`` (from 0) of logical shard ``shard``."""

    shard: int
    batch: int


@dataclass(slots=True)
class _Free:
    """The free batches of all shards: ``[front[s], back[s])`` and ``holes[s]``, which are sorted and above ``back[s]``.

    Lists over shards, not an object per shard: every member copies this once per step, for every shard there is.
    """

    front: list[int]
    back: list[int]
    holes: dict[int, list[int]] = field(default_factory=dict)

    def copy(self) -> _Free:
        return _Free(self.front.copy(), self.back.copy(), {s: list(h) for s, h in self.holes.items()})

    def left(self, s: int) -> int:
        return self.back[s] - self.front[s] + (len(self.holes[s]) if s in self.holes else 0)

    def total(self) -> int:
        return sum(self.back) - sum(self.front) + sum(map(len, self.holes.values()))

    def take_lowest(self, s: int) -> Piece | None:
        lowest = self.front[s]
        if lowest < self.back[s]:
            self.front[s] = lowest + 1
            return Piece(s, lowest)
        return Piece(s, self._take_hole(s, 0)) if s in self.holes else None

    def take_highest(self, s: int) -> Piece:
        if s in self.holes:
            return Piece(s, self._take_hole(s, -1))
        self.back[s] -= 1
        return Piece(s, self.back[s])

    def _take_hole(self, s: int, index: int) -> int:
        hole = self.holes[s].pop(index)
        if not self.holes[s]:
            del self.holes[s]
        return hole

    def consume(self, s: int, batches: set[int]) -> None:
        """Remove ``batches`` of shard s (all of them free) and restore the form above."""
        holes = [b for b in self.holes.pop(s, ()) if b not in batches]
        front, back = self.front[s], self.back[s]
        while front < back and front in batches:
            front += 1
        above = [b for b in batches if front <= b < back]
        if above:
            holes[:0] = [b for b in range(min(above) + 1, back) if b not in batches]
            back = min(above)
        self.front[s], self.back[s] = front, back
        if holes:
            self.holes[s] = holes


def _deal(free: _Free, basis: Sequence[int]) -> dict[int, Piece | None]:
    """One round: takes at most one batch per member of ``basis`` out of ``free``, owners first."""
    dealt = {r: free.take_lowest(r) for r in basis}
    idle = [r for r, piece in dealt.items() if piece is None]
    if not idle:
        return dealt
    most = [(-left, s) for s in range(len(free.front)) if (left := free.left(s))]
    heapq.heapify(most)
    for rank in idle:
        if not most:
            break
        s = most[0][1]
        dealt[rank] = free.take_highest(s)
        if left := free.left(s):
            heapq.heapreplace(most, (-left, s))
        else:
            heapq.heappop(most)
    return dealt


@dataclass(slots=True)
class _Window:
    basis: tuple[int, ...]
    free: _Free
    rounds: int = 0
    taken: dict[int, list[Piece]] = field(default_factory=dict)


class ShardLedger:
    """The book of one epoch over ``world_size`` logical shards (see the module's page).

    Args:
        world_size: number of logical ranks W; shards have the same numbers.
        audit: keep :attr:`consumed`, the list of every batch in the order of its commit (at most one epoch).
    """

    def __init__(self, world_size: int, *, audit: bool = False) -> None:
        if world_size < 1:
            raise ValueError(f"world_size={world_size}: a world has at least one logical rank")
        self.world_size = world_size
        self.epoch = -1
        self.lengths: tuple[int, ...] = (0,) * world_size
        self.consumed: list[Piece] | None = [] if audit else None
        self._free = _Free([0] * world_size, [0] * world_size)
        self._members: tuple[int, ...] = tuple(range(world_size))
        self._rounds = 0
        self._window: _Window | None = None

    # ------------------------------------------------------------------ the epoch
    def reset(self, epoch: int, lengths: Sequence[int]) -> None:
        """Start ``epoch`` with ``lengths[s]`` batches in shard s (after any per-shard limit).

        Raises:
            RuntimeError: a window is open: its batches would be lost without a trace.
            ValueError: not one length per shard, or a negative one.
        """
        if self._window is not None:
            raise RuntimeError(f"epoch {self.epoch} has an open window: commit() or abandon() it before reset()")
        if len(lengths) != self.world_size or any(n < 0 for n in lengths):
            raise ValueError(f"lengths={list(lengths)}: need {self.world_size} numbers of batches, none negative")
        self.epoch = epoch
        self.lengths = tuple(lengths)
        self._free = _Free([0] * self.world_size, list(lengths))
        self._rounds = 0
        if self.consumed is not None:
            self.consumed = []

    # ------------------------------------------------------------------ the window
    def begin(self, members: Iterable[int] | None = None) -> None:
        """Open the window of one optimizer step.

        Args:
            members: the basis, i.e. logical ranks of the view in which the previous step committed.  Default:
                what the last :meth:`commit` was given (all ranks before the first).
        """
        if self._window is not None:
            raise RuntimeError("a window is open already: commit() or abandon() it before begin()")
        basis = self._members if members is None else self._ranks(members)
        self._members = basis
        self._window = _Window(basis, self._free.copy())

    def assign(self) -> dict[int, Piece | None]:
        """One more microbatch for every rank of the basis; None: nothing is left for it (weight zero)."""
        window = self._open()
        dealt = _deal(window.free, window.basis)
        window.rounds += 1
        for rank, piece in dealt.items():
            if piece is not None:
                window.taken.setdefault(rank, []).append(piece)
        return dealt

    def counts(self, members: Iterable[int]) -> dict[int, int]:
        """Real microbatches of this window per rank of the basis that is in ``members`` (the mean's weights)."""
        window = self._open()
        within = set(members)
        return {r: len(window.taken[r]) if r in window.taken else 0 for r in window.basis if r in within}

    def contributors(self, members: Iterable[int]) -> tuple[int, ...]:
        """Ranks with a real microbatch in this window that are in ``members``, ascending."""
        return tuple(r for r, n in self.counts(members).items() if n)

    def commit(self, members: Iterable[int]) -> tuple[int, ...]:
        """The step stands.  Consume what ``members`` had, free what others had, close the window.

        Args:
            members: logical ranks of the view in which the step's result completed.  A rank whose process was
                replaced *inside* this window must not be among them: its replacement did not compute these
                microbatches (rule R8: pass the ranks that the reduced counts name).  Pass the newcomer to the
                next :meth:`begin` instead.

        Returns:
            The contributors.
        """
        window = self._open()
        ranks = self._ranks(members)
        contributors = self.contributors(ranks)
        by_shard: dict[int, set[int]] = {}
        front = self._free.front
        for rank in contributors:
            pieces = window.taken[rank]
            if self.consumed is not None:
                self.consumed += pieces
            for piece in pieces:
                shard, batch = piece
                # Owners took fronts in order: nearly all there is, and nothing to sort out.
                if batch == front[shard] < self._free.back[shard]:
                    front[shard] += 1
                else:
                    by_shard.setdefault(shard, set()).add(batch)
        for shard, batches in by_shard.items():
            self._free.consume(shard, batches)
        self._rounds += window.rounds
        self._members = ranks
        self._window = None
        return contributors

    def abandon(self) -> None:
        """Drop the open window, if any: all its batches are free again."""
        self._window = None

    # ------------------------------------------------------------------ questions
    @property
    def window_open(self) -> bool:
        return self._window is not None

    @property
    def members(self) -> tuple[int, ...]:
        """Basis of the open window, else the basis that the next one gets by default."""
        return self._members

    @property
    def rounds(self) -> int:
        """Microbatch rounds of this epoch so far, those of the open window included."""
        return self._rounds + (self._window.rounds if self._window else 0)

    @property
    def window_rounds(self) -> int:
        """Microbatch rounds in the open window; 0 without one."""
        return self._window.rounds if self._window else 0

    def remaining(self) -> int:
        """Batches that are not consumed (those pending in the open window count as remaining)."""
        return self._free.total()

    def unassigned(self) -> int:
        """Batches that :meth:`assign` could still deal out now."""
        return (self._window.free if self._window else self._free).total()

    def rounds_left(self, members: Iterable[int] | None = None) -> int:
        """Rounds that ``members`` need after those dealt so far (pending ones of others must be done again)."""
        ranks = self._members if members is None else self._ranks(members)
        left = self.remaining()
        if self._window is not None:
            left -= sum(self.counts(ranks).values())
        return -(-left // len(ranks))

    def front(self, shard: int) -> int:
        """The next batch that the owner of ``shard`` takes by committed state; ``lengths[shard]`` at its end."""
        if self._free.front[shard] < self._free.back[shard]:
            return self._free.front[shard]
        return self._free.holes[shard][0] if shard in self._free.holes else self.lengths[shard]

    def unconsumed(self) -> list[Piece]:
        """Every batch that no committed step has used, in order: the audit's other half."""
        free = self._free
        return [
            Piece(s, b)
            for s in range(self.world_size)
            for b in (*range(free.front[s], free.back[s]), *free.holes.get(s, ()))
        ]

    def forecast(self, rank: int) -> Iterator[Piece | None]:
        """What ``rank`` will get from now on if no member comes or goes (for reading ahead).

        None stands for the round in which others still have a batch and ``rank`` has not.  The iterator works
        on a copy: later calls on the ledger do not change it.
        """
        free = self._window.free if self._window else self._free
        return _forecast(free.copy(), self._members, rank)

    # ------------------------------------------------------------------ transfer
    def state_dict(self) -> dict[str, Any]:
        """JSON-able state, an open window included: its basis and number of rounds say the rest."""
        return {
            "version": STATE_VERSION,
            "world_size": self.world_size,
            "epoch": self.epoch,
            "lengths": list(self.lengths),
            "front": list(self._free.front),
            "back": list(self._free.back),
            "holes": [[s, list(holes)] for s, holes in sorted(self._free.holes.items())],
            "rounds": self._rounds,
            "members": list(self._members),
            "window": None if self._window is None else self._window.rounds,
            "consumed": None if self.consumed is None else [list(piece) for piece in self.consumed],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become equal to the ledger that wrote ``state``; an open window of this one is dropped.

        Raises:
            ValueError: another version or world size; or this ledger audits and ``state`` has no audit list.
        """
        if state["version"] != STATE_VERSION or state["world_size"] != self.world_size:
            raise ValueError(
                f"ledger state of version {state['version']} for {state['world_size']} shards does not fit "
                f"version {STATE_VERSION} with {self.world_size} shards"
            )
        if self.consumed is not None and state["consumed"] is None:
            raise ValueError("this ledger audits but the state has no audit list: use the same audit= on every member")
        self.epoch = int(state["epoch"])
        self.lengths = tuple(int(n) for n in state["lengths"])
        self._free = _Free(
            list(map(int, state["front"])),
            list(map(int, state["back"])),
            {int(s): list(map(int, holes)) for s, holes in state["holes"]},
        )
        self._rounds = int(state["rounds"])
        self._members = self._ranks(state["members"])
        if self.consumed is not None:
            self.consumed = [Piece(int(s), int(b)) for s, b in state["consumed"]]
        self._window = None
        if state["window"] is not None:
            self.begin(self._members)
            for _ in range(int(state["window"])):
                self.assign()

    # ------------------------------------------------------------------ inner
    def _open(self) -> _Window:
        if self._window is None:
            raise RuntimeError("no window is open: begin() comes first")
        return self._window

    def _ranks(self, members: Iterable[int]) -> tuple[int, ...]:
        ranks = tuple(sorted(set(members)))
        if not ranks or ranks[0] < 0 or ranks[-1] >= self.world_size:
            raise ValueError(f"members={ranks}: need at least one logical rank, each within 0..{self.world_size - 1}")
        return ranks


def _forecast(free: _Free, basis: tuple[int, ...], rank: int) -> Iterator[Piece | None]:
    while True:
        dealt = _deal(free, basis)
        piece = dealt.get(rank)
        if piece is None:
            # Who gets nothing while others do gets nothing later either: one repeat, then the end.
            if any(p is not None for p in dealt.values()):
                yield None
            return
        yield piece
