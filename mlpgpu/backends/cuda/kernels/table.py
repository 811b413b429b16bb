"""The table as a whole."""

from __future__ import annotations

from functools import cache
from itertools import product

from .dense import dense_entries
from .entry import Entry
from .local import local_entries
from .losses import loss_entries
from .metrics import metric_entries, rank_entries
from .network import network_entries
from .parts import part_entries
from .primitives import primitive_entries
from .row_step import row_step_entries, tensor_row_step_entries
from .rows import row_entries
from .split_operands import split_entries
from .tensor import tensor_entries
from .updates import update_entries
from .whole_batch import whole_batch_entries


@cache
def all_entries() -> tuple[Entry, ...]:
    """Every entry that a plan or its metrics can ask for, from the tables of the NumPy specification."""
    entries = [*dense_entries(), *whole_batch_entries(), *split_entries(), *tensor_entries(), *local_entries()]
    entries += [*row_entries(), *loss_entries(), *update_entries(), *primitive_entries(), *network_entries()]
    entries += [*row_step_entries(), *tensor_row_step_entries(), *part_entries()]
    for kind, textured in product(("index", "dense"), (True, False)):
        entries += [*metric_entries(kind, textured=textured), *rank_entries(textured=textured)]
    return tuple(dict.fromkeys(entries))
