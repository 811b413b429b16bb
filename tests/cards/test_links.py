"""Cards of one host, linked by their copy engines, without a card: the streams' operations run on threads.

A stand-in for the driver runs what streams are given: each stream is a thread, which copies, and writes and waits for
words as CUDA's documentation states it.  All ranks are of this process, so what they map is memory of its own.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import queue
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from launched import run_ranks

from mlpgpu.backends.cuda import exchange
from mlpgpu.backends.cuda.exchange import Card
from mlpgpu.backends.cuda.kernels import MESSAGE_BLOCKS, MESSAGE_WORD_BYTES, primitives, send_messages
from mlpgpu.backends.cuda.runtime import LinkedCards, Message, Words, links, message_kernel, messages, part_sums
from mlpgpu.errors import BackendError, RankError

SECONDS = 60.0


class Kinds:
    CU_STREAM_MEM_OP_WAIT_VALUE_32 = 1
    CU_STREAM_MEM_OP_WRITE_VALUE_32 = 2


class Driver:
    """cuda-bindings as far as links call it, and what is registered, mapped and unmapped."""

    CUstreamBatchMemOpType = Kinds
    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_EQ=1)
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_BUFFER_ID=7)
    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2
    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUdeviceptr = cuuint32_t = int

    def __init__(self) -> None:
        self.registered: list[int] = []  # by each rank, which are of one process here
        self.allocations: dict[int, np.ndarray] = {}
        self.mapped: list[int] = []
        self.reused = 0  # how often allocations were freed and others made in their places
        self.refuses = self.locks_nothing = False

    def allocate(self, array: np.ndarray) -> np.ndarray:
        """The array as an allocation of a card, which other ranks can map."""
        self.allocations[array.ctypes.data] = array
        return array

    class CUipcMemHandle:
        reserved = bytes(64)

    @staticmethod
    def CUstreamBatchMemOpParams() -> Any:
        return SimpleNamespace(operation=0, waitValue=SimpleNamespace(operation=0, address=0, value=0, flags=0))

    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[Any, ...]:
        if self.locks_nothing:
            return (SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY"),)
        assert flags == 3 and nbytes
        self.registered.append(address)
        return (0,)

    def cuMemHostUnregister(self, address: int) -> tuple[int]:
        self.registered.remove(address)
        return (0,)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:
        assert address in self.registered and not flags
        return 0, address

    def cuMemGetAddressRange(self, address: int) -> tuple[int, int, int]:
        base, array = next(
            (base, array) for base, array in self.allocations.items() if base <= address < base + array.nbytes
        )
        return 0, base, array.nbytes

    def cuPointerGetAttribute(self, attribute: int, base: int) -> tuple[int, int]:
        assert attribute == 7 and base in self.allocations
        return 0, base + self.reused

    def cuIpcGetMemHandle(self, base: int) -> tuple[int, Any]:
        assert base in self.allocations
        return 0, SimpleNamespace(reserved=base.to_bytes(64, "little"))

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[Any, ...]:
        if self.refuses:
            return SimpleNamespace(name="CUDA_ERROR_INVALID_CONTEXT"), None
        self.mapped.append(int.from_bytes(handle.reserved, "little"))
        return 0, self.mapped[-1]

    def cuIpcCloseMemHandle(self, address: int) -> tuple[int]:
        self.mapped.remove(address)
        return (0,)

    def cuStreamBatchMemOp(self, stream: ThreadStream, count: int, operations: list[Any], flags: int) -> tuple[int]:
        assert count == len(operations) and not flags
        for each in operations:
            assert each.operation == each.waitValue.operation
            word = np.ctypeslib.as_array(ctypes.cast(each.waitValue.address, ctypes.POINTER(ctypes.c_uint32)), (1,))
            stream.do(lambda each=each.waitValue, word=word: self._operate(each, word))
        return (0,)

    @staticmethod
    def _operate(each: Any, word: np.ndarray) -> None:
        if each.operation == Kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32:
            word[0] = each.value
            return
        assert each.flags == 1
        while word[0] != each.value:
            time.sleep(1e-5)


class ThreadStream:
    """A stream: a thread that does one thing after another."""

    def __init__(self, device: object, name: str = "") -> None:
        self.bound, self._works = self, queue.Queue[Callable[[], None]]()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._works.get()()

    def do(self, work: Callable[[], None]) -> None:
        self._works.put(work)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self.do(lambda: ctypes.memmove(destination, source, nbytes) and None)

    def upload(self, address: int, array: np.ndarray) -> None:
        kept = array.copy()
        self.do(lambda: ctypes.memmove(address, kept.ctypes.data, kept.nbytes) and None)

    def download(self, array: np.ndarray, address: int) -> None:
        self.copy(array.ctypes.data, address, array.nbytes)

    def record(self, event: ThreadEvent) -> None:
        event.reached.clear()
        self.do(event.reached.set)


class ThreadEvent:
    def __init__(self, device: object) -> None:
        self.reached = threading.Event()

    @property
    def is_reached(self) -> bool:
        return self.reached.is_set()


class Card0:
    """A device, which knows whether it was abandoned."""

    is_abandoned = False

    def synchronize(self) -> None: ...

    def abandon(self) -> None:
        self.is_abandoned = True

    def destroy(self, box: list[Any], how: Callable[[Any], object]) -> None:
        how(box[0])


class Team:
    """Ranks, as threads."""

    def __init__(self, size: int) -> None:
        self.size, self._barrier, self._told = size, threading.Barrier(size, timeout=SECONDS), [None] * size

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._told[rank] = value
        self._barrier.wait()
        told = list(self._told)
        self._barrier.wait()
        return told

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def of_rank(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SECONDS)
        for error in errors:  # the first one is why
            raise error
        return results


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()

    class Arena:
        def __init__(self, device: object, nbytes: int) -> None:
            self._array = np.zeros(nbytes, np.uint8)
            made.allocations[self._array.ctypes.data] = self._array

        @classmethod
        def of(cls, device: object, sizes: dict[str, int]) -> tuple[Arena, dict[str, int]]:
            arena = cls(device, sum(sizes.values()))
            ends = itertools.accumulate(sizes.values(), initial=arena.take(0))
            return arena, dict(zip(sizes, ends, strict=False))

        def take(self, nbytes: int) -> int:
            return self._array.ctypes.data

    for name, stand_in in {"cu": made, "Arena": Arena, "Stream": ThreadStream, "Event": ThreadEvent}.items():
        monkeypatch.setattr(links, name, stand_in)
    monkeypatch.setattr(links, "drv", SimpleNamespace(Error=ZeroDivisionError))
    monkeypatch.setattr(message_kernel, "Arena", Arena)
    copies = {"memset_d8": lambda *of: ctypes.memset(*of), "memcpy_htod": copy_to_card}
    monkeypatch.setattr(message_kernel, "drv", SimpleNamespace(**copies))
    monkeypatch.setattr(part_sums, "Arena", Arena)
    monkeypatch.setattr(part_sums, "drv", SimpleNamespace(**copies))
    monkeypatch.setattr(links, "call", call)
    monkeypatch.setattr(messages, "Event", ThreadEvent)
    monkeypatch.setattr(links, "GREETING_SECONDS", 20.0)
    monkeypatch.setattr(messages, "ABORT_SECONDS", 5.0)
    yield made
    gc.collect()  # what is left is closed by this driver


def copy_to_card(address: int, array: np.ndarray) -> None:
    ctypes.memmove(address, array.ctypes.data, array.nbytes)


def call(function: Callable[..., tuple[Any, ...]], *arguments: object) -> Any:
    status, *results = function(*arguments)
    if status:
        raise links.CallError(f"{function.__name__} failed: {status.name}")
    return results if len(results) > 1 else results[0] if results else None


def wait_until(is_done: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not is_done():
        if time.monotonic() > end:
            raise RankError(what, expected="all ranks", got="one that hangs")
        time.sleep(1e-4)


class SendFunction:
    """The kernel that sends messages, as its source says it does, one block after another."""

    entry = send_messages()

    def launch(self, stream: ThreadStream, grid: tuple[int, ...], packed: bytes) -> None:
        table, aborted, memory = struct.unpack("@PPP", packed)
        assert grid == (grid[0], 1, 1) and 1 <= grid[0] <= MESSAGE_BLOCKS and memory == 0
        stream.do(lambda: self._send(table, words_at(aborted, 1, np.uint32), grid[0]))

    def _send(self, table: int, aborted: np.ndarray, blocks: int) -> None:
        receivers, senders, messages = words_at(table, 3, np.int64).tolist()
        words = words_at(table, 3 + 2 * (receivers + senders) + 3 * messages, np.int64)[3:].tolist()
        pairs = [words[2 * i : 2 * i + 2] for i in range(receivers + senders)]
        for _, told in pairs[receivers:]:
            self._tell(told, blocks)
        for awaited, _ in pairs[:receivers]:
            self._await(awaited, blocks, aborted)
        for i in range(2 * len(pairs), len(words), 3):
            ctypes.memmove(words[i + 1], words[i], words[i + 2])
        for _, told in pairs[:receivers]:
            self._tell(told, blocks)
        for awaited, _ in pairs[receivers:]:
            self._await(awaited, blocks, aborted)

    def _tell(self, address: int, blocks: int) -> None:
        for block in range(blocks):
            words_at(address + MESSAGE_WORD_BYTES * block, 1, np.uint32)[0] = 1

    def _await(self, address: int, blocks: int, aborted: np.ndarray) -> None:
        for block in range(blocks):
            word = words_at(address + MESSAGE_WORD_BYTES * block, 1, np.uint32)
            while not word[0]:
                if aborted[0]:
                    return
                time.sleep(1e-5)
            word[0] = 0


def words_at(address: int, count: int, dtype: type) -> np.ndarray:
    """Words of memory, wherever they are."""
    bytes_of = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))
    return np.ctypeslib.as_array(bytes_of, (count * np.dtype(dtype).itemsize,)).view(dtype)


def linked(team: Team, rank: int, memory: mmap.mmap) -> LinkedCards:
    device: Any = Card0()
    load: Any = SendFunction
    return LinkedCards(device, rank, team.size, memory, lambda value: team.gather(rank, value), wait_until, load)


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_messages_arrive_step_after_step_in_both_lanes(
    size: int, by_kernel: bool, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes is what was sent for that step, though nothing but the words keeps ranks from running ahead."""
    monkeypatch.setattr(primitives, "MESSAGE_BLOCK_BYTES", 16)  # so that two ranks have several blocks, and not all
    draw = random.Random(f"linked cards {size}")
    team, memory, steps, numbers = Team(size), mmap.mmap(-1, Words.nbytes(size)), 40, 16
    # By lane, from whom to whom how many numbers go; some pairs have nothing to send.
    counts = {
        (lane, a, b): draw.choice([0, 1, numbers])
        for lane, a, b in itertools.product(range(2), range(size), range(size))
        if a != b
    }
    delays = [draw.random() * 2e-3 for _ in range(steps)]

    def work(rank: int) -> list[str]:
        cards = linked(team, rank, memory)
        assert cards.greet()
        arrays = {name: np.zeros((2, size, numbers), np.int64) for name in ("sent", "received")}
        for array in arrays.values():
            driver.allocate(array)
        own = {
            lane: [
                [
                    Message(peer, arrays[name][lane, peer].ctypes.data, 8 * count)
                    for peer in range(size)
                    if (count := counts.get((lane, rank, peer) if name == "sent" else (lane, peer, rank), 0))
                ]
                for name in arrays
            ]
            for lane in range(2)
        }
        sent = iter(cards.reach([*own[0][0], *own[1][0]], [*own[0][1], *own[1][1]]))
        for lane in range(2):
            own[lane][0] = [next(sent) for _ in own[lane][0]]
        kernels = [cards.bind(*own[lane]) for lane in range(2)] if by_kernel else []
        wrong: list[str] = []
        streams: list[Any] = [ThreadStream(None) for _ in range(2)]  # stand-ins for Stream

        def fill(lane: int, step: int) -> None:
            arrays["sent"][lane] = 1000 * step + 10 * rank + lane
            if random.random() < 0.3:
                time.sleep(delays[step])

        def check(lane: int, step: int) -> None:
            for peer in range(size):
                count = counts.get((lane, peer, rank), 0)
                got = arrays["received"][lane, peer]
                if (got[:count] != 1000 * step + 10 * peer + lane).any() or got[count:].any():
                    wrong.append(f"step {step}, lane {lane}: {got} from {peer}")

        for step in range(1, steps):
            for lane, stream in enumerate(streams):
                stream.do(partial(fill, lane, step))
                if by_kernel:
                    kernels[lane](stream, lane)
                else:
                    cards.put(*own[lane], stream, lane)
                stream.do(partial(check, lane, step))
        for stream in streams:
            cards.wait(stream)
        return wrong

    assert team.run(work) == [[]] * size
    assert not np.frombuffer(memory, np.uint32).any()  # all words are taken back


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_parts_arrive_step_after_step(ranks: int, driver: Driver) -> None:
    """By the tables that a tail is given, though nothing but the words' numbers keeps ranks from running ahead."""
    team, memory, rows, columns, steps = Team(ranks), mmap.mmap(-1, Words.nbytes(ranks)), 3, 5, 60

    def work(rank: int) -> list[int]:
        cards = linked(team, rank, memory)
        sums = cards.exchange_sums(ranks, rank, rows, columns)
        assert sums.aborted == cards._words.aborted(rank)
        wrong, draw = [], random.Random(rank)
        for step in range(steps):
            for row in range(rows):
                if draw.random() < 0.3:
                    time.sleep(draw.random() * 2e-3)
                own = np.arange(columns, dtype=np.float32) + 100 * step + 10 * row + rank / 4
                got = exchange_row(sums.table, row, (rows, columns), own)
                if (got != sum(own + (other - rank) / 4 for other in range(ranks))).any():
                    wrong.append(step)
        return wrong

    assert team.run(work) == [[]] * ranks
    assert not driver.mapped


