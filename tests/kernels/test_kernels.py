"""Each kernel against the NumPy specification, on the host; and faults planted in them, each of which is found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn import first_and_drawn, share_of
from kernel_cases import all_cases, dense, losses, rows
from kernel_cases.case import UNWRITTEN, Case, batches, whole
from kernel_cases.rows import check_initialised, initialised_steps
from shim_runner import drawn_entries, plant, planted, program_name, run, run_case

from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import TILES, Entry, all_entries

ALL_CASES = all_cases()
CASES = [case for case in ALL_CASES if case.entry in drawn_entries()]
SMALLEST = TILES[-1]


def parameters() -> Iterator[Any]:
    """Cases, those of a program for one process; of all but the first one of an entry a part, for thorough runs."""
    first = {case.entry: case for case in reversed(CASES)}
    others = {id(case) for case in share_of([case for case in CASES if case is not first[case.entry]], 1 / 3, "cases")}
    for case in CASES:
        if case is first[case.entry] or id(case) in others:
            marks = [pytest.mark.xdist_group(program_name(case.entry))]
            marks += [pytest.mark.thorough] if id(case) in others else []
            yield pytest.param(case, id=f"{case.entry.name}-{case.name}", marks=marks)


@pytest.mark.parametrize("case", list(parameters()))
def test_kernel_against_numpy(case: Case) -> None:
    case.check(run_case(case))


def test_initialise_steps() -> None:
    check_initialised(run(kernels.initialise_steps(), 1, kernels.WARP, initialised_steps(40)), 40)


def test_every_entry_has_a_case() -> None:
    assert {case.entry for case in ALL_CASES} | {kernels.initialise_steps()} == set(all_entries())


@pytest.mark.parametrize("tile", TILES[:-1], ids=str)
def test_all_tiles_give_the_same_bits(tile: kernels.SimtTile) -> None:
    x, w = np.random.default_rng(1).normal(size=(2, 70, 70)).astype(np.float32)
    first, second = (run_case(dense.dense_forward("tanh", side, whole(70), x, w)) for side in (SMALLEST, tile))
    np.testing.assert_array_equal(first["y"].view(np.uint32), second["y"].view(np.uint32))
    first, second = (run_case(dense.dense_backward_weight(side, whole(70), 70, 70)) for side in (SMALLEST, tile))
    for name in ("dw", "db"):
        np.testing.assert_array_equal(first[name].view(np.uint32), second[name].view(np.uint32))


def test_tiles_whose_warps_share_k_give_the_same_bits() -> None:
    x, w = np.random.default_rng(1).normal(size=(2, 300, 300)).astype(np.float32)
    for made in (lambda tile: dense.dense_forward("tanh", tile, whole(70), x[:70], w),
                 lambda tile: dense.dense_backward_input("tanh", tile, whole(70), 30, 300)):  # fmt: skip
        first, second = (next(iter(run_case(made(tile)).values())) for tile in kernels.WARP_SPLIT_TILES)
        np.testing.assert_array_equal(first.view(np.uint32), second.view(np.uint32))


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    x, w = np.random.default_rng(2).normal(size=(2, 70, 70)).astype(np.float32)
    cases = [dense.dense_forward("tanh", SMALLEST, whole(rows), x[:rows], w) for rows in (1, 70)]
    alone, among = (run_case(case)["y"] for case in cases)
    np.testing.assert_array_equal(alone[0].view(np.uint32), among[0].view(np.uint32))


@pytest.mark.parametrize("count", [5, 118, 300])
def test_a_tail_adds_a_parts_sums_in_the_order_of_the_launch_that_else_does(count: int) -> None:
    rows, width = 3, 90
    tail = losses.tail("softmax_cross_entropy", "index", whole(rows), 7, width, cards=2, own=1, count=count)
    partials = np.random.default_rng(3).normal(size=(count, rows, width)).astype(np.float32)
    y = run_case(replace(tail, args={**tail.args, "partials": partials}))["y"][: rows * width]
    entry = kernels.dense_forward_sum_partials("identity")
    added = {"partials": partials, "b": None, "z": None, "kept": None, "keep": 1.0, "n": width, "count": count}
    of_part = {**whole(rows).args, **added, "capacity": rows, "y": np.zeros((rows, width), np.float32)}
    sums = run(entry, (4,), entry.threads, of_part)["y"]
    parameters = tail.args["parameters"]
    assert isinstance(parameters, np.ndarray)
    np.testing.assert_array_equal(y.reshape(rows, width), sums + sums + parameters[-width:])


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_tail_waits_for_no_sums_when_the_host_says_that_none_come(
    has_ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do launches behind one that was told; what the tail stores then is never read.  The host is asked earlier."""
    plant("fused/part_sums.cuh", "ROUNDS_OF_HOST = 1 << 16", "ROUNDS_OF_HOST = 512", tmp_path, monkeypatch)
    tail = losses.tail("softmax_cross_entropy", "index", whole(2), 7, 3, cards=2, own=1)
    table, memory = (np.array(tail.args[name]) for name in ("exchange", "memory"))
    table[3] += memory.size  # where the card with part 0 would be, from which nothing comes
    longer = np.concatenate([memory, memory])
    longer.view(np.uint32)[0] = has_ended
    aborted = np.full(1, not has_ended, np.uint32)
    left = run_case(replace(tail, args={**tail.args, "exchange": table, "memory": longer, "aborted": aborted}))[
        "memory"
    ]
    assert left.view(np.uint32)[0] == 1


# --- the comparison itself ---


def test_the_comparison_tells_wrong_from_right() -> None:
    case = rows.standardize(batches(31)[1], 5)
    output = case.outputs["y"]
    right = np.where(output.written, output.value, UNWRITTEN).astype(np.float32)
    case.check({"y": right})
    for row, wrong in ((0, np.nan), (0, np.inf), (0, right[0, 0] + 1e-4), (20, 0.0)):
        changed = right.copy()
        changed[row, 0] = wrong
        with pytest.raises(AssertionError, match=rf"standardize: y\[{row}, 0\] is"):
            case.check({"y": changed})


# --- planted faults ---

UPDATES_OF_TWO = kernels.tensor_backward_updates("Adam", kernels.cluster_split_tiles(kernels.BFLOAT16_PAIR)[1], 2)


def cases_of(entries: Iterable[Entry]) -> list[Case]:
    wanted = set(entries)
    return [case for case in ALL_CASES if case.entry in wanted]


