"""The coordinator process over real sockets: strangers, a view of two, the store relay, restart on the same port."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import TypeVar

import pytest

from lightning_cann.membership import messages as m
from lightning_cann.membership.messages import NO_VIEW, MemberInfo, ViewId

TOKEN = "secret of the job"
PATIENCE_S = 20.0
Wanted = TypeVar("Wanted")


class Peer:
    """A connection that speaks the protocol."""

    def __init__(self, address: tuple[str, int], token: str = TOKEN) -> None:
        self.sock = socket.create_connection(address, timeout=PATIENCE_S)
        self.sock.sendall(m.preamble(token))

    def send(self, message: m.Message) -> None:
        self.sock.sendall(m.encode(message))

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.sock.recv(size - len(data))
            if not more:
                raise ConnectionResetError("the server has closed the connection")
            data += more
        return data

    def receive(self) -> m.Message:
        return m.decode(self._exactly(int.from_bytes(self._exactly(4), "big")))

    def expect(self, kind: type[Wanted]) -> Wanted:
        """The next message, which must be of this kind."""
        message = self.receive()
        assert isinstance(message, kind), message
        return message

    def await_(self, kind: type[Wanted]) -> Wanted:
        """The next message of this kind; others before it are passed over."""
        while not isinstance(message := self.receive(), kind):
            pass
        return message

    def closed(self) -> bool:
        """Waits until the server has closed the connection; what it still says is a failure."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.sock.close()


class Member(Peer):
    def __init__(
        self, address: tuple[str, int], name: str, rank: int, view: ViewId = NO_VIEW, members: tuple = ()
    ) -> None:
        super().__init__(address)
        self.info = MemberInfo(name, rank, "127.0.0.1", 9)
        self.send(m.Hello(self.info, 1, view == NO_VIEW, view, members))

    def flush(self, done: int, fresh: bool) -> ViewId:
        view = self.await_(m.Propose).view
        self.send(m.Flush(view, done, fresh))
        return view


class Server:
    """The coordinator as the agent starts it: the listening socket stays here, the process can be replaced."""

    def __init__(self, events: pathlib.Path) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = self.listener.getsockname()
        self.events = events
        self.process: subprocess.Popen | None = None

    def start(self, incarnation: int = 0, **settings: object) -> None:
        fd = self.listener.fileno()
        options = {"world_size": 2, "lease_s": 60.0, **settings}
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "lightning_cann.membership.server",
                "--fd",
                str(fd),
                "--incarnation",
                str(incarnation),
                "--settings",
                json.dumps(options),
                "--events",
                str(self.events),
            ],
            pass_fds=[fd],
            env={**os.environ, "CANN_FT_TOKEN": TOKEN},
        )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(PATIENCE_S)
            self.process = None


@pytest.fixture
def server(tmp_path: pathlib.Path) -> Iterator[Server]:
    server = Server(tmp_path / "events.jsonl")
    server.start()
    yield server
    server.kill()
    server.listener.close()


def two_members(server: Server) -> tuple[Member, Member, m.Install]:
    a, b = Member(server.address, "a", 0), Member(server.address, "b", 1)
    for member in (a, b):
        member.flush(0, True)
    install = a.expect(m.Install)
    assert b.expect(m.Install) == install
    return a, b, install


