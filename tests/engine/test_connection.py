"""Every message between front end and worker arrives whole and in order, however it comes."""

import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truedraft.engine.messages import Failed, Inbox, decode_from_worker, framed
from truedraft.engine.process import connection
from truedraft.engine.process.connection import Connection

TIMEOUT_MILLISECONDS = 60_000


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def texts(received: list[bytes]) -> list[str]:
    messages = [decode_from_worker(data) for data in received]
    return [message.message for message in messages if isinstance(message, Failed)]


def receive(connection: Connection, number: int) -> list[str]:
    read: list[str] = []
    while len(read) < number:
        read += texts(connection.receive(TIMEOUT_MILLISECONDS))
    return read


@given(st.lists(st.text(max_size=40), max_size=8), st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_messages_come_out_of_any_pieces(sent: list[str], sizes: list[int]) -> None:
    data = b"".join(framed(Failed("id", "code", text)) for text in sent)
    inbox, read = Inbox(), []
    for number in range(len(data)):
        piece, data = data[: sizes[number % len(sizes)]], data[sizes[number % len(sizes)] :]
        read += inbox.add(piece)
    assert texts(read) == sent


def test_a_message_larger_than_the_sockets_buffer(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    text = "0123456789" * 1_000_000
    sending = threading.Thread(target=ours.send, args=(Failed("id", "code", text),))
    sending.start()
    assert receive(theirs, 1) == [text]
    sending.join()


def test_what_has_come_of_a_message_is_read_at_once(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker asks once between two steps: a message that is longer than a piece takes one step."""
    monkeypatch.setattr(connection, "CHUNK_BYTES", 100)
    ours, theirs = ends
    text = "0123456789" * 1_000
    ours.send(Failed("id", "code", text))
    assert texts(theirs.receive(TIMEOUT_MILLISECONDS)) == [text]
    assert theirs.receive(0) == []


def test_threads_that_send_at_once_do_not_mix(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    large = ["a" * 500_000, "b" * 500_000]

    def send(text: str) -> None:
        for _ in range(20):
            ours.send(Failed("id", "code", text))

    threads = [threading.Thread(target=send, args=(text,)) for text in large]
    for thread in threads:
        thread.start()
    assert sorted(receive(theirs, 40)) == sorted(20 * large)
    for thread in threads:
        thread.join()


def test_the_other_sides_end_comes_after_its_messages(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    ours.send(Failed("id", "code", "last words"))
    ours.close()
    assert receive(theirs, 1) == ["last words"]
    with pytest.raises(EOFError):
        theirs.receive(0)
    theirs.send(Failed("id", "code", "dropped"))


def test_nothing_is_waited_for_only_so_long(ends: tuple[Connection, Connection]) -> None:
    assert ends[0].receive(0) == ends[0].receive(1) == []
