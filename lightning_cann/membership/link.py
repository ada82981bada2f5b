"""A process's connection to the coordinator: one thread that reads, beats, and reconnects with back-off.

    link = Link(address, token, hello=make_hello, handle=on_message, beat_s=0.5)
    link.start(); link.send(message); link.close()

``hello()`` builds the first message of each connection; ``handle(message)`` runs on the link's thread and must not block.
When the coordinator is gone, nothing is raised: training goes on inside its view, and the link announces itself anew to
the coordinator's successor.  What was sent meanwhile is lost, which the protocol allows (the hello says it all).
"""

from __future__ import annotations

import contextlib
import logging
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable

from lightning_cann.membership import messages as m

__all__ = ["Link"]

log = logging.getLogger(__name__)

MAX_BACKOFF_S = 1.0


class Link:
    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        *,
        hello: Callable[[], m.Message],
        handle: Callable[[m.Message], None],
        beat_s: float | None = 0.5,
        name: str = "link",
    ) -> None:
        self._address, self._token = address, token
        self._hello, self._handle, self._beat_s = hello, handle, beat_s
        self._sock: socket.socket | None = None
        self._lock = threading.Lock()  # guards writes and the socket's identity
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"cann-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: m.Message) -> bool:
        """Sends a message; False when there is no connection at the moment (see above)."""
        frame = m.encode(message)
        with self._lock:
            if self._sock is None:
                return False
            try:
                self._sock.sendall(frame)
            except OSError:
                return False
            return True

    def close(self) -> None:
        """Ends the thread and the connection; what was sent before is delivered."""
        self._closing.set()
        with self._lock:
            if self._sock is not None:
                with contextlib.suppress(OSError):  # already closed by the other side
                    self._sock.shutdown(socket.SHUT_WR)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        backoff = 0.02
        while not self._closing.is_set():
            try:
                sock = socket.create_connection(self._address, timeout=5)
            except OSError:
                self._closing.wait(backoff * random.uniform(0.5, 1.0))
                backoff = min(backoff * 2, MAX_BACKOFF_S)
                continue
            with sock:
                try:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    sock.sendall(m.preamble(self._token) + m.encode(self._hello()))
                    sock.settimeout(None)
                    with self._lock:
                        self._sock = sock
                    if self._read(sock):
                        backoff = 0.02
                except OSError as error:
                    log.debug("connection to the coordinator failed: %s", error)
                finally:
                    with self._lock:
                        self._sock = None
            self._closing.wait(backoff * random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, MAX_BACKOFF_S)

    def _read(self, sock: socket.socket) -> bool:
        """Reads until the connection ends; returns whether anything was heard."""
        buffer, heard = bytearray(), False
        next_beat = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            while True:
                timeout = None
                if self._beat_s is not None:
                    now = time.monotonic()
                    if now >= next_beat and not self._closing.is_set():
                        self.send(m.Beat())
                        next_beat = now + self._beat_s
                    timeout = max(0.0, next_beat - now)
                if not selector.select(timeout):
                    continue
                data = sock.recv(1 << 18)
                if not data:
                    return heard
                heard = True
                buffer += data
                while len(buffer) >= 4:
                    size = int.from_bytes(buffer[:4], "big")
                    if size > m.MAX_FRAME:
                        raise OSError(f"a frame of {size} bytes exceeds the limit")
                    if len(buffer) < 4 + size:
                        break
                    payload = bytes(buffer[4 : 4 + size])
                    del buffer[: 4 + size]
                    self._handle(m.decode(payload))
