"""Estimators for scikit-learn: :class:`MLPClassifier` and :class:`MLPRegressor`, trained by this package's backends.

They take the arguments of scikit-learn's estimators of the same names and mean the same by them, but for the solver
``"lbfgs"``, and have a few of their own.  ``docs/sklearn.md`` has what differs.
"""

from __future__ import annotations

from .compat import check_version

check_version()

from .classifier import MLPClassifier  # noqa: E402  (an older scikit-learn would fail here in words of its own)
from .regressor import MLPRegressor  # noqa: E402

__all__ = ["MLPClassifier", "MLPRegressor"]
