"""Framed messages: whole or not at all, in order, with their descriptors."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.comm.framed import Channel, FrameError, channel_of, channel_pair

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def pair(max_bytes: int = 1 << 26) -> tuple[Channel, Channel]:
    left, right = socket.socketpair()
    return Channel(left, max_bytes), Channel(right, max_bytes)


@given(messages=st.lists(st.dictionaries(st.text(), JSON, max_size=4), max_size=6))
def test_messages_arrive_as_they_were_sent(messages: list[dict[str, object]]) -> None:
    left, right = pair()
    for message in messages:
        left.send(message)
    left.close()
    assert [right.receive() for _ in messages] == messages
    assert right.receive() is None and right.at_end
    right.close()


@given(cuts=st.lists(st.integers(1, 7), min_size=1, max_size=30))
def test_cuts_in_the_stream_change_nothing(cuts: list[int]) -> None:
    bare, theirs = socket.socketpair()
    right = Channel(theirs)
    messages = [{"number": number, "text": "é" * number} for number in range(4)]
    bodies = [json.dumps(message, ensure_ascii=False).encode() for message in messages]
    stream = b"".join(struct.pack("!I", len(body)) + body for body in bodies)
    heard: list[dict[str, object]] = []
    position, turn = 0, 0
    while position < len(stream):
        step = cuts[turn % len(cuts)]
        bare.sendall(stream[position : position + step])
        heard += right.receive_ready()
        position, turn = position + step, turn + 1
    assert heard == messages
    bare.close()
    right.close()


def test_a_message_larger_than_the_socket_buffer_arrives() -> None:
    left, right = pair()
    large = {"text": "x" * (9 << 20)}
    sender = threading.Thread(target=left.send, args=(large,))
    sender.start()
    assert right.receive() == large
    sender.join()


def test_senders_in_several_threads_do_not_mix() -> None:
    left, right = pair()
    texts = ["a" * 300_000, "b" * 300_000, "c" * 300_000]

    def send(text: str) -> None:
        for _ in range(5):
            left.send({"t": text})

    threads = [threading.Thread(target=send, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    heard = [right.receive() for _ in range(15)]
    assert sorted(str(message and message["t"]) for message in heard) == sorted(texts * 5)


def test_ready_never_waits() -> None:
    left, right = pair()
    assert right.receive_ready() == [] and not right.at_end
    left.send({"a": 1})
    left.send({"b": 2})
    assert right.receive_ready() == [{"a": 1}, {"b": 2}] and not right.at_end
    left.close()
    assert right.receive_ready() == [] and right.at_end


def test_a_torn_last_message_is_dropped_and_the_whole_ones_kept() -> None:
    bare, theirs = socket.socketpair()
    right = Channel(theirs)
    bare.sendall(struct.pack("!I", 7) + b'{"a":1}' + struct.pack("!I", 100) + b'{"half')
    bare.close()
    assert right.receive() == {"a": 1}
    assert right.receive() is None


def test_what_was_sent_is_heard_though_the_sender_left_messages_unread() -> None:
    left, right = pair()
    right.send({"never": "read"})
    left.send({"last": "word"})
    left.close()
    assert right.receive() == {"last": "word"}
    assert right.receive() is None


def test_too_large_is_refused_on_both_sides() -> None:
    left, right = pair(max_bytes=100)
    with pytest.raises(FrameError, match="at most 100"):
        left.send({"text": "x" * 200})
    left.send({"ok": 1})
    assert right.receive() == {"ok": 1}
    bare, theirs = socket.socketpair()
    bare.sendall(struct.pack("!I", 1 << 31))
    with pytest.raises(FrameError, match="announced"):
        Channel(theirs).receive()


@pytest.mark.parametrize("body", [b"nonsense", b"[1,2]", b"\xff\xfe"])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    bare, theirs = socket.socketpair()
    bare.sendall(struct.pack("!I", len(body)) + body)
    with pytest.raises(FrameError, match="no JSON"):
        Channel(theirs).receive()


def test_the_sender_learns_that_nobody_listens() -> None:
    left, right = pair()
    right.close()
    with pytest.raises(BrokenPipeError):
        left.send({"a": 1})


def test_a_descriptor_travels_and_does_not_leak_into_programs() -> None:
    left, right = pair()
    reader, writer = os.pipe()
    left.send({"with": "descriptor"}, [writer])
    os.close(writer)
    assert right.receive() == {"with": "descriptor"}
    received = right.take_fd()
    check = f"import os\ntry: os.fstat({received})\nexcept OSError: print('closed')"
    program = subprocess.run([sys.executable, "-c", check], close_fds=False, capture_output=True, text=True, check=True)
    assert program.stdout.strip() == "closed"
    os.write(received, b"through")
    assert os.read(reader, 100) == b"through"
    os.close(received)
    os.close(reader)
    with pytest.raises(FrameError, match="descriptor"):
        right.take_fd()


def test_a_pair_is_two_ends_of_one_conversation() -> None:
    ours, theirs = channel_pair()
    other = channel_of(theirs.detach())
    other.send({"hello": "there"})
    assert ours.receive() == {"hello": "there"}
    assert ours.fileno() != other.fileno()
