"""The ranks that train one network: rank 0 leads a fit, and the others follow.

All ranks run the same fit.  What only one is to do, because it depends on a clock, on files or on code of the user's,
rank 0 does, and the others take its result.  What it changes meanwhile that all of them have, such as parameters that
are kept or put back, it has them change, too.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ..errors import MlpgpuError, RankError
from ..ranks import Communicator, communicator, rank, ranks

Result = TypeVar("Result")
Agreed = TypeVar("Agreed")

_IS_DONE = None  # in place of a command's name


class Team:
    """This process, alone or as one of the ranks that train a network together.

    Arguments:
        is_alone: whether it trains by itself, however many ranks there are.

    Attributes:
        ranks: how many train together.
        is_leader: whether this is rank 0, or alone.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self.ranks = 1 if is_alone else ranks()
        self.is_leader = self.ranks == 1 or rank() == 0
        self._is_led = False  # whether a call of lead is under way
        self._is_joint = False  # whether the followers make the same calls as rank 0, which leads

    @property
    def communicator(self) -> Communicator | None:
        """That of the ranks, or None; whoever asks first waits for all of them, so only what they do together asks."""
        return None if self.ranks == 1 else communicator()

    def agreed(self, value: Agreed) -> Agreed:
        """Rank 0's value, on all ranks."""
        return value if self.communicator is None else self.communicator.broadcast(value)

    def agreed_steps(self, count: int, *, is_interrupted: bool) -> tuple[int, bool]:
        """Rank 0's number of steps, and whether one of the ranks was interrupted."""
        if self.communicator is None:
            return count, is_interrupted
        told = self.communicator.gather((count, is_interrupted))
        return told[0][0], any(was for _, was in told)

    def lead(self, work: Callable[[], Result], follower: object) -> Result:
        """Have rank 0 do something, however long it takes; all ranks return what it returns, or raise what it raises.

        Arguments:
            work: what rank 0 does; its result is pickled.
            follower: whose methods the other ranks call meanwhile where rank 0 says so by :meth:`command`.
        """
        if self.ranks == 1 or self._is_led:
            return work()
        self._is_led = True
        try:
            return self._do(work) if self.is_leader else self._follow(follower)
        finally:
            self._is_led = False

    @property
    def is_followed(self) -> bool:
        """Whether this is rank 0, and the others wait for what it has them do."""
        return self._is_led and self.is_leader and not self._is_joint

    def command(self, name: str, *arguments: Any) -> None:
        """Have the followers call a method that rank 0 calls in the middle of what it leads; otherwise nothing."""
        if self.is_followed and self.communicator is not None:
            self.communicator.broadcast((name, arguments))

    @contextmanager
    def together(self, name: str, *arguments: Any) -> Iterator[None]:
        """While all ranks call something together: if rank 0 leads, have the followers call this method meanwhile.

        What is called inside, all of them call in turn.  An error that a call raises is rank 0's to tell.
        """
        is_first = self.is_followed
        if is_first:
            self.command(name, *arguments)
            self._is_joint = True
        try:
            yield
        finally:
            if is_first:
                self._is_joint = False

    def _do(self, work: Callable[[], Result]) -> Result:
        assert self.communicator is not None
        try:
            result = work()
        except BaseException as error:
            self.communicator.broadcast((_IS_DONE, (None, sendable(error))))
            raise
        self.communicator.broadcast((_IS_DONE, (result, None)))
        return result

    def _follow(self, follower: object) -> Any:
        assert self.communicator is not None
        while True:
            name, arguments = self.communicator.broadcast(patient=True)
            if name is _IS_DONE:
                result, error = arguments
                if error is not None:
                    raise error
                return result
            try:
                getattr(follower, name)(*arguments)
            except RankError:
                raise
            except MlpgpuError:  # rank 0 has it as well, and what came of it
                pass


def sendable(error: BaseException) -> BaseException:
    """The error, or what it says where it cannot be pickled."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # whatever its own __reduce__ raises
        pass
    return RankError("rank 0", expected="a fit without an error", got=f"{type(error).__name__}: {error}")
