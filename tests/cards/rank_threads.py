"""Ranks as threads of one process, and what they tell each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

from mlpgpu.backends.cuda.runtime import Place
from mlpgpu.backends.cuda.runtime.links import PeerMemory

SECONDS = 120.0


class RankThreads:
    """The ranks, in place of a communicator; one that fails ends the others."""

    def __init__(self, size: int) -> None:
        self.size, self.own = size, threading.local()
        self._barrier = threading.Barrier(size, timeout=SECONDS)
        self._told: list[Any] = [None] * size

    @property
    def rank(self) -> int:
        return int(self.own.rank)

    @property
    def has_failed(self) -> bool:
        """Whether a rank did."""
        return self._barrier.broken

    def gather(self, value: Any) -> list[Any]:
        self._told[self.rank] = value
        self._barrier.wait()
        told = list(self._told)
        self._barrier.wait()
        return told

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]

    def run(self, work: Callable[[], Any]) -> list[Any]:
        """What ``work`` returns on each rank."""
        results: list[Any] = [None] * self.size

        def of_rank(rank: int) -> None:
            self.own.rank = rank
            try:
                results[rank] = work()
            except BaseException as error:
                results[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in sorted(failures, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
            raise failure
        return results


class MappedThreads(RankThreads):
    """Ranks whose cards read each other's memory, which is this process's."""

    def map(self, addresses: Sequence[int]) -> dict[int, list[Place]]:
        told = self.gather(list(addresses))
        others, no_mapping = (rank for rank in range(self.size) if rank != self.rank), cast(PeerMemory, None)
        return {rank: [Place(no_mapping, address) for address in told[rank]] for rank in others}
