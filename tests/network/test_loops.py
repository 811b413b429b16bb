"""Compiled loops: each against NumPy in float64, trainings beside NumPy's, and what happens without a compiler."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sanitized import SANITIZERS, run_sanitized

import mlpgpu as mg
from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends.constants import hyper_parameters, loss_numbers
from mlpgpu.backends.cpu.blas import BLAS, BlasThreads
from mlpgpu.backends.cpu.loops import Call, address_of, has_loop, joined, library, loops_name, why_not
from mlpgpu.backends.cpu.loops import library as loops_library
from mlpgpu.backends.cpu.products import (
    packs_nothing,
    packs_nothing_for_gradient,
    packs_nothing_for_inputs,
    spares_blas,
)
from mlpgpu.backends.sources import native_folder, source_folder
from mlpgpu.losses import FORMS
from mlpgpu.optimizers import OPTIMIZERS
from mlpgpu.random import half_words, least_kept

DRAW = np.random.default_rng(7)
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
SHAPES = (1, 1), (1, 33), (3, 16), (5, 10), (40, 1), (7, 47), (37, 5)
NUMBERS: dict[str, Any] = {"huber": {"delta": 0.7}, "quantile": {"level": 0.3}, "binary_focal": {"gamma": 1.5}}
OPTIONS: dict[str, Any] = {"l1": 0.01, "l2": 0.02}

library_module = sys.modules[loops_library.__module__]
needs_loops = pytest.mark.skipif(library(FLOAT32) is None, reason=f"no loops: {why_not(FLOAT32)}")
of_each_type = pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)


@pytest.mark.skipif(
    os.environ.get("MLPGPU_LOOPS") == "0" or shutil.which("g++") is None, reason="nobody compiles loops here"
)
def test_loops_are_there_where_a_compiler_is() -> None:
    """Else all tests that need them would be left out, as if there were no compiler."""
    for dtype in FLOAT32, FLOAT64:
        assert library(dtype) is not None, why_not(dtype)


def call(dtype: np.dtype, name: str, *arguments: Any) -> None:
    for each in joined([Call(dtype, name, *arguments)]):
        each()


def close(found: np.ndarray, expected: np.ndarray, *, factor: float = 8.0) -> None:
    """Within some roundings of the largest number of a row, and not finite in the same places."""
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
    finite = np.isfinite(expected)
    scale = np.maximum(np.abs(np.where(finite, expected, 0.0)), 1.0)
    assert (np.abs(np.where(finite, found - expected, 0.0)) <= factor * np.finfo(found.dtype).eps * scale).all()


def numbers(dtype: np.dtype, shape: tuple[int, ...], scale: float = 2.0) -> np.ndarray:
    return (scale * DRAW.standard_normal(shape)).astype(dtype)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What is known of the loops is found out anew, by the test and after it."""
    library_module._found.cache_clear()
    yield
    library_module._found.cache_clear()


