"""Tables of what the ladders' scripts measured, put into docs/ladder.md between its marks.

R=benchmarks/results
python examples/ladders/gemm_ladder.py --json $R/gemm_ladder.jsonl --picture docs/gemm_ladder.png
python examples/ladders/local_ladder.py --json $R/local_ladder.jsonl --picture docs/local_ladder.png
for N in 1 2 4; do python -m mlpgpu launch -n $N examples/ladders/ranks_ladder.py \
    --json $R/ranks_ladder.jsonl --append --picture docs/ranks_ladder.png; done
python benchmarks/local.py --json $R/local.json
python benchmarks/ladder_report.py
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "ladder.md"
MOST_SIZES = 6  # columns of a table
# Milliseconds of the course report, N and K to OpenMP's on its CPU and CUDA's on an RTX 2080.
REPORT = {(50_000, 1000): (969, 9.25), (100_000, 1000): (2321, 25.7), (300_000, 1000): (7252, 70.8)}

Record = dict[str, Any]


def grid(records: Sequence[Record], size: Callable[[Record], str], cell: Callable[[Record], str]) -> str:
    """A row for each rung, a column for each size."""
    sizes = list(dict.fromkeys(map(size, records)))
    rungs = list(dict.fromkeys(record["rung"] for record in records))
    found = {(record["rung"], size(record)): cell(record) for record in records if record["seconds"] is not None}
    rows = [["rung", *sizes], ["---"] * (len(sizes) + 1)]
    rows += [[rung, *(found.get((rung, column), "–") for column in sizes)] for rung in rungs]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def spread(values: Sequence[Any]) -> list[Any]:
    """At most ``MOST_SIZES`` of them, the first and the last among them."""
    step = max(1, -(-(len(values) - 1) // (MOST_SIZES - 1)))
    return list(dict.fromkeys([*values[::step], *values[-1:]]))


def about(records: Sequence[Record], what: str) -> str:
    one = records[0]
    commit = f" at {one['commit'][:10]}" if one["commit"] else ""
    return f"{what} on an {one['card']}, driver {one['driver']}, mlpgpu {one['versions']['mlpgpu']}{commit}."


def gemm_tables(records: Sequence[Record], peers: Sequence[Record] = ()) -> str:
    """``peers`` are records of benchmarks/peers.py, whose products of the same size stand beside the ladder's."""
    squares = spread(sorted({record["n"] for record in records if record["m"] == record["n"] == record["k"]}))
    square = [record for record in records if record["m"] == record["n"] == record["k"] and record["n"] in squares]
    flat = [record for record in records if record["k"] < record["m"] == record["n"]]
    layer = [record for record in records if record["m"] != record["n"]]

    def rate(record: Record) -> str:
        return f"{record['gflops']:,.0f}"

    def compared(record: Record) -> str:
        values = (record["speedup"], record["of_cublas"], record["of_limit"], record["error"])
        texts = ("{:,.0f} ×", "{:.0%}", "{:.0%}", "{:.1e}")
        return " / ".join("–" if v is None else text.format(v) for text, v in zip(texts, values, strict=True))

    parts = [about(records, "GFLOP/s by m = n = k,"), grid(square, lambda record: f"{record['n']:,}", rate)]
    if flat:
        heading = "GFLOP/s by k, where m = n = {:,}:".format(flat[0]["n"])
        parts += [heading, grid(flat, lambda record: str(record["k"]), rate)]
    largest = [record for record in square if record["n"] == squares[-1]]
    heading = f"Speed-up over the serial loop, of cuBLAS, of the card's limit, and error, at {squares[-1]:,}:"
    parts += [heading, grid(largest, lambda record: f"{record['n']:,}", compared)]
    if layer:
        m, n = layer[0]["m"], layer[0]["n"]
        heading = (
            f"TFLOP/s where m = {m:,} and n = k = {n:,}, and of the same product in a step of `benchmarks/peers.py`:"
        )
        rows = [["precision", "the ladder", "alone, in turns with cuBLAS", "in a step, with its epilogue"], ["---"] * 4]
        for record in layer:
            precision = record["rung"].removeprefix("mlpgpu, ")
            steps = [
                each
                for each in peers
                if (each.get("form"), each["workload"], each["precision"]) == ("forward", "large", precision)
            ]
            if record["seconds"] is not None and steps:
                alone, in_step = (
                    statistics.median(1e3 * each["gigaflop"] / each[time] for each in steps)
                    for time in ("alone_microseconds", "microseconds")
                )
                rows.append([precision, f"{record['gflops'] / 1000:.0f}", f"{alone:.0f}", f"{in_step:.0f}"])
        parts += [heading, "\n".join(f"| {' | '.join(row)} |" for row in rows)]
    return "\n\n".join(parts)