def test_strangers_are_refused_and_the_server_lives_on(server: Server) -> None:
    wrong = Peer(server.address, token="guessed")
    assert wrong.closed()

    garbage = socket.create_connection(server.address, timeout=PATIENCE_S)
    garbage.sendall(b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n" + bytes(64))
    with contextlib.suppress(ConnectionResetError):  # closed with bytes unread
        assert garbage.recv(1) == b""

    oversized = Peer(server.address)  # right token, a hello of 4 GiB
    oversized.sock.sendall(b"\xff\xff\xff\xff")
    assert oversized.closed()

    nonsense = Peer(server.address)  # right token, no message
    nonsense.sock.sendall((5).to_bytes(4, "big") + b"\xc1\xc1\xc1\xc1\xc1")
    assert nonsense.closed()

    rude = Peer(server.address)  # right token, no hello
    rude.send(m.Beat())
    assert rude.closed()

    impostor = Member(server.address, "x", 1)  # a hello, then a message that only the coordinator sends
    impostor.expect(m.Welcome)
    impostor.send(m.Stop("now", False))
    assert impostor.closed()

    assert server.process is not None and server.process.poll() is None
    member = Member(server.address, "a", 0)
    assert member.expect(m.Welcome).incarnation == 0
    for peer in (wrong, garbage, oversized, nonsense, rude, impostor, member):
        peer.close()


def test_two_members_form_a_view_and_one_is_told_of_the_end_of_the_other(server: Server) -> None:
    a, b, install = two_members(server)
    assert install.view == ViewId(0, 1)
    assert [x.member_id for x in install.members] == ["a", "b"]
    b.close()
    view = a.flush(3, False)
    assert view == ViewId(0, 2)
    alone = a.expect(m.Install)
    assert [x.member_id for x in alone.members] == ["a"] and alone.cut == 3
    a.send(m.Left("finished", True))
    late = Member(server.address, "c", 1)
    late.expect(m.Welcome)
    assert not late.expect(m.Stop).error
    names = [json.loads(line)["event"] for line in server.events.read_text().splitlines()]  # written before that answer
    assert names[:4] == ["job_started", "member_started", "member_started", "view_installed"]
    assert names[4:7] == ["member_failed", "view_installed", "job_finished"]
    for peer in (a, late):
        peer.close()


def test_store_values_reach_all_members_of_the_view_and_nobody_else(server: Server) -> None:
    a, b, install = two_members(server)
    waiting = Peer(server.address)
    waiting.send(m.Hello(MemberInfo("c", 5, "127.0.0.1", 9), 1, True, NO_VIEW))
    waiting.expect(m.Welcome)
    a.send(m.StoreSet(ViewId(0, 99), "key", b"of no view"))
    a.send(m.StoreSet(install.view, "key", b"value"))
    assert b.expect(m.StoreValue) == m.StoreValue(install.view, "key", b"value")
    assert a.expect(m.StoreValue).value == b"value"
    a.send(m.MembersQuery())  # answered after everything before it
    waiting.send(m.MembersQuery())
    waiting.expect(m.MembersInfo)
    for peer in (a, b, waiting):
        peer.close()


def test_a_frame_that_breaks_the_protocol_costs_its_sender_the_membership(server: Server) -> None:
    a, b, _ = two_members(server)
    b.sock.sendall((m.MAX_FRAME + 1).to_bytes(4, "big"))
    assert b.closed()
    assert a.flush(1, False) == ViewId(0, 2)
    again = Member(server.address, "b", 1, ViewId(0, 1))
    assert again.expect(m.ExcludedNotice).reason == "connection closed"
    for peer in (a, b, again):
        peer.close()


def test_a_frame_may_come_in_pieces(server: Server) -> None:
    slow = Peer(server.address)
    frame = m.encode(m.Hello(MemberInfo("a", 0, "127.0.0.1", 9), 1, True, NO_VIEW))
    slow.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in frame:
        slow.sock.sendall(bytes([byte]))
    slow.expect(m.Welcome)
    slow.close()


def test_a_silent_member_is_excluded_after_its_lease_and_its_agent_ends_it(server: Server) -> None:
    server.kill()
    server.start(lease_s=0.6)
    agent = Peer(server.address)
    agent.send(m.AgentHello("n0", ("a", "b")))
    a, b = Member(server.address, "a", 0), Member(server.address, "b", 1)
    for member in (a, b):
        member.flush(0, True)
    a.await_(m.Install)
    a.sock.settimeout(0.1)
    while True:  # it beats until the other has been excluded
        a.send(m.Beat())
        try:
            if isinstance(a.receive(), m.Propose):
                break
        except TimeoutError:
            continue
    assert b.await_(m.ExcludedNotice).reason == "lease expired"
    assert agent.await_(m.Fence).member_id == "b"
    for peer in (a, b, agent):
        peer.close()


def test_a_restarted_coordinator_keeps_the_port_and_waits_for_all_of_the_last_view(server: Server) -> None:
    a, b, install = two_members(server)
    server.kill()
    assert a.closed() and b.closed()
    # these wait in the backlog: nobody serves them yet
    a2 = Member(server.address, "a", 0, install.view, install.members)
    server.start(incarnation=1)
    assert a2.expect(m.Welcome).incarnation == 1
    a2.send(m.MembersQuery())  # not answered, and no view proposed: b has not announced itself
    b2 = Member(server.address, "b", 1, install.view, install.members)
    assert b2.expect(m.Welcome).incarnation == 1
    for member, done in ((a2, 4), (b2, 5)):
        assert member.flush(done, False) == ViewId(1, 2)
    again = a2.expect(m.Install)
    assert again.view == ViewId(1, 2) and again.cut == 5 and again.sources == {"a": "b"}
    for peer in (a, b, a2, b2):
        peer.close()


def test_a_restarted_coordinator_believes_an_agent_that_reaped_a_member(server: Server) -> None:
    a, b, install = two_members(server)
    server.kill()
    a2 = Member(server.address, "a", 0, install.view, install.members)
    server.start(incarnation=1)
    a2.expect(m.Welcome)
    agent = Peer(server.address)
    agent.send(m.AgentHello("n0", ("a",), ("b",)))
    assert a2.flush(2, False) == ViewId(1, 2)
    assert [x.member_id for x in a2.expect(m.Install).members] == ["a"]
    for peer in (a, b, a2, agent):
        peer.close()
