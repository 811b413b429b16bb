"""A network: its layers, the values of their parameters and who has them, what it predicts, what a file holds of it."""

from __future__ import annotations

from .exchange import from_sklearn, load, to_torch
from .network import Data, Network
from .parameters import FlatParameters, Parameters
from .predictor import Predictor

__all__ = [
    "Data",
    "FlatParameters",
    "Network",
    "Parameters",
    "Predictor",
    "from_sklearn",
    "load",
    "to_torch",
]
