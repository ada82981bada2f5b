"""The messages of the membership protocol, and their frames.

Every message is a frozen :class:`msgspec.Struct`, tagged by its class name and encoded as msgpack.  On a
connection each message is one frame: a 4-byte big-endian length, then the payload.  A connection opens with a
preamble of :data:`PREAMBLE_SIZE` bytes (magic, protocol version, SHA-256 of the job token): a stranger is refused
before anything of his is parsed.

Directions: *member* and *agent* messages go to the coordinator; *coordinator* messages go to one of them.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple, Union

import msgspec

__all__ = ["MAX_FRAME", "PREAMBLE_SIZE", "Message", "ViewId", "decode", "encode", "preamble"]

MAGIC = b"CNFT"
VERSION = 1
PREAMBLE_SIZE = len(MAGIC) + 1 + 32
MAX_FRAME = 64 * 1024 * 1024  # bytes; a longer frame is a protocol error


class ViewId(NamedTuple):
    """Number of a view: (incarnation of the coordinator, counter).  The counter never goes back."""

    incarnation: int
    number: int


NO_VIEW = ViewId(-1, 0)


class MemberInfo(msgspec.Struct, frozen=True):
    """Who holds a logical rank in a view, and where its peer server listens."""

    member_id: str
    rank: int
    host: str
    port: int
    node: str = ""


class _Tagged(msgspec.Struct, frozen=True, tag=True):
    pass


# ------------------------------------------------------------------------------------------- from members


class Hello(_Tagged, frozen=True):
    """First message of a member: who it is, and what it knows (after a reconnect: its view)."""

    info: MemberInfo
    pid: int
    fresh: bool
    view: ViewId
    members: tuple[MemberInfo, ...] = ()
    stage: int = 0
    joining: bool = False
    stopping: str = ""  # why, if the sender's view exists only to end the job


class Beat(_Tagged, frozen=True):
    """Heartbeat: renews a member's lease; from the coordinator to agents: it lives."""


class Broken(_Tagged, frozen=True):
    """The sender saw a collective of ``view`` fail: evidence that the view is broken, not who broke it."""

    view: ViewId
    reason: str
    features: tuple[str, ...] = ()


class Flush(_Tagged, frozen=True):
    """Answer to :class:`Propose`: transactions completed; the sender is frozen from now on (R3)."""

    view: ViewId
    done: int
    fresh: bool
    features: tuple[str, ...] = ()


class JoinReady(_Tagged, frozen=True):
    """A newcomer has built its model and waits at the entrance of stage ``stage``."""

    stage: int


class Boundary(_Tagged, frozen=True):
    """Answer to :class:`BoundaryQuery`: number of safe points that the sender has passed."""

    attempt: int
    boundary: int


class JoinArmed(_Tagged, frozen=True):
    """Answer to :class:`JoinAt`: will the sender stop there?  (False: it is past that safe point.)"""

    attempt: int
    ok: bool


class AtBoundary(_Tagged, frozen=True):
    """The sender waits at the safe point of this attempt."""

    attempt: int


class Resumed(_Tagged, frozen=True):
    """The sender can train in ``view``, ``latency_s`` seconds after it saw the old one break."""

    view: ViewId
    latency_s: float


class Joined(_Tagged, frozen=True):
    """A newcomer has the state of its donor; ``transfer_s`` is how long that took."""

    view: ViewId
    transfer_s: float


class StageReached(_Tagged, frozen=True):
    """The sender entered its n-th trainer call (fit, validate, ...)."""

    stage: int


class Left(_Tagged, frozen=True):
    """Planned leave: the sender has finished, or was asked to go."""

    reason: str
    finished: bool
    steps: int = 0  # committed by this member


class RankError(_Tagged, frozen=True):
    """The user's code raised on this rank."""

    kind: str
    text: str
    traceback: str


class MembersQuery(_Tagged, frozen=True):
    """A newcomer asks whom it can ask."""


class StoreSet(_Tagged, frozen=True):
    """A key of the store from which the process group of ``view`` is made (relayed to its members)."""

    view: ViewId
    key: str
    value: bytes


class Report(_Tagged, frozen=True):
    """One event for the event log."""

    event: str
    fields: dict[str, Any]


# ------------------------------------------------------------------------------------------- from agents


