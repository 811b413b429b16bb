"""What a copied or pickled trainer consists of: all that a file of it would hold, with the network as an object."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import storage
from ..errors import DtypeError
from ..network import Network

# What pickles functions by their code.
_PICKLERS_OF_CODE = ("cloudpickle", "dill")


@dataclass(frozen=True, eq=False)
class CopiedTrainer:
    """A trainer between two steps, as plain data.

    Attributes:
        run: what :class:`~mlpgpu.training.run_file.SavedRun` has of it.
        functions: metrics of one's own, by name.
        is_to_be_continued: whether its next fit goes on with one that has begun.
        interrupted: of its history.
        saved: where it was saved last, and as of how many steps.
    """

    network: Network
    run: storage.Contents
    functions: Mapping[str, Callable[..., Any]]
    is_to_be_continued: bool
    interrupted: bool
    saved: tuple[str, int] | None


def check_pickles(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Refuse metrics that whoever is pickling cannot pickle.

    Raises:
        DtypeError: one is a lambda, a function inside a function, or holds something that is not pickled.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if not set(frame.f_globals.get("__name__", "").split(".")).isdisjoint(_PICKLERS_OF_CODE):
            return
        frame = frame.f_back
    for name, function in functions.items():
        try:
            pickle.dumps(function)
        except Exception as error:  # pickle raises three kinds of errors, and what the object raises
            hint = "define it in a module, not as a lambda or inside a function; copy.deepcopy takes any function"
            expected = "a function that can be pickled"
            raise DtypeError(f"metric {name} of a pickled trainer", expected=expected, got=error, hint=hint) from error
