"""What a command prints: results on standard output, everything else on standard error."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

import numpy as np

from ..errors import ConfigurationError, MlpgpuError, UnknownNameError

DONE, FAILURE, USAGE, INTERRUPTED = 0, 1, 2, 130


def exit_code(error: BaseException) -> int:
    """2 for arguments without meaning, 130 for Ctrl-C, 1 for all else."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return USAGE if isinstance(error, (ConfigurationError, UnknownNameError)) else FAILURE


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors, and --json's result")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


class Output:
    """Where the lines of a command go.

    Arguments:
        quiet: whether nothing is printed but errors and JSON.
        as_json: whether the result is printed as JSON, and no text.
    """

    def __init__(self, quiet: bool, as_json: bool) -> None:
        self.quiet, self.as_json = quiet, as_json

    def text(self, *lines: str) -> None:
        """Results for people."""
        if not self.quiet and not self.as_json:
            print(*lines, sep="\n")

    def result(self, result: dict[str, Any]) -> None:
        """The result for programs."""
        if self.as_json:
            print(json.dumps(plain(result)))


def plain(value: Any) -> Any:
    """``value`` as JSON has it: arrays as lists, and null for what is not finite."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


@contextlib.contextmanager
def telling(quiet: bool) -> Iterator[None]:
    """Warnings as lines on standard error, like all else that the package tells; or nothing of it."""
    stream: TextIO = io.StringIO() if quiet else sys.stderr
    with warnings.catch_warnings(), contextlib.redirect_stderr(stream):
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *about, **options: print(f"mlpgpu: {message}", file=sys.stderr)
        yield


def tell_error(error: BaseException) -> int:
    """Print an error as one line on standard error and return the exit code."""
    if isinstance(error, BrokenPipeError):  # whoever reads standard output has gone, as head does
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (what is left is written there at the end)
        return FAILURE
    if isinstance(error, MlpgpuError):
        print("mlpgpu:", *str(error).split(), file=sys.stderr)
    else:
        print("mlpgpu: interrupted", file=sys.stderr)
    return exit_code(error)
