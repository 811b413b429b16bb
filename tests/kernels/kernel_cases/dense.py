"""Dense layers on plain cores, and products of split operands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
from helpers import EPS32

from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import (
    SHORT_TILES,
    SPLIT_SM80,
    SPLIT_SM90,
    TILES,
    WARP_SPLIT_TILES,
    WARP_SPLIT_WEIGHT,
    SimtTile,
    SplitSm80Tile,
    SplitSm90Tile,
    TileOfParts,
    WarpSplitTile,
    ceil_div,
)

from .case import (
    SPECIAL,
    Batch,
    Case,
    Output,
    Shifted,
    activation_bound,
    batches,
    blank,
    chained,
    expect,
    forward,
    normal,
    saved_of,
    whole,
    wide,
)
from .dropouts import differentiated, dropped, kept_arguments
from .updates import stepped


def finish(
    activation: str, total: np.ndarray, bound: np.ndarray, b: np.ndarray | None, batch: Batch, *, with_z: bool
) -> dict[str, Output]:
    """Outputs of y = f(z), z = total + b, ``total (B, n)`` being within ``bound``."""
    z = total + (0.0 if b is None else wide(b))
    bound = bound + (0.0 if b is None else 2 * EPS32 * (abs(z) + abs(b)))
    bound = np.where(np.isfinite(z), bound, 0.0)
    y = forward(activation, z)
    # Between its ends an interval of z holds an extremum of f at most, and there f varies by bound² only.
    with np.errstate(invalid="ignore"):
        reach = np.maximum(*(abs(forward(activation, end) - y) for end in (z - bound, z + bound)))
    written = batch.written(*z.shape)
    outputs = {"y": expect(y, reach + activation_bound(z, y), written)}
    return {**outputs, "z": expect(z, bound, written)} if with_z else outputs


def input_of(
    batch: Batch, k: int, *, fetched: bool = False, shift: bool = False
) -> tuple[np.ndarray, dict[str, object]]:
    """The rows of an input, and the arguments that give them; ``fetched`` is from a data set by the order."""
    if not fetched:
        x = batch.rows_of(normal(batch.capacity, k))
        return x, {"x": Shifted(x) if shift else x, "order": None}
    data = np.full((2 * batch.epoch_rows, k), np.nan, np.float32)
    data[batch.fetched] = normal(2 * batch.epoch_rows, k)[batch.fetched]
    x = np.full((batch.capacity, k), np.nan, np.float32)
    x[batch.part] = data[batch.fetched]
    return x, {"x": Shifted(data) if shift else data, "order": batch.order}


def dense_forward(
    activation: str,
    tile: SimtTile | WarpSplitTile,
    batch: Batch,
    x: np.ndarray | int,
    w: np.ndarray,
    *,
    plain: bool = False,
    shift: bool = False,
    fetched: bool = False,
    rate: float = 0.0,
) -> Case:
    """``x`` may be its width; ``plain`` is without a bias and without z, ``fetched`` with x from a data set.

    A dropout of a ``rate`` that is not 0 comes last.
    """
    if isinstance(x, int):
        x, given = input_of(batch, x, fetched=fetched, shift=shift)
    else:
        x = batch.rows_of(x)
        given = {"x": Shifted(x) if shift else x, "order": None}
    (rows, k), n = x.shape, w.shape[1]
    b = None if plain else normal(n)
    args = {**batch.args, **given, "w": w, "b": b, "z": None if plain else blank(rows, n), "y": blank(rows, n)}
    if shift:
        args["w"] = Shifted(w)
    with np.errstate(invalid="ignore"):
        outputs = finish(activation, *chained(x, w), b, batch, with_z=not plain)
        outputs["y"] = dropped(outputs["y"], batch, rate)
    return Case(
        f"{batch}-{k}x{n}" + "-plain" * plain + "-shifted" * shift + "-fetched" * fetched + f"-rate{rate}" * (rate > 0),
        kernels.dense_forward(activation, tile, drops=rate > 0),
        tile.grid(batch.most_rows, n),
        {**args, **kept_arguments(batch, n, rate), "k": k, "n": n},
        outputs,
    )


def dense_forward_split_k(
    tile: SimtTile | WarpSplitTile | SplitSm80Tile | SplitSm90Tile | None,
    batch: Batch,
    k: int,
    n: int,
    part: int,
    *,
    shift: bool = False,
    fetched: bool = False,
    special: float | None = None,
    factor: float = 1.0,
) -> Case:
    """Without a tile, for few rows; ``special`` is what one element of x is, and all of x is times ``factor``."""
    (x, given), w, count = input_of(batch, k, fetched=fetched, shift=shift), normal(k, n), ceil_div(k, part)
    if special is not None:
        x[batch.part.start, k - 1] = special
    x *= np.float32(factor)
    cuts = [slice(start, start + part) for start in range(0, k, part)]
    values, bounds = zip(*(chained(x[:, cut], w[cut]) for cut in cuts), strict=True)
    args = {**batch.args, **given, "w": Shifted(w) if shift else w}
    shape = (count, batch.capacity, n)
    variant = "-shifted" * shift + "-fetched" * fetched + f"-{special}" * (special is not None)
    variant += f"-times{factor}" * (factor != 1.0)
    return Case(
        f"{batch}-{k}x{n}-parts-of-{part}" + variant,
        kernels.dense_forward_split_k(tile) if tile else kernels.dense_forward_few_rows(),
        tile.grid(batch.most_rows, n, count) if tile else (1, 1, count),
        {**args, "partials": blank(*shape), "k": k, "n": n, "part": part, "capacity": batch.capacity},
        {"partials": expect(np.stack(values), np.stack(bounds), batch.written(*shape[1:]))},
    )


def split_product(tile: SplitSm80Tile | SplitSm90Tile, a: np.ndarray, b: np.ndarray) -> Case:
    """A launch whose ``parts[0]`` is A · B, of split operands; its expectation is of others."""
    case = dense_forward_split_k(tile, whole(len(a)), *b.shape, part=len(b))
    return replace(case, args={**case.args, "x": a, "w": b})


def dense_forward_sum_partials(
    activation: str, batch: Batch, n: int, count: int, *, plain: bool = False, rate: float = 0.0
) -> Case:
    parts = np.stack([batch.rows_of(part) for part in normal(count, batch.capacity, n)])
    b = None if plain else normal(n)
    total, bound = wide(parts).sum(axis=0), count * EPS32 * abs(wide(parts)).sum(axis=0)
    z = None if plain else blank(batch.capacity, n)
    sizes = {"n": n, "count": count, "capacity": batch.capacity, **kept_arguments(batch, n, rate)}
    outputs = finish(activation, total, bound, b, batch, with_z=not plain)
    outputs["y"] = dropped(outputs["y"], batch, rate)
    return Case(
        f"{batch}-{n}-parts{count}" + "-plain" * plain + f"-rate{rate}" * (rate > 0),
        kernels.dense_forward_sum_partials(activation),
        (2,),
        {**batch.args, "partials": parts, "b": b, "z": z, "y": blank(batch.capacity, n), **sizes},
        outputs,
    )


def dense_backward_input(
    activation: str,
    tile: SimtTile | WarpSplitTile,
    batch: Batch,
    k: int,
    n: int,
    *,
    plain: bool = False,
    shift: bool = False,
    rate: float = 0.0,
) -> Case:
    """``plain`` is without an activation below; ``rate`` of a dropout above that."""
    dz, w = batch.rows_of(normal(batch.capacity, n)), normal(k, n)
    saved = None if plain else batch.rows_of(saved_of(activation, 2 * normal(batch.capacity, k)))
    dx, through = differentiated(activation, batch, *chained(dz, w.T), saved, rate)
    operands = {"dz": Shifted(dz), "w": Shifted(w)} if shift else {"dz": dz, "w": w}
    return Case(
        f"{batch}-{k}x{n}" + "-plain" * plain + "-shifted" * shift + f"-rate{rate}" * (rate > 0),
        kernels.dense_backward_input(activation, tile, drops=rate > 0),
        tile.grid(batch.most_rows, k),
        {
            **batch.args,
            **operands,
            "saved": saved,
            "dx": blank(batch.capacity, k),
            **through,
            "k": k,
            "n": n,
        },
        {"dx": dx},
    )


def weight_gradient(x: np.ndarray, dz: np.ndarray, part: slice, error: float = 0.0) -> dict[str, Output]:
    """dW, whose products may be off by ``error`` of themselves, and db over the rows of ``part``."""
    (dw, bound), db = chained(x[part].T, dz[part]), chained(np.ones((1, part.stop - part.start)), dz[part])
    bound += error * (abs(wide(x[part].T)) @ abs(wide(dz[part])))
    return {"dw": expect(dw, bound), "db": expect(db[0][0], db[1][0])}


def dense_backward_weight(
    tile: SimtTile | WarpSplitTile | None,
    batch: Batch,
    k: int,
    n: int,
    *,
    plain: bool = False,
    shift: bool = False,
    fetched: bool = False,
) -> Case:
    """``plain`` is without a bias; without a tile, by blocks of rows of W."""
    (x, given), dz = input_of(batch, k, fetched=fetched, shift=shift), batch.rows_of(1 - normal(batch.capacity, n))
    outputs = weight_gradient(x, dz, batch.part)
    if plain:
        del outputs["db"]
    gradients = {"dw": blank(k, n), "db": None if plain else blank(n)}
    return Case(
        f"{batch}-{k}x{n}" + "-plain" * plain + "-shifted" * shift + "-fetched" * fetched,
        kernels.dense_backward_weight(tile),
        tile.grid(k, n) if tile else kernels.small_n_grid(k, n),
        {**batch.args, **given, "dz": Shifted(dz) if shift else dz, **gradients, "k": k, "n": n},
        outputs,
    )


def dense_backward_update(
    rule: str,
    operand_format: SimtTile | TileOfParts | str,
    batch: Batch,
    k: int,
    n: int,
    *,
    plain: bool = False,
    fetched: bool = False,
    special: float | None = None,
) -> Case:
    """``operand_format`` is a tile, or a word; ``plain`` is without a bias; ``special`` is what an element of dz is."""
    (x, given), dz = input_of(batch, k, fetched=fetched), batch.rows_of(1 - normal(batch.capacity, n))
    if special is not None:
        dz[batch.part.start, n - 1] = special
    grids = {"small_n": kernels.small_n_grid(k, n), "few_columns": kernels.few_columns_grid(k), "large_k": (2, 1, 1)}
    gradients = weight_gradient(x, dz, batch.part)
    of_parameters = {"weight": gradients["dw"]} | ({} if plain else {"bias": gradients["db"]})
    moved, outputs, constants = stepped(rule, of_parameters)
    return Case(
        f"{batch}-{k}x{n}" + "-plain" * plain + "-fetched" * fetched + f"-{special}" * (special is not None),
        kernels.dense_backward_update(rule, operand_format),
        grids[operand_format] if isinstance(operand_format, str) else operand_format.grid(k, n),
        {**batch.args, **given, "dz": dz, **moved, "k": k, "n": n},
        outputs,
        constants,
    )


def dense_backward_update_by_parts(
    rule: str,
    batch: Batch,
    k: int,
    n: int,
    part: int,
    parts: int,
    *,
    plain: bool = False,
    fetched: bool = False,
    tile: TileOfParts = WARP_SPLIT_WEIGHT,
) -> Case:
    """Parts of the rows, of which the last ones may have none."""
    case = dense_backward_update(rule, tile, batch, k, n, plain=plain, fetched=fetched)
    across, down, _ = tile.grid(k, n)
    given = {
        "partials": blank(across, down, parts, kernels.sums_of_part(tile)),
        "arrived": np.zeros((across, down), np.uint32), "part": part,
    }  # fmt: skip
    outputs = {**case.outputs, "arrived": expect(np.zeros((across, down)), 0.0)}
    return replace(
        case, name=f"{case.name}-{parts}x{part}", entry=kernels.dense_backward_update_by_parts(rule, tile),
        grid=(across, down, parts), args={**case.args, **given}, outputs=outputs,
    )  # fmt: skip


def update_layers(
    rule: str,
    tile: WarpSplitTile | None,
    batch: Batch,
    k: int,
    middle: int,
    n: int,
    *,
    fetched: bool = False,
    part: int = 0,
    parts: int = 1,
) -> Case:
    """Of two layers in one grid, the second without a bias; their parameters lie one after another.

    With ``part`` each block has so many of the rows, of which the last ones of ``parts`` may have none; of the second
    layer twice as many, in one part more.
    """
    (x, given), y = input_of(batch, k, fetched=fetched), batch.rows_of(normal(batch.capacity, middle))
    below, above = (batch.rows_of(1 - normal(batch.capacity, columns)) for columns in (middle, n))
    first, second = weight_gradient(x, below, batch.part), weight_gradient(y, above, batch.part)
    layers = [stepped(rule, {"weight": first["dw"], "bias": first["db"]}), stepped(rule, {"weight": second["dw"]})]
    places = [(layers[0], "weight"), (layers[0], "bias"), (layers[1], "weight")]
    sizes = [layer[1][name].value.size for layer, name in places]

    def flat(arrays: list[np.ndarray]) -> np.ndarray:
        """Parameters, or slots (slots, size) of which each layer uses the first ones, side by side."""
        return np.concatenate([a[..., :size] for a, size in zip(arrays, sizes, strict=True)], axis=-1)

    def output(suffix: str) -> Output:
        found = [layer[1][name + suffix] for layer, name in places]
        shapes = [(-1, each.value.shape[-1]) if suffix else (-1,) for each in found]
        values, bounds = (
            flat([getattr(each, which).reshape(shape) for each, shape in zip(found, shapes, strict=True)])
            for which in ("value", "bound")
        )
        return expect(values, bounds)

    weights = [np.ravel(layer[0][name]) for layer, name in places]
    outputs, slots = {"parameters": output("")}, None
    if layers[0][0]["weight_slots"] is not None:
        slots = flat([np.asarray(layer[0][f"{name}_slots"]) for layer, name in places])
        outputs["slots"] = output("_slots")
    grid = kernels.small_n_grid if tile is None else tile.grid
    (across, down, _), (other, of_other, _) = grid(k, middle), grid(middle, n)
    tiles, others = across * down * parts, other * of_other * (parts + (part > 0))
    described = [
        [k, middle, 0, 0, sizes[0], -1, 0, parts, part],
        [middle, n, tiles, sizes[0] + sizes[1], -1, 0, middle, parts + 1, 2 * part],
    ]
    args = {
        **batch.args, "described": np.array(described, np.int32), "layer_count": 2, "inputs": given["x"],
        "order": given["order"], "outputs": y, "deltas": np.concatenate([below.ravel(), above.ravel()]),
        "totals": layers[0][0]["totals"], "parameters": flat(weights), "slots": slots, "size": sum(sizes),
        "capacity": batch.capacity,
    }  # fmt: skip
    blocks = tiles + others
    if part:
        args["partials"] = blank(blocks, kernels.PARTS_SUMS)
        args["arrived"] = np.zeros(blocks, np.uint32)
        outputs["arrived"] = expect(np.zeros(blocks), 0.0)
    return Case(
        f"{batch}-{k}-{middle}-{n}" + "-fetched" * fetched + f"-{parts}x{part}" * (part > 0),
        kernels.update_layers(rule, tile, by_parts=part > 0), (blocks,), args, outputs, layers[0][2],
    )  # fmt: skip


def dense_update_few_rows(
    rule: str,
    batch: Batch,
    k: int,
    n: int,
    part: int,
    *,
    stream: bool = False,
    plain: bool = False,
    ahead: bool = True,
    first: bool = False,
) -> Case:
    """``plain`` is without a bias; ``ahead`` with the next step's z, or if this is the first one with its own."""
    following = batch if first else replace(batch, place=batch.place + 1)
    last = following.place * batch.capacity >= batch.epoch_rows
    next_rows = np.empty(0, int) if last else following.fetched
    data = np.full((2 * batch.epoch_rows, k), np.nan, np.float32)
    for rows in (batch.fetched, next_rows):
        data[rows] = normal(len(data), k)[rows]
    x, dz = np.full((batch.capacity, k), np.nan, np.float32), batch.rows_of(1 - normal(batch.capacity, n))
    x[batch.part] = data[batch.fetched]
    gradients = weight_gradient(x, dz, batch.part)
    moved, outputs, constants = stepped(
        rule, {"weight": gradients["dw"]} | ({} if plain else {"bias": gradients["db"]})
    )
    if first:
        unused = dict.fromkeys(("totals", "bias", "bias_slots"))
        moved |= unused
        outputs = {"weight": expect(moved["weight"], 0.0)}
    weight, parts = outputs["weight"], None
    if ahead:
        cuts = [slice(start, start + part) for start in range(0, k, part)]
        parts, values = blank(len(cuts), batch.capacity, n), np.zeros((2, len(cuts), batch.capacity, n))
        for place, cut in enumerate(cuts):
            of_next = data[next_rows][:, cut]
            value, bound = chained(of_next, weight.value[cut])
            values[:, place, : len(next_rows)] = value, bound + abs(wide(of_next)) @ weight.bound[cut]
        outputs["partials"] = expect(*values, np.arange(batch.capacity)[:, np.newaxis] < len(next_rows))
    given = {"x": data, "order": batch.order} if ahead else {"x": x, "order": None}
    return Case(
        f"{batch}-{k}x{n}-parts-of-{part}" + "-plain" * plain + "-ahead" * ahead + "-first" * first,
        kernels.dense_update_few_rows(rule, stream=stream),
        kernels.few_rows_grid(k, n, part),
        {
            "step": batch.args["step"], **given, "dz": None if first else dz, **moved, "partials": parts, "k": k,
            "n": n,
            "part": part, "capacity": batch.capacity,
        },
        outputs,
        constants,
    )  # fmt: skip


