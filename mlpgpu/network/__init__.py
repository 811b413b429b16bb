"""A network: its layers, the values of their parameters and who has them, what it predicts, what a file holds of it."""

from __future__ import annotations

from .network import Data, Network, load
from .parameters import FlatParameters, Parameters
from .predictor import Predictor

__all__ = ["Data", "FlatParameters", "Network", "Parameters", "Predictor", "load"]
