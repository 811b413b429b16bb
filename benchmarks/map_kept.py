"""Points of kept files, which mlpgpu runs again beside their peers' figures.

Peers take most of a map's time, and a change of mlpgpu does not change them.  So where their figures of an earlier run
on such a card are kept, mlpgpu alone says what a change made of hundreds of points, in two seconds each.  The figures
are of two runs and two machines: they show where to look, and no claim rests on them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from map_contenders import OURS
from map_measure import library_of
from map_points import Point

from mlpgpu.bench import Workload

Line = dict[str, Any]


def peers_of(line: Line) -> Line:
    """A line's contenders that are no form of mlpgpu's and did not fail, by name."""
    return {
        name: each for name, each in line["contenders"].items() if library_of(name) != OURS and "microseconds" in each
    }


def fastest_of(line: Line) -> float:
    """The microseconds of the fastest peer."""
    return float(min(each["microseconds"] for each in peers_of(line).values()))


def ratio_of(line: Line) -> float | None:
    """How many times as long as mlpgpu the fastest peer takes; None if either has no figures."""
    ours = line["contenders"].get(OURS, {}).get("microseconds")
    return fastest_of(line) / ours if ours and peers_of(line) else None


def kept(lines: Iterable[Line], backend: str, below: float) -> dict[tuple[str, int], Line]:
    """The lines of points whose ratio was below so much, by seed and number, the least ratio first.

    Of several lines of a point it is the one with the fastest peer.
    """
    found: dict[tuple[str, int], Line] = {}
    for line in lines:
        ratio = ratio_of(line) if line["backend"] == backend else None
        if ratio is not None and ratio < below:
            place = line["seed"], line["number"]
            if place not in found or fastest_of(line) < fastest_of(found[place]):
                found[place] = line
    return dict(sorted(found.items(), key=lambda item: ratio_of(item[1]) or 0.0))


def point_of(line: Line) -> Point:
    """The point that a line was measured at."""
    names = {field.name for field in dataclasses.fields(Workload)} - {"precisions"}
    values = {name: line[name] for name in names & line.keys()}
    workload = Workload(**{**values, "widths": tuple(line["widths"])})
    return Point(line["seed"], line["number"], line["precision"], workload)


def beside(line: Line, known: Line) -> Line:
    """A new line of mlpgpu with the peers of a kept one, and their ratios."""
    peers, ours = peers_of(known), line["contenders"].get(OURS, {}).get("microseconds")
    made = {**line, "contenders": {**line["contenders"], **peers}, "peers_commit": known.get("commit")}
    if not ours:
        return made
    fastest: dict[str, str] = {}
    for name in sorted(peers, key=lambda name: float(peers[name]["microseconds"])):
        fastest.setdefault(library_of(name), name)
    ratios = {library: peers[name]["microseconds"] / ours for library, name in fastest.items()}
    return {**made, "ratios": ratios, "ratio": min(ratios.values()), "fastest": fastest}