def dense_backward_atomic(batch: Batch, k: int, n: int, *, plain: bool = False) -> Case:
    """``plain`` is without a bias and without dx."""
    x, dz = batch.rows_of(normal(batch.capacity, k)), batch.rows_of(1 - normal(batch.capacity, n))
    w = normal(k, n)
    outputs = weight_gradient(x, dz, batch.part)
    dx = np.ones((batch.capacity, k), np.float32)  # where nothing is to be added, what is added must show
    dx[batch.part] = 0.0
    if plain:
        del outputs["db"]
    else:
        outputs["dx"] = expect(*chained(dz, w.T), batch.written(*dx.shape))
    written = {"dw": blank(k, n), "db": None if plain else blank(n), "dx": None if plain else dx}
    return Case(
        f"{batch}-{k}x{n}" + "-plain" * plain,
        kernels.dense_backward_atomic(),
        (ceil_div(k, 32), ceil_div(n, 32)),
        {**batch.args, "x": x, "dz": dz, "w": w, **written, "k": k, "n": n},
        outputs,
        atomic=True,
    )


def warp_split_cases() -> Iterator[Case]:
    """Tiles whose warps share k: borders, slices that end early, vectors and none, rows fetched by an order."""
    for tile in WARP_SPLIT_TILES:
        for rows, k, n in ((1, 1, 1), (31, 33, 32), (64, 128, 48), (33, 36, 9), (65, 261, 15), (40, 300, 132)):
            yield dense_forward("relu", tile, whole(rows), normal(rows, k), normal(k, n))
            yield dense_backward_input("relu", tile, whole(rows), n, k)
            yield dense_forward_split_k(tile, whole(rows), k, n, part=tile.K)
        for activation in ACTIVATIONS:
            yield dense_forward(activation, tile, whole(33), 3 * normal(33, 5), normal(5, 37))
            yield dense_backward_input(activation, tile, whole(33), 37, 5)
        for batch in batches(65):
            yield dense_forward("tanh", tile, batch, normal(65, 33), normal(33, 35))
            yield dense_backward_input("tanh", tile, batch, 35, 33)
            yield dense_forward("tanh", tile, batch, normal(65, 33), normal(33, 35), rate=0.25)
            yield dense_backward_input("tanh", tile, batch, 35, 33, rate=0.25)
            yield dense_forward_split_k(tile, batch, 300, 35, part=2 * tile.K)
        for batch, k in product((whole(33), Batch(33, 68, 2)), (35, 132)):
            yield dense_forward("relu", tile, batch, k, normal(k, 36), fetched=True)
        yield dense_forward("identity", tile, whole(33), normal(33, 36), normal(36, 40), shift=True)
        yield dense_backward_input("identity", tile, whole(33), 36, 40, plain=True, shift=True)
        x = normal(34, 131)
        x[5, 3], x[20, 130], x[33, 0] = np.nan, np.inf, -np.inf
        yield dense_forward("identity", tile, whole(34), x, normal(131, 33), plain=True)
    tile = WARP_SPLIT_WEIGHT
    for rows, k, n in ((1, 1, 1), (31, 33, 32), (64, 128, 48), (257, 36, 9), (513, 65, 15), (256, 32, 16)):
        yield dense_backward_weight(tile, whole(rows), k, n)
        yield dense_backward_update("Adam", tile, whole(rows), k, n, plain=rows % 2 == 0)
    for rule in kernels.RULES:
        yield dense_backward_update(rule, tile, whole(33), 35, 37)
    for batch, k in product((whole(33), Batch(33, 68, 2)), (35, 132)):
        yield dense_backward_weight(tile, batch, k, 36, fetched=True)
        yield dense_backward_update("Momentum", tile, batch, k, 36, fetched=True)
    for batch in batches(65):
        yield dense_backward_update("SGD", tile, batch, 35, 33)
        yield dense_backward_update_by_parts("SGD", batch, 35, 33, part=32, parts=3)
    for rule in kernels.RULES:
        yield dense_backward_update_by_parts(rule, whole(70), 35, 37, part=32, parts=3)
    sizes = ((1, 1, 1, 256, 2), (513, 36, 9, 256, 3), (600, 12, 33, 256, 4), (512, 64, 16, 256, 2))
    for rows, k, n, part, parts in sizes:
        yield dense_backward_update_by_parts("Adam", whole(rows), k, n, part, parts, plain=rows % 2 == 0)
    for batch, k in product((whole(33), Batch(33, 68, 2)), (35, 132)):
        yield dense_backward_update_by_parts("Momentum", batch, k, 36, 16, 3, fetched=True)
    for strips in kernels.STRIPS:
        few = min(strips.m, strips.n)

        def shape(long: int, short: int, strips: kernels.StripTile = strips) -> tuple[int, int]:
            return (long, short) if strips.n < strips.m else (short, long)

        for rule in kernels.RULES:
            yield dense_backward_update_by_parts(rule, whole(70), *shape(35, few), part=32, parts=3, tile=strips)
        for rows, long, short in ((1, 1, 1), (513, 128, few), (257, 260, few // 2 + 1), (64, 516, few)):
            yield dense_backward_update_by_parts(
                "Adam", whole(rows), *shape(long, short), part=96, parts=6, plain=rows % 2 == 0, tile=strips
            )
        for batch, long in product((*batches(65), Batch(33, 68, 2)), (35, 132)):
            yield dense_backward_update_by_parts(
                "SGD", batch, *shape(long, few), 32, 3, fetched=long == 132, tile=strips
            )
    for short in SHORT_TILES:
        for rows, k, n in ((1, 1, 1), (127, short.k, 129), (130, short.k - 1, 127), (300, short.k - 3, 260)):
            yield dense_forward("relu", short, whole(rows), normal(rows, k), normal(k, n))
            yield dense_forward("tanh", short, whole(rows), normal(rows, k), normal(k, n), rate=0.25)
        for activation in ACTIVATIONS:
            yield dense_forward(activation, short, whole(3), 3 * normal(3, 5), normal(5, 6))
            yield dense_forward(activation, short, whole(3), 3 * normal(3, 5), normal(5, 37), rate=0.25)
        for batch in (*batches(65), Batch(33, 68, 2)):
            x = normal(batch.capacity, 4)
            yield dense_forward("gelu", short, batch, x, normal(4, 36), fetched=True)
            yield dense_forward("gelu", short, batch, x, normal(4, 36), plain=True)
    yield dense_backward_weight(tile, whole(33), 36, 40, plain=True, shift=True)
    yield dense_backward_update("SGD", tile, whole(34), 36, 40, special=np.nan)


def dense_cases() -> Iterator[Case]:
    yield from warp_split_cases()
    # Odd by odd, around the tiles' borders, and multiples of 4, which are read as vectors.
    sizes = [(1, 1, 1), (31, 33, 32), (32, 32, 31), (33, 31, 127), (127, 257, 33), (257, 127, 31)]
    # The last one has whole tiles of every size inside, in all three products.
    sizes += [(33, 36, 32), (5, 4, 132), (136, 132, 140)]
    smallest = TILES[-1]
    for tile, (rows, k, n) in product(TILES, sizes):
        yield dense_forward("relu", tile, whole(rows), normal(rows, k), normal(k, n))
        yield dense_forward_split_k(tile, whole(rows), k, n, part=32)
        yield dense_backward_input("relu", tile, whole(rows), k, n)
        yield dense_backward_weight(tile, whole(rows), k, n)
    for rows, k, n in sizes:
        yield dense_backward_atomic(whole(rows), k, n)
    for activation, tile in product(ACTIVATIONS, TILES):
        yield dense_forward(activation, tile, whole(33), 3 * normal(33, 5), normal(5, 37))
        yield dense_backward_input(activation, tile, whole(33), 37, 5)
    for activation, tile in product(ACTIVATIONS, (*TILES, *WARP_SPLIT_TILES)):
        yield dense_forward(activation, tile, whole(130), 2 * normal(130, 33), normal(33, 69), rate=0.5)
        yield dense_backward_input(activation, tile, whole(130), 69, 33, plain=activation == "identity", rate=0.25)
    for activation in ACTIVATIONS:
        yield dense_forward(activation, smallest, whole(1), np.ones((1, 1), np.float32), SPECIAL, plain=True)
        yield dense_forward_sum_partials(activation, whole(33), 37, 3)
    yield dense_forward_sum_partials("relu", whole(260), kernels.PART_SUM_MANY // 256, 11)  # a thread an element
    for rule, tile in product(kernels.RULES, TILES):
        yield dense_backward_update(rule, tile, whole(33), 35, 37)
    for tile, (rows, k, n) in product(TILES, sizes):
        yield dense_backward_update("Adam", tile, whole(rows), k, n, plain=rows % 2 == 0)
    for rule in kernels.RULES:
        for tile in (None, WARP_SPLIT_WEIGHT):
            yield update_layers(rule, tile, whole(33), 9, 35, 17, fetched=rule == "SGD")
        yield update_layers(rule, WARP_SPLIT_WEIGHT, whole(33), 9, 35, 17, fetched=rule == "SGD", part=16, parts=3)
        yield dense_backward_update(rule, "small_n", whole(33), 35, 37)
        yield dense_backward_update(rule, "few_columns", whole(33), 70, 7)
        # Columns that come in pairs, and such that do not; of two slots, the second one may lie so too.
        for k, n in ((36, 38), (35, 38), (36, 37)):
            for stream in (False, True):
                yield dense_update_few_rows(rule, Batch(7, 12), k, n, part=16, stream=stream)
    for rows, k, n in sizes:
        yield dense_backward_update("Adam", "small_n", whole(rows), k, n, plain=rows % 2 == 0)
        if rows <= kernels.FEW_ROWS:
            yield dense_update_few_rows("Adam", whole(rows), k, n, part=32, plain=rows % 2 == 0, ahead=False)
            if n <= kernels.STREAM_COLUMNS:
                yield dense_update_few_rows(
                    "Adam", whole(rows), k, n, 32, stream=True, plain=rows % 2 == 0, ahead=False
                )
    for tile in (None, WARP_SPLIT_WEIGHT):
        yield update_layers("Adam", tile, Batch(11, 27, 2), 36, 16, 3, fetched=True)
    yield update_layers("Adam", WARP_SPLIT_WEIGHT, Batch(300, 700, 2), 36, 16, 3, part=256, parts=4)
    yield dense_backward_update("Momentum", "small_n", whole(1025), 9, 17)  # dz is staged more than once
    for batch, k, n in ((whole(1025), 36, 10), (Batch(600, 900, 1), 35, 16), (whole(3), 1, 1), (whole(65), 260, 17)):
        for fetched in (False, True):
            yield dense_backward_weight(None, batch, k, n, plain=k == 1, fetched=fetched)
    yield dense_backward_weight(None, whole(33), 36, 4, shift=True)
    for rows, k, n in ((1, 1, 1), (64, 64, 16), (65, 65, 15), (130, 200, 4)):  # dz is staged up to three times
        for fetched in (False, True):
            yield dense_backward_update(
                "Adam", "few_columns", Batch(rows, 2 * rows + 1, 1), k, n, plain=rows == 64, fetched=fetched
            )
    yield dense_update_few_rows("SGD", Batch(2, 4), 260, 300, part=64)  # several blocks of columns
    yield dense_update_few_rows(
        "RMSprop", Batch(8, 30), 700, 16, part=512, plain=True
    )  # of as many rows as there can be
    yield dense_update_few_rows("RMSprop", Batch(8, 30), 1000, 16, part=704, stream=True, plain=True)
    yield dense_update_few_rows("Momentum", Batch(1, 3), 1412, 90, part=704, stream=True)  # all stages, many times
    yield dense_update_few_rows("Adam", Batch(3, 7), 800, 96, part=704, stream=True)
    yield dense_update_few_rows("Momentum", Batch(1, 3), 700, 90, part=352)
    yield dense_update_few_rows("Momentum", Batch(1, 3), 300, 7, part=100)
    for place in range(3):  # the last one has two rows, and nothing follows
        for first in (False, True):
            for stream in (False, True):
                yield dense_update_few_rows("Momentum", Batch(5, 12, place), 70, 90, 32, stream=stream, first=first)
    for batch in (whole(5), Batch(5, 12, 2), whole(1)):
        for fetched in (False, True):
            yield dense_forward_split_k(None, batch, 70, 35, part=32, fetched=fetched)
            yield dense_forward_split_k(None, batch, 1400, 130, part=1024, fetched=fetched)
            yield dense_forward_split_k(None, batch, 70, 300, part=64, fetched=fetched)
            for stream in (False, True):
                yield dense_update_few_rows("Momentum", batch, 36, 33, part=16, stream=stream, ahead=fetched)
            yield dense_backward_update("Momentum", "small_n", batch, 36, 33, fetched=fetched)
    for shard in range(3):
        yield dense_forward_split_k(None, Batch(5, 12, 2, shard, 3), 70, 35, part=32)
    for rows, k, n in sizes:
        yield dense_backward_update("Momentum", SPLIT_SM80, whole(rows), k, n, plain=rows % 2 == 0)
    for rule in kernels.RULES:
        yield dense_backward_update(rule, SPLIT_SM80, whole(33), 35, 37)
        yield dense_backward_update_by_parts(rule, whole(70), 70, 99, part=32, parts=3, tile=SPLIT_SM80)
        yield dense_backward_update(rule, "large_k", whole(33), 131, 37)
        yield dense_backward_update(rule, "large_k", whole(65), 260, 36)
    for rows, k, n in ((1, 1, 1), (128, 700, 90), (100, 516, 96), (128, 260, 3)):  # up to three tiles for a block
        yield dense_backward_update("Momentum", "large_k", whole(rows), k, n, plain=rows == 1)
        yield dense_backward_update("Momentum", "large_k", Batch(rows, 2 * rows + 1, 2), k, n, fetched=True)
    for special in (1e-35, 1e-40):  # which do not split
        yield dense_backward_update("Momentum", "large_k", whole(5), 300, 9, special=special)
    for split in (SPLIT_SM80, SPLIT_SM90):
        for rows, k, n in sizes:
            yield dense_forward_split_k(split, whole(rows), k, n, part=96)
        for special in (np.nan, np.inf, -np.inf, 1e-35, 1e-40, 3e38, 0.0, -0.0):
            yield dense_forward_split_k(split, whole(5), 40, 9, part=96, special=special)
        # So small that the last parts would lose bits, and all of it, so that no larger term hides them.
        yield dense_forward_split_k(split, whole(5), 8, 9, part=96, factor=1e-36)
        for batch in batches(65):
            yield dense_forward_split_k(split, batch, 70, 35, part=32)
        yield dense_forward_split_k(split, whole(33), 72, 40, part=32, shift=True)
    yield dense_forward_split_k(SPLIT_SM90, whole(130), 500, 100, part=320)  # all stages of the ring, twice
    for tile, batch in product((TILES[0], TILES[1], SPLIT_SM80, SPLIT_SM90, smallest), (whole(33), Batch(33, 68, 2))):
        # Odd lengths, and such as are read by vectors.
        for k in (35, 132):
            if isinstance(tile, SimtTile):
                yield dense_forward("relu", tile, batch, k, normal(k, 36), fetched=True)
                yield dense_backward_weight(tile, batch, k, 36, fetched=True)
            yield dense_forward_split_k(tile, batch, k, 36, part=32, fetched=True)
            if not isinstance(tile, SplitSm90Tile):
                yield dense_backward_update("Momentum", tile, batch, k, 36, fetched=True)
    for batch in batches(65):
        yield dense_forward("tanh", smallest, batch, normal(65, 33), normal(33, 35))
        yield dense_forward_split_k(smallest, batch, 70, 35, part=32)
        yield dense_forward_sum_partials("tanh", batch, 35, 2)
        yield dense_forward_sum_partials("gelu", batch, 35, 2, rate=0.25)
        yield dense_backward_input("tanh", smallest, batch, 35, 33)
        yield dense_forward("gelu", smallest, batch, normal(65, 33), normal(33, 35), rate=0.25)
        yield dense_backward_input("gelu", smallest, batch, 35, 33, rate=0.25)
        yield dense_backward_weight(smallest, batch, 35, 36)
        yield dense_backward_weight(smallest, batch, 35, 36, fetched=True)
        yield dense_backward_weight(None, batch, 36, 16, fetched=True)
        yield dense_backward_weight(None, batch, 35, 5)
        yield dense_forward_split_k(smallest, batch, 70, 35, part=32, fetched=True)
        yield dense_backward_atomic(batch, 35, 36)
    yield dense_forward("identity", smallest, whole(33), normal(33, 35), normal(35, 36), plain=True)
    yield dense_forward_sum_partials("identity", whole(33), 37, 1, plain=True)
    yield dense_backward_input("identity", smallest, whole(33), 35, 36, plain=True)
    yield dense_backward_weight(smallest, whole(33), 35, 36, plain=True)
    yield dense_backward_atomic(whole(33), 35, 36, plain=True)
    # Lengths that allow vectors, at addresses that do not.
    yield dense_forward("identity", smallest, whole(33), normal(33, 36), normal(36, 40), shift=True)
    yield dense_forward_split_k(smallest, whole(33), 72, 40, part=32, shift=True)
    yield dense_backward_input("identity", smallest, whole(33), 36, 40, plain=True, shift=True)
    yield dense_backward_weight(smallest, whole(33), 36, 40, shift=True)
    # What is not finite stays in its row, whichever neighbours are read along with it.
    for tile, k in product(TILES, (31, 32)):
        x = normal(34, k)
        x[5, 3], x[20, k - 1], x[33, 0] = np.nan, np.inf, -np.inf
        yield dense_forward("identity", tile, whole(34), x, normal(k, 33))
