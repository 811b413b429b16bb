"""Training: the trainer, its fit loop and its run file, and what holds a network's state meanwhile."""

from __future__ import annotations

from .trainer import Trainer

__all__ = ["Trainer"]
