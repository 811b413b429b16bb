"""What scikit-learn itself asks of an estimator, and of its own MLP."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from deviations import (
    CHECKS,
    CHECKS_OF_SOME_PROCESSORS,
    LATEST,
    NOT_OF_BEHAVIOUR,
    SINCE_1_7,
    TESTS,
    VERSION,
    table,
)
from sklearn.utils.estimator_checks import check_estimator, check_methods_subset_invariance

from mlpgpu.sklearn import MLPClassifier, MLPRegressor

DOCS = Path(__file__).parents[2] / "docs" / "sklearn.md"
LISTED = pytest.mark.skipif(VERSION > LATEST, reason="deviations.py has the lists of scikit-learn 1.6 to 1.9")
EACH = pytest.mark.parametrize("kind", [MLPClassifier, MLPRegressor])


def failed_checks(estimator: Any) -> set[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(estimator, on_fail=None, on_skip=None)
    assert sum(result["status"] == "passed" for result in results) > 50
    return {result["check_name"] for result in results if result["status"] == "failed"}


@EACH
@LISTED
@pytest.mark.thorough
def test_check_estimator(kind: type) -> None:
    failed = failed_checks(kind(backend="cpu"))
    assert set(CHECKS) <= failed <= {*CHECKS, *CHECKS_OF_SOME_PROCESSORS}


@EACH
@LISTED
def test_in_float64_a_row_s_prediction_does_not_depend_on_others(kind: type) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has not converged
        check_methods_subset_invariance(kind.__name__, kind(backend="cpu", precision="float64"))


@EACH
@pytest.mark.gpu
def test_check_estimator_on_a_card(kind: type) -> None:
    assert failed_checks(kind(backend="cuda")) <= set(CHECKS)


def test_the_documentation_lists_what_fails() -> None:
    assert table() in DOCS.read_text(encoding="utf-8")


@pytest.mark.parametrize("there", ["None", "types.SimpleNamespace(__version__='1.5.2')"])
def test_without_scikit_learn_or_with_an_old_one_the_error_is_ours(there: str) -> None:
    script = f"""
import sys, types
sys.modules["sklearn"] = {there}
import mlpgpu
try:
    import mlpgpu.sklearn
except ImportError as error:
    assert isinstance(error, mlpgpu.errors.MissingPackageError), repr(error)
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "expected the package scikit-learn, 1.6 or newer, got " in done.stdout
    assert "pip install 'mlpgpu[sklearn]'" in done.stdout


def test_where_scikit_learn_has_no_callbacks_the_estimators_are_the_same_otherwise() -> None:
    # As before scikit-learn 1.9; its own modules are imported first, because those of 1.9 need the callbacks.
    script = """
import sys
import pytest, sklearn.calibration, sklearn.inspection, sklearn.model_selection, sklearn.utils.estimator_checks
sys.modules["sklearn.callback"] = None
sys.exit(pytest.main(sys.argv[1:]))
"""
    here = Path(__file__).parent
    files = [str(here / name) for name in ("test_protocols.py", "test_ctrl_c.py")]
    options = ["-q", "-p", "no:cacheprovider", "-m", "not thorough and not gpu"]
    done = subprocess.run(
        [sys.executable, "-c", script, *options, *files], cwd=here.parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "could not import 'sklearn.callback'" in done.stdout  # why the tests of callbacks were skipped


def base(name: str) -> str:
    """The test's function."""
    return name.partition("[")[0]


@LISTED
@pytest.mark.thorough
def test_scikit_learns_own_tests() -> None:
    script = Path(__file__).with_name("scikit_learns_tests.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    results = json.loads(done.stdout.splitlines()[-1])
    unexpected = [name for name in results["failed"] if name not in TESTS and base(name) not in TESTS]
    assert unexpected == []
    all_failed = {*results["failed"], *map(base, results["failed"])}
    later = SINCE_1_7 if VERSION < (1, 7) else ()
    assert [name for name in TESTS if name not in all_failed and name not in later] == []
    reasons = [TESTS.get(name, TESTS.get(base(name))) for name in results["failed"]]
    of_behaviour = sum(reason not in NOT_OF_BEHAVIOUR for reason in reasons) + len(results["passed"])
    assert len(results["passed"]) >= 0.8 * of_behaviour