def exchange_row(table: int, row: int, shape: tuple[int, int], own: np.ndarray) -> np.ndarray:
    """The sum of all parts of a row, as fused/part_sums.cuh says it is made."""
    count, part, counts = words_at(table, 3, np.int64).tolist()
    inboxes = words_at(table, 3 + count, np.int64)[3:].tolist()
    sent = words_at(counts + 4 * (1 + row), 1, np.uint32)
    sequence = int(sent[0]) + 1

    def places(to: int, of: int) -> np.ndarray:
        inbox = words_at(inboxes[to], 2 * count * shape[0] * shape[1], np.uint64)
        return inbox.reshape(2, count, *shape)[sequence % 2, of, row]

    for to in set(range(count)) - {part}:
        places(to, part)[:] = np.uint64(sequence << 32) | own.view(np.uint32)
    total = np.zeros_like(own)
    for of in range(count):
        words = places(part, of)
        while of != part and (words >> np.uint64(32) != sequence).any():
            time.sleep(1e-5)
        total += own if of == part else (words & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)
    sent[0] = sequence
    return total


def test_memory_is_mapped_once_and_as_long_as_it_is_used(driver: Driver) -> None:
    team, memory = Team(2), mmap.mmap(-1, Words.nbytes(2))

    def work(rank: int) -> None:
        cards = linked(team, rank, memory)
        array = driver.allocate(np.zeros(8, np.uint8))
        address, other = array.ctypes.data, 1 - rank
        sent = cards.reach([Message(other, address, 1)] * 3, [Message(other, address + 4, 1)] * 3)
        assert len({each.to for each in sent}) == 1
        team.gather(rank, None)
        assert len(driver.mapped) == 2  # each the other's
        team.gather(rank, None)
        del sent
        team.gather(rank, None)
        assert not driver.mapped

    team.run(work)


