"""What TensorBoard shows of a training: curves, distributions, the network."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np

from ..backends import MOST_BINS
from ..errors import BackendError, StorageError, check_integer
from ..history import Record
from ..storage.files import check_path, reason
from .callback import Callback, TrainerLike
from .histograms import COUNTED, check_counted


class TensorBoard(Callback):
    """Writes each epoch's numbers to a folder that ``tensorboard --logdir`` shows (extra ``tensorboard``).

    Each column of the history is a curve over epochs; metrics of training and validation have names of their own.
    Distributions of layers are counted where they lie, as :class:`Histograms` does, and their sums are those of the
    bins' centres.  The network is drawn as its layers.  A resumed fit replaces what an unfinished one wrote after the
    epoch that it goes on from.

    Arguments:
        folder: made where it is not there; several runs are compared as folders inside one.
        histograms_every: epochs between distributions, or 0 for none.
        bins: of a distribution, at most 4,096.
        of: what is counted, some of ``"parameters"``, ``"activations"`` and ``"gradients"``.

    Raises:
        DtypeError, ConfigurationError, UnknownNameError: an argument has no meaning.
        BackendError: at the start of a fit: tensorboardX is not installed.
        StorageError: the folder cannot be made, or written to.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        histograms_every: int = 0,
        bins: int = 64,
        of: Sequence[str] = COUNTED,
    ) -> None:
        self.folder = check_path("TensorBoard folder", folder)
        self.histograms_every = check_integer("TensorBoard histograms_every", histograms_every, least=0)
        self.bins = check_integer("TensorBoard bins", bins, least=1, most=MOST_BINS)
        self.of = check_counted("TensorBoard of", of)
        self._writer: Any = None

    def begin(self, trainer: TrainerLike) -> None:
        try:
            import tensorboardX
        except ImportError as error:
            hint = "pip install 'mlpgpu[tensorboard]'"
            raise BackendError("TensorBoard", expected="the package tensorboardX", got=error, hint=hint) from error

        self._close()
        try:
            # Files are named by the second: those of two fits in one would be the same, and the first one lost.
            suffix = f".{trainer.epochs:06}.{secrets.token_hex(4)}"
            next_epoch = trainer.epochs + 1
            self._writer = tensorboardX.SummaryWriter(str(self.folder), purge_step=next_epoch, filename_suffix=suffix)
            if trainer.epochs == 0:
                self._writer.file_writer.add_event(_graph(tensorboardX.proto, trainer.network.layers))
        except (OSError, ValueError) as error:
            raise self._refused(error) from error

    def epoch_end(self, trainer: TrainerLike, record: Record) -> None:
        epoch = trainer.epochs
        counted = {}
        if self.histograms_every and epoch % self.histograms_every == 0:
            counted = trainer.histograms(self.bins, self.of)
        try:
            for name, value in record.items():
                if name != "epoch" and np.isfinite(value):
                    self._writer.add_scalar(name, value, epoch)
            for name, (counts, edges) in counted.items():
                centres = (edges[:-1] + edges[1:]) / 2
                self._writer.add_histogram_raw(
                    name,
                    min=edges[0],
                    max=edges[-1],
                    num=int(counts.sum()),
                    sum=float(counts @ centres),
                    sum_squares=float(counts @ np.square(centres)),
                    bucket_limits=edges[1:].tolist(),
                    bucket_counts=counts.tolist(),
                    global_step=epoch,
                )
            self._writer.flush()
        except OSError as error:
            raise self._refused(error) from error

    def end(self, trainer: TrainerLike) -> None:
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _refused(self, error: Exception) -> StorageError:
        return StorageError(f"TensorBoard folder {self.folder}", expected="one to write to", got=reason(error))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_writer": None}  # files stay with the process that opened them


def _graph(proto: Any, layers: Sequence[Any]) -> Any:
    """The event of a graph, the layers as a chain of nodes; ``proto`` has TensorFlow's messages."""
    nodes = [proto.node_def_pb2.NodeDef(name="inputs", op="Placeholder")]
    for place, layer in enumerate(layers):
        text = proto.attr_value_pb2.AttrValue(s=repr(layer).encode())
        kind = type(layer).__name__
        node = proto.node_def_pb2.NodeDef(name=f"{place}_{kind}", op=kind, input=[nodes[-1].name], attr={"layer": text})
        nodes.append(node)
    versions = proto.versions_pb2.VersionDef(producer=22)
    graph = proto.graph_pb2.GraphDef(node=nodes, versions=versions)
    return proto.event_pb2.Event(graph_def=graph.SerializeToString())
