"""Arrays of operands of tensor cores, beside the float32 arrays after which they are named.

Operands without scales have neither scales, flags of columns, nor floats that products would read beside them.
"""

from __future__ import annotations

from ...kernels import OperandFormat, padded_columns, padded_rows
from ...kernels.launches import At, Value
from ..groups import Stored
from .shard import Shard


def format_of(shard: Shard) -> OperandFormat:
    """The format of a shard that has products on tensor cores."""
    assert shard.work.operand_format is not None
    return shard.work.operand_format


def of_shard(shard: Shard, name: str) -> str:
    """Shards run side by side, so each has operands of its own."""
    return f"{name}@{shard.number}" if shard.number else name


def component_elements(shard: Shard, n: int) -> int:
    """Elements of one component of the shard's rows."""
    return padded_rows(shard.rows) * padded_columns(n)


def elements_of(shard: Shard, name: str) -> int:
    """Elements of one component of a buffer; 0 where there are no tensor cores."""
    return component_elements(shard, shard.width(name)) if shard.work.operand_format else 0


def component_count(shard: Shard) -> int:
    """Components of an operand; 0 where there are no tensor cores."""
    return shard.work.operand_format.components if shard.work.operand_format else 0


def components(shard: Shard, name: str, elements: int) -> At:
    """The components, of so many elements each, beside an array."""
    return shard.room(name, 2 * component_count(shard) * elements)


def components_of(shard: Shard, name: str) -> At:
    """The components beside a buffer."""
    return components(shard, of_shard(shard, f"{name}.components"), elements_of(shard, name))


def weight_components(shard: Shard, weight: str) -> At:
    k, n = shard.shapes[weight]
    return components(shard, f"{weight}.components", padded_rows(k) * padded_columns(n))


def words(shard: Shard, name: str, count: int) -> Value:
    """An array of ``count`` row or column scales; None in formats without scales."""
    return shard.room(name, 4 * count) if format_of(shard).scaled else None


def rows_words(shard: Shard, name: str) -> Value:
    """The row scales of a buffer."""
    return words(shard, of_shard(shard, f"{name}.row_scales"), padded_rows(shard.rows))


def floats(shard: Shard, name: str) -> Value:
    """The float32 array beside components: products read it where its scaled components do not hold it."""
    return shard.ref(name) if format_of(shard).scaled else None


def collected_column_scales(shard: Shard, name: str, n: int) -> Value:
    """Column scales whose flags several blocks set: all lie in one array, which one launch clears."""
    if not format_of(shard).scaled:
        return None
    sizes = shard.lowered.column_scales
    sizes.setdefault(name, padded_columns(n))
    names = list(sizes)
    return At("column scales", sum(sizes[other] for other in names[: names.index(name)]))


def weight_words(shard: Shard, weight: str) -> dict[str, Value]:
    """A weight's row scales and column scales."""
    k, n = shard.shapes[weight]
    return {
        "row_scales": words(shard, f"{weight}.row_scales", padded_rows(k)),
        "column_scales": collected_column_scales(shard, f"{weight}.column_scales", n),
    }


def written(shard: Shard, name: str | None, forms: Stored | None) -> tuple[Value, Value]:
    """The arrays that a kernel stores a buffer to: of floats, and of components."""
    if name is None or forms is None:
        return None, None
    operands = components_of(shard, name) if forms.operands else None
    return shard.stored(name) if forms.floats else None, operands


def columns_of(shard: Shard, dz: str, dweight: str | None) -> At:
    """The components of a delta for dW: scaled ones along columns, others as for dx."""
    name = f"{dz}.components for {dweight}" if format_of(shard).scaled else f"{dz}.components"
    return components(shard, of_shard(shard, name), component_elements(shard, shard.width(dz)))


def bias_sum(shard: Shard, dbias: str | None, n: int, *, is_summed: bool) -> Value:
    """Where a bias's gradient lies: among the partials, or for the product that updates it."""
    if dbias is None or not is_summed:
        return None
    return shard.room(dbias, 4 * n) if shard.work.in_place else shard.ref(dbias)
