"""Whether the other ranks are still there: a connection of each to rank 0, which ends when its process does.

A rank says on it that it failed, or that it has come to its end; what rank 0 hears it passes on to all.  A connection
that ends without a word is a rank that was killed.  Between hosts it may fall silent instead, when a cable or a host
fails: the system looks at times whether the other end still answers, also while nobody waits for the rank.  No data of
the training goes this way, and MPI knows nothing of it: launchers do not all end the other ranks, and none of them ends
a rank that waits for one which has ended well.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hmac
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import psutil

GRACE_SECONDS = 5.0  # from hearing that another rank failed to the end of a rank that does not come to a call meanwhile
LAST_SECONDS = 8.0  # that a rank which failed waits for the others to end before it
CONNECT_SECONDS = 5.0
LOCKED_SECONDS = 1.0  # more, for a process of which one thread keeps all others of Python's from running
PROGRESS_SECONDS = 0.002
LOOKS = 4  # at a silent connection within the time limit
MOST_SILENT_SECONDS = 30000.0  # Linux takes some more between two looks
LINE_BYTES = 1 << 12  # more are cut off
INTERRUPTED = 130  # the exit code of Ctrl-C


class Failure(NamedTuple):
    """That a rank ended the run.

    Attributes:
        rank: which one.
        code: the exit code of all of them.
        text: what happened, after the rank's name.
    """

    rank: int
    code: int
    text: str


class Meeting(NamedTuple):
    """Where rank 0 waits for the others' connections, and the word by which it knows them."""

    hosts: tuple[str, ...]
    port: int
    word: str


