"""Member to member: results for a laggard, the state for a newcomer, the journal of set-up for a replacement.

    server = PeerServer(host, token, provide)        # provide(kind, argument) -> bytes-like chunks, on a thread
    data = fetch((host, port), token, "result", 17)  # blocks; raises ConnectionError

A connection opens with the same preamble as the coordinator's, so that a stranger is refused before he is parsed.
The payload is pickled, tensors beside it as raw bytes (:mod:`.packing`): fit for processes of one job that run the same
script, not a storage format.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

from lightning_cann.collectives.packing import pack, unpack
from lightning_cann.membership import messages as m

__all__ = ["PeerServer", "fetch"]

log = logging.getLogger(__name__)

MAX_REQUEST = 4096  # bytes


def _read_exactly(sock: socket.socket, size: int) -> memoryview:
    buffer = memoryview(bytearray(size))
    _read_into(sock, buffer)
    return buffer


def _read_into(sock: socket.socket, buffer: memoryview) -> None:
    filled = 0
    while filled < len(buffer):
        got = sock.recv_into(buffer[filled:])
        if got == 0:
            raise ConnectionError("the peer closed the connection")
        filled += got


class PeerServer:
    """Serves other members.  Owner of its sockets; ``provide`` runs on a thread per connection and may block.

    Args:
        host: address to listen on; the port is chosen by the system (:attr:`port`).
        token: the job's token.
        provide: ``(kind, argument) -> object`` that torch can pickle; raises LookupError when it has no such thing.
    """

    def __init__(self, host: str, token: str, provide: Callable[[str, Any], Any]) -> None:
        self._token, self._provide = token, provide
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.create_server((host, 0), family=family, backlog=128)
        self.port: int = self._sock.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="cann-peer-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # not connected is fine: this only wakes accept()
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join(timeout=5)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(sock,), name="cann-peer", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                sock.settimeout(10)
                if not hmac.compare_digest(bytes(_read_exactly(sock, m.PREAMBLE_SIZE)), m.preamble(self._token)):
                    log.warning("refused a stranger at %s: wrong protocol, version or job token", sock.getpeername())
                    return
                size = int.from_bytes(_read_exactly(sock, 4), "big")
                if size > MAX_REQUEST:
                    return
                kind, argument = _requests.decode(bytes(_read_exactly(sock, size)))
                sock.settimeout(60)
                try:
                    answer = self._provide(kind, argument)
                except LookupError as error:
                    log.info("a peer asked for %s %s: %s", kind, argument, error)
                    return  # the peer sees the connection end
                header, buffers = pack(answer)
                sock.sendall(len(header).to_bytes(8, "big") + header)
                for buffer in buffers:
                    sock.sendall(buffer)
            except (OSError, ValueError) as error:
                log.debug("a peer's request failed: %s", error)


class _Requests:
    """Requests are a pair (kind, argument) in msgpack."""

    def __init__(self) -> None:
        import msgspec

        self.encode = msgspec.msgpack.Encoder().encode
        self.decode = msgspec.msgpack.Decoder(tuple[str, Any]).decode


_requests = _Requests()


def fetch(address: tuple[str, int], token: str, kind: str, argument: Any, timeout_s: float) -> Any:
    """Asks a peer.  Raises ConnectionError when it refuses, dies, or is silent for ``timeout_s`` seconds."""
    try:
        with socket.create_connection(address, timeout=timeout_s) as sock:
            request = _requests.encode((kind, argument))
            sock.sendall(m.preamble(token) + len(request).to_bytes(4, "big") + request)
            size = int.from_bytes(_read_exactly(sock, 8), "big")
            value, buffers = unpack(_read_exactly(sock, size))
            for buffer in buffers:
                _read_into(sock, buffer)
            return value
    except OSError as error:
        raise ConnectionError(f"peer {address[0]}:{address[1]} did not answer for {kind} {argument}: {error}") from error