def test_kernels_find_the_memory_of_each_other_rank(driver: Driver) -> None:
    """Of several arrays in one allocation, each rank's at addresses of its own; mapped as long as they are held."""
    team, memory = Team(3), mmap.mmap(-1, Words.nbytes(3))

    def work(rank: int) -> None:
        cards = linked(team, rank, memory)
        array = driver.allocate(np.full(8, rank, np.uint8))
        of_ranks = team.gather(rank, array)
        found = cards.map([array.ctypes.data + rank, array.ctypes.data + 5])
        assert {peer: [place.address for place in places] for peer, places in found.items()} == {
            peer: [of_ranks[peer].ctypes.data + offset for offset in (peer, 5)] for peer in range(3) if peer != rank
        }
        team.gather(rank, None)
        assert len(driver.mapped) == 6  # by each rank those of two others
        team.gather(rank, None)
        found.clear()
        team.gather(rank, None)
        assert not driver.mapped

    team.run(work)


def test_memory_that_a_rank_has_freed_is_not_taken_for_what_it_has_there_now(driver: Driver) -> None:
    """Another trainer's messages still hold the mapping, and the driver gives the new allocation the same handle."""
    team, memory = Team(2), mmap.mmap(-1, Words.nbytes(2))

    def work(rank: int) -> None:
        cards = linked(team, rank, memory)
        array = driver.allocate(np.zeros(8, np.uint8))
        message = Message(1 - rank, array.ctypes.data, 1)
        (before,) = cards.reach([message], [message])
        team.gather(rank, None)
        if rank == 0:
            driver.reused += 1
        team.gather(rank, None)
        (after,) = cards.reach([message], [message])
        assert before.to is not None and after.to is not None
        assert before.to.memory.handle is None and after.to.memory.handle is not None
        team.gather(rank, None)
        assert len(driver.mapped) == 2  # one of each rank
        team.gather(rank, None)

    team.run(work)