class AgentHello(_Tagged, frozen=True):
    """First message of an agent: its node, and its living and reaped children (soft state for a new coordinator)."""

    node: str
    alive: tuple[str, ...]
    reaped: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()  # of the reaped: those that came to the end of the script
    trained: bool = False  # has seen a view installed
    stop: str = ""  # why the operator wants the job to end, if he does


class Reaped(_Tagged, frozen=True):
    """A child ended: how (``"SIGKILL"``, ``"exit code 3"``), and whether the agent starts another one."""

    member_id: str
    rank: int
    cause: str
    restarting: bool


class StopRequest(_Tagged, frozen=True):
    """The operator wants the job to end cleanly (SIGTERM or Ctrl-C to the agent)."""

    reason: str


# -------------------------------------------------------------------------------------- from the coordinator


class Welcome(_Tagged, frozen=True):
    """Answer to :class:`Hello`; a newcomer finds the job running and must be admitted."""

    incarnation: int
    newcomer: bool
    stage: int
    lease_s: float


class Propose(_Tagged, frozen=True):
    """A new view is on its way: freeze, and say what you completed."""

    view: ViewId


class Install(_Tagged, frozen=True):
    """The view.  ``cut``: transactions that stand.  ``sources``: who serves whom (laggards: the last result;
    newcomers: the state).  ``stop``: the view exists only to end the job in a consistent state, with an error.  ``end``: so
    too, at a safe point, because the operator wishes it."""

    view: ViewId
    members: tuple[MemberInfo, ...]
    cut: int
    sources: dict[str, str]
    newcomers: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    stop: str = ""
    cause: str = ""
    boundary: int = 0  # safe points passed by the members that admit newcomers
    end: str = ""


class Dismissed(_Tagged, frozen=True):
    """A newcomer without state is not in the next view; it waits for the next admission."""

    view: ViewId


class ExcludedNotice(_Tagged, frozen=True):
    """The others went on without you (R5)."""

    incarnation: int
    reason: str


class BoundaryQuery(_Tagged, frozen=True):
    attempt: int


class JoinAt(_Tagged, frozen=True):
    """Stop at safe point number ``boundary`` so that newcomers can be admitted there."""

    attempt: int
    boundary: int


class JoinCancel(_Tagged, frozen=True):
    attempt: int


class StoreValue(_Tagged, frozen=True):
    view: ViewId
    key: str
    value: bytes


class MembersInfo(_Tagged, frozen=True):
    members: tuple[MemberInfo, ...]
    stage: int


class StageInfo(_Tagged, frozen=True):
    """The job has reached this stage (for newcomers that wait at the entrance of an earlier one)."""

    stage: int


class Stop(_Tagged, frozen=True):
    """To agents and to processes without state: the job ends, with an error or (not ``error``) because it is over."""

    reason: str
    error: bool


class Fence(_Tagged, frozen=True):
    """To agents: end this process for certain, it was excluded."""

    member_id: str
    reason: str


class EventNotice(_Tagged, frozen=True):
    """To agents: an event, to be shown to the user."""

    line: dict[str, Any]


Message = Union[  # noqa: UP007  (one per line)
    Hello,
    Beat,
    Broken,
    Flush,
    JoinReady,
    Boundary,
    JoinArmed,
    AtBoundary,
    Resumed,
    Joined,
    StageReached,
    Left,
    RankError,
    MembersQuery,
    MembersInfo,
    StoreSet,
    Report,
    AgentHello,
    Reaped,
    StopRequest,
    Welcome,
    Propose,
    Install,
    Dismissed,
    ExcludedNotice,
    BoundaryQuery,
    JoinAt,
    JoinCancel,
    StoreValue,
    StageInfo,
    Stop,
    Fence,
    EventNotice,
]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The frame of a message: length and payload."""
    payload = _encoder.encode(message)
    return len(payload).to_bytes(4, "big") + payload


def decode(payload: bytes) -> Message:
    """The message of a payload.  Raises :class:`msgspec.MsgspecError` when it is none."""
    return _decoder.decode(payload)


def preamble(token: str) -> bytes:
    """What a connection opens with.  The token itself never travels."""
    return MAGIC + bytes([VERSION]) + hashlib.sha256(token.encode()).digest()