def rank_tables(records: Sequence[Record]) -> str:
    """The product over ranks: GFLOP/s of the whole and of the products alone, speed-up and error, by size."""
    named = [
        {**record, "rung": f"{record['rung']}, {record['ranks']} ranks" if record["rung"] != "serial" else "serial"}
        for record in records
    ]

    def size(record: Record) -> str:
        m, n, k = record["m"], record["n"], record["k"]
        return f"{n:,}" if m == n == k else f"{m:,} × {n:,}, k = {k}"

    def cell(record: Record) -> str:
        alone = 2e-9 * record["m"] * record["n"] * record["k"] / record["seconds_of_products"]
        return f"{record['gflops']:.0f} ({alone:.0f}), {record['speedup']:.2f} ×, {record['error']:.1e}"

    one = records[0]
    commit = f" at {one['commit'][:10]}" if one["commit"] else ""
    heading = (
        f"GFLOP/s of the whole (of the products and their sum alone), speed-up over the serial program, error; "
        f"{one['machine']}, {one['cores']} cores, mlpgpu {one['versions']['mlpgpu']}{commit}."
    )
    return "\n\n".join([heading, grid(named, size, cell)])


def local_tables(records: Sequence[Record]) -> str:
    def size(record: Record) -> str:
        return f"N = {record['n']:,}, K = {record['k']:,}"

    def cell(record: Record) -> str:
        share = "" if record["of_limit"] is None else f", {record['of_limit']:.0%} of limit"
        return f"{record['outputs_per_second']:.3g} ({1000 * record['seconds']:,.2f} ms{share})"

    parts = []
    for weights in ("distinct", "reused"):
        of_weights = [record for record in records if record["weights"] == weights]
        parts += [about(records, f"Outputs per second, weights {weights},"), grid(of_weights, size, cell)]
    return "\n\n".join(parts)


def of_peer(record: Record) -> str:
    """PyTorch's time; where it had room for some of the layers only, scaled up to all of them."""
    if record["pytorch_ms"] is None:
        return "–"
    layers = record.get("pytorch_layers", record["k"])
    if layers == record["k"]:
        return f"{record['pytorch_ms']:.2f} ms"
    return f"{record['pytorch_ms'] * record['k'] / layers:.2f} ms, by {layers:,} layers, which fit"


def stack_tables(found: Record) -> str:
    """The report's table with a column of ours, then what the largest network takes beside its floor."""
    records = found["results"]
    ours = {record["n"]: record for record in records if record["what"] == "forward" and record["weights"] == "reused"}
    rows = [["N", "K", "the report: OpenMP", "the report: CUDA", "PyTorch, compiled", "mlpgpu"], ["---"] * 6]
    for (n, k), (openmp, cuda) in REPORT.items():
        record = ours.get(n)
        if record is not None and record["k"] == k:
            rows.append(
                [f"{n:,}", f"{k:,}", f"{openmp:,.0f} ms", f"{cuda:.2f} ms", of_peer(record), f"{record['ms']:.2f} ms"]
            )  # fmt: skip
    largest = [["", "weights", "mlpgpu", "floor", "PyTorch, compiled"], ["---"] * 5]
    for record in records:
        if record["n"] == max(ours):
            floor = "–" if record["floor_ms"] is None else f"{record['floor_ms']:.2f} ms"
            largest.append([record["what"], record["weights"], f"{record['ms']:.2f} ms", floor, of_peer(record)])
    tables = ["\n".join(f"| {' | '.join(row)} |" for row in table) for table in (rows, largest)]
    heading = "N = {:,}, K = {:,}, one row:".format(records[0]["n"], records[0]["k"])
    return "\n\n".join([about([found], "One row forward, one matrix for all layers,"), tables[0], heading, tables[1]])


def fill(page: str, name: str, part: str, *, picture: bool = True) -> str:
    """The page with ``part`` between the marks of ``name``, and its picture."""
    begin, end = f"<!-- {name}: made by benchmarks/ladder_report.py -->", f"<!-- {name}: end of what it made -->"
    before, first, rest = page.partition(begin)
    _, second, after = rest.partition(end)
    if not (first and second):
        raise SystemExit(f"{PAGE}: expected the marks {begin} and {end}")
    shown = f"{part}\n\n![{name}]({name}.png)" if picture else part
    return f"{before}{begin}\n\n{shown}\n\n{end}{after}"


def read(name: str) -> list[Record]:
    """Records of a file of results; none where there is no such file."""
    path = RESULTS / name
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def main() -> None:
    page, found = PAGE.read_text(encoding="utf-8"), False
    if products := read("gemm_ladder.jsonl"):
        page, found = fill(page, "gemm_ladder", gemm_tables(products, read("peers.jsonl"))), True
    if layers := read("local_ladder.jsonl"):
        page, found = fill(page, "local_ladder", local_tables(layers)), True
    if shared := read("ranks_ladder.jsonl"):
        page, found = fill(page, "ranks_ladder", rank_tables(shared)), True
    stacks = RESULTS / "local.json"
    if stacks.exists():
        part = stack_tables(json.loads(stacks.read_text(encoding="utf-8")))
        page, found = fill(page, "local", part, picture=False), True
    if not found:
        raise SystemExit(
            f"{RESULTS}: expected gemm_ladder.jsonl, local_ladder.jsonl, ranks_ladder.jsonl or local.json, got none"
        )
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
