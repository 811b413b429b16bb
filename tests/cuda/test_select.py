"""Paths and their reasons: where each threshold lies, what a path follows from, and that nobody else chooses."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cuda_lowering import make_plan, plans

from mlpgpu import Dense, LocallyConnected
from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import BFLOAT16, HALF_PAIR, Entry, OperandFormat, StackShape, StreamedWeights, Team
from mlpgpu.backends.cuda.kernels.dense import BlockTile
from mlpgpu.backends.cuda.lower import lowering
from mlpgpu.backends.cuda.lower.emit.emit import _EMIT
from mlpgpu.backends.cuda.lower.groups import Group
from mlpgpu.backends.cuda.lower.lowering import passes
from mlpgpu.backends.cuda.lower.overlap import overlap
from mlpgpu.backends.cuda.profile.paths import CARDS, Card, describe_on
from mlpgpu.backends.cuda.select import data, loss, thresholds
from mlpgpu.backends.cuda.select.dense import DensePath, FewRows, SplitK, dense_path
from mlpgpu.backends.cuda.select.local_stack import choose_stack, runs_of_layers, streamed_weights
from mlpgpu.backends.cuda.select.operands import plan_format
from mlpgpu.backends.cuda.select.persistent import choose_kernel
from mlpgpu.backends.cuda.select.select import select
from mlpgpu.backends.cuda.select.setting import Setting, Work
from mlpgpu.backends.cuda.select.stages import stages_of
from mlpgpu.plan import Plan

SETTING = Setting(132, "sm_90a", "float32", textured=True)
STEP = Work(
    SETTING, is_training=True, rows=32, shards=1, reduction="ordered", in_place=True, ends_with_gradient=False,
    operand_format=HALF_PAIR,
)  # fmt: skip
EVALUATION = dataclasses.replace(STEP, is_training=False, in_place=False)
PLAIN = dataclasses.replace(STEP, operand_format=None)


def of_rows(rows: int, work: Work = STEP) -> Work:
    return dataclasses.replace(work, rows=rows)


def kinds(path: DensePath) -> tuple[str, str]:
    """Of the forward product and of the update."""
    forward = path.forward
    by = "" if not isinstance(forward, SplitK) else " few" if forward.tile is None else f" {forward.tile.needs}"
    stream = " stream" if isinstance(path.update, FewRows) and path.update.stream else ""
    return type(forward).__name__ + by, type(path.update).__name__ + stream


BOTH_SIDES: list[tuple[str, tuple[int, int, Work], tuple[int, int, Work], int, str, str]] = [
    ("k from which a product is cut", (4095, 64, STEP), (4096, 64, STEP), 0, "Simt", "SplitK sm_90a"),
    ("n up to which it is cut", (4096, 513, STEP), (4096, 512, STEP), 0, "Simt", "SplitK sm_90a"),
    ("width for tensor cores", (4095, 127, of_rows(256)), (4095, 128, of_rows(256)), 0, "Simt", "Gemm"),
    ("weights for tensor cores", (512, 511, of_rows(256)), (512, 512, of_rows(256)), 0, "Simt", "Gemm"),
    ("rows for tensor cores", (512, 512, of_rows(255)), (512, 512, of_rows(256)), 1, "Simt", "Gemm"),
    ("an evaluation has any rows", (512, 511, EVALUATION), (512, 512, EVALUATION), 0, "Simt", "Gemm"),
    ("n for split operands", (9000, 48, of_rows(128)), (9000, 49, of_rows(128)), 0, "SplitK sm_75", "SplitK sm_90a"),
    ("few rows, forward", (90_000, 90, of_rows(9)), (90_000, 90, of_rows(8)), 0, "SplitK sm_90a", "SplitK few"),
    ("few rows, update", (90_000, 90, of_rows(9)), (90_000, 90, of_rows(8)), 1, "LargeK", "FewRows stream"),
    ("weights for few rows", (4096, 63, of_rows(8)), (4096, 64, of_rows(8)), 1, "Simt", "FewRows stream"),
    ("offsets of few rows", (1 << 22, 512, of_rows(8)), ((1 << 22) - 1, 512, of_rows(8)), 1, "Simt", "FewRows"),
    ("columns of a stream", (90_000, 97, of_rows(8)), (90_000, 96, of_rows(8)), 1, "FewRows", "FewRows stream"),
    ("rows of large k", (90_000, 90, of_rows(129)), (90_000, 90, of_rows(128)), 1, "SplitOperands", "LargeK"),
    ("columns of large k", (90_000, 97, of_rows(64)), (90_000, 96, of_rows(64)), 1, "SplitOperands", "LargeK"),
    ("columns of small n", (90_000, 17, of_rows(65, PLAIN)), (90_000, 16, of_rows(65, PLAIN)), 1, "Simt", "SmallN"),
    ("rows of few columns", (500, 16, of_rows(65, PLAIN)), (500, 16, of_rows(64, PLAIN)), 1, "SmallN", "FewColumns"),
    ("tiles that fill the card", (32 * 119, 32, PLAIN), (32 * 118, 32, PLAIN), 1, "Simt", "SmallN"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other", "product", "first", "second"), [case[1:] for case in BOTH_SIDES],
                         ids=[case[0] for case in BOTH_SIDES])  # fmt: skip
def test_each_side_of_a_threshold_has_its_path(
    one: tuple[int, int, Work],
    other: tuple[int, int, Work],
    product: int,
    first: str,
    second: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of tiles for small batches are in test_small_batches.py."""
    monkeypatch.setattr(thresholds, "NARROW_TILES_ARE_USED", False)
    monkeypatch.setattr(thresholds, "WHOLE_BATCH_IS_USED", False)
    assert (kinds(dense_path(*one))[product], kinds(dense_path(*other))[product]) == (first, second)


