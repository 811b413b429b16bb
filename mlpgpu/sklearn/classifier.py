"""The classifier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import column_or_1d

from ..errors import ConfigurationError
from ..losses import Loss
from ..optimizers import Optimizer
from .base import BaseMLP, Prepared, has_batches
from .compat import with_callbacks
from .labels import Labels
from .losses import classification_loss


class MLPClassifier(ClassifierMixin, BaseMLP):  # type: ignore[misc]
    """A multilayer perceptron that tells classes, or labels, apart.

    Arguments that scikit-learn's ``MLPClassifier`` has mean what they mean there; ``docs/sklearn.md`` lists what
    differs.  They are checked when a fit begins.

    Arguments:
        hidden_layer_sizes: the hidden layers' widths, or the one width; ``()`` makes a linear model.
        activation: of hidden layers, a name in :data:`~mlpgpu.activations.ACTIVATIONS`; ``"logistic"`` is the sigmoid.
        solver: ``"sgd"``, which has ``momentum``, ``"adam"``, another optimizer's name, or an optimizer such as
            ``mlpgpu.Adam(0.001)``, which has its own rate; not ``"lbfgs"``.
        alpha: the penalty ½ alpha Σ w² over weights, not biases, divided by the batch's summed sample weight.
        batch_size: rows of a step; ``"auto"`` is 200, or all rows if they are fewer.
        learning_rate: ``"constant"``; ``"invscaling"``, the rate over (samples seen + 1) to the power ``power_t``; or
            ``"adaptive"``, divided by 5 whenever ``n_iter_no_change`` epochs have not improved.  For SGD alone.
        learning_rate_init: the rate at first, of an optimizer that is named.
        power_t: of ``"invscaling"``.
        max_iter: the most epochs.
        shuffle: whether each epoch has an order of its own.
        random_state: of initial values, of the rows held out, of shuffles and dropouts.
        tol: an epoch improves if it passes the best loss, or score, by this.
        verbose: whether to print each epoch's loss.
        warm_start: whether ``fit`` goes on from the network that there is.
        momentum, nesterovs_momentum: of ``"sgd"``.
        early_stopping: whether to hold rows out, and to end at the epoch that is best on them.
        validation_fraction: how many are held out.
        beta_1, beta_2, epsilon: of ``"adam"``.
        n_iter_no_change: a fit ends once more epochs than this, one after another, have not improved.
        optimizer: a synonym of ``solver``.
        dropout: the chance that a hidden unit is left out of a step, or one for each hidden layer.
        loss: ``"log_loss"``, or one of ours for classes, such as ``mlpgpu.Focal()``.
        class_weight: weights of the classes' rows in training, by class, or ``"balanced"``.
        standardize: whether the network begins with a ``Standardize`` layer, fitted to the first data.
        backend: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        precision: of the products, as :class:`~mlpgpu.Trainer` has it.
        metric: what early stopping goes by: a name in :data:`~mlpgpu.metrics.METRICS`, ``"accuracy"`` if None;
            ``"loss"``; or a function of ``(y, prediction)`` that is higher for what is better, where y are numbers of
            classes and predictions are probabilities.

    Attributes:
        classes_: (classes,), or the numbers of labels.
        network_: the fitted :class:`~mlpgpu.Network`; it saves itself to a file, and predicts without scikit-learn.
        coefs_, intercepts_: each layer's weights (n_in, n_out) and biases (n_out,), float32.
        loss_curve_, loss_, best_loss_: an epoch's loss, with the penalty; ``best_loss_`` is None with early stopping.
        validation_scores_, validation_loss_curve_, best_validation_score_: of the rows held out; None without.
        n_iter_: epochs of the last fit.
        converged_: whether it ended because it no longer improved.
        t_: rows seen by all fits.
        learning_rate_: the rate at the end.
        n_features_in_, feature_names_in_, n_layers_, n_outputs_, out_activation_: as scikit-learn's.
    """

    _default_metric: ClassVar[str] = "accuracy"
    _scales_targets: ClassVar[bool] = False
    _y_checks: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
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
        loss: str | Loss = "log_loss",
        class_weight: Mapping[Any, float] | str | None = None,
        standardize: bool = False,
        backend: str = "auto",
        precision: str = "float32",
        metric: str | Callable[..., Any] | None = None,
    ) -> None:
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
        self.loss = loss
        self.class_weight = class_weight
        self.standardize = standardize
        self.backend = backend
        self.precision = precision
        self.metric = metric

    @with_callbacks
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> MLPClassifier:
        """Train on X (rows, features), dense or sparse, and y (rows,), or labels (rows, labels) of 0 and 1.

        ``sample_weight`` is (rows,), or None.  Ctrl-C ends a fit after a step, with a warning; the network is that of
        the step, or with early stopping that of the best epoch.

        Raises:
            MlpgpuError, ValueError: an argument, or the data, cannot be trained on; nothing has changed then.
            DivergenceError: the loss stopped being finite, and no epoch before was scored.
        """
        return self._fit(X, y, sample_weight, incremental=False)

    @available_if(has_batches)  # type: ignore[untyped-decorator]
    @with_callbacks
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None, classes: Any = None) -> MLPClassifier:
        """Train for one epoch on these rows, from where the last call or fit left off.

        With early stopping, a part of the rows is held out and scored after each call.  Once ``n_iter_no_change`` calls
        have not improved the score, ``converged_`` is True and the network is that of the best call.

        Arguments:
            classes: all that there will be; needed in the first call, unless y has labels.

        Raises:
            ConfigurationError: the first call lacks ``classes``, or a later one has others.
            and as :meth:`fit` does.
        """
        if classes is not None and hasattr(self, "classes_") and not np.array_equal(self.classes_, np.unique(classes)):
            raise ConfigurationError("classes", expected=f"those of the first call, {self.classes_}", got=classes)
        self._given_classes = classes
        self._needs_classes = not hasattr(self, "network_")
        try:
            return self._fit(X, y, sample_weight, incremental=True)
        finally:
            del self._given_classes, self._needs_classes

    def _prepare(self, x: np.ndarray, y: Any, weight: np.ndarray | None, *, goes_on: bool) -> Prepared:
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        if goes_on:
            labels = self._labels
            if not hasattr(self, "_given_classes"):
                labels.check_same(y)
        else:
            given = getattr(self, "_given_classes", None)
            labels = Labels.of(y, given)
            if getattr(self, "_needs_classes", False) and given is None and not labels.is_multilabel:
                hint = "classes must be passed on the first call to partial_fit."
                raise ConfigurationError("classes", expected="all classes that there will be", got=None, hint=hint)
        counted, n_out = classification_loss(self.loss, len(labels.classes), is_multilabel=labels.is_multilabel)
        codes = labels.encode(y)
        return Prepared(
            x=x,
            y=codes,
            weight=weight,
            counted=counted,
            n_out=n_out,
            stratify=codes.astype(bool).reshape(-1, 1) if codes.ndim == 1 and n_out == 1 else None,
            class_weight=labels.weights(self.class_weight),
            labels=labels,
        )

    def predict(self, X: Any) -> np.ndarray:
        """The class of each row of X (rows, features): (rows,), or labels (rows, labels) of 0 and 1.

        Raises:
            NotFittedError: there was no fit.
            ValueError, MlpgpuError: X does not suit the network.
        """
        outputs = self._outputs(X)
        return self._labels.decode(outputs)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Each class's probability, in the order of ``classes_``, (rows, classes) float32; each label's, on its own.

        Raises as :meth:`predict` does.
        """
        outputs = self._outputs(X)
        return self._labels.probabilities(outputs)

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """The logarithms of :meth:`predict_proba`."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags
