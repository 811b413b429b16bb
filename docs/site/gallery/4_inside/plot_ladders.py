"""
What the ladders measured
=========================

Two ladders make a kernel fast, one idea a rung: a matrix product and a locally connected layer. This page draws the
records that their scripts left in ``benchmarks/results/``, from an NVIDIA H200; nothing is measured here.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

import mlpgpu

results = Path(mlpgpu.__file__).parents[1] / "benchmarks" / "results"  # of a checkout


def read(name):
    text = (results / name).read_text(encoding="utf-8")
    return [json.loads(row) for row in text.splitlines()]


products, layers = read("gemm_ladder.jsonl"), read("local_ladder.jsonl")
print(f"{len(products)} products and {len(layers)} layers on an {products[0]['card']}, driver {products[0]['driver']}")

# %%
# Of products, those of square matrices in float32; of layers, those with a matrix of each layer's own.

square = [r for r in products if r["m"] == r["n"] == r["k"] and r["seconds"]]
rungs = [
    *("serial loop", "naive", "coalesced", "panels", "shared row", "reduction", "shared tiles", "register tiles"),
    *("double buffered", "mlpgpu, plain cores", "mlpgpu, float32", "cuBLAS, float32"),
]

figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
for place, rung in enumerate(rungs):
    found = [(r["n"], r["gflops"]) for r in square if r["rung"] == rung]
    style = {"color": "k", "linestyle": "--"} if rung.startswith("cuBLAS") else {"color": plt.cm.viridis(place / 12)}
    left.plot(*zip(*sorted(found), strict=True), marker=".", label=rung, **style)
limit = products[0]["limit_gflops"]
left.axhline(limit, color="0.6", linestyle=":", label="limit of plain cores")
left.set(xlabel="n of n × n times n × n", ylabel="GFLOP/s", xscale="log", yscale="log", ylim=(1, None))
left.legend(fontsize=7, ncols=3, loc=(0.02, 0.12))

largest = [r for r in layers if r["weights"] == "distinct" and r["n"] == 300_000 and r["k"] == 1000 and r["seconds"]]
largest = [r for r in largest if r["rung"] != "serial loop"]
right.barh([r["rung"] for r in largest], [1e3 * r["seconds"] for r in largest])
for r in largest:
    share = "" if r["of_limit"] is None else f"{r['of_limit']:.0%} of the memory's rate"
    right.text(1e3 * r["seconds"], r["rung"], f" {share}", va="center", fontsize=8)
right.invert_yaxis()
right.set(xlabel="milliseconds of 1,000 layers of 300,000 outputs", ylabel="rung", xscale="log", xlim=(1, 1500))
plt.show()

# %%
# On the left three ideas make the large steps: reads that neighbouring threads share (coalesced), tiles in registers,
# and tensor cores, which pass the limit of plain cores.  The reduction lies below all of them: many threads for one
# sum look parallel, but read each word anew.  On the right a layer reads each weight once, so the memory's rate is
# the limit, and a plan comes to 98 % of it.  The stencil has no weights of its own to read.  That ``separate
# read-only`` took fifteen times as long as its neighbours is of this size alone; with 300 layers it takes as long as
# they do.
