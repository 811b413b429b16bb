"""What differs between versions of scikit-learn, and what is said if there is none."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import MissingPackageError

LEAST = (1, 6)  # has validate_data and the tags of today

_HINT = "pip install 'mlpgpu[sklearn]'"
_EXPECTED = f"the package scikit-learn, {'.'.join(map(str, LEAST))} or newer"

try:
    import sklearn as _sklearn
except ImportError as error:
    raise MissingPackageError("mlpgpu.sklearn", expected=_EXPECTED, got=error, hint=_HINT) from error

Method = TypeVar("Method", bound=Callable[..., Any])


class _NoCallbackSupport:
    """A base before ``BaseEstimator`` where scikit-learn has no callbacks; ``object`` can stand before no class."""


try:  # from scikit-learn 1.9 on
    from sklearn.callback import CallbackSupportMixin as _CallbackSupport
    from sklearn.callback import with_callbacks as _with_callbacks
except ImportError:
    _CallbackSupport, _with_callbacks = _NoCallbackSupport, None

CallbackSupport = _CallbackSupport


def with_callbacks(method: Method) -> Method:
    """``method``, after which callbacks are torn down; the method itself where scikit-learn has none."""
    return method if _with_callbacks is None else _with_callbacks(method)


def check_version() -> None:
    """Refuse a scikit-learn that is too old.

    Raises:
        MissingPackageError: it is.
    """
    version = _sklearn.__version__
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < LEAST:
        raise MissingPackageError("mlpgpu.sklearn", expected=_EXPECTED, got=version, hint=_HINT)