def test_each_side_of_the_other_thresholds() -> None:
    assert [loss.team_of(n).block_rows for n in (16383, 16384)] == [8, 1]
    assert [bool(loss.head(64, n, "identity", STEP)) for n in (33, 32)] == [False, True]
    assert loss.head_form(1024, 13, of_rows(264))[0] is kernels.FEW_ROWS_HEAD
    assert loss.head_form(1024, 13, of_rows(265))[0] is kernels.COLUMN_HEAD
    forms = [loss.head_form(1024, 10, of_rows(rows))[0] for rows in (25, 26, 1056, 1057)]
    assert forms == [kernels.FEW_ROWS_HEAD, kernels.WHOLE_HEAD, kernels.WHOLE_HEAD, kernels.COLUMN_HEAD]
    assert [loss.head_form(*shape, of_rows(64))[0] for shape in ((409, 10), (410, 10))] == [
        kernels.FEW_ROWS_HEAD, kernels.WHOLE_HEAD,
    ]  # fmt: skip
    shapes = (410, 10), (409, 10), (1025, 10), (1024, 12), (1024, 13)
    assert [loss.head_form(*shape, of_rows(1000))[0] is kernels.WHOLE_HEAD for shape in shapes] == [1, 0, 0, 1, 0]
    many = [loss.head_form(*shape, of_rows(rows))[0] for *shape, rows in ((6, 1, 2112), (6, 1, 2113), (6, 9, 2113))]
    assert many == [kernels.COLUMN_HEAD, kernels.ROW_HEAD, kernels.COLUMN_HEAD]
    fitting = [(1152, 8), (1153, 8), (9216, 1), (9217, 1)]
    assert [kernels.fits_row_head(*shape) for shape in fitting] == [True, False, True, False]
    counted = [(256, 1), (1536, 1), (64, 8), (768, 8)]
    assert [loss.head_form(*shape, of_rows(4096))[0] is kernels.ROW_HEAD for shape in counted] == [1, 0, 1, 0]
    assert loss.head_parts(kernels.ROW_HEAD, 768, 1, of_rows(4096)) == 1
    shares = [loss.head_form(k, n, of_rows(rows))[0] for k, n, rows in ((512, 32, 16), (512, 31, 16), (512, 32, 17))]
    assert [form is kernels.CLUSTER_HEAD for form in shares] == [True, False, False]
    older = dataclasses.replace(of_rows(8), setting=Setting(132, "sm_80", "float32", True))
    assert loss.head_form(512, 32, older)[0] is kernels.FEW_ROWS_HEAD
    assert loss.head_form_of_operands(kernels.CLUSTER_HEAD) is kernels.FEW_ROWS_HEAD
    few, work = kernels.FEW_ROWS_HEAD, of_rows(2)
    assert [loss.head_parts(few, k, 1, work) for k in (256, 257, 2048)] == [1, 2, 8]
    assert [loss.head_parts(few, 2048, blocks, work) for blocks in (16, 33, 66, 67, 200)] == [8, 4, 2, 1, 1]
    assert loss.head_parts(kernels.WHOLE_HEAD, 1024, 1, work) == 1
    single = dataclasses.replace(STEP, operand_format=BFLOAT16)
    assert [bool(loss.product_with_loss(n, "identity", "huber", single)) for n in (516, 520)] == [False, True]
    assert not loss.product_with_loss(520, "identity", "huber", STEP)
    layers = [(5000, 64), (64, 10)]
    assert [bool(loss.tail(layers, "identity", of_rows(rows), 10**6)) for rows in (257, 256)] == [False, True]
    for last, fits in (((64, 161), False), ((64, 160), True)):
        assert bool(loss.tail([(5000, 64), last], "identity", STEP, 10**6)) == fits
    assert [loss.updates_after_others(of_rows(rows)).holds for rows in (8, 9)] == [False, True]
    assert [stages_of(size) for size in (0, 1 << 19, (1 << 19) + 1, 1 << 25)] == [32, 32, 16, 1]
    assert [data.by_kernel(values).holds for values in ((1 << 20) - 1, 1 << 20)] == [False, True]
    assert [data.sorts_on_card(rows).holds for rows in ((1 << 17) - 1, 1 << 17)] == [False, True]
    waited = [data.sorts_on_card_after(s, is_compiled=lambda c=c: c).holds for c in (0, 1) for s in (0.009, 0.01, 1.0)]
    assert waited == [False, False, True, False, True, True]
    assert [data.by_texture(elements, 100).holds for elements in (101, 100)] == [False, True]