@pytest.mark.parametrize("by_kernel", [False, True])
def test_what_waits_for_a_rank_that_does_not_come_is_broken_off(by_kernel: bool, driver: Driver) -> None:
    team, memory = Team(2), mmap.mmap(-1, Words.nbytes(2))
    sending, cards = threading.Event(), dict[int, LinkedCards]()

    def work(rank: int) -> None:
        made = cards[rank] = linked(team, rank, memory)
        array = driver.allocate(np.zeros(8, np.uint8))
        message = Message(1 - rank, array.ctypes.data, 1)
        sent = made.reach([message], [message])
        kernel = made.bind(sent, [message]) if by_kernel else None
        if rank:
            return
        stream: Any = ThreadStream(None)

        def put() -> None:
            if kernel:
                kernel(stream, 0)
            else:
                made.put(sent, [message], stream)

        put()
        reached = ThreadEvent(None)
        stream.record(reached)
        assert not reached.reached.wait(0.3)
        assert made.abort(stream) and made.abort(stream) and made.is_aborted
        sending.set()
        for broken in (put, lambda: made.wait(stream)):
            with pytest.raises(BackendError, match="broken off"):
                broken()

    team.run(work)
    assert sending.is_set() and not cards[0].device.is_abandoned  # type: ignore[attr-defined]  # a stand-in


