"""State dicts: values by the names that PyTorch gives them in a ``Sequential`` with one module for each step.

What is read may come of any modules that compute a stack of Linear layers: names and shapes tell which ones there are,
and in which order; functions between them are in no state dict, so the caller says them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import FileFormatError
from ...layers import MOST_LAYERS
from ..saved import SavedNetwork
from .hints import Hints
from .steps import Linear, Local, Standardize, Step, network_of


def state_dict(steps: Iterable[Step], named: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A network's values by PyTorch's names: ``"0.weight"`` (n_out, n_in), ``"0.bias"`` (n_out,), ``"2.weight"``, …"""
    return {name: values.T if is_turned else values for name, values, is_turned in _places(steps, named)}


def values_of(what: str, steps: Iterable[Step], found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The network's values of what :func:`state_dict` gave.

    Raises:
        FileFormatError: there are tensors beside them, or shared ones differ.
        KeyError: one is missing.
    """
    left = dict(found)
    values: dict[str, np.ndarray] = {}
    for name, target, is_turned in _places(steps, {}):
        array = left.pop(name)
        array = array.T if is_turned else array
        if target in values and not np.array_equal(values[target], array):
            raise FileFormatError(what, expected=f"{name} equal to that of the layer that it is", got="other numbers")
        values[target] = array
    if left:
        raise FileFormatError(what, expected="the tensors that its description lists", got=f"also {', '.join(left)}")
    return values


def _places(steps: Iterable[Step], named: Mapping[str, np.ndarray]) -> Iterable[tuple[str, Any, bool]]:
    """The name of each value, what ``named`` has of it or else its name there, and whether it is transposed."""
    for number, step in enumerate(steps):
        for name in step.values:
            assert isinstance(step, (Linear, Standardize))
            source = f"{step.place}.{name}"
            is_turned = name == "weight" and not isinstance(step, Local)
            yield f"{number}.{name}", named.get(source, source), is_turned


def network_of_state_dict(
    what: str, tensors: Mapping[str, np.ndarray], hints: Hints, *, is_ordered: bool
) -> SavedNetwork:
    """The network of Linear layers, and of our ``Standardize`` first and last, that these tensors are of.

    ``is_ordered`` says whether they come in the order of the modules.  Otherwise names that differ in numbers alone
    tell it, or widths where only one order fits them.

    Raises:
        FileFormatError: they are of other modules, or nothing tells the order.
        ConfigurationError: there are hidden layers, and ``hints`` do not say their activations.
    """
    groups: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        group, _, kind = name.rpartition(".")
        groups.setdefault(group, {})[kind] = tensor
    if len(groups) > MOST_LAYERS:
        raise FileFormatError(what, expected=f"at most {MOST_LAYERS} modules", got=len(groups))
    for group, found in groups.items():
        _check_module(what, group, found)
    if not any("weight" in found for found in groups.values()):
        raise FileFormatError(what, expected="at least one dense layer", got="none")
    names = list(groups) if is_ordered else _in_order(what, groups)
    linear = [name for name in names if "weight" in groups[name]]
    functions = hints.functions(what, len(linear))
    steps: list[Step] = []
    values: dict[str, np.ndarray] = {}
    for place, name in enumerate(names):
        found = groups[name]
        if "weight" not in found:
            steps.append(Standardize(place, is_inverse=place > 0))
            values |= {f"{place}.mean": found["mean"], f"{place}.scale": found["scale"]}
            continue
        n_out, n_in = found["weight"].shape
        steps.append(Linear(place, n_in, n_out, "bias" in found))
        values |= {f"{place}.{kind}": tensor.T for kind, tensor in found.items()}
        steps += functions[linear.index(name)]
    ending = [steps.pop()] if isinstance(steps[-1], Standardize) and len(steps) > 1 else []
    return network_of(what, [*steps, *hints.outputs(), *ending], values)


def _check_module(what: str, name: str, found: Mapping[str, np.ndarray]) -> None:
    """Refuse what is not a Linear's weight (n_out, n_in) with or without its bias (n_out,), nor our ``Standardize``."""
    shapes = {kind: tensor.shape for kind, tensor in found.items()}
    of_linear = len(shapes.get("weight", ())) == 2 and shapes in (
        {"weight": shapes["weight"]},
        {"weight": shapes["weight"], "bias": shapes["weight"][:1]},
    )
    of_statistics = set(shapes) == {"mean", "scale"} and len(shapes["mean"]) == 1
    if not (of_linear or of_statistics):
        listed = ", ".join(f"{kind} {shape}" for kind, shape in list(shapes.items())[:5])
        expected = "modules with a weight (n_out, n_in) and a bias (n_out,), such as torch.nn.Linear's"
        raise FileFormatError(f"{what}, module {name!r}", expected=expected, got=listed)


def _in_order(what: str, groups: Mapping[str, Mapping[str, np.ndarray]]) -> list[str]:
    """The names of the modules in the order of the network."""
    if len({re.sub(r"\d+", "#", name) for name in groups}) == 1:
        return sorted(groups, key=lambda name: [int(digits) for digits in re.findall(r"\d+", name)])
    widths = {
        name: found["weight"].shape[::-1] if "weight" in found else found["mean"].shape * 2
        for name, found in groups.items()
    }
    orders = [order for name in widths if (order := _chain(name, widths))]
    if len(orders) == 1:
        return orders[0]
    expected = "modules whose names tell their order, such as 0.weight, 2.weight"
    raise FileFormatError(what, expected=expected, got=", ".join(list(groups)[:5]))


def _chain(first: str, widths: Mapping[str, Sequence[int]]) -> list[str]:
    """The one order from ``first`` in which each takes what the one before gives; empty if there is not one."""
    order, left = [first], [name for name in widths if name != first]
    while left:
        following = [name for name in left if widths[name][0] == widths[order[-1]][1]]
        if len(following) != 1:
            return []
        order.append(following[0])
        left.remove(following[0])
    return order