def test_textures_are_switched_off_by_a_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "TEXTURES_ARE_USED", False)
    assert not data.by_texture(1, 100)


@pytest.mark.parametrize("textured", [True, False])
def test_a_selection_says_how_targets_are_read_and_what_streams_cost(textured: bool) -> None:
    def printed(shards: int) -> str:
        plan = make_plan([Dense(8, 3)], shards=shards)
        return str(select(plan, Setting(132, "sm_90a", "float32", textured), is_training=True))

    assert f"targets are read {'through a texture object' if textured else 'by plain loads'}" in printed(1)
    assert "2 streams, as asked" in printed(2) and "streams, as asked" not in printed(1)


def test_a_stage_of_a_ring_has_several_weight_rows_if_there_are_enough_stages() -> None:
    for warps in range(1, 28):
        weights = streamed_weights(StackShape(warps, 1))
        assert (weights.weight_rows == 4) == (StreamedWeights(StackShape(warps, 1), 4).stages >= 8)
        assert weights.weight_rows in (1, 4)


def test_operands_have_scales_where_a_weight_is_large() -> None:
    formats = [
        plan_format(make_plan([Dense(2048, n, "relu"), Dense(n, 3)], precision="tf32"), "sm_90a")[0]
        for n in (1024, 1025)
    ]
    assert [each.name for each in formats if each] == ["bfloat16_pair", "half"]


def test_the_rows_of_kernels_for_whole_networks_and_stacks() -> None:
    def persistent(rows: int) -> object:
        plan = make_plan([Dense(20, 8, "relu"), Dense(8, 3)], capacity=rows)
        return choose_kernel(plan, multiprocessors=132, shared_bytes=227 << 10, arch="sm_90a")

    assert persistent(1025) == "a batch of 1025 rows is larger than 1024" and not isinstance(persistent(1024), str)

    def stack(rows: int) -> object:
        plan = make_plan([LocallyConnected(100, 5, "tanh"), LocallyConnected(96, 5, "tanh")], capacity=rows)
        (run,) = runs_of_layers(plan.training)
        return choose_stack(plan, run, shards=1, multiprocessors=132, arch="sm_90a")

    assert stack(33) == "a batch of 33 rows is larger than 32" and not isinstance(stack(32), str)


