"""A whole network forward for few rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from helpers import EPS32

from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import ceil_div
from mlpgpu.losses import OUTPUTS, OutputName, apply_output

from .case import ROUNDINGS, Case, activation_bound, blank, expect, forward, generator, normal, wide

SEQUENCE = 0xFFFFFFFE


def network_forward(
    output: OutputName,
    source: str,
    widths: Sequence[int],
    rows: int,
    *,
    activation: str = "tanh",
    spread: int = 0,
    blocks: int = 1,
    shifts: Sequence[int] = (),
    standardized: bool = False,
    logits: bool = False,
    shifted: int = 0,
) -> Case:
    """``widths`` from the inputs to the outputs; ``shifted`` elements lie before the parameters.

    Every other layer has a bias, and the last one no activation.
    """
    layers, parts, offset = len(widths) - 1, [np.zeros(shifted, np.float32)], shifted
    scale = np.float32(1 / 255 if source == "uint8" else 1.0)
    data = generator().integers(256, size=(rows, widths[0])).astype(np.uint8) if source == "uint8" else None
    data = normal(rows, widths[0]) if data is None else data
    mean = deviation = target_mean = target_scale = None
    h = wide(np.multiply(data, scale, dtype=np.float32))
    bound = np.zeros_like(h)
    if standardized:
        mean, deviation = normal(widths[0]) / 2, abs(normal(widths[0])) + np.float32(0.5)
        target_mean, target_scale = normal(widths[-1]), abs(normal(widths[-1])) + np.float32(0.5)
        h = (h - mean) / deviation
        bound = 2 * EPS32 * abs(h)
    described = []
    for number, (k, n) in enumerate(itertools.pairwise(widths)):
        w = np.random.default_rng(number).normal(size=(k, n)).astype(np.float32) / np.float32(np.sqrt(k))
        b = normal(n) if number % 2 == 0 else np.zeros(n, np.float32)
        name = activation if number + 1 < layers else "identity"
        shift = shifts[number] if shifts else 3
        described.append(
            (n, offset, offset + w.size if number % 2 == 0 else -1, kernels.activation_number(name), shift)
        )
        parts += [w.ravel(), b]
        offset += w.size + n
        z = h @ wide(w) + b
        of_z = bound @ abs(wide(w)) + (k + 3) * EPS32 * (abs(h) @ abs(wide(w)) + abs(b))
        h = forward(name, z)
        bound = 1.2 * of_z + activation_bound(z, h)  # no slope exceeds 1.2
    if not logits:
        apply_output(output, h)
        # Outputs move no more than twice as far as logits: a softmax by its probabilities, a sigmoid by a quarter.
        widest = np.maximum(bound, 2.0 * bound.max(axis=1, keepdims=True))
        bound = h * np.expm1(bound) if output == "exp" else widest
        bound += ROUNDINGS * (1 + widths[-1]) * EPS32 * abs(h)
        if target_scale is not None:
            h, bound = h * target_scale + target_mean, bound * target_scale + 4 * EPS32 * (abs(h * target_scale) + 3.0)
    pitch = 4 * ceil_div(max(widths), 4)
    args = {
        "data": data, "scale": scale, "mean": mean, "deviation": deviation, "parameters": np.concatenate(parts),
        "layers": np.array(described, np.int32), "layer_count": layers, "spread": spread,
        "scratch": np.full(3 * rows * pitch, np.nan, np.float32), "pitch": pitch, "arrived": np.zeros(1, np.uint32),
        "meetings": np.full(1, 5, np.uint64), "target_mean": target_mean, "target_scale": target_scale,
        "y": blank(rows, widths[-1]), "done": np.full(1, 3, np.uint32), "n_in": widths[0], "n": widths[-1],
        "rows": rows, "output": kernels.output_number(output), "is_logits": int(logits), "sequence": SEQUENCE,
    }  # fmt: skip
    meetings = np.full(1, 5.0 + spread)
    outputs = {
        "y": expect(h, bound), "done": expect(np.full(1, float(SEQUENCE)), 0.0),
        "arrived": expect(np.zeros(1), 0.0), "meetings": expect(meetings, 0.0),
    }  # fmt: skip
    what = "-".join(map(str, widths)) + f"-{rows}rows-{blocks}blocks-{activation}" + "-logits" * logits
    what += "-standardized" * standardized + "-shifted" * bool(shifted)
    return Case(f"{output}-{what}", kernels.network_forward(source), (blocks,), args, outputs)


def network_cases() -> Iterator[Case]:
    for output in OUTPUTS:
        for source in ("float32", "uint8"):
            yield network_forward(output, source, (33, 20, 7), 3, spread=1, blocks=3)
            yield network_forward(output, source, (5, 4), 1, logits=True)
    for activation in ACTIVATIONS:
        yield network_forward("identity", "float32", (9, 12, 5, 3), 2, activation=activation)
    # Several stages of k, tiles of all widths, groups of rows, and more tiles than blocks.
    yield network_forward("softmax", "float32", (1000, 20, 10), 9, spread=1, blocks=2)
    yield network_forward("softmax", "float32", (1000, 20, 10), 1, spread=1, blocks=3, shifted=1)
    yield network_forward("identity", "uint8", (40, 70, 130, 66), 32, spread=2, blocks=4, shifts=(3, 4, 6))
    yield network_forward("identity", "float32", (37, 50, 3), 17, spread=2, blocks=3, standardized=True)
    yield network_forward("sigmoid", "float32", (64, 64, 64, 2), 32, shifts=(6, 6, 3), standardized=True)
    yield network_forward("identity", "float32", (128, 100), 11, shifts=(5,), logits=True, shifted=3)
