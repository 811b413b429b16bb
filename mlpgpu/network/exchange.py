"""Networks from other programs, and for them: files that are loaded, scikit-learn's estimators, PyTorch's modules."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from os import PathLike
from typing import Any

from .. import storage
from ..errors import DtypeError, MlpgpuError, StorageError, check_truth
from ..storage.files import check_path, reason
from .formats import Hints, network_of_estimator, reader_of, sequential_of
from .network import Network


def load(
    path: str | PathLike[str], *, activation: str | Sequence[str] | None = None, output: str | None = None
) -> Network:
    """The network in a file: one of ``Network.save`` or ``Trainer.save``, or of another program.

    Of others it reads stacks of dense layers: safetensors, Keras' archives and HDF5 files, PyTorch's state dicts;
    ``docs/formats.md`` has what is taken and what is refused.  What a file is, is told by what is in it.  Nothing in it
    is ever executed.

    Arguments:
        activation: where the file has weights alone, that of all layers but the last, or a list of one for each layer.
        output: likewise, what makes predictions of logits: ``"identity"``, ``"sigmoid"``, ``"softmax"`` or ``"exp"``.

    Raises:
        StorageError: the file cannot be read.
        FileFormatError: it is damaged, or of no format that is known, or has what no network of ours does, or is from
            a newer version.
        ConfigurationError: functions are not said of a file without them, or are of a file that has them.
        BackendError: a package that reads the format is missing.
    """
    hints = Hints(activation, output)
    source = check_path("path of a file", path)
    what = f"file {source}"
    try:
        # Asked first because opening a pipe would wait for its other end.
        read = reader_of(what, source) if stat.S_ISREG(source.stat().st_mode) else None
        if read is not None:
            return Network.from_saved(read(source, hints))
    except MlpgpuError:
        raise
    except (OSError, ValueError) as error:
        raise StorageError(what, expected="a readable file", got=reason(error)) from error
    hints.refuse(what)
    return Network.from_contents(storage.read(path))


def from_sklearn(estimator: Any) -> Network:
    """The network of a fitted ``MLPClassifier`` or ``MLPRegressor`` of scikit-learn, which predicts the same.

    A ``StandardScaler`` before it in a ``Pipeline`` becomes the first layer, and that of the targets in a
    ``TransformedTargetRegressor`` the last one.  Parameters have the estimator's precision, which is float64 unless it
    was fitted to float32.  The network's seed is 0: it does not know that of the estimator.

    Raises:
        DtypeError: it is no such estimator.
        ConfigurationError: it is not fitted, or the pipeline has another step.
    """
    network = getattr(estimator, "network_", None)  # an estimator of ours has it
    return Network.from_saved(network.saved() if isinstance(network, Network) else network_of_estimator(estimator))


def to_torch(network: Network, *, logits: bool = False) -> Any:
    """A ``torch.nn.Sequential`` that predicts what the network does, (rows, n_out), in eval mode.

    Its modules are PyTorch's own, and some of ours for what PyTorch lacks (``Standardize``, ``LocallyConnected``, bytes
    that are scaled, exp).  Values are copies; a layer that stands at several places is one module, and frozen ones
    require no gradient.

    Arguments:
        network: to be exported; its values are those of this moment.
        logits: leave out the output's function and the scaling back of standardized targets, as PyTorch's losses
            want it.

    Raises:
        DtypeError: it is no network, or ``logits`` is neither True nor False.
        ConfigurationError: a ``Standardize`` layer was never fitted.
        DataError: a parameter is not finite.
        BackendError: PyTorch is missing.
    """
    if not isinstance(network, Network):
        raise DtypeError("network", expected="a mlpgpu.Network", got=type(network).__name__)
    return sequential_of(network.to_export(logits=check_truth("logits", logits)))