@given(plans(), st.sampled_from(["sm_75", "sm_80", "sm_90a"]), st.sampled_from(["float32", "uint8"]))
def test_every_path_and_group_has_a_reason(plan: Plan, arch: str, source: str) -> None:
    setting = Setting(132, arch, source, textured=True)
    made = passes(plan, setting)
    printed = str(made)
    for fused in filter(None, (made.training, made.evaluation)):
        for each in fused.selection.operations:
            reasons = (
                [product.why for product in each.path.products.values()] if isinstance(each.path, DensePath) else []
            )
            assert all(reason.strip() for reason in (each.path.why, *reasons)) and f"{each.title} " in printed
        assert all(group.why.strip() for group in (*fused.groups, *fused.finish))
        done = {op for group in (*fused.groups, *fused.finish) for op in group.operations()}
        assert done <= {each.operation for each in fused.selection.operations}


WIDTHS = st.sampled_from([1, 16, 17, 90, 127, 128, 512, 513, 1024, 4095, 4096, 5000])
ROWS = st.sampled_from([1, 8, 9, 128, 255, 256, 1024])


@given(
    WIDTHS, WIDTHS, st.tuples(WIDTHS, WIDTHS), st.tuples(WIDTHS, WIDTHS), ROWS,
    st.sampled_from(["float32", "float32-ieee", "bfloat16"]), st.sampled_from(["sm_75", "sm_80", "sm_90a"]),
)  # fmt: skip
def test_a_layers_path_follows_from_its_widths_and_not_from_its_neighbours(
    k: int, n: int, some: tuple[int, int], others: tuple[int, int], rows: int, precision: str, arch: str
) -> None:
    found = []
    for first, last in (some, others):
        layers = [Dense(first, k, "relu"), Dense(k, n, "tanh"), Dense(n, last)]
        plan = make_plan(layers, capacity=rows, precision=precision)
        setting = dataclasses.replace(SETTING, arch=arch)
        (path,) = (
            each.path
            for each in select(plan, setting, is_training=True).operations
            if getattr(each.operation, "weight", "") == "1.weight" and type(each.operation).__name__ == "Dense"
        )
        found.append(path)
    assert found[0] == found[1]


@given(plans(), st.sampled_from(["sm_80", "sm_90a"]))
def test_a_pass_leaves_what_it_is_given_as_it_is(plan: Plan, arch: str) -> None:
    made = passes(plan, dataclasses.replace(SETTING, arch=arch))
    printed = str(made)
    lowered = lowering._emit(plan, made)
    before = copy.deepcopy(lowered)
    assert overlap(lowered, plan, 132) is not lowered and lowered == before
    assert str(made) == printed and lowering._emit(plan, made).bytes == before.bytes


def test_every_group_is_emitted() -> None:
    kinds = Group.__subclasses__()
    for kind in kinds:  # those of a kind of groups come behind it
        kinds += kind.__subclasses__()
    assert set(_EMIT) == {kind for kind in kinds if not kind.__subclasses__()}


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.name)
def test_what_a_card_would_run_is_told_without_it(card: Card) -> None:
    plan = make_plan([Dense(784, 128, "relu"), Dense(128, 10)], loss="softmax_cross_entropy", capacity=128)
    told = describe_on(plan, card, "float32")
    start = "launch by launch, since a tile of its weights" if card.name == "T4" else "inside one kernel on "
    assert told.startswith(f"trains {start}") and "paths of a training step" in told
    clipped = make_plan([Dense(8, 8), Dense(8, 3)], shards=2)
    why = describe_on(clipped, card, "uint8")
    assert why.startswith("trains launch by launch, since the batch is split over streams:")


# --- nobody else chooses ---

CUDA = Path(__file__).parents[2] / "mlpgpu" / "backends" / "cuda"
SOURCES = sorted(path for path in CUDA.rglob("*.py") if path.relative_to(CUDA).parts[0] != "select")

SHAPES = {
    "rows", "k", "n", "m", "width", "widths", "capacity", "columns", "units", "size", "shape", "shapes", "n_in",
    "n_out", "parameter_count", "window",
}  # fmt: skip


def _is_entry(value: object) -> bool:
    """Whether a public name of ``kernels`` is an entry, or part of one: a tile, a team, an operand format."""
    if inspect.isfunction(value):
        return inspect.signature(value).return_annotation in (Entry, "Entry")
    return isinstance(value, (BlockTile, Team, OperandFormat)) or (
        isinstance(value, tuple) and any(map(_is_entry, value))
    )


ENTRIES = {name for name, value in vars(kernels).items() if _is_entry(value)}


