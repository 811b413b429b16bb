"""A page of the names that arguments take, made of the package's tables."""

from __future__ import annotations

from collections.abc import Iterable

from mlpgpu.activations import ACTIVATIONS
from mlpgpu.initializers import INITIALIZERS
from mlpgpu.losses import LOSSES
from mlpgpu.metrics import METRICS
from mlpgpu.names import SYNONYMS
from mlpgpu.optimizers import OPTIMIZERS
from mlpgpu.plan import CARD_PRECISIONS, PRECISIONS

INTRODUCTION = """# Names that arguments take

Wherever an argument is a name, it is a row of one of these tables. Names that other libraries have for the same thing
are understood too; what no table has is refused, and the error names the nearest row.
"""


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    first = list(heads)
    listed = [first, ["---"] * len(first), *map(list, rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in listed)


def code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


def synonyms(name: str) -> str:
    return ", ".join(code(other) for other, names in SYNONYMS.items() if name in names)


def data(name: str) -> str:
    """What docstrings that name a table link to."""
    return f"```{{eval-rst}}\n.. py:data:: {name}\n```\n\n"


def names_page() -> str:
    """The page, in Markdown."""
    activations = ([code(n), code(row.formula), code(row.initializer), synonyms(n)] for n, row in ACTIVATIONS.items())
    losses = (
        [code(name), code(kind.__name__), code(kind.formula), code(kind.output), synonyms(name)]
        for name, kind in LOSSES.items()
    )
    optimizers = ([code(name.lower()), code(name), synonyms(name.lower())] for name in OPTIMIZERS)
    metrics = [
        [code(name), "higher" if row.higher_is_better else "lower", synonyms(name)] for name, row in METRICS.items()
    ]
    metrics += [["`top_<k>_accuracy`", "higher", ""], ["`pinball_<level>`", "lower", ""]]
    initializers = ([code(name), row.distribution] for name, row in INITIALIZERS.items())
    precisions = ([code(name), "a card" if name in CARD_PRECISIONS else "either"] for name in PRECISIONS)
    parts = {
        "Activations": data("mlpgpu.activations.ACTIVATIONS")
        + table(["name", "y = f(z)", "weights that suit it", "also"], activations),
        "Losses": data("mlpgpu.losses.LOSSES") + table(["name", "class", "a row's value", "output", "also"], losses),
        "Optimizers": data("mlpgpu.optimizers.OPTIMIZERS") + table(["name", "class", "also"], optimizers),
        "Metrics": data("mlpgpu.metrics.METRICS") + table(["name", "better", "also"], metrics),
        "Initial weights": data("mlpgpu.initializers.INITIALIZERS") + table(["name", "distribution"], initializers),
        "Precisions": table(["name", "on"], precisions),
    }
    return "\n".join([INTRODUCTION, *(f"## {heading}\n\n{part}\n" for heading, part in parts.items())])
