"""Train multilayer perceptrons fast, with GPU kernels anyone can read."""

from . import datasets, errors, tables
from .callbacks import Callback, Checkpoint, CSVLogger, EarlyStopping, Histograms, OptunaPruning, TensorBoard
from .datasets import Dataset
from .errors import MlpgpuError
from .history import History
from .layers import Dense, Dropout, LocallyConnected, Standardize
from .losses import (
    AbsoluteError,
    BinaryCrossEntropy,
    BinaryFocal,
    Focal,
    Huber,
    Loss,
    MeanSquaredError,
    Poisson,
    Quantile,
    SoftmaxCrossEntropy,
    SquaredError,
)
from .network import Network, Predictor, from_sklearn, load, to_torch
from .optimizers import SGD, Adam, AdamW, Momentum, Nesterov, RMSprop
from .ranks import rank, ranks
from .schedules import Constant, CosineDecay, ExponentialDecay, OneCycle, ReduceOnPlateau, StepDecay, WarmUp
from .tables import Table
from .training import Trainer
from .version import __version__


def __dir__() -> list[str]:
    return __all__  # what Tab shows


__all__ = [
    "SGD",
    "AbsoluteError",
    "Adam",
    "AdamW",
    "BinaryCrossEntropy",
    "BinaryFocal",
    "CSVLogger",
    "Callback",
    "Checkpoint",
    "Constant",
    "CosineDecay",
    "Dataset",
    "Dense",
    "Dropout",
    "EarlyStopping",
    "ExponentialDecay",
    "Focal",
    "Histograms",
    "History",
    "Huber",
    "LocallyConnected",
    "Loss",
    "MeanSquaredError",
    "MlpgpuError",
    "Momentum",
    "Nesterov",
    "Network",
    "OneCycle",
    "OptunaPruning",
    "Poisson",
    "Predictor",
    "Quantile",
    "RMSprop",
    "ReduceOnPlateau",
    "SoftmaxCrossEntropy",
    "SquaredError",
    "Standardize",
    "StepDecay",
    "Table",
    "TensorBoard",
    "Trainer",
    "WarmUp",
    "__version__",
    "datasets",
    "errors",
    "from_sklearn",
    "load",
    "rank",
    "ranks",
    "tables",
    "to_torch",
]