def _names(node: ast.AST) -> set[str]:
    """All names and attributes in a part of a program."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def _compares_shapes(node: ast.AST) -> bool:
    """Whether an expression compares a shape or a limit, itself or by a function of shapes."""
    compared = [each for each in ast.walk(node) if isinstance(each, ast.Compare)]
    asked = [argument for each in ast.walk(node) if isinstance(each, ast.Call) for argument in each.args]
    if any(isinstance(each, ast.Name) and each.id in SHAPES for each in asked):
        return True
    names = {name for each in compared for name in _names(each)}
    return bool(names & SHAPES) or any(name.startswith(("MOST_", "LEAST_")) for name in names)


def _entries_of(tree: ast.AST) -> set[str]:
    """What a module has imported from ``kernels`` that is an entry or part of one."""
    modules = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "kernels" in (node.module or ""))
    return {alias.name for node in modules for alias in node.names} & ENTRIES


def _has_entry(node: ast.AST, imported: set[str]) -> bool:
    """Whether a part of a program names an entry or a part of one."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    of_table = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "kernels"
    }
    return bool((of_table & ENTRIES) | (names & imported))


def choices_by_shape(source: str) -> list[int]:
    """The lines of a module in which an entry depends on how a shape compares, or a threshold is asked for."""
    tree = ast.parse(source)
    imported = _entries_of(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            asked = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
            wrong = any("thresholds" in name for name in asked)
        elif isinstance(node, (ast.If, ast.IfExp)):
            chosen = [*node.body, *node.orelse] if isinstance(node, ast.If) else [node.body, node.orelse]
            wrong = _compares_shapes(node.test) and any(_has_entry(each, imported) for each in chosen)
        elif isinstance(node, ast.Call):
            is_least = getattr(node.func, "id", "") in ("min", "max", "sorted")
            compares = any(_compares_shapes(each) for each in (*node.args, *(each.value for each in node.keywords)))
            wrong = (is_least or compares) and _has_entry(node.func if not is_least else node, imported)
        elif isinstance(node, ast.comprehension):
            wrong = any(map(_compares_shapes, node.ifs)) and _has_entry(node.iter, imported)
        else:
            continue
        if wrong:
            found.append(getattr(node, "lineno", 0))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(CUDA)))
def test_no_other_module_chooses_between_kernels_by_a_shape(path: Path) -> None:
    assert choices_by_shape(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "planted",
    [
        "from ..select import thresholds",
        "if shard.rows <= 8:\n    entry = kernels.dense_forward_few_rows()",
        "def tile(n):\n    if n > 96 and n < MOST_N:\n        return kernels.SPLIT_SM80\n    return kernels.TILES[0]",
        "entry = kernels.loss(name, kind, team=kernels.WIDE_TEAM if shard.width(y) >= 16384 else kernels.WARP_TEAM)",
        "entry = kernels.dense_update_few_rows(optimizer, stream=n <= 96)",
        "if self._updates_few(k, n):\n    entry = kernels.dense_update_few_rows(optimizer)",
        "tile = min(kernels.TILES, key=lambda tile: rows % tile.m)",
        "from ..kernels import TILES\ntile = next(tile for tile in TILES if rows <= tile.m)\n",
        "tiles = [tile for tile in kernels.TILES if tile.m * 2 < rows]",
    ],
)
def test_a_planted_choice_is_found(planted: str) -> None:
    assert choices_by_shape(planted)


@pytest.mark.parametrize(
    "bound",
    [
        "grid = min(rows, MOST_GRID_Y), 1, 1",
        "rows = kernels.filled_rows(shard.rows) if components else shard.rows",
        "if isinstance(path, SmallN):\n    entry = kernels.dense_backward_update(optimizer, 'narrow')",
        "if address % 16 == 0:\n    copy = kernels.zero()",
    ],
)
def test_bounds_and_alignment_are_no_choice(bound: str) -> None:
    assert not choices_by_shape(bound)


def test_paths_say_what_they_are_in_words_of_the_table() -> None:
    told = [str(dense_path(*case[side])) for case in BOTH_SIDES for side in (1, 2)]
    for word in (
        "simt",
        "gemm_sm90",
        "split-K,",
        "split_sm90",
        "split_sm80",
        "few rows",
        "few columns",
        "small n",
        "large k",
    ):
        assert any(word in each for each in told), word