FAULTS: Mapping[str, tuple[str, str, str, Entry]] = {
    "barrier removed in gemm_tile": (
        "gemm/simt.cuh",
        "        __syncthreads();\n        if (Columns::IS_SUMMED",
        "        if (Columns::IS_SUMMED",
        kernels.dense_forward("identity", SMALLEST),
    ),
    "slice overwritten before all warps have read it": (
        "gemm/warp_split.cuh",
        "        __syncthreads();  // all have read the slice before\n",
        "",
        kernels.dense_forward("identity", kernels.WARP_SPLIT_TILES[0]),
    ),
    "a warp's sum left out": (
        "gemm/warp_split.cuh",
        "warp < T::WARPS;",
        "warp + 1 < T::WARPS;",
        kernels.dense_forward("identity", kernels.WARP_SPLIT_TILES[1]),
    ),
    "rows of a lane mistaken where rows of A run along them": (
        "gemm/warp_split.cuh",
        "lane_row * T::ROWS + i",
        "lane_row + T::LANE_ROWS * i",
        kernels.dense_backward_weight(kernels.WARP_SPLIT_WEIGHT),
    ),
    "a bias's sum of one warp alone": (
        "gemm/warp_split.cuh",
        "sum_of_warps<T>(column_sums, T::N, threadIdx.x)",
        "column_sums[threadIdx.x]",
        kernels.dense_backward_update("SGD", kernels.WARP_SPLIT_WEIGHT),
    ),
    "columns of a lane mistaken where rows of B run along k": (
        "gemm/warp_split.cuh",
        "lane_column + T::LANE_COLUMNS * i",
        "lane_column + i",
        kernels.dense_backward_input("identity", kernels.WARP_SPLIT_TILES[1]),
    ),
    "border off by one in load_edge": (
        "gemm/simt.cuh",
        "start + 3 < length",
        "start + 3 <= length",
        kernels.dense_forward("identity", SMALLEST),
    ),
    "vectors from addresses that are not aligned": (
        "common/vectors.cuh",
        "(reinterpret_cast<uintptr_t>(data) % 16 == 0) && pitch % 4 == 0",
        "(reinterpret_cast<uintptr_t>(data) % 4 == 0) && pitch % 4 == 0",
        kernels.dense_forward("identity", SMALLEST),
    ),
    "last slice of a product left out": (
        "gemm/simt.cuh",
        "k0 < k_end; k0 += T::K",
        "k0 + T::K <= k_end; k0 += T::K",
        kernels.dense_forward("identity", SMALLEST),
    ),
    "partial left out in reduce": (
        "elementwise/update.cuh",
        "shard < shards; ++shard",
        "shard < shards - 1; ++shard",
        kernels.reduce(),
    ),
    "uses and shards swapped in reduce": (
        "elementwise/update.cuh",
        "sum += partials[shard * pitch + use * size + i]",
        "sum += partials[use * pitch + shard * size + i]",
        kernels.reduce(),
    ),
    "shards added one after another in reduce": (
        "elementwise/update.cuh",
        "const bool is_second = shard >> level & 1;",
        "const bool is_second = level < 1 && shard > 0;",
        kernels.reduce(),
    ),
    "index swapped in dense_backward_input": (
        "dense/dense.cuh",
        "dx[offset(row, column)] = value",
        "dx[offset(column, row)] = value",
        kernels.dense_backward_input("relu", SMALLEST),
    ),
    "dropout forgotten in the head": (
        "fused/head.cuh",
        "values[i] * keep",
        "values[i] / keep",
        kernels.head("huber", "dense"),
    ),
    "dropout forgotten in a column head": (
        "fused/column_head.cuh",
        "slopes[i] * keep",
        "slopes[i] / keep",
        kernels.head("huber", "dense", form=kernels.COLUMN_HEAD),
    ),
    "dropout forgotten in dense_backward_input": (
        "dense/dense.cuh",
        "derivative(of) * keep",
        "derivative(of) / keep",
        kernels.dense_backward_input("relu", SMALLEST),
    ),
    "dropout forgotten in tensor_backward_input": (
        "dense/tensor_dense.cuh",
        "Activation::derivative(of) * keep",
        "Activation::derivative(of) / keep",
        kernels.tensor_backward_input("relu", kernels.sm90_tiles(kernels.BFLOAT16)[-1]),
    ),
    "what a dropout left taken for what the activation left": (
        "dense/tensor_dense.cuh",
        "Activation::derivative(of * restore)",
        "Activation::derivative(of)",
        kernels.tensor_backward_input("tanh", kernels.sm90_tiles(kernels.BFLOAT16)[-1], drops=True),
    ),
    "elements kept of the row's first columns alone": (
        "gemm/staging.cuh",
        "pair_column(piece, i / 2 * KeptElements::OF_WORD / 8)",
        "pair_column(piece, 0)",
        kernels.tensor_forward("relu", kernels.sm90_tiles(kernels.BFLOAT16)[-1], drops=True),
    ),
    "the later elements of a dropped quad left out": (
        "math/kept_elements.cuh",
        "const bool is_later = 3 * APART >= OF_WORD",
        "const bool is_later = 3 * APART < OF_WORD",
        kernels.tensor_forward("relu", kernels.tiles_sharing_k(kernels.HALF)[0], drops=True),
    ),
    "a shard's dropout drawn from a block's first element on": (
        "elementwise/rows.cuh",
        "static_cast<uint32_t>(bits >> before)",
        "static_cast<uint32_t>(bits)",
        kernels.draw_dropouts(),
    ),
    "a dropout forgotten in dense_forward": (
        "dense/dense.cuh",
        "kept(kept.has(made.word, column), made.y)",
        "kept(kept.has(made.word, column) || row == 0, made.y)",
        kernels.dense_forward("relu", SMALLEST, drops=True),
    ),
    "last column's sum left out": (
        "dense/dense.cuh",
        "column_sum(db ? n : 0,",
        "column_sum(db ? n - 1 : 0,",
        kernels.dense_backward_weight(SMALLEST),
    ),
    "barrier removed in dense_backward_atomic": (
        "dense/atomic.cuh",
        "        __syncthreads();\n        for (int r = 0; r < T::R; ++r) {",
        "        for (int r = 0; r < T::R; ++r) {",
        kernels.dense_backward_atomic(),
    ),
    "last block of dropout skipped": (
        "elementwise/rows.cuh",
        "block * of.OF_WARP < end",
        "block * of.OF_WARP + of.OF_WARP < end",
        kernels.dropout(),
    ),
    "dropout's blocks counted from the shard's first row": (
        "elementwise/rows.cuh",
        "layer, place / DROPOUT_BLOCK",
        "layer, (place - first) / DROPOUT_BLOCK",
        kernels.dropout(),
    ),
    "wrong shard of rows": (
        "common/step.cuh",
        "rows * (shard + 1) / shards",
        "(rows * (shard + 1) + shards - 1) / shards",
        kernels.standardize(),
    ),
    "last batch taken for a full one": (
        "common/step.cuh",
        "const int64_t rows = batch_rows(*step);",
        "const int64_t rows = step->batch_rows;",
        kernels.gather("float32"),
    ),
    "order read from its start": (
        "elementwise/rows.cuh",
        "order[rows.order + rows.first + row]",
        "order[rows.first + row]",
        kernels.gather("uint8"),
    ),
    "last words of a row that several pieces make left out": (
        "primitives/take_rows.cuh",
        "if (word + j * lanes < words) to[word",
        "if (word + j * lanes < words - 1 || words < 128) to[word",
        kernels.take_partition(784 * 4),
    ),
    "rows of another partition taken": (
        "primitives/take_rows.cuh",
        "if (place < begin || place >= end) continue;",
        "if (place < begin || place > end) continue;",
        kernels.take_partition(4),
    ),
    "rows taken from beside a rank's part of a batch": (
        "primitives/take_rows.cuh",
        "static_cast<int64_t>(row / of_batch) * batch_rows + row % of_batch",
        "static_cast<int64_t>(row / of_batch) * (batch_rows - 1) + row % of_batch",
        kernels.take_partition(1),
    ),
    "step of a stored gradient along the other one twice": (
        "dense/tensor_update.cuh",
        "move_quads<true>(end, gradient, k, n);",
        "move_quads<true>(end, received, k, n);",
        kernels.move_weight("Momentum", kernels.BFLOAT16),
    ),
    "last quads of a weight not moved": (
        "dense/tensor_update.cuh",
        "const int quads = ceil_div(n, 4);",
        "const int quads = n / 4;",
        kernels.move_weight("Momentum", kernels.BFLOAT16_PAIR),
    ),
    "last words of a message left out": (
        "primitives/send_messages.cuh",
        "if (i + j * stride < count) target",
        "if (i + j * stride < count - 1) target",
        kernels.send_messages(),
    ),
    "first message alone sent": (
        "primitives/send_messages.cuh",
        "for (int i = 0; i < of.messages(); ++i) {",
        "for (int i = 0; i < 1; ++i) {",
        kernels.send_messages(),
    ),
    "bytes sent as words": (
        "primitives/send_messages.cuh",
        "else if (ends % sizeof(unsigned) == 0)",
        "else if (bytes % sizeof(unsigned) == 0)",
        kernels.send_messages(),
    ),
    "word that a card has waited for left there": (
        "primitives/send_messages.cuh",
        "    *word = 0;",
        "",
        kernels.send_messages(),
    ),
    "receiver not told that a message is there": (
        "primitives/send_messages.cuh",
        "__syncthreads();\n    if (is_receiver) store_for_card(of.told(peer), 1);",
        "__syncthreads();",
        kernels.send_messages(),
    ),
    "barrier removed between two sums of a block": (
        "common/batch_total.cuh",
        "    value = block_sum(value, scratch);\n    __syncthreads();\n",
        "    value = block_sum(value, scratch);\n",
        kernels.loss("huber", "dense"),
    ),
    "barrier removed where rows of a tile change hands": (
        "gemm/simt.cuh",
        "        __syncthreads();\n        finish_rows<ROWS",
        "        finish_rows<ROWS",
        kernels.dense_backward_update("SGD", SMALLEST),
    ),
    "another block than the last one adds up": (
        "common/reduce.cuh",
        "arrival.before == blocks - 1",
        "arrival.before + 2 == blocks",
        kernels.dense_backward_update_by_parts("SGD", kernels.WARP_SPLIT_WEIGHT),
    ),
    "another block than the last one adds the losses up": (
        "common/batch_total.cuh",
        "before, 0) != static_cast<unsigned>(blocks - 1))",
        "before, 0) + 2 != static_cast<unsigned>(blocks))",
        kernels.loss("huber", "dense"),
    ),
    "another block of the head than the last one adds up": (
        "common/batch_total.cuh",
        "before, 0) != static_cast<unsigned>(blocks - 1))",
        "before, 0) + 2 != static_cast<unsigned>(blocks))",
        kernels.head("huber", "dense"),
    ),
    "first warp of the head left out": (
        "fused/head.cuh",
        "for (int i = 0; i < T::WARPS; ++i)\n            if (i * T::OF_WARP < k)",
        "for (int i = 1; i < T::WARPS; ++i)\n            if (i * T::OF_WARP < k)",
        kernels.head("huber", "dense"),
    ),
    "what lies after the last row of W not cleared": (
        "fused/head.cuh",
        "all = ceil_div(end - first",
        "all = ceil_div(min(depth, end) - first",
        kernels.head("huber", "dense"),
    ),
    "a lane keeps what it should send away": (
        "common/reduce.cuh",
        "low = values[i], high = values[i + width]",
        "low = values[i + width], high = values[i]",
        kernels.head("huber", "dense"),
    ),
    "a lane of a whole batch keeps what it should send away": (
        "common/reduce.cuh",
        "low = values[i], high = values[i + left]",
        "low = values[i + left], high = values[i]",
        kernels.dense_backward_whole_batch("SGD", kernels.WHOLE_BATCHES[0]),
    ),
    "all rows of dz taken to begin as the first one does": (
        "whole_batch/copies.cuh",
        "static_cast<unsigned>(row) % 4 * n)",
        "static_cast<unsigned>(row) % 1 * n)",
        kernels.dense_backward_whole_batch("SGD", kernels.WHOLE_BATCHES[0]),
    ),
    "what lies behind a row of dz not cleared": (
        "whole_batch/copies.cuh",
        "    if (left >= 4) {",
        "    if (left > 0) {",
        kernels.dense_backward_whole_batch("SGD", kernels.WHOLE_BATCHES[0]),
    ),
    "a chunk of W multiplied before all of it has come": (
        "whole_batch/tensor_backward.cuh",
        "__syncthreads();  // the chunk is there for all, and all have moved the one before",
        "__syncwarp();",
        kernels.dense_backward_tensor_whole_batch("SGD", 32, 2),
    ),
    "fragments of rows that there are not left as they are": (
        "whole_batch/tensor_backward.cuh",
        "const int left_rows = rows.count - lane_row_of_tile();",
        "const int left_rows = T::ROWS;",
        kernels.dense_backward_tensor_whole_batch("SGD", 32, 2),
    ),
    "the sums of dx of the first columns left out": (
        "whole_batch/tensor_backward.cuh",
        "for (unsigned block = 0; gridDim.y > 1",
        "for (unsigned block = 1; gridDim.y > 1",
        kernels.dense_backward_tensor_whole_batch("Nesterov", 32, 2),
    ),
    "the end of rows of dz not copied": (
        "whole_batch/backward.cuh",
        "if (end_row < rows.count)\n",
        "if (end_row + 1 < rows.count)\n",
        kernels.dense_backward_whole_batch("SGD", kernels.WHOLE_BATCHES[0]),
    ),
    "rows of dz that there are not left as they were": (
        "whole_batch/backward.cuh",
        "stage < T::STAGES; ++stage) staged_dz",
        "stage + 1 < T::STAGES; ++stage) staged_dz",
        kernels.dense_backward_whole_batch("Adam", kernels.WHOLE_BATCHES[0]),
    ),
    "the end of rows of W not copied": (
        "whole_batch/backward.cuh",
        "if (lane < ARRAYS * T::LANE_ROWS && row",
        "if (lane + 1 < ARRAYS * T::LANE_ROWS && row",
        kernels.dense_backward_whole_batch("Adam", kernels.WHOLE_BATCHES[0]),
    ),
    "a chunk of W copied where the one before is read": (
        "whole_batch/backward.cuh",
        "? ahead : ahead - T::STAGES)",
        "? ahead - 1 : ahead - T::STAGES)",
        kernels.dense_backward_whole_batch("Momentum", kernels.WHOLE_BATCHES[-1]),
    ),
    "rows of W taken for whole at their ends": (
        "whole_batch/backward.cuh",
        "left >= T::COLUMNS + 4 ? fetch<true>",
        "left >= 0 ? fetch<true>",
        kernels.dense_backward_whole_batch("Adam", kernels.WHOLE_BATCHES[1]),
    ),
    "a block moves the biases of its first chunk alone": (
        "whole_batch/backward.cuh",
        "until_bias = gridDim.x;",
        "until_bias = -1;",
        kernels.dense_backward_whole_batch("Adam", kernels.WHOLE_BATCHES[1]),
    ),
    "the second of two numbers that are no vector not copied": (
        "whole_batch/copies.cuh",
        "copy_or_clear(to + 1, from + 1, left > 1);",
        "copy_or_clear(to + 1, from + 1, left > 2);",
        kernels.dense_forward_whole_batch(kernels.WHOLE_BATCHES[0]),
    ),
    "rows of x read where other banks would have them": (
        "whole_batch/forward.cuh",
        "place_of_x(lane_row, part);",
        "lane_row * T::K + 4 * part;",
        kernels.dense_forward_whole_batch(kernels.WHOLE_BATCHES[-1]),
    ),
    "rows of W taken to begin as their tile's first one does": (
        "whole_batch/forward.cuh",
        "lead_of(w + n0, row, n);",
        "lead_of(w + n0, 0, n);",
        kernels.dense_forward_whole_batch(kernels.WHOLE_BATCHES[0], 32),
    ),
    "the end of a tile's rows of W not copied": (
        "whole_batch/forward.cuh",
        "if (HAS_LEADS && row < T::K)",
        "if (HAS_LEADS && row + 1 < T::K)",
        kernels.dense_forward_whole_batch(kernels.WHOLE_BATCHES[1], 64),
    ),
    "what lies behind the last row of W multiplied": (
        "whole_batch/forward.cuh",
        "row < rows ? left : -4",
        "row < rows ? left : 0",
        kernels.dense_forward_whole_batch(kernels.WHOLE_BATCHES[-1], 32),
    ),
    "what lies behind W's columns in a row head not cleared": (
        "fused/row_head.cuh",
        "row < k ? __ldcg(from) : 0.0f;",
        "__ldcg(row < k ? from : w);",
        kernels.head("huber", "dense", form=kernels.ROW_HEAD),
    ),
    "a row head's second row taken for the first": (
        "fused/row_head.cuh",
        "{deltas[j], deltas[T::MOST_COLUMNS + j]}",
        "{deltas[j], deltas[j]}",
        kernels.head("huber", "dense", form=kernels.ROW_HEAD),
    ),
    "errors of a row head added up before all are there": (
        "fused/row_head.cuh",
        "    __syncthreads();  // all errors are there\n",
        "",
        kernels.head("huber", "dense", form=kernels.ROW_HEAD),
    ),
    "x of a row head kept where its row is longer": (
        "fused/row_head.cuh",
        "saved == x && k <= T::DEPTH",
        "saved == x && k <= 2 * T::DEPTH",
        kernels.head("squared_error", "dense", form=kernels.ROW_HEAD),
    ),
    "sums of a cluster's last block left out": (
        "whole_batch/forward.cuh",
        "block < SPLIT; ++block)",
        "block + 1 < SPLIT; ++block)",
        kernels.dense_forward_whole_batch(kernels.WHOLE_BATCHES[0], split=4),
    ),
    "sums of a cluster's blocks read before they are there": (
        "whole_batch/forward.cuh",
        "        cluster_synchronize<SPLIT>();\n        for (int i",
        "        for (int i",
        kernels.dense_forward_whole_batch(kernels.WHOLE_BATCHES[-1], 32, 2),
    ),
    "all blocks of a cluster take the slices of the first one": (
        "whole_batch/forward.cuh",
        "first_row = (cluster_rank<SPLIT>() * T::WARPS + warp) * T::K;",
        "first_row = warp * T::K;",
        kernels.dense_forward_whole_batch(kernels.WHOLE_BATCHES[1], split=8),
    ),
    "a piece of a long row split with the scale of the others": (
        "gemm/split_operands.cuh",
        "first + (n - 1) / piece * piece : first;",
        "first : first;",
        kernels.split_weights(kernels.HALF),
    ),
    "pieces of a long row behind the first one not split": (
        "gemm/split_operands.cuh",
        "if (begin >= pitch) break;",
        "break;",
        kernels.split_rows(kernels.BFLOAT16_PAIR),
    ),
    "flags of columns forgotten": (
        "gemm/split_operands.cuh",
        "if ((missing[0] | missing[1] | missing[2] | missing[3]) == 0) return;",
        "if ((missing[0] | missing[1] | missing[2]) == 0) return;",
        kernels.split_weights(kernels.HALF),
    ),
    "a zero flagged as a number": (
        "gemm/operand_formats.cuh",
        "flags[i] = is_zero ? 0 : NONZERO;",
        "flags[i] = NONZERO;",
        kernels.split_rows(kernels.HALF_PAIR),
    ),
    "flags of a number that is not exact are those of exact ones": (
        "gemm/operand_formats.cuh",
        "are_exact & (is_zero | (fabsf(scaled[i]) >= LEAST_EXACT))",
        "are_exact & (i > 0 || is_zero | (fabsf(scaled[i]) >= LEAST_EXACT))",
        kernels.split_rows(kernels.HALF_PAIR),
    ),
    "a small element not flagged": (
        "gemm/operand_formats.cuh",
        "(fabsf(x) >= LEAST_NORMAL && size < LEAST_EXACT)",
        "(fabsf(x) >= 1.0f && size < LEAST_EXACT)",
        kernels.split_weights(kernels.HALF),
    ),
    "barrier removed before sums take the place of dz": (
        "whole_batch/backward.cuh",
        "    sums_to_lanes(of_dx);\n    __syncthreads();",
        "    sums_to_lanes(of_dx);",
        kernels.dense_backward_whole_batch("SGD", kernels.WHOLE_BATCHES[0]),
    ),
    "a slice of a tail's sums left out": (
        "fused/tail.cuh",
        "for (int s = 1; s < slices; ++s) sum",
        "for (int s = 2; s < slices; ++s) sum",
        kernels.tail("huber", "dense"),
    ),
    "a warp's sums of deltas left out": (
        "elementwise/delta_sums.cuh",
        "for (int w = 0; w < T::WARPS; ++w) total",
        "for (int w = 1; w < T::WARPS; ++w) total",
        kernels.sum_deltas(kernels.BFLOAT16),
    ),
    "a layer's first columns taken for the one before it": (
        "elementwise/delta_sums.cuh",
        "block -= before, found",
        "found",
        kernels.sum_deltas(kernels.BFLOAT16),
    ),
    "barrier removed before warps' sums of deltas are added up": (
        "elementwise/delta_sums.cuh",
        "sum);\n    __syncthreads();\n    const int of_column",
        "sum);\n    const int of_column",
        kernels.sum_deltas(kernels.BFLOAT16),
    ),
    "rows of a run's end left out": (
        "elementwise/delta_sums.cuh",
        "ceil_div(rows, static_cast<int>(gridDim.y))",
        "rows / static_cast<int>(gridDim.y)",
        kernels.sum_deltas(kernels.BFLOAT16),
    ),
    "a run of a part's sums left out": (
        "fused/tail.cuh",
        "for (int r = 1; r < Tail::RUNS; ++r) sum",
        "for (int r = 2; r < Tail::RUNS; ++r) sum",
        kernels.tail("softmax_cross_entropy", "index"),
    ),
    "sums of every step put to one place of an inbox": (
        "fused/part_sums.cuh",
        "(sequence % 2 * count() + part) * size",
        "(sequence % 1 * count() + part) * size",
        kernels.tail("softmax_cross_entropy", "index"),
    ),
    "a card's sums sent to the place of another's": (
        "fused/part_sums.cuh",
        "word(part, own(), i, sequence), FlaggedWord",
        "word(part, part, i, sequence), FlaggedWord",
        kernels.tail("softmax_cross_entropy", "index"),
    ),
    "messages of a row not counted": (
        "fused/tail.cuh",
        "if (threadIdx.x == 0) *sent = sequence;",
        "",
        kernels.tail("softmax_cross_entropy", "index"),
    ),
    "a layer's first block takes the place of another": (
        "fused/update_layers.cuh",
        "block - layer.first, layer",
        "block, layer",
        kernels.update_layers("Momentum", None),
    ),
    "a tile's parts of the rows counted with another tile's": (
        "fused/update_layers.cuh",
        "rows.arrived + layer.first + tile",
        "rows.arrived + layer.first",
        kernels.update_layers("Adam", kernels.WARP_SPLIT_WEIGHT, by_parts=True),
    ),
    "a tile taken for a part of the rows": (
        "fused/update_layers.cuh",
        "tile = place % tiles, which = place / tiles",
        "tile = place / layer.parts, which = place / tiles",
        kernels.update_layers("Adam", kernels.WARP_SPLIT_WEIGHT, by_parts=True),
    ),
    "a block given to the layer before its own": (
        "fused/tensor_updates.cuh",
        "if (tile >= each.first) of = each;",
        "if (tile > each.first) of = each;",
        UPDATES_OF_TWO,
    ),
    "a second layer's tiles counted from the grid's first one": (
        "fused/tensor_updates.cuh",
        "    tile -= of.first;\n",
        "",
        UPDATES_OF_TWO,
    ),
    "components of dz taken a row too near each other": (
        "fused/tensor_updates.cuh",
        "padded_rows(capacity) * padded_columns(of.n), rows.count",
        "(padded_rows(capacity) - 1) * padded_columns(of.n), rows.count",
        UPDATES_OF_TWO,
    ),
    "biases moved by the first block of their cluster alone": (
        "fused/tensor_updates.cuh",
        "rank * QUADS + threadIdx.x",
        "static_cast<int>(threadIdx.x)",
        UPDATES_OF_TWO,
    ),
    "rows of a bias left out": (
        "fused/tensor_updates.cuh",
        "for (int l = 0; l < LANES",
        "for (int l = 1; l < LANES",
        UPDATES_OF_TWO,
    ),
    "a block's rows of a bias left out": (
        "fused/tensor_updates.cuh",
        "for (int block = 0; block < BLOCKS",
        "for (int block = 1; block < BLOCKS",
        UPDATES_OF_TWO,
    ),
    "a bias's first rows summed by every block": (
        "fused/tensor_updates.cuh",
        "rows * rank / BLOCKS + lane",
        "lane",
        UPDATES_OF_TWO,
    ),
    "barrier removed before a bias's sums are read": (
        "fused/tensor_updates.cuh",
        "sum);\n    __syncthreads();\n    float* const sums",
        "sum);\n    float* const sums",
        UPDATES_OF_TWO,
    ),
    "a bias's sums read before all blocks have theirs": (
        "fused/tensor_updates.cuh",
        "    cluster_synchronize<BLOCKS>();\n    constexpr int QUADS",
        "    constexpr int QUADS",
        UPDATES_OF_TWO,
    ),
    "a bias moved while the launch before makes its delta": (
        "fused/tensor_updates.cuh",
        "    pdl_wait_and_trigger();\n    end.begin();",
        "    end.begin();",
        UPDATES_OF_TWO,
    ),
    "rows of dz staged second left out": (
        "dense/small_n_update.cuh",
        "row0 += T::STAGED_ROWS",
        "row0 += 2 * T::STAGED_ROWS",
        kernels.dense_backward_update("Adam", "few_columns"),
    ),
    "a bias moved by the sum of the first rows alone": (
        "dense/small_n_update.cuh",
        "of_column += delta[threadIdx.x]",
        "of_column = delta[threadIdx.x]",
        kernels.dense_backward_update("Momentum", "few_columns"),
    ),
    "the order applied to inputs of a hidden layer": (
        "fused/update_layers.cuh",
        "is_first ? order : nullptr,",
        "order,",
        kernels.update_layers("SGD", kernels.WARP_SPLIT_WEIGHT),
    ),
    "a weight's last row taken for the bias": (
        "fused/row_step.cuh",
        "of_layer + k * pitch : nullptr",
        "of_layer + (k - 1) * pitch : nullptr",
        kernels.row_step("huber", "dense"),
    ),
    "barrier removed before a level is finished": (
        "fused/row_step.cuh",
        "            __syncthreads();\n            float* const stored",
        "            float* const stored",
        kernels.row_step("huber", "dense"),
    ),
    "rows of a weight in shared memory that overlap": (
        "fused/row_step.cuh",
        "(levels[l - 1].n + 1) * row_step_pitch(levels[l].n);",
        "levels[l - 1].n * row_step_pitch(levels[l].n);",
        kernels.row_step("huber", "dense"),
    ),
    "barrier removed in the head": (
        "fused/head.cuh",
        "            __syncthreads();\n            if (thread.computes(k - k0)) add_products",
        "            if (thread.computes(k - k0)) add_products",
        kernels.head("huber", "dense"),
    ),
    "barrier removed before x comes to a column head": (
        "fused/column_head.cuh",
        "staged);\n        __syncthreads();\n        for (int done",
        "staged);\n        for (int done",
        kernels.head("huber", "dense", form=kernels.FEW_ROWS_HEAD),
    ),
    "the shares of a cluster's head read before all are there": (
        "fused/column_head.cuh",
        "        cluster_synchronize<T::SPLIT>();  // all shares are there\n",
        "",
        kernels.head("huber", "dense", form=kernels.CLUSTER_HEAD),
    ),
    "the first share of a cluster's head left out": (
        "fused/column_head.cuh",
        "for (int other = 0; other < T::SPLIT; ++other)",
        "for (int other = 1; other < T::SPLIT; ++other)",
        kernels.head("huber", "dense", form=kernels.CLUSTER_HEAD),
    ),
    "x overwritten while a column head reads it": (
        "fused/column_head.cuh",
        "        if (k0 > k_begin) __syncthreads();  // x before has been read\n",
        "",
        kernels.head("huber", "dense", form=kernels.COLUMN_HEAD),
    ),
    "W's columns overwritten while a column head reads them": (
        "fused/column_head.cuh",
        "            __syncthreads();  // the columns before have been read\n",
        "",
        kernels.head("huber", "dense", form=kernels.COLUMN_HEAD),
    ),
    "a later batch of W taken from its start": (
        "fused/column_head.cuh",
        "column.load(w, k0 + done, k0",
        "column.load(w, k0, k0",
        kernels.head("huber", "dense", form=kernels.FEW_ROWS_HEAD),
    ),
    "what lies after the last x of a column head not cleared": (
        "fused/column_head.cuh",
        "min(k0 + first + i * stride, depth)",
        "(k0 + first + i * stride)",
        kernels.head("huber", "dense", form=kernels.COLUMN_HEAD),
    ),
    "a column head's threads of other columns left out": (
        "fused/column_head.cuh",
        "for (int i = lane / lanes; i < stride",
        "for (int i = lane / lanes; i < stride - 1",
        kernels.head("huber", "dense", form=kernels.FEW_ROWS_HEAD),
    ),
    "each block of the same rows makes the first part of dx": (
        "fused/column_head.cuh",
        ": own * part, stride",
        ": 0 * part, stride",
        kernels.head("huber", "dense", form=kernels.FEW_ROWS_HEAD),
    ),
    "the slots of a bias taken for the weight's": (
        "dense/update.cuh",
        "of_bias = {bias, bias_slots, size, n, scale, row};\n    gemm",
        "of_bias = {bias, bias ? weight_slots : bias_slots, size, n, scale, row};\n    gemm",
        kernels.dense_backward_update("Momentum", SMALLEST),
    ),
    "a part of the rows left out": (
        "dense/split_k.cuh",
        "for (int i = 0; i < parts; ++i)\n",
        "for (int i = 1; i < parts; ++i)\n",
        kernels.dense_backward_update_by_parts("SGD", kernels.WARP_SPLIT_WEIGHT),
    ),
    "rows behind the last one added to a strip": (
        "gemm/strip.cuh",
        "is_inside = k0 + k_of(i) < k_end && has",
        "is_inside = has",
        kernels.dense_backward_update_by_parts("SGD", kernels.STRIPS[0]),
    ),
    "sums of a strip added up before all warps have left theirs": (
        "gemm/strip.cuh",
        "    __syncthreads();\n    for (int element",
        "    for (int element",
        kernels.dense_backward_update_by_parts("Adam", kernels.STRIPS[3]),
    ),
    "rows behind the last one added to a bias by a strip of few rows": (
        "gemm/strip.cuh",
        "if (k0 + i < k_end && w < of_wide.outer) four",
        "if (w < of_wide.outer) four",
        kernels.dense_backward_update_by_parts("SGD", kernels.STRIPS[-1]),
    ),
    "a strip's inputs read before all lanes have left theirs": (
        "gemm/strip.cuh",
        "        __syncwarp();\n        const Slice slice",
        "        const Slice slice",
        kernels.dense_backward_update_by_parts("Adam", kernels.STRIPS[-1]),
    ),
    "sums of columns left before a strip's own are read": (
        "gemm/strip.cuh",
        "    __syncthreads();\n    put_columns(shared);",
        "    put_columns(shared);",
        kernels.dense_backward_update_by_parts("Momentum", kernels.STRIPS[-2]),
    ),
    "a tile of few terms multiplied before all inputs are there": (
        "gemm/strip.cuh",
        "    __syncthreads();\n#pragma unroll 2",
        "#pragma unroll 2",
        kernels.dense_forward("relu", kernels.SHORT_TILES[0]),
    ),
    "a quad's elements of the next row moved by the row's own input": (
        "whole_batch/outer_products.cuh",
        "next_row = min(row + 1, k - 1);",
        "next_row = min(row, k - 1);",
        kernels.dense_update_outer_products("SGD", 2),
    ),
    "a bias moved by the rows of another shard": (
        "whole_batch/outer_products.cuh",
        "sum += dz[static_cast<int64_t>(rows.first + r) * n + column];",
        "sum += dz[static_cast<int64_t>(r) * n + column];",
        kernels.dense_update_outer_products("SGD", 2),
    ),
    "a tile moved before all parts have arrived": (
        "dense/split_k.cuh",
        "shared, parts)) return;",
        "shared, parts - (parts > 1))) return;",
        kernels.dense_backward_update_by_parts("SGD", kernels.WARP_SPLIT_WEIGHT),
    ),
    "a barrier removed before dz is staged again": (
        "dense/small_n_update.cuh",
        "        if (row0 > 0) __syncthreads();\n        float values[T::BATCH][T::PER_LANE]",
        "        float values[T::BATCH][T::PER_LANE]",
        kernels.dense_backward_update("Momentum", "small_n"),
    ),
    "the gradient of a bias stored among a weight's": (
        "dense/small_n_update.cuh",
        "static_cast<int64_t>(row) * n : db)[column] = sum;",
        "static_cast<int64_t>(row) * n : dw)[column] = sum;",
        kernels.dense_backward_weight(None),
    ),
    "a team's sums of the next step's z left out": (
        "dense/few_rows_update.cuh",
        "for (int t = 1; t < teams; ++t) sum",
        "for (int t = 2; t < teams; ++t) sum",
        kernels.dense_update_few_rows("Momentum"),
    ),
    "a product of components left out": (
        "gemm/split_sm80.cuh",
        "for (int both = T::COMPONENTS - 1; both",
        "for (int both = T::COMPONENTS - 2; both",
        kernels.dense_forward_split_k(kernels.SPLIT_SM80),
    ),
    "what does not split is taken as it is": (
        "gemm/split_sm80.cuh",
        "if (!splits(rest[e])) flags",
        "if (!splits(rest[e]) && e < 0) flags",
        kernels.dense_forward_split_k(kernels.SPLIT_SM80),
    ),
    "barrier removed before C takes the slices' place": (
        "gemm/split_sm80.cuh",
        "    __syncthreads();\n#pragma unroll\n    for (int j = 0; j < T::FRAGMENTS; ++j)\n#pragma unroll\n"
        "        for (int half",
        "#pragma unroll\n    for (int j = 0; j < T::FRAGMENTS; ++j)\n#pragma unroll\n        for (int half",
        kernels.dense_forward_split_k(kernels.SPLIT_SM80),
    ),
    "a warpgroup's products of components left out": (
        "gemm/split_sm90.cuh",
        "for (int both = T::COMPONENTS - 1; both",
        "for (int both = T::COMPONENTS - 2; both",
        kernels.dense_forward_split_k(kernels.SPLIT_SM90),
    ),
    "a stage of the ring is released before it was read": (
        "gemm/split_sm90.cuh",
        "        ring_b.wait_full();\n",
        "        ring_b.wait_full();\n        if (lane == 0) barrier_arrive<1>(ring_b.empty + 8 * ring_b.stage, 0);\n",
        kernels.dense_forward_split_k(kernels.SPLIT_SM90),
    ),
    "what is recomputed is put away as it is": (
        "gemm/split_sm90.cuh",
        "is_right ? elements[i] : recompute(row(i), column(i))",
        "is_right ? elements[i] : 0 * recompute(row(i), column(i)) + elements[i]",
        kernels.dense_forward_split_k(kernels.SPLIT_SM90),
    ),
    "the last slot is updated, but not stored": (
        "arch/bulk_tile.cuh",
        "for (int i = 0; i < ARRAYS; ++i) bulk_store",
        "for (int i = 0; i < ARRAYS - 1; ++i) bulk_store",
        kernels.dense_update_few_rows("Momentum", stream=True),
    ),
    "sums of a tile of large k are read before they are complete": (
        "dense/large_k_update.cuh",
        "barrier_wait(summed + 8 * group, tile / T::GROUPS % 2);",
        "",
        kernels.dense_backward_update("Momentum", "large_k"),
    ),
    "a stage is loaded again before its rows are stored": (
        "dense/few_rows_stream.cuh",
        "const int freed = ring.stage == 0 ? stages - 1 : ring.stage - 1;",
        "const int freed = ring.stage == stages - 1 ? 0 : ring.stage + 1;",
        kernels.dense_update_few_rows("Momentum", stream=True),
    ),
    "pieces of few rows' product overlap": (
        "dense/few_rows.cuh",
        "piece.fetch(w + static_cast<int64_t>(k0 + piece_depth) * n",
        "piece.fetch(w + static_cast<int64_t>(k0) * n",
        kernels.dense_forward_few_rows(),
    ),
    "rounds of the ring not told apart": (
        "arch/ring.cuh",
        "stage = 0, parity ^= 1;",
        "stage = 0;",
        kernels.tensor_backward_weight(kernels.sm90_tiles(kernels.BFLOAT16)[-1]),
    ),
    "a block's portion of the cluster's slice not loaded": (
        "gemm/gemm_sm90.cuh",
        "slice * T::K, component, rank);",
        "slice * T::K, component, 0);",
        kernels.tensor_backward_weight(kernels.sm90_tiles(kernels.BFLOAT16)[0]),
    ),
    "sums of one block taken for those of all that share the rows": (
        "gemm/cluster_split.cuh",
        "* PITCH + column()), block);",
        "* PITCH + column()), 0);",
        kernels.tensor_backward_update("Adam", kernels.cluster_split_tiles(kernels.BFLOAT16)[-1]),
    ),
    "sums of a cluster's blocks read before all have left theirs": (
        "gemm/cluster_split.cuh",
        "        load(0);\n        cluster_synchronize<SPLIT>();",
        "        load(0);\n        __syncthreads();",
        kernels.tensor_backward_update("Adam", kernels.cluster_split_tiles(kernels.BFLOAT16)[1]),
    ),
    "columns of rows that are no vectors not spread over lanes": (
        "gemm/cluster_split.cuh",
        "if (APART > 1) quad = spread(first + i, rank, quad);",
        "",
        kernels.tensor_backward_update("Adam", kernels.cluster_split_tiles(kernels.BFLOAT16_PAIR)[1]),
    ),
    "clusters waiting for slices of tiles that a smaller batch lacks": (
        "gemm/cluster_split.cuh",
        "if (tile.is_done()) {",
        "if (false) {",
        kernels.tensor_forward("tanh", kernels.tiles_sharing_k(kernels.BFLOAT16)[0]),
    ),
    "sums left in the ring before every warp has read its stages": (
        "gemm/cluster_split.cuh",
        "        __syncthreads();  // nobody reads the stages any more\n",
        "",
        kernels.tensor_backward_update("Adam", kernels.cluster_split_tiles(kernels.BFLOAT16)[0]),
    ),
    "rows of 32 bytes stepped through as rows of 128": (
        "gemm/gemm_sm90.cuh",
        "16 * T::B_ROW_BYTES;",
        "16 * T::ROW_BYTES;",
        kernels.tensor_forward("identity", kernels.narrow_tiles(kernels.BFLOAT16)[-1]),
    ),
    "rows of 32 bytes told apart by the wrong swizzle": (
        "arch/wgmma.cuh",
        "SWIZZLE = ROW_BYTES == 128 ? 1 : 3;",
        "SWIZZLE = 1;",
        kernels.tensor_forward("identity", kernels.narrow_tiles(kernels.BFLOAT16)[-1]),
    ),
    "lanes that take the rows of a narrow tile in turns not added up": (
        "gemm/gemm_sm90.cuh",
        "sums[q] = add_lanes(sums[q], other);",
        "sums[q] = sums[q];",
        kernels.tensor_backward_update("Adam", kernels.narrow_tiles(kernels.BFLOAT16)[0]),
    ),
    "staging tile read before it is whole": (
        "gemm/staging.cuh",
        "            stage(c + piece * (WIDTH / 2), staging);\n            __syncwarp();\n",
        "            stage(c + piece * (WIDTH / 2), staging);\n",
        kernels.tensor_backward_weight(kernels.sm90_tiles(kernels.BFLOAT16)[-1]),
    ),
    "component's rows read before they are staged": (
        "gemm/staging.cuh",
        "= saved[component][v];\n        __syncwarp();\n",
        "= saved[component][v];\n",
        kernels.tensor_backward_input("gelu", kernels.sm90_tiles(kernels.BFLOAT16)[-1]),
    ),
    "a number that rounding makes infinite stays so": (
        "gemm/operand_formats.cuh",
        "    if ((word & 0x7fff) == 0x7f80) word = __float_as_uint(x) >> 16;\n",
        "",
        kernels.split_rows(kernels.BFLOAT16_PAIR),
    ),
    "row of a slice left out of a bias's partial sum": (
        "gemm/gemm_sm90.cuh",
        "T::K * (part + 1) / parts : 0",
        "T::K * (part + 1) / parts - 1 : 0",
        kernels.tensor_backward_update("Adam", kernels.sm90_tiles(kernels.BFLOAT16)[-1]),
    ),
    "a warp that sums a bias's gradient not waited for": (
        "gemm/gemm_sm90.cuh",
        "warp > 0 && warp <= summing_warps((m + T::M - 1) / T::M))",
        "warp == 1)",
        kernels.tensor_backward_update("Adam", kernels.sm90_tiles(kernels.BFLOAT16)[-1]),
    ),
    "value of a row beyond the shard": (
        "dense/tensor_loss.cuh",
        "if (row.is_inside) value",
        "value",
        kernels.tensor_forward_loss("huber", kernels.sm90_tiles(kernels.BFLOAT16)[-1]),
    ),
    "weight of a row counted twice": (
        "dense/tensor_loss.cuh",
        "if (column == 0 && found",
        "if (column >= 0 && found",
        kernels.tensor_forward_loss("huber", kernels.sm80_tiles(kernels.BFLOAT16)[-1]),
    ),
    "shared memory of a product taken before its end": (
        "dense/tensor_loss.cuh",
        "    __syncthreads();  // since the sums take the product's shared memory\n",
        "",
        kernels.tensor_forward_loss("huber", kernels.sm90_tiles(kernels.BFLOAT16)[-1]),
    ),
    "partial sum of a bias left out": (
        "elementwise/update.cuh",
        "i < bias.count;",
        "i + 1 < bias.count;",
        kernels.update_biases("Adam"),
    ),
    "lo multiplied by lo": (
        "gemm/gemm_sm90.cuh",
        "multiply(c, p, both - p, true);",
        "multiply(c, p, p ? p : both, true);",
        kernels.tensor_backward_weight(kernels.sm90_tiles(kernels.HALF_PAIR)[-1]),
    ),
    "products of the last of three components left out": (
        "gemm/gemm_sm90.cuh",
        "for (int both = T::COMPONENTS - 1; both > 0; --both)",
        "for (int both = 1; both > 0; --both)",
        kernels.tensor_backward_weight(kernels.sm90_tiles(kernels.BFLOAT16_TRIPLE)[-1]),
    ),
    "three components, of which each is shifted": (
        "gemm/operand_formats.cuh",
        "return components > 2 ? 0 : 7;",
        "return components > 2 ? 1 : 7;",
        kernels.split_rows(kernels.BFLOAT16_TRIPLE),
    ),
    "every derivative from the first component alone": (
        "math/activations.cuh",
        "constexpr bool DERIVED_BY_SIGN = false;",
        "constexpr bool DERIVED_BY_SIGN = true;",
        kernels.tensor_backward_input("tanh", kernels.sm90_tiles(kernels.BFLOAT16_TRIPLE)[-1]),
    ),
    "barrier removed between warps of a prefix sum": (
        "primitives/scan.cuh",
        "    if (lane == 0) scratch[warp] = of_warp;\n    __syncthreads();\n",
        "    if (lane == 0) scratch[warp] = of_warp;\n",
        kernels.prefix_sum("int32"),
    ),
    "a tile left out of the sum of several": (
        "primitives/scan.cuh",
        "if (other < tile) {",
        "if (other + 1 < tile) {",
        kernels.prefix_sum("int32"),
    ),
    "equal keys change places": (
        "primitives/sort.cuh",
        "*of_digit + before);",
        "*of_digit + __popc(alike) - 1 - before);",
        kernels.sort_scatter("uint32"),
    ),
    "-0 ranked apart from 0": (
        "elementwise/ranking.cuh",
        "score == 0.0f ? 0.0f : score",
        "score",
        kernels.rank_keys(),
    ),
    "equal scores ranked one after another": (
        "elementwise/ranking.cuh",
        "lower_bound(keys, i, keys[i])",
        "i",
        kernels.rank_area("roc_auc"),
    ),
    "value behind the last edge": (
        "primitives/histogram.cuh",
        "bin + 1 < bins &&",
        "bin + 1 <= bins &&",
        kernels.histogram(),
    ),
    "rates of the batch's place in the epoch": (
        "math/optimizers.cuh",
        "return schedule + step->run * RATES_PER_STEP",
        "return schedule + step->batch * RATES_PER_STEP",
        kernels.update("SGD"),
    ),
    "slots as far apart as what is trained": (
        "elementwise/update.cuh",
        "slot[s] = slots[s * slot_pitch + i];",
        "slot[s] = slots[s * size + i];",
        kernels.update("Adam"),
    ),
    "totals read while the launch before makes them": (
        "dense/small_n_update.cuh",
        "        pdl_wait_and_trigger();\n        end.read();",
        "        end.read();\n        pdl_wait_and_trigger();",
        kernels.dense_backward_update("Momentum", "small_n"),
    ),
    "blocks of a column head that do not wait for the launch before": (
        "fused/column_head.cuh",
        "    pdl_wait_and_trigger();\n",
        "",
        kernels.head("softmax_cross_entropy", "index", form=kernels.COLUMN_HEAD),
    ),
    "blocks that do not wait for the launch before": (
        "fused/head.cuh",
        "            if (k0 + j0 == 0) pdl_wait_and_trigger();\n",
        "",
        kernels.head("softmax_cross_entropy", "index"),
    ),
}


def test_faults_can_be_planted() -> None:
    """Of all, since those that are drawn change with the sources."""
    for file, right, wrong, _ in FAULTS.values():
        planted(file, right, wrong)


@pytest.mark.parametrize("fault", first_and_drawn(FAULTS, 1 / 2, "faults of kernels"))
def test_planted_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, right, wrong, entry = FAULTS[fault]
    plant(file, right, wrong, tmp_path, monkeypatch)

    def fails(case: Case) -> bool:
        try:
            case.check(run_case(case))
        except AssertionError:
            return True
        return False

    assert any(fails(case) for case in cases_of([entry]))
