"""Tables of what the ladders' scripts measured, put into docs/ladder.md between its marks.

R=benchmarks/results
python examples/ladders/gemm_ladder.py --json $R/gemm_ladder.jsonl --picture docs/gemm_ladder.png
python examples/ladders/local_ladder.py --json $R/local_ladder.jsonl --picture docs/local_ladder.png
python benchmarks/ladder_report.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "ladder.md"
MOST_SIZES = 6  # columns of a table

Line = dict[str, Any]


def grid(lines: Sequence[Line], size: Callable[[Line], str], cell: Callable[[Line], str]) -> str:
    """A row for each rung, a column for each size."""
    sizes = list(dict.fromkeys(map(size, lines)))
    rungs = list(dict.fromkeys(line["rung"] for line in lines))
    found = {(line["rung"], size(line)): cell(line) for line in lines if line["seconds"] is not None}
    rows = [["rung", *sizes], ["---"] * (len(sizes) + 1)]
    rows += [[rung, *(found.get((rung, at), "–") for at in sizes)] for rung in rungs]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def spread(values: Sequence[Any]) -> list[Any]:
    """At most ``MOST_SIZES`` of them, the first and the last among them."""
    step = max(1, -(-(len(values) - 1) // (MOST_SIZES - 1)))
    return list(dict.fromkeys([*values[::step], *values[-1:]]))


def about(lines: Sequence[Line], what: str) -> str:
    one = lines[0]
    commit = f" at {one['commit'][:10]}" if one["commit"] else ""
    return f"{what} on an {one['card']}, driver {one['driver']}, mlpgpu {one['versions']['mlpgpu']}{commit}."


def gemm_tables(lines: Sequence[Line]) -> str:
    squares = spread(sorted({line["n"] for line in lines if line["m"] == line["n"] == line["k"]}))
    square = [line for line in lines if line["m"] == line["n"] == line["k"] and line["n"] in squares]
    flat = [line for line in lines if not line["m"] == line["n"] == line["k"]]

    def rate(line: Line) -> str:
        return f"{line['gflops']:,.0f}"

    def shares(line: Line) -> str:
        own = (line["speedup"], line["of_cublas"], line["of_limit"], line["error"])
        texts = ("{:,.0f} ×", "{:.0%}", "{:.0%}", "{:.1e}")
        return " / ".join("–" if value is None else text.format(value) for text, value in zip(texts, own, strict=True))

    parts = [about(lines, "GFLOP/s by m = n = k,"), grid(square, lambda line: f"{line['n']:,}", rate)]
    if flat:
        heading = "GFLOP/s by k, where m = n = {:,}:".format(flat[0]["n"])
        parts += [heading, grid(flat, lambda line: str(line["k"]), rate)]
    largest = [line for line in square if line["n"] == squares[-1]]
    heading = f"Speed-up over the serial loop, of cuBLAS, of the card's limit, and error, at {squares[-1]:,}:"
    return "\n\n".join([*parts, heading, grid(largest, lambda line: f"{line['n']:,}", shares)])


def local_tables(lines: Sequence[Line]) -> str:
    def size(line: Line) -> str:
        return f"N = {line['n']:,}, K = {line['k']:,}"

    def cell(line: Line) -> str:
        share = "" if line["of_limit"] is None else f", {line['of_limit']:.0%} of limit"
        return f"{line['outputs_per_second']:.3g} ({1000 * line['seconds']:,.2f} ms{share})"

    parts = []
    for weights in ("distinct", "reused"):
        own = [line for line in lines if line["weights"] == weights]
        parts += [about(lines, f"Outputs per second, weights {weights},"), grid(own, size, cell)]
    return "\n\n".join(parts)


def fill(page: str, name: str, part: str) -> str:
    """The page with ``part`` between the marks of ``name``."""
    begin, end = f"<!-- {name}: made by benchmarks/ladder_report.py -->", f"<!-- {name}: end of what it made -->"
    before, first, rest = page.partition(begin)
    _, second, after = rest.partition(end)
    if not (first and second):
        raise SystemExit(f"{PAGE}: expected the lines {begin} and {end}")
    return f"{before}{begin}\n\n{part}\n\n![{name}]({name}.png)\n\n{end}{after}"


def main() -> None:
    page, found = PAGE.read_text(encoding="utf-8"), False
    for name, tables in (("gemm_ladder", gemm_tables), ("local_ladder", local_tables)):
        path = RESULTS / f"{name}.jsonl"
        if path.exists():
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            page, found = fill(page, name, tables(lines)), True
    if not found:
        raise SystemExit(f"{RESULTS}: expected gemm_ladder.jsonl or local_ladder.jsonl, got neither")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
