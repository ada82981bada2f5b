"""The coordinator process: an asyncio TCP server around the pure :class:`~.coordinator.Coordinator`.

    python -m lightning_cann.membership.server --fd 5 --incarnation 0 --settings '{"world_size": 4}' --events events.jsonl

It is started by the agent of the first node, which owns the listening socket (``--fd``): a restarted coordinator keeps
the port, and connections made meanwhile wait in the backlog.  The job token comes in ``CANN_FT_TOKEN``.  It imports
neither torch nor lightning.

It does not persist anything but the event log: what it knows is soft state that members and agents announce again.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import logging
import os
import socket
import time
from typing import Any

import msgspec

from lightning_cann.environment import JOB_ID, TOKEN
from lightning_cann.membership import messages as m
from lightning_cann.membership.coordinator import CONNECTION_CLOSED, Coordinator, CoordinatorSettings, Emit, Send
from lightning_cann.metrics.events import EventLog

__all__ = ["CoordinatorServer", "main"]

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0  # a connection that has not said who it is by then is closed
MAX_HELLO = 1 << 20  # bytes
REAP_WAIT_S = 0.25  # how long events wait for an agent to say how a member ended, after its connection did
EVIDENCE_S = 0.01  # a failed collective does not say who failed; the end of a connection does, and comes as fast
MAX_BUFFERED = 32 * 1024 * 1024  # bytes unsent to one peer before its connection is given up


class CoordinatorServer:
    """Serves one job.  Owner of the :class:`Coordinator` and of all connections: the event loop's thread."""

    def __init__(self, settings: CoordinatorSettings, token: str, incarnation: int = 0, events: str | None = None) -> None:
        self.core = Coordinator(settings, incarnation, time.monotonic())
        self._preamble = m.preamble(token)
        self._events = EventLog(events) if events else None
        self._members: dict[str, asyncio.StreamWriter] = {}
        self._agents: dict[str, asyncio.StreamWriter] = {}
        self._log_failed = False
        self._held: list[dict[str, Any]] = []  # events, in order, behind one whose cause is not known yet
        self._unexplained: dict[str, asyncio.TimerHandle] = {}  # members whose end no agent has told yet

    async def serve(self, sock: socket.socket) -> None:
        if self.core.incarnation == 0:
            size, job = self.core.settings.world_size, os.environ.get(JOB_ID, "")
            self._emit("job_started", {"world_size": size, "job_id": job, "pid": os.getppid()})
        server = await asyncio.start_server(self._connection, sock=sock)
        async with server:
            while True:
                await asyncio.sleep(self.core.settings.lease_s / 8)
                self._apply(self.core.tick(time.monotonic()))
                for name in list(self._agents):  # a frozen coordinator is known by its silence
                    self._send(name, m.Beat())

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        name = None
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                opening = await reader.readexactly(m.PREAMBLE_SIZE)
                if not hmac.compare_digest(opening, self._preamble):
                    log.warning("refused a stranger at %s: wrong protocol, version or job token", peer)
                    return
                hello = await self._read(reader, MAX_HELLO)
            transport = writer.transport
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if isinstance(hello, m.Hello):
                name, table = hello.info.member_id, self._members
            elif isinstance(hello, m.AgentHello):
                name, table = "agent:" + hello.node, self._agents
            else:
                log.warning("refused %s: the first message was %s", peer, type(hello).__name__)
                return
            if name in table:
                table[name].transport.abort()
            table[name] = writer
            self._apply(self.core.receive(name, hello, time.monotonic()))
            while not transport.is_closing():
                message = await self._read(reader, m.MAX_FRAME)
                if isinstance(message, m.StoreSet):
                    self._relay(name, message)
                else:
                    if isinstance(message, m.Reaped):
                        self._explain(message.member_id, message.cause)
                    if isinstance(message, m.Broken):
                        asyncio.get_running_loop().call_later(EVIDENCE_S, self._hear, name, message)
                        continue
                    self._apply(self.core.receive(name, message, time.monotonic()))
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass  # the peer is gone: the finally block says so to the state machine
        except (msgspec.MsgspecError, ValueError) as error:
            log.warning("closing the connection of %s: %s", name or peer, error)
        finally:
            writer.close()
            for table in (self._members, self._agents):
                if name is not None and table.get(name) is writer:
                    del table[name]
                    if table is self._members:
                        self._apply(self.core.disconnected(name, time.monotonic()))

    @staticmethod
    async def _read(reader: asyncio.StreamReader, limit: int) -> m.Message:
        size = int.from_bytes(await reader.readexactly(4), "big")
        if size > limit:
            raise ValueError(f"a frame of {size} bytes exceeds the limit of {limit}")
        return m.decode(await reader.readexactly(size))

    def _hear(self, name: str, message: m.Message) -> None:
        if name in self._members:
            self._apply(self.core.receive(name, message, time.monotonic()))

    def _relay(self, sender: str, message: m.StoreSet) -> None:
        """Keys of a view's store go to all its members: nobody else hosts a store whose death would matter."""
        if message.view == self.core.view:
            for member_id in self.core.members:
                self._send(member_id, m.StoreValue(message.view, message.key, message.value))

    def _apply(self, effects: list[Send | Emit]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                if effect.to is None:
                    for name in list(self._agents):
                        self._send(name, effect.message)
                else:
                    self._send(effect.to, effect.message)
            else:
                self._emit(effect.event, effect.fields)

    def _emit(self, event: str, fields: dict[str, Any]) -> None:
        """Events go out in order.  A connection ends some milliseconds before the agent has reaped the process: the
        event log waits for that, the view change does not."""
        self._held.append({"time": time.time(), "event": event, **fields})
        if fields.get("cause") == CONNECTION_CLOSED and self._agents:
            member_id = fields["member_id"]
            self._unexplained[member_id] = asyncio.get_running_loop().call_later(REAP_WAIT_S, self._explain, member_id)
        self._release()

    def _explain(self, member_id: str, cause: str = "") -> None:
        timer = self._unexplained.pop(member_id, None)
        if timer is None:
            return
        timer.cancel()
        for line in self._held:
            if cause and line["event"] == "member_failed" and line["member_id"] == member_id:
                line["cause"] = cause
        self._release()

    def _release(self) -> None:
        if self._unexplained:
            return
        held, self._held = self._held, []
        for line in held:
            if self._events is not None:
                try:
                    self._events.write(**line)
                except OSError as error:  # a full disk must not end the job; the agents are still told
                    if not self._log_failed:
                        log.warning("the event log %s cannot be written: %s", self._events.path, error)
                    self._log_failed = True
            for name in list(self._agents):
                self._send(name, m.EventNotice(line))

    def _send(self, to: str, message: m.Message) -> None:
        writer = self._members.get(to) or self._agents.get(to)
        if writer is None or writer.transport.is_closing():
            return
        if writer.transport.get_write_buffer_size() > MAX_BUFFERED:
            log.warning("%s does not read: closing its connection", to)
            writer.transport.abort()
            return
        writer.write(m.encode(message))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fd", type=int, required=True, help="inherited listening socket")
    parser.add_argument("--incarnation", type=int, default=0, help="0 at first, one more at each restart")
    parser.add_argument("--settings", type=json.loads, required=True, help="CoordinatorSettings as JSON")
    parser.add_argument("--events", default=None, help="path of the event log (JSONL)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="coordinator: %(message)s")
    settings = CoordinatorSettings(**arguments.settings)
    server = CoordinatorServer(settings, os.environ[TOKEN], arguments.incarnation, arguments.events)
    sock = socket.socket(fileno=arguments.fd)
    sock.setblocking(False)
    asyncio.run(server.serve(sock))


if __name__ == "__main__":
    main()
