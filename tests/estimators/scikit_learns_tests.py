"""Runs scikit-learn's own tests of its MLP, as installed, with the estimators of this package in place of its two.

    python tests/estimators/scikit_learns_tests.py [pytest's arguments]

The last row printed is JSON: the tests passed and failed, by name.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import sklearn.neural_network as theirs

import mlpgpu.sklearn as ours


class Results:
    """What became of each test."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            name = report.nodeid.rpartition("::")[2]
            (self.passed if report.passed else self.failed).append(name)


def main(arguments: list[str]) -> int:
    os.environ.setdefault("SKLEARN_SEED", "0")  # of tests that give no random_state
    theirs.MLPClassifier, theirs.MLPRegressor = ours.MLPClassifier, ours.MLPRegressor
    path = Path(theirs.__file__).parent / "tests" / "test_mlp.py"
    results = Results()
    options = ["-q", "--tb=line", "-p", "no:cacheprovider", "-c", "/dev/null", "-W", "ignore"]
    pytest.main([*options, str(path), *arguments], plugins=[results])
    print(json.dumps({"passed": results.passed, "failed": results.failed}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
