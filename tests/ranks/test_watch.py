"""The connections by which ranks know that the others are still there, without MPI."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from mlpgpu.ranks import watch
from mlpgpu.ranks.watch import Meeting, Watch

SECONDS = 10.0


@pytest.fixture
def ranks() -> Iterator[list[Watch]]:
    watches = [Watch(rank, 2) for rank in range(2)]
    yield watches
    for each in watches:
        each.close()


def test_a_stranger_who_hangs_up_keeps_no_rank_away(ranks: list[Watch]) -> None:
    meeting = ranks[0].listen(elsewhere=False)
    for said in (b"half a line", b"a wrong word 1\n"):
        with socket.create_connection(("127.0.0.1", meeting.port)) as stranger:
            stranger.sendall(said)
    accepting = threading.Thread(target=ranks[0].accept, args=(meeting,))
    accepting.start()
    ranks[1].connect(meeting)
    accepting.join(SECONDS)
    assert ranks[0].is_connected and ranks[1].is_connected


def test_addresses_that_others_have_are_passed_over(ranks: list[Watch]) -> None:
    """Of a meeting's addresses one may lead to a machine that refuses, hangs up or knows another word."""
    meeting = ranks[0].listen(elsewhere=False)

    def answer(listener: socket.socket) -> None:
        for said in (b"", b"another word\n"):
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(said)

    with socket.create_server(("127.0.0.2", meeting.port)) as stranger:
        answering = threading.Thread(target=answer, args=(stranger,))
        accepting = threading.Thread(target=ranks[0].accept, args=(meeting,))
        answering.start(), accepting.start()
        hosts = ("127.0.0.3", "127.0.0.2", "127.0.0.2", "127.0.0.1")
        ranks[1].connect(Meeting(hosts, meeting.port, meeting.word))
        answering.join(SECONDS), accepting.join(SECONDS)
    assert ranks[0].is_connected and ranks[1].is_connected


@pytest.mark.parametrize("seconds", [1e-3, 1.0, 300.0, 1e12, float("inf")])
def test_a_silence_of_any_length_can_be_told_to_the_system(seconds: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        watch._limit_silence(client, seconds)
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0
        told = [client.getsockopt(socket.IPPROTO_TCP, option) for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)]
        looks = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
        expected = min(max(seconds, watch.LOOKS), watch.MOST_SILENT_SECONDS)
        assert told[0] + told[1] * looks == expected
        assert (
            client.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == min(expected, max(seconds, 1e-3)) * 1000
        )
