"""Whether all ranks were started with the same: versions, data, arguments, seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ..errors import RankError, shown
from .communicator import Communicator, name_ranks

Facts = Mapping[str, str | int | float]
_ABSENT = "nothing"


def check_agreement(communicator: Communicator | None, what: Facts) -> None:
    """Have every rank raise the same error where ``what`` is not equal on all of them; collective.

    What most ranks have is what is expected; of equally many, what the lowest rank has.  NaN equals NaN.

    Raises:
        RankError: it names each rank that has another value, the key and the values.
    """
    if communicator is None:
        return
    told = communicator.gather({key: shown(value) for key, value in what.items()})
    if all(facts == told[0] for facts in told):
        return
    for key in dict.fromkeys(key for facts in told for key in facts):
        values = [facts.get(key, _ABSENT) for facts in told]
        expected = Counter(values).most_common(1)[0][0]  # the first one of equally many
        others = {value: [rank for rank, has in enumerate(values) if has == value] for value in values}
        del others[expected]
        if others:
            got = "; ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in others.items())
            raise RankError(f"{key} of {len(told)} ranks", expected=f"{expected} on all of them", got=got)