def test_a_card_that_never_ends_is_abandoned(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "ABORT_SECONDS", 0.1)
    cards, stream = linked(Team(1), 0, mmap.mmap(-1, Words.nbytes(1))), ThreadStream(None)
    stream.do(lambda: time.sleep(3))
    assert not cards.abort(stream) and cards.device.is_abandoned  # type: ignore[arg-type,attr-defined]  # stand-ins


def test_cards_that_cannot_be_mapped_are_not_linked(driver: Driver) -> None:
    driver.refuses = True
    team, memory = Team(2), mmap.mmap(-1, Words.nbytes(2))
    assert team.run(lambda rank: linked(team, rank, memory).greet()) == [False, False]


class OneHost:
    """A communicator of one rank that says the same as this one."""

    rank, size = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value

    wait_until = staticmethod(wait_until)


@pytest.mark.parametrize("hindrance", ["", "another host", "no way between them", "no memory to lock", "a benchmark"])
def test_only_cards_that_reach_each_other_are_linked(
    hindrance: str, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = ("H200", "sm_90a", 132)
    cards = [Card("a", "1", kind), Card("b" if hindrance == "another host" else "a", "2", kind)]
    device: Any = Card0()
    device.bus_id, device.reaches = "1", lambda bus: hindrance != "no way between them"
    driver.locks_nothing = hindrance == "no memory to lock"
    monkeypatch.setattr(exchange, "CARDS_MAY_BE_LINKED", hindrance != "a benchmark")
    made = exchange._linked(device, OneHost(), cards)  # type: ignore[arg-type]  # a stand-in
    assert (made is None) == bool(hindrance)


# --- the memory that ranks share ---


@pytest.mark.xdist_group("ranks")
def test_ranks_of_one_host_share_memory(tmp_path: Path) -> None:
    script = """
    import numpy as np
    from mlpgpu.ranks import communicator, share_memory

    c = communicator()
    words = np.frombuffer(share_memory(c, 4096), np.uint32)
    c.barrier()
    assert words.sum() == 0 and len(words) == 1024
    c.barrier()
    words[c.rank] = c.rank + 1
    c.barrier()
    assert list(words[:3]) == [1, 2, 0]
    print("shared", flush=True)
    """
    before = set(Path("/dev/shm").glob("mlpgpu-*"))
    done = run_ranks(tmp_path, 2, dedent(script))
    assert (done.code, done.output) == (0, "shared\n" * 2), done.errors
    assert set(Path("/dev/shm").glob("mlpgpu-*")) <= before


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("where", ["nowhere", "on rank 0 alone"])
def test_ranks_that_cannot_share_memory_all_know(where: str, tmp_path: Path) -> None:
    script = f"""
    from mlpgpu.ranks import communicator, share_memory, shared

    c = communicator()
    if c.rank or {where == "nowhere"}:
        shared.FOLDER, shared._open = "/no/such/folder", lambda name, nbytes: None
    print(share_memory(c, 4096), flush=True)
    """
    done = run_ranks(tmp_path, 2, dedent(script))
    assert (done.code, done.output) == (0, "None\n" * 2), done.errors