class Watch:
    """What one rank knows of the others.

    Threads that read connections belong to it, daemons that wait in the system and cost nothing.

    Attributes:
        rank, size: this process's number, and how many there are.
        failure: the first one that was heard of, or None.
        left: ranks that have come to the end of their scripts, with their exit codes.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.failure: Failure | None = None
        self.left: dict[int, int] = {}
        self._connections: dict[int, socket.socket] = {}
        self._sending = threading.Lock()
        self._news = threading.Condition()
        self._listener: socket.socket | None = None
        self._failed: set[int] = set()  # others that end the run themselves, and may wait for this one
        self._is_on = False

    def listen(self, *, elsewhere: bool) -> Meeting:
        """Open rank 0's side; for ranks ``elsewhere``, on other hosts, at all addresses of this one."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("" if elsewhere else "127.0.0.1", 0))
        listener.listen(self.size)
        self._listener = listener
        hosts = ["127.0.0.1"]
        if elsewhere:
            found = [address for addresses in psutil.net_if_addrs().values() for address in addresses]
            hosts += [one.address for one in found if one.family == socket.AF_INET and one.address not in hosts]
            hosts = [*hosts[1:], hosts[0]]
        return Meeting(tuple(hosts), listener.getsockname()[1], secrets.token_hex(16))

    def accept(self, meeting: Meeting) -> None:
        """Take the other ranks' connections, those that come in time."""
        assert self._listener is not None
        end = time.monotonic() + CONNECT_SECONDS
        with contextlib.suppress(OSError):  # nobody came in time
            while len(self._connections) < self.size - 1 and (left := end - time.monotonic()) > 0:
                self._listener.settimeout(left)
                connection, _ = self._listener.accept()
                self._greet(connection, meeting)
        self._listener.close()

    def _greet(self, connection: socket.socket, meeting: Meeting) -> None:
        """Keep the connection of a rank, which says the word; a stranger may have found the port, and may hang up."""
        try:
            connection.settimeout(CONNECT_SECONDS)
            word, _, rank = _read_line(connection).partition(" ")
            if hmac.compare_digest(word.encode(), meeting.word.encode()) and rank.isdigit():
                connection.sendall(f"{meeting.word}\n".encode())
                self._connections[int(rank)] = connection
                return
        except OSError:
            pass
        connection.close()

    def connect(self, meeting: Meeting) -> None:
        """Connect to rank 0, if one of its addresses can be reached.

        Not each is meant for this host, where another machine, or this one itself, may have the same address.
        """
        end = time.monotonic() + CONNECT_SECONDS
        for host in meeting.hosts:
            try:
                connection = socket.create_connection((host, meeting.port), CONNECT_SECONDS / len(meeting.hosts))
            except OSError:
                continue
            try:
                # Rank 0 greets one rank after the other.
                connection.settimeout(max(end - time.monotonic(), CONNECT_SECONDS / len(meeting.hosts)))
                connection.sendall(f"{meeting.word} {self.rank}\n".encode())
                if _read_line(connection) == meeting.word:
                    self._connections[0] = connection
                    return
            except OSError:
                pass
            connection.close()

    @property
    def is_connected(self) -> bool:
        """Whether the connections that this rank is to have are there: all of them on rank 0, to rank 0 on others."""
        return len(self._connections) == (self.size - 1 if self.rank == 0 else 1)

    def begin(self, seconds: float) -> None:
        """Listen to the connections; called where all ranks are connected.

        Arguments:
            seconds: after which a rank whose host does not answer is lost.
        """
        self._is_on = True
        for connection in self._connections.values():
            connection.settimeout(None)
            _limit_silence(connection, seconds)
        threading.Thread(target=self._read, name="mlpgpu ranks", daemon=True).start()

    def fail(self, code: int, text: str) -> bool:
        """Tell the others that this rank ends the run; false where a rank has done so before."""
        failure = Failure(self.rank, code, text)
        with self._news:
            if self.failure is not None:
                return False
            self.failure = failure
            self._news.notify_all()
        self._tell(f"failed {self.rank} {code} {text}")
        self._end_within(LAST_SECONDS, code)
        return True

    def end(self, text: str) -> NoReturn:
        """End this process, whose main thread hangs where no exception reaches it, and tell why and where it was."""
        tell(f"rank {self.rank} of {self.size} {text}")
        faulthandler.dump_traceback(file=2)
        self.fail(1, text)
        os._exit(1)

    def leave(self, code: int, progress: Callable[[], object]) -> None:
        """Tell the others that this rank has come to its end, and wait until all have, or one fails.

        Arguments:
            code: its exit code.
            progress: called meanwhile: MPI ends what it has begun, such as others' receives, in calls of it alone.
        """
        self._learn_left(self.rank, code)
        self._tell(f"left {self.rank} {code}")
        # If the watch is off nothing would be heard: then MPI alone waits for the others.
        while self._is_on:
            with self._news:
                if self._news.wait_for(lambda: self.failure or len(self.left) == self.size, PROGRESS_SECONDS):
                    return
            progress()

    def wait_for_others(self) -> bool:
        """In the rank that failed: wait some seconds until the others have ended, as far as connections tell.

        Returns:
            whether they have.
        """
        with self._news:
            return self._is_on and self._news.wait_for(
                lambda: self._connections.keys() <= self._failed, LAST_SECONDS - 1
            )

    def close(self) -> None:
        """Let go of the connections: where not all ranks have one, or in a forked child, whose parent may end first."""
        for connection in self._connections.values():
            connection.close()

    def _tell(self, line: str, besides: int | None = None) -> None:
        data = (line.replace("\n", " ").encode("utf-8", "replace")[: LINE_BYTES - 1]) + b"\n"
        with self._sending:
            for rank, connection in list(self._connections.items()):
                if rank != besides:
                    try:
                        connection.sendall(data)
                    except OSError:  # it has ended, which is seen where it is read
                        continue

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, (rank, bytearray()))
            while selector.get_map():
                for key, _ in selector.select():
                    rank, begun = key.data
                    connection = self._connections[rank]
                    data, text = b"", "was killed or crashed"
                    try:
                        data = connection.recv(LINE_BYTES)
                    except ConnectionError:  # its process has ended
                        pass
                    except OSError:  # of all others the system says that the time is over, or that there is no way
                        text = "cannot be reached any longer"
                    begun += data
                    *lines, rest = begun.split(b"\n")
                    begun[:] = rest
                    for line in lines:
                        self._hear(rank, line.decode("utf-8", "replace"))
                    if not data:
                        selector.unregister(connection)
                        self._lose(rank, text)

    def _hear(self, source: int, line: str) -> None:
        kind, rank, *rest = line.split(" ", 3 if line.startswith("failed") else 2)
        if self.rank == 0:
            self._tell(line, besides=source)
        if kind == "left":
            self._learn_left(int(rank), int(rest[0]))
        else:
            self._learn(Failure(int(rank), int(rest[0]), rest[1]))

    def _lose(self, rank: int, text: str) -> None:
        """A connection has ended; unless its rank was to end, the run fails by ``text``."""
        with self._news:
            self._connections.pop(rank).close()
            self._news.notify_all()
            is_expected = rank in self.left or self.failure is not None
        if not is_expected:
            failure = Failure(rank, 1, text)
            if self.rank == 0:
                self._tell(f"failed {failure.rank} {failure.code} {failure.text}")
            self._learn(failure)

    def _learn_left(self, rank: int, code: int) -> None:
        with self._news:
            self.left[rank] = code
            self._news.notify_all()

    def _learn(self, failure: Failure) -> None:
        with self._news:
            self._failed.add(failure.rank)
            is_first = self.failure is None
            if is_first:
                # Before the main thread knows, which may end the process.
                if failure.code != INTERRUPTED:
                    tell(f"rank {self.rank} of {self.size} ends: rank {failure.rank} {failure.text}")
                elif self.rank == 0:  # all ranks are interrupted at once, and one tells it
                    tell("interrupted")
                self.failure = failure
            self._news.notify_all()
        if is_first:
            self._end_within(GRACE_SECONDS, failure.code)

    def _end_within(self, seconds: float, code: int) -> None:
        timer = threading.Timer(seconds, os._exit, (exit_status(code),))
        timer.daemon = True
        timer.start()
        # A driver may hold Python's lock for ever, which this one does without.
        faulthandler.dump_traceback_later(seconds + LOCKED_SECONDS, exit=True, file=2)


def exit_status(code: int) -> int:
    """What a process that failed ends with: never 0, which the system would make of 256."""
    return code & 0xFF or 1


def tell(text: str) -> None:
    """Write a line to standard error whole, so that those of several ranks do not mix."""
    with contextlib.suppress(OSError):  # nobody reads it any longer
        os.write(2, f"mlpgpu: {text}\n".encode("utf-8", "backslashreplace"))


def _limit_silence(connection: socket.socket, seconds: float) -> None:
    """Have the system end a connection whose other end has answered nothing for so long, as far as it can be told so.

    The other end's system answers, not its process, which may be stopped or busy.
    """
    between = int(min(max(seconds / LOOKS, 1.0), MOST_SILENT_SECONDS / LOOKS))
    of_sent = int(min(seconds, MOST_SILENT_SECONDS) * 1000)  # in milliseconds, for what was sent already
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", between),
        ("TCP_KEEPALIVE", between),  # its name on macOS
        ("TCP_KEEPINTVL", between),
        ("TCP_KEEPCNT", LOOKS - 1),
        ("TCP_USER_TIMEOUT", of_sent),
    ):
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _read_line(connection: socket.socket) -> str:
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < LINE_BYTES:
        data = connection.recv(1)
        if not data:
            raise ConnectionError("the connection has ended")
        line += data
    return line.decode("utf-8", "replace").rstrip("\n")
