"""The shell's commands that train and use models, and ``launch``: ``python -m mlpgpu train`` and so on."""

from __future__ import annotations

import argparse
from typing import Any

from .evaluate import add_evaluate, add_export
from .launch import add_launch
from .output import Output, tell_error, telling
from .predict import add_predict
from .train import add_train

__all__ = ["add_commands", "run", "tell_error"]


def add_commands(commands: Any) -> None:
    """Add the commands to a parser's."""
    for add in (add_train, add_predict, add_evaluate, add_export, add_launch):
        add(commands)


def run(options: argparse.Namespace) -> int:
    """Run the command that was asked for, and return the exit code.

    Raises:
        MlpgpuError: it failed.
    """
    with telling(options.quiet):
        return int(options.run(options, Output(options.quiet, options.json)))
