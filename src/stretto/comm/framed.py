"""JSON messages over a stream socket: four bytes of length, then the text. Nothing is ever unpickled.

Open file descriptors may travel with a message (``SCM_RIGHTS``), which is how a launcher hands a socket to a process
that a fork server makes for it.
"""

from __future__ import annotations

import array
import json
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("!I")
_CHUNK_BYTES = 1 << 18
_MAX_FDS = 16

Message = dict[str, Any]  # a JSON object


class FrameError(Exception):
    """A message is larger than the channel allows, or the bytes received are no message."""


class Channel:
    """One end of a conversation. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket, max_bytes: int = 64 << 20) -> None:
        self._socket = sock
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._fds: deque[int] = deque()
        self._sending = threading.Lock()
        self.at_end = False

    def fileno(self) -> int:
        """The socket's descriptor, to wait on."""
        return self._socket.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Sends a message whole, and copies of ``fds`` with it.

        Raises:
            FrameError: the message is larger than ``max_bytes``; nothing was sent.
            TypeError: the message holds something that JSON does not.
            OSError: the other end is gone (``BrokenPipeError``).
        """
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > self._max_bytes:
            raise FrameError(f"a message of {len(body)} bytes; at most {self._max_bytes} are sent")
        frame = memoryview(_LENGTH.pack(len(body)) + body)
        with self._sending:
            sent = socket.send_fds(self._socket, [frame], list(fds)) if fds else 0
            self._socket.sendall(frame[sent:])

    def receive(self) -> Message | None:
        """Waits for the next message; None at the end of the conversation. A message cut off by the end is dropped."""
        while (message := self._next()) is None:
            if not self._fill():
                return None
        return message

    def receive_ready(self) -> list[Message]:
        """The messages that are here already, without waiting; ``at_end`` says whether more can come."""
        while self._fill(socket.MSG_DONTWAIT):
            pass
        return list(iter(self._next, None))

    def take_fd(self) -> int:
        """The next descriptor that came with the messages, in order; the caller closes it."""
        if not self._fds:
            raise FrameError("a message came without the descriptor it needs")
        return self._fds.popleft()

    def close(self) -> None:
        """Closes the socket; the other end reads what was sent, then the end."""
        self._socket.close()

    def _fill(self, flags: int = 0) -> bool:
        """Reads once into the buffer; False where nothing came (the end, or nothing yet)."""
        fds = array.array("i")
        try:
            # socket.recv_fds loses its flags (CPython 3.11). Without MSG_CMSG_CLOEXEC a received descriptor would leak
            # into every program that a worker starts.
            data, extras, _, _ = self._socket.recvmsg(
                _CHUNK_BYTES, socket.CMSG_LEN(_MAX_FDS * fds.itemsize), flags | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except ConnectionResetError:  # the other end left messages of ours unread: an end like any other
            data, extras = b"", []
        for level, kind, body in extras:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
        self._fds.extend(fds)
        self._buffer += data
        self.at_end = not data
        return bool(data)

    def _next(self) -> Message | None:
        """Takes the first whole message out of the buffer."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self._max_bytes:
            raise FrameError(f"a message of {length} bytes announced; at most {self._max_bytes} are taken")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        try:
            message = json.loads(body)
        except ValueError as error:
            raise FrameError(f"a message that is no JSON: {body[:80]!r}") from error
        if not isinstance(message, dict):
            raise FrameError(f"a message that is no JSON object: {body[:80]!r}")
        return message


def channel_pair() -> tuple[Channel, socket.socket]:
    """Two connected ends: a channel to keep, and the bare socket to hand to another process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(ours), theirs


def channel_of(fd: int) -> Channel:
    """A channel over an inherited or received descriptor, which it owns from now on."""
    return Channel(socket.socket(fileno=fd))
