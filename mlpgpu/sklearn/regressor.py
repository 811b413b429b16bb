"""The regressor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import column_or_1d

from ..losses import Loss
from ..optimizers import Optimizer
from .base import BaseMLP, Prepared, has_batches, is_narrow
from .compat import with_callbacks
from .losses import regression_loss


class MLPRegressor(RegressorMixin, BaseMLP):  # type: ignore[misc]
    """A multilayer perceptron that predicts numbers, one or several for each row.

    Its arguments and attributes are those of :class:`MLPClassifier`, but for these.

    Arguments:
        loss: ``"squared_error"``, ``"poisson"``, or another of ours for numbers, such as ``"absolute_error"`` or
            ``mlpgpu.Quantile(0.9)``.
        standardize: whether inputs and targets are standardized, by layers fitted to the first data; predictions are
            scaled back, and losses are those of the standardized targets.
        metric: as the classifier's; ``"r2"`` if None, and predictions are numbers.
    """

    _default_metric: ClassVar[str] = "r2"
    _scales_targets: ClassVar[bool] = True
    _y_checks: ClassVar[dict[str, Any]] = {"y_numeric": True}

    def __init__(
        self,
        loss: str | Loss = "squared_error",
        hidden_layer_sizes: int | Sequence[int] = (100,),
        activation: str = "relu",
        *,
        solver: str | Optimizer = "adam",
        alpha: float = 0.0001,
        batch_size: int | str = "auto",
        learning_rate: str = "constant",
        learning_rate_init: float = 0.001,
        power_t: float = 0.5,
        max_iter: int = 200,
        shuffle: bool = True,
        random_state: Any = None,
        tol: float = 1e-4,
        verbose: bool | int = False,
        warm_start: bool = False,
        momentum: float = 0.9,
        nesterovs_momentum: bool = True,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        n_iter_no_change: float = 10,
        optimizer: str | Optimizer | None = None,
        dropout: float | Sequence[float] = 0.0,
        standardize: bool = False,
        backend: str = "auto",
        precision: str = "float32",
        metric: str | Callable[..., Any] | None = None,
    ) -> None:
        self.loss = loss
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.solver = solver
        self.alpha = alpha
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.learning_rate_init = learning_rate_init
        self.power_t = power_t
        self.max_iter = max_iter
        self.shuffle = shuffle
        self.random_state = random_state
        self.tol = tol
        self.verbose = verbose
        self.warm_start = warm_start
        self.momentum = momentum
        self.nesterovs_momentum = nesterovs_momentum
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.n_iter_no_change = n_iter_no_change
        self.optimizer = optimizer
        self.dropout = dropout
        self.standardize = standardize
        self.backend = backend
        self.precision = precision
        self.metric = metric

    @with_callbacks
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> MLPRegressor:
        """Train on X (rows, features), dense or sparse, and y (rows,) or (rows, outputs).

        As :meth:`MLPClassifier.fit` otherwise.
        """
        return self._fit(X, y, sample_weight, incremental=False)

    @available_if(has_batches)  # type: ignore[untyped-decorator]
    @with_callbacks
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> MLPRegressor:
        """Train for one epoch on these rows, as :meth:`MLPClassifier.partial_fit` does."""
        return self._fit(X, y, sample_weight, incremental=True)

    def _prepare(self, x: np.ndarray, y: Any, weight: np.ndarray | None, *, goes_on: bool) -> Prepared:
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        columns = y.reshape(len(y), -1)
        counted = regression_loss(self.loss, columns, weight)
        return Prepared(x=x, y=y, weight=weight, counted=counted, n_out=columns.shape[1])

    def predict(self, X: Any) -> np.ndarray:
        """Values for the rows of X (rows, features): (rows,) or (rows, outputs), float32 where X is, else float64.

        Raises:
            NotFittedError: there was no fit.
            ValueError, MlpgpuError: X does not suit the network.
        """
        outputs = self._outputs(X)
        return outputs if is_narrow(X) else outputs.astype(np.float64, copy=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