@needs_loops
@of_each_type
@pytest.mark.skipif(shutil.which("g++") is None, reason="what g++ says of a loop is read")
def test_each_loop_over_elements_is_made_of_vectors(dtype: np.dtype) -> None:
    """A loop or a branch that is left inside it makes it ten times as long, with the same bits."""
    module = library_module
    folders = [Path(module.__file__ or "").parent, native_folder(), source_folder()]
    options = [each for each in module.OPTIONS if not each.startswith("-march")]
    options += ["-march=x86-64-v3"] if platform.machine() == "x86_64" else []  # whatever this machine has beyond that
    options.append(f"-DMLPGPU_REAL={module.REAL[dtype]}")
    command = ["g++", *options, "-fPIC", "-fopt-info-vec-missed", *(f"-I{folder}" for folder in folders)]
    told = subprocess.run(
        [*command, "-x", "c++", "-", "-c", "-o", os.devnull],
        input=module.unit(), capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    missed = {(name, int(line)) for name, line in re.findall(r"/(\w+\.h):(\d+):\d+: missed: couldn't vectorize", told)}
    assert missed, "the compiler says nothing of loops"
    for name in ("loops.h", "steps.h"):
        lines = (folders[0] / name).read_text().splitlines()
        over_elements = {(name, number) for number, line in enumerate(lines, 1) if line.lstrip().startswith("EACH for")}
        assert sorted(over_elements & missed) == []


def test_an_arrays_address_is_read_as_numpy_gives_it() -> None:
    frozen = np.arange(12.0).reshape(3, 4)
    frozen.flags.writeable = False
    for array in (frozen, frozen[1:, ::-1], np.zeros((2, 0)), np.array(3), np.frombuffer(b"bytes", np.uint8)[2:]):
        assert address_of(array) == array.__array_interface__["data"][0]
    assert address_of.__name__ == (
        "_read_address" if platform.python_implementation() == "CPython" else "_asked_address"
    )


# --- each loop ---


@needs_loops
@of_each_type
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(dtype: np.dtype, name: str, shape: tuple[int, int]) -> None:
    activation = ACTIVATIONS[name]
    roundings = 64.0 if (name, dtype) == ("gelu", FLOAT64) else 8.0  # NumPy's is off by up to 1e-14 times z
    z, bias, dy = numbers(dtype, shape, 4.0), numbers(dtype, shape[1:]), numbers(dtype, shape)
    z.flat[0] = np.nan if shape == (5, 10) else 30.0
    wide = z.astype(np.float64) + bias
    expected, slope, scratch = np.empty(shape), np.empty(shape), np.empty(shape)
    activation.forward(wide, expected, scratch)
    elsewhere, in_place = np.empty_like(z), z.copy()
    for source, into in ((z, elsewhere), (in_place, in_place)):
        call(dtype, f"activate_{name}", source, bias, into, *shape)
        close(into, expected, factor=roundings)
    y, kept = np.empty_like(z), z.copy()
    if activation.with_slope is not None:
        activation.backward(wide, np.ones(shape), slope, scratch)
        call(dtype, f"activate_with_slope_{name}", kept, bias, y, *shape)
        close(y, expected, factor=roundings)
        close(kept, slope, factor=roundings)
    else:
        activation.backward(expected, np.ones(shape), slope, scratch)
        found = dy.copy()
        call(dtype, f"activation_backward_{name}", expected.astype(dtype), found, found.size)
        close(found, dy * slope, factor=16.0)


@needs_loops
@of_each_type
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_number_has_the_same_bits_wherever_it_stands(dtype: np.dtype, name: str) -> None:
    z, first = numbers(dtype, (120,), 3.0), np.empty(120, dtype)
    call(dtype, f"activate_{name}", z, None, first, 1, 120)
    for shape in ((120, 1), (12, 10), (5, 24), (3, 40)):
        y = np.empty_like(z)
        call(dtype, f"activate_{name}", z, np.zeros(shape[1], dtype), y, *shape)
        np.testing.assert_array_equal(y, first)


@needs_loops
@of_each_type
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", [form for form in FORMS if has_loop(FLOAT32, f"loss_{form}")])
def test_losses_of_terms(dtype: np.dtype, form: str, shape: tuple[int, int]) -> None:
    loss = FORMS[form](**NUMBERS.get(form, {}))
    z, t = numbers(dtype, shape), np.abs(numbers(dtype, shape, 0.4)).clip(0.0, 1.0)
    value, delta, scratch = np.empty(shape[0], dtype), np.empty_like(z), np.empty_like(z)
    call(dtype, f"loss_{form}", z, t, value, delta, scratch, *shape, loss_numbers(loss, dtype))
    wide_value, wide_delta = np.empty(shape[0]), np.empty(shape)
    loss.evaluate(z.astype(np.float64), t.astype(np.float64), wide_value, wide_delta, np.empty(shape))
    close(value, wide_value, factor=32.0)
    close(delta, wide_delta, factor=16.0)


@needs_loops
@of_each_type
@pytest.mark.parametrize("kind", ["index", "dense"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_softmax_cross_entropy(dtype: np.dtype, shape: tuple[int, int], kind: str) -> None:
    z = numbers(dtype, shape, 5.0)
    z[0] += 1e4
    t: np.ndarray = DRAW.integers(0, shape[1], shape[0])
    if kind == "dense":
        t = DRAW.dirichlet(np.ones(shape[1]), shape[0]).astype(dtype)
    value, delta, scratch = np.empty(shape[0], dtype), np.empty_like(z), np.empty_like(z)
    call(dtype, f"softmax_cross_entropy_of_{kind}", z, t, value, delta, scratch, *shape)
    wide_value, wide_delta = np.empty(shape[0]), np.empty(shape)
    wide_t = t if kind == "index" else t.astype(np.float64)
    FORMS["softmax_cross_entropy"]().evaluate(z.astype(np.float64), wide_t, wide_value, wide_delta, np.empty(shape))
    close(value, wide_value, factor=32.0)
    close(delta, wide_delta, factor=16.0)
    call(dtype, "softmax", z, z, *shape)  # in place
    np.testing.assert_allclose(z.sum(axis=1), 1.0, rtol=1e-5)


@needs_loops
@of_each_type
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates(dtype: np.dtype, name: str) -> None:
    rule, count = OPTIMIZERS[name](0.1, **OPTIONS), 101
    w, g = numbers(dtype, (count,)), numbers(dtype, (count,))
    w[3] = 0.0
    slots = np.abs(numbers(dtype, (len(rule.slots), count)))
    row = rule.table(2, np.array([0.1]))[0]
    rates = np.zeros(3, dtype)
    rates[: len(row)] = row
    expected, wide_slots = w.astype(np.float64), slots.astype(np.float64)
    rule.update(expected, g.astype(np.float64) * 0.25, list(wide_slots), list(row), np.empty(count))
    call(
        dtype,
        f"update_{name}",
        w,
        g,
        slots if len(slots) else None,
        count,
        count,
        0.25,
        rates,
        hyper_parameters(rule, dtype),
    )
    close(w, expected, factor=32.0)
    close(slots, wide_slots, factor=32.0)


@needs_loops
@of_each_type
@pytest.mark.parametrize("first", [0, 1, 6, 35])
@pytest.mark.parametrize(("rows", "n", "pitch"), [(1, 41, 41), (3, 41, 41), (3, 41, 50), (2, 500, 501), (5, 1, 1)])
def test_dropouts_mask_has_the_addressed_half_words(dtype: np.dtype, rows: int, n: int, pitch: int, first: int) -> None:
    rate, keep, shape = 0.3, 1.0 / 0.7, (rows, n)
    x, mask, y = numbers(dtype, shape), np.empty(shape, dtype), np.empty(shape, dtype)
    address = np.array([2**63 + 5, 17], np.uint64)
    call(dtype, "dropout", x, mask, y, first, pitch, rows, n, address, 4, least_kept(rate), keep)
    drawn = half_words(first, rows * pitch, seed=2**63 + 5, step=17, layer=4).reshape(rows, pitch)[:, :n]
    np.testing.assert_array_equal(mask, (drawn / 2**16 >= rate).astype(dtype) * dtype.type(keep))
    np.testing.assert_array_equal(y, x * mask)


@needs_loops
@of_each_type
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize(("k", "n"), [(1, 1), (9, 5), (33, 16), (20, 17), (7, 130), (64, 257), (3, 79)])
def test_products_of_few_rows(dtype: np.dtype, rows: int, k: int, n: int) -> None:
    x, w, dz = numbers(dtype, (rows, k)), numbers(dtype, (k, n)), numbers(dtype, (rows, n))
    y, dw = np.empty((rows, n), dtype), np.empty((k, n), dtype)
    call(dtype, "unpacked_product", x, k, 1, w, y, rows, n, k)
    bound = k * np.finfo(dtype).eps * (np.abs(x).astype(np.float64) @ np.abs(w))
    assert (np.abs(y - x.astype(np.float64) @ w) <= bound).all()
    call(dtype, "unpacked_product", x, 1, k, dz, dw, k, n, rows)
    bound = rows * np.finfo(dtype).eps * (np.abs(x.T).astype(np.float64) @ np.abs(dz))
    assert (np.abs(dw - x.T.astype(np.float64) @ dz) <= bound).all()


@needs_loops
@of_each_type
@pytest.mark.parametrize(("rows", "k", "n"), [(29, 1100, 79), (9, 513, 48), (70, 512, 33), (23, 40, 600)])
def test_a_product_that_packs_nothing_is_one_sum_whatever_the_tile(dtype: np.dtype, rows: int, k: int, n: int) -> None:
    """In several blocks of terms and panels of columns; a row alone, and some columns, have the bits of the whole."""
    x, w, y, of_row = (
        numbers(dtype, (rows, k)),
        numbers(dtype, (k, n)),
        np.empty((rows, n), dtype),
        np.empty((1, n), dtype),
    )
    call(dtype, "unpacked_product", x, k, 1, w, y, rows, n, k)
    bound = k * np.finfo(dtype).eps * (np.abs(x).astype(np.float64) @ np.abs(w))
    assert (np.abs(y - x.astype(np.float64) @ w) <= bound).all()
    for row in range(rows):
        call(dtype, "unpacked_product", x[row], k, 1, w, of_row, 1, n, k)
        np.testing.assert_array_equal(of_row[0], y[row])
    some, of_some = np.ascontiguousarray(w[:, 3:27]), np.empty((rows, 24), dtype)
    call(dtype, "unpacked_product", x, k, 1, some, of_some, rows, 24, k)
    np.testing.assert_array_equal(of_some, y[:, 3:27])


def test_small_chains_of_products_ask_no_blas() -> None:
    layers = [(20, 64), (64, 64), (64, 2)]  # the last one counts as 32 columns
    assert [spares_blas(rows, layers, is_fast=True) for rows in (141, 142)] == [True, False]
    assert [spares_blas(rows, layers, is_fast=False) for rows in (17, 18)] == [True, False]


def test_blas_makes_large_products_where_it_is_faster() -> None:
    """By several threads, by vectors of 32 bytes, of few columns, and of more rows than the loop gains by."""
    weights = 512 * 512
    for packs in (packs_nothing, packs_nothing_for_gradient):
        assert packs(64, weights, 512, is_fast=True)
        assert packs(8, weights, 512, is_fast=False)
        assert not packs(9, weights, 512, is_fast=False)
        assert not packs(64, 5 * 16384, 5, is_fast=True)
        assert not packs(64, 15 * 16384, 15, is_fast=False)
        assert not packs(513, weights, 512, is_fast=True)
        assert not packs(5, 100, 20, is_fast=True)
    assert packs_nothing(64, 15 * 16384, 15, is_fast=True)
    assert packs_nothing(64, 9 * 16, 9, is_fast=True)
    assert packs_nothing(4096, 6 * 784, 6, is_fast=True)
    assert not packs_nothing(16, 6 * 128, 6, is_fast=True)
    assert not packs_nothing_for_gradient(64, 15 * 16384, 15, is_fast=True)
    assert packs_nothing(8, 128 * 64, 64, is_fast=True) and not packs_nothing(8, 128 * 32, 32, is_fast=True)
    assert packs_nothing(8, 128 * 32, 32, is_fast=False) and not packs_nothing(9, 128 * 32, 32, is_fast=False)


def test_the_loop_makes_inputs_gradients_of_few_rows_where_blas_packs() -> None:
    for rows, weights, made in (
        (2, 2**19, False),
        (3, 2**19, True),
        (64, 2**19, True),
        (65, 2**19, False),
        (64, 15625, False),
    ):
        assert packs_nothing_for_inputs(rows, weights, is_fast=True) == made
        assert not packs_nothing_for_inputs(rows, weights, is_fast=False)
    assert packs_nothing_for_inputs(4096, 100, is_fast=True, is_faster=True)


def test_the_loop_makes_nearly_all_products_where_blas_has_shorter_vectors() -> None:
    faster = {"is_fast": True, "is_faster": True}
    for rows, k, n in product((2, 64, 4096), (16, 8192), (16, 100, 8192)):
        assert packs_nothing(rows, k * n, n, **faster) and packs_nothing_for_gradient(rows, k * n, n, **faster)
    assert packs_nothing(64, 9 * 16, 9, **faster) and not packs_nothing(64, 8 * 16, 8, **faster)
    assert not packs_nothing_for_gradient(64, 15 * 16, 15, **faster)


@needs_loops
@of_each_type
@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("rows", [1, 15, 16, 40, 300])
def test_a_step_is_the_same_whatever_makes_its_products(
    dtype: np.dtype, is_short: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for rounding: BLAS, or loops, of weights with fewer numbers than rows have, and with more."""
    monkeypatch.setattr(BlasThreads, "has_short_vectors", property(lambda _: is_short))
    draw = np.random.default_rng(2)
    x, y = draw.standard_normal((rows, 24)).astype(dtype), draw.standard_normal((rows, 2)).astype(dtype)
    net = mg.Network([mg.Dense(24, 70, "tanh"), mg.Dense(70, 33, "tanh"), mg.Dense(33, 2)], seed=1)
    w = {name: value.astype(np.float64) for name, value in net.parameters.items()}
    precision = "float32" if dtype == FLOAT32 else "float64"
    mg.Trainer(net, "squared_error", mg.SGD(1.0), batch_size=rows, precision=precision, backend="cpu").step(x, y)
    a = np.tanh(x @ w["0.weight"] + w["0.bias"])
    b = np.tanh(a @ w["1.weight"] + w["1.bias"])
    delta = b @ w["2.weight"] + w["2.bias"] - y
    of_b = (1 - b**2) * (delta @ w["2.weight"].T)
    of_a = (1 - a**2) * (of_b @ w["1.weight"].T)
    expected = {"0": x.T @ of_a, "1": a.T @ of_b, "2": b.T @ delta}
    for layer, gradient in expected.items():
        moved = w[f"{layer}.weight"] - net.parameters[f"{layer}.weight"]
        np.testing.assert_allclose(moved, gradient / rows, atol=200 * np.finfo(dtype).eps)


@needs_loops
@of_each_type
@pytest.mark.skipif(BLAS.products(FLOAT32) is None, reason="products of another BLAS than OpenBLAS")
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 5, 9), (17, 5, 9), (64, 33, 70)])
def test_products_of_blas_are_numpys(dtype: np.dtype, rows: int, k: int, n: int) -> None:
    blas = BLAS.products(dtype)
    assert blas is not None
    x, w, bits = numbers(dtype, (rows, k)), numbers(dtype, (k, n)), blas.bits
    y, flipped = np.empty((rows, n), dtype), np.empty((rows, n), dtype)
    call(dtype, f"product{bits}", blas.gemm, False, False, rows, n, k, x, k, w, n, y, n, False)
    bound = k * np.finfo(dtype).eps * (np.abs(x).astype(np.float64) @ np.abs(w))
    assert (np.abs(y - x.astype(np.float64) @ w) <= bound).all()
    call(dtype, f"product{bits}", blas.gemm, True, True, rows, n, k, x.T.copy(), rows, w.T.copy(), k, flipped, n, False)
    assert (np.abs(flipped - x.astype(np.float64) @ w) <= bound).all()
    if rows == 1:
        call(dtype, f"vector_product{bits}", blas.gemv, True, k, n, w, n, x, y, False)
        np.testing.assert_allclose(y, x @ w, rtol=1e-5, atol=1e-5)


@needs_loops
@of_each_type
@pytest.mark.parametrize("rows", [1, 3, 70, 130])
@pytest.mark.parametrize(("n_in", "window"), [(1, 1), (5, 5), (9, 4), (60, 33), (300, 9), (2100, 6)])
def test_locally_connected_layers(dtype: np.dtype, n_in: int, window: int, rows: int) -> None:
    n, spare = n_in - window + 1, 3  # columns of the arrays that nothing reads or writes
    x, dz = numbers(dtype, (rows, n_in + spare)), numbers(dtype, (rows, n + spare))
    w, bias = numbers(dtype, (window, n + spare)), numbers(dtype, (n,))
    of_x, of_dz, of_w = (array[:, :width].astype(np.float64) for array, width in ((x, n_in), (dz, n), (w, n)))
    pitches = n_in + spare, n + spare
    bound = 8.0 * np.finfo(dtype).eps

    def check(found: np.ndarray, terms: Sequence[np.ndarray]) -> None:
        sums, most = sum(terms), sum(map(np.abs, terms))
        assert (np.abs(found[:, : sums.shape[1]] - sums) <= bound * len(terms) * most).all()
        assert (found[:, sums.shape[1] :] == 7.0).all()

    windows = [of_x[:, r : r + n] for r in range(window)]
    for given, step in ((bias, 1), (bias[:1], 0), (None, 0)):
        z = np.full((rows, n + spare), 7.0, dtype)
        call(dtype, "local_forward", x, pitches[0], w, pitches[1], window, given, step, z, pitches[1], rows, n)
        biases = np.zeros((rows, n)) + (0.0 if given is None else given.astype(np.float64))
        check(z, [biases, *(seen * each for seen, each in zip(windows, of_w, strict=True))])
    dw = np.full((window, n + spare), 7.0, dtype)
    call(dtype, "local_gradient", dz, pitches[1], x, pitches[0], dw, pitches[1], window, rows, n)
    check(dw, [np.stack([delta * seen[i] for seen in windows]) for i, delta in enumerate(of_dz)])
    terms = []
    for r in range(window):
        terms.append(np.zeros((rows, n_in)))
        terms[-1][:, r : r + n] = of_dz * of_w[r]
    for parts in (1, 3):
        dx, ends = np.full((rows, n_in + spare), 7.0, dtype), [n_in * part // parts for part in range(parts + 1)]
        for first, end in pairwise(ends):
            into = dx[:, first:], pitches[0], rows, first, end
            call(dtype, "local_input_gradient", dz, pitches[1], w, pitches[1], window, n, *into)
        check(dx, terms)


@needs_loops
@of_each_type
def test_passes_that_add_copy_and_look(dtype: np.dtype) -> None:
    dz = numbers(dtype, (700, 300))
    sums, turned = np.empty(300, dtype), np.empty((300, 700), dtype)
    call(dtype, "column_sums", dz, sums, 700, 300, 300, False)
    np.testing.assert_allclose(sums, dz.sum(axis=0, dtype=np.float64), atol=1e-3)
    call(dtype, "transpose", dz, turned, 300, 700, 700)
    np.testing.assert_array_equal(turned, dz.T)
    mean, scale, y = numbers(dtype, (300,)), np.abs(numbers(dtype, (300,))) + 1, np.empty_like(dz)
    call(dtype, "standardize", dz, mean, scale, y, 700, 300)
    np.testing.assert_array_equal(y, (dz - mean) / scale)
    call(dtype, "unstandardize", y, mean, scale, y, 700, 300)
    np.testing.assert_allclose(y, dz, atol=1e-5)
    value, weight, both = dz[:, 0].copy(), np.abs(numbers(dtype, (700,))), np.empty(2)
    call(dtype, "weigh", None, value, y, 700, 300, both)
    np.testing.assert_allclose(both, (dz[:, 0].sum(dtype=np.float64), 700), rtol=1e-6)
    call(dtype, "weigh", weight, value, y, 700, 300, both)
    np.testing.assert_array_equal(value, dz[:, 0] * weight)
    np.testing.assert_allclose(both, (value.sum(dtype=np.float64), weight.sum(dtype=np.float64)), rtol=1e-6)
    for wrong in (np.nan, np.inf, -np.inf, None):
        found = np.zeros(1, np.int64)
        looked_at = numbers(dtype, (37,))
        if wrong is not None:
            looked_at[36] = wrong
        call(dtype, "find_infinite", looked_at, 37, found)
        assert bool(found[0]) is (wrong is not None)


# --- whole trainings ---


def trained(seed: int, dtype: np.dtype = FLOAT32) -> tuple[list[float], dict[str, np.ndarray], np.ndarray]:
    """Losses, parameters and predictions of a network drawn at random."""
    draw = np.random.default_rng(seed)
    names, widths = list(ACTIVATIONS), [int(n) for n in draw.integers(1, 70, 2 + seed % 4)]
    layers: list[Any] = [mg.Standardize(widths[0])] if seed % 3 else []
    if seed % 4 == 2:  # a stack, whose layers share a weight
        bias: Any = ("output", "layer", None)[seed % 3]
        local = mg.LocallyConnected(widths[0] + 6, 4, names[seed % len(names)], bias=bias)
        layers = [local, local]
    for place, (n_in, n_out) in enumerate(pairwise(widths)):
        layers.append(mg.Dense(n_in, n_out, names[(seed + place) % len(names)], bias=bool(draw.random() < 0.8)))
        if draw.random() < 0.3:
            layers.append(mg.Dropout(0.25))
    loss = list(FORMS)[seed % (len(FORMS) - 1)]
    is_class = loss in ("softmax_cross_entropy", "focal")
    n_out = 4 if is_class else 2
    layers.append(mg.Dense(widths[-1], n_out, init="fan_in_uniform"))
    rows = int(draw.integers(20, 200))
    x = draw.standard_normal((rows, widths[0] + 6 * (seed % 4 == 2)))
    y = draw.integers(0, n_out, rows) if is_class else np.abs(draw.standard_normal((rows, n_out))).clip(0, 1)
    weight = draw.uniform(0.5, 2.0, rows) if seed % 2 else None
    optimizer = list(OPTIMIZERS.values())[seed % len(OPTIMIZERS)](
        0.003, clip_norm=0.5 if seed % 5 == 0 else None, alpha=0.1 if seed % 4 == 0 else 0.0
    )
    net = mg.Network(layers, seed=seed)
    batch_size, streams = int(draw.integers(1, 40)), 1 + seed % 3
    options: Any = {"precision": str(dtype), "backend": "cpu", "threads": 1}
    trainer = mg.Trainer(net, loss, optimizer, batch_size=batch_size, streams=streams, **options)
    history = trainer.fit(mg.Dataset(x, y, weight), 4, validation=0.2, progress=False)
    return [*history["loss"], *history["validation_loss"]], dict(net.parameters), net.predict(x)


@needs_loops
@of_each_type
@pytest.mark.parametrize("seed", range(24))
@pytest.mark.usefixtures("forgotten")
def test_a_training_is_numpys_but_for_rounding(seed: int, dtype: np.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, parameters, predictions = trained(seed, dtype)
    monkeypatch.setenv("MLPGPU_LOOPS", "0")
    library_module._found.cache_clear()
    assert loops_name(dtype) == "NumPy"
    by_numpy, expected, predicted = trained(seed, dtype)
    rounding = 1.0 if dtype == np.float32 else 1e-7  # predictions are computed in float32 either way
    np.testing.assert_allclose(losses, by_numpy, rtol=2e-4 * rounding)
    for name, values in expected.items():
        np.testing.assert_allclose(parameters[name], values, rtol=5e-3 * rounding, atol=5e-4 * rounding, err_msg=name)
    np.testing.assert_allclose(predictions, predicted, rtol=1e-2, atol=1e-3)


# --- the compiler ---


def test_each_row_of_the_tables_has_a_loop() -> None:
    text = library_module.unit()
    assert all(f"LOOP(activate_{name}," in text for name in ACTIVATIONS)
    assert all(f"LOOP(update_{name}," in text for name in OPTIMIZERS)
    assert all(f"LOOP(loss_{form}," in text for form in FORMS if form not in library_module._LOSSES_OF_ROWS)


@pytest.mark.usefixtures("forgotten")
def test_without_a_compiler_numpy_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLPGPU_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert library(FLOAT32) is None
    assert why_not(FLOAT32) == f"{tmp_path / 'none'} is not there"
    assert trained(1)[0][-1] > 0.0


@pytest.mark.usefixtures("forgotten")
def test_a_compiler_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'loops.h:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("MLPGPU_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    assert why_not(FLOAT32) == f"{compiler}: loops.h:1: error: no such thing"
    assert not list((tmp_path / "loops").glob("*"))


@needs_loops
@pytest.mark.usefixtures("forgotten")
def test_a_damaged_file_of_the_cache_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLPGPU_CACHE", str(tmp_path))
    assert library(FLOAT32) is not None
    assert "compiling loops" in capsys.readouterr().err
    (made,) = (tmp_path / "loops").glob("*.so")
    whole = made.read_bytes()
    made.unlink()  # the one that is loaded stays as it is
    made.write_bytes(whole[:100])
    library_module._found.cache_clear()
    assert library(FLOAT32) is not None
    assert "compiling loops" in capsys.readouterr().err
    library_module._found.cache_clear()
    assert library(FLOAT32) is not None
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("forgotten")
def test_a_cache_that_cannot_be_written_leaves_it_to_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLPGPU_CACHE", str(tmp_path / "file"))
    assert library(FLOAT32) is None
    assert why_not(FLOAT32)


SANITIZED = """
import sys
from mlpgpu.backends.cpu.loops import library as made_by
module = sys.modules[made_by.__module__]
module.OPTIONS = (*(each for each in module.OPTIONS if each != "-O3"), "-O1", *{flags!r})
sys.path.insert(0, {folder!r})
import test_loops as tests
for dtype in tests.FLOAT32, tests.FLOAT64:
    assert made_by(dtype) is not None, module.why_not(dtype)
    for seed in range(12):
        tests.trained(seed, dtype)
    for shape in tests.SHAPES:
        for name in tests.ACTIVATIONS:
            tests.test_activations(dtype, name, shape)
    for rows, (k, n) in ((1, (9, 5)), (3, (33, 16)), (5, (20, 17)), (8, (7, 130))):
        tests.test_products_of_few_rows(dtype, rows, k, n)
print("done")
"""


@needs_loops
@pytest.mark.thorough
def test_loops_stay_within_their_arrays(tmp_path: Path) -> None:
    """Under the address and undefined-behaviour sanitizers."""
    run_sanitized(SANITIZED.format(flags=SANITIZERS, folder=str(Path(__file__).parent)), tmp_path)
    notes = [*(tmp_path / "loops").glob("*.json")]
    assert [set(json.loads(note.read_text())) for note in notes] == 2 * [{"sha256"}]
