"""Frames survive any cut of the stream, and nothing oversized is believed."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.reward.messages import FrameBuffer, FrameError, frame, receive_frame


@given(st.lists(st.binary(max_size=64)), st.lists(st.integers(1, 9)))
def test_frames_come_out_whole_however_the_stream_is_cut(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(frame, payloads))
    buffer = FrameBuffer(64)
    found: list[bytes] = []
    for size in cuts:
        found += buffer.feed(stream[:size])
        stream = stream[size:]
    found += buffer.feed(stream)
    assert found == payloads


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(FrameError, match="frame of 65 bytes, the limit is 64"):
        FrameBuffer(64).feed(frame(b"x" * 65)[:4])


def test_a_socket_gives_frames_then_the_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame(b"one") + frame(b""))
        ours.shutdown(socket.SHUT_WR)
        stream = theirs.makefile("rb")
        assert [receive_frame(stream, 10) for _ in range(3)] == [b"one", b"", None]


@pytest.mark.parametrize("torn", [frame(b"three")[:2], frame(b"three")[:6]])
def test_a_stream_that_ends_inside_a_frame_is_an_error(torn: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(torn)
        ours.close()
        with pytest.raises(FrameError, match="ended inside a frame"):
            receive_frame(theirs.makefile("rb"), 10)


def test_a_socket_refuses_a_frame_over_the_limit() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame(b"too long"))
        with pytest.raises(FrameError, match="the limit is 4"):
            receive_frame(theirs.makefile("rb"), 4)
