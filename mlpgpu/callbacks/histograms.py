"""The values of layers, counted and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, overload

import numpy as np

from ..backends import MOST_BINS, Histogram
from ..errors import BackendError, DtypeError, EmptyDataError, as_list, check_integer, lookup, shown
from ..history import Record
from ..pictures import PICTURES, check_picture, deliver
from ..storage.files import check_path
from .callback import Callback, TrainerLike, check_place

COUNTED = ("parameters", "activations", "gradients")


def check_counted(what: str, of: object) -> tuple[str, ...]:
    """Some of COUNTED, as a tuple.

    Raises:
        DtypeError, UnknownNameError: ``of`` is no list of such names, or an empty one.
    """
    kinds = () if isinstance(of, str) else as_list(what, of, "some of " + ", ".join(COUNTED))
    if not kinds:
        raise DtypeError(what, expected="some of " + ", ".join(COUNTED), got=shown(of))
    return tuple(lookup(what, kind, COUNTED) for kind in kinds)


class Histograms(Callback):
    """Counts the values of layers after each ``every`` epochs, where they lie: on a card, by a kernel.

    Bins are equal, from the least finite value to the greatest, and counts are NumPy's.  A fit begins with none.

    Activations are what a layer with parameters puts out, and gradients those of the mean loss, without penalties,
    before their norm is clipped; both of one step on the first batch of the training data as they stand, the same rows
    each time.  It moves nothing, so a training has the same bits with histograms or without.  On a card this step is
    computed in float32 by kernels that store all of it.

    Arguments:
        path: of a picture that is drawn anew with each count; ends in ``.png`` or ``.svg``.
        bins: at most 4,096.
        of: what is counted, some of ``"parameters"``, ``"activations"`` and ``"gradients"``.

    Attributes:
        epochs: ``epochs[e][name]`` is counts (bins,) and edges (bins + 1,) after epoch e, from 1; ``name`` is a
            parameter's, such as ``"0.weight"``, or ``"0.activation"``, or ``"0.weight.gradient"``.

    Raises:
        DtypeError, ConfigurationError: an argument has no meaning.
        BackendError: a picture is asked for, and matplotlib is not installed.
        StorageError: at the start of a fit: the picture's folder is not there; later: it cannot be written.
    """

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        bins: int = 64,
        every: int = 1,
        of: Sequence[str] = COUNTED,
    ) -> None:
        self.of = check_counted("Histograms of", of)
        self.path = None if path is None else check_path("Histograms path", path, PICTURES)
        self.bins = check_integer("Histograms bins", bins, least=1, most=MOST_BINS)
        self.every = check_integer("Histograms every", every, least=1)
        self.epochs: dict[int, dict[str, Histogram]] = {}

    def begin(self, trainer: TrainerLike) -> None:
        self.epochs = {}
        if self.path is not None:
            check_place(self, self.path)

    def epoch_end(self, trainer: TrainerLike, record: Record) -> None:
        if trainer.epochs % self.every == 0:
            self.epochs[trainer.epochs] = trainer.histograms(self.bins, self.of)
            if self.path is not None:
                self.plot(self.path)

    @overload
    def plot(self, path: str | PathLike[str]) -> Path: ...

    @overload
    def plot(self, path: None = None) -> Any: ...

    def plot(self, path: str | PathLike[str] | None = None) -> Any:
        """Draw a row for each layer, with a line for each epoch that was counted, the last one darkest.

        Returns ``path``, or without one the figure, which a notebook shows.

        Raises:
            ConfigurationError: the name does not end in ``.png`` or ``.svg``.
            EmptyDataError: nothing was counted yet.
            BackendError: matplotlib is not installed.
            StorageError: the picture cannot be written.
        """
        checked = check_picture(path)
        if not self.epochs:
            raise EmptyDataError("Histograms", expected="at least one count", got="none")
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            hint = "pip install 'mlpgpu[plot]'"
            raise BackendError("Histograms.plot", expected="the package matplotlib", got=error, hint=hint) from error

        of_layer: dict[str, list[str]] = {}  # names by the layer's place
        for name in next(iter(self.epochs.values())):
            of_layer.setdefault(name.partition(".")[0], []).append(name)
        columns = max(map(len, of_layer.values()))
        figure = Figure(figsize=(4.5 * columns, 2.5 * len(of_layer)), layout="tight")  # inches
        grid = figure.subplots(len(of_layer), columns, squeeze=False)
        panels = {
            name: axes
            for row, names in zip(grid, of_layer.values(), strict=True)
            for name, axes in zip(names, row, strict=False)
        }
        for axes in set(grid.ravel()) - set(panels.values()):
            axes.remove()
        for name, axes in panels.items():
            for place, (epoch, of_epoch) in enumerate(self.epochs.items(), 1):
                counts, edges = of_epoch[name]
                label = f"epoch {epoch}" if place in (1, len(self.epochs)) else None
                shade = 0.15 + 0.85 * place / len(self.epochs)
                # As a density, so that epochs of other widths compare.
                density = counts / (max(1, counts.sum()) * np.diff(edges))
                axes.stairs(density, edges, color="tab:blue", alpha=shade, label=label)
            axes.set(title=name, ylabel="density")
            axes.legend(fontsize="small")
        return deliver(figure, checked)
