"""What both estimators share: arguments, a fit from arrays to a network, and predictions."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from ..callbacks import Callback
from ..datasets import Dataset
from ..errors import ConfigurationError, DataError, DivergenceError, ShapeError
from ..metrics import VALIDATION, find_metric, metric_name
from ..network import Network
from ..training import Trainer
from .building import build, dense_places, layers_of
from .compat import CallbackSupport
from .course import Course, Follower
from .labels import Labels
from .losses import CountedLoss
from .runs import KeptRun
from .settings import Settings
from .tasks import EpochTasks

OWN_SCORE = "score"  # the history's column of a metric that is a function
# What scikit-learn says of a fit that diverged, and what users look for.
NON_FINITE = (
    "Solver produced non-finite parameter weights. The input data may contain large values and need to be preprocessed."
)
NARROW_TYPES = ("bool", "uint8", "int8", "uint16", "int16", "float16", "float32")  # which float32 holds


@dataclass(frozen=True)
class Prepared:
    """The arrays of a fit.

    Attributes:
        x: (rows, n_in).
        y: as a Dataset takes it.
        weight: (rows,) or None.
        counted: the loss.
        n_out: outputs.
        stratify: labels (rows, 1) that a split keeps the proportions of, or None.
        class_weight: as a trainer takes it.
        labels: a classifier's.
    """

    x: np.ndarray
    y: np.ndarray
    weight: np.ndarray | None
    counted: CountedLoss
    n_out: int
    stratify: np.ndarray | None = None
    class_weight: Any = None
    labels: Labels | None = None


class BaseMLP(CallbackSupport, BaseEstimator):  # type: ignore[misc]
    """A multilayer perceptron as an estimator; :class:`MLPClassifier` and :class:`MLPRegressor` are two."""

    network_: Network
    _course: Course
    _default_metric: ClassVar[str]
    _scales_targets: ClassVar[bool]  # whether ``standardize`` is for targets as well
    _y_checks: ClassVar[dict[str, Any]]  # further arguments of validate_data

    # --- what the two differ in ---

    @abstractmethod
    def _prepare(self, x: np.ndarray, y: Any, weight: np.ndarray | None, *, goes_on: bool) -> Prepared:
        """The arrays of a fit, which takes up where another was if it ``goes_on``; changes nothing."""

    # --- fitting ---

    def _fit(self, X: Any, y: Any, sample_weight: Any, *, incremental: bool) -> Any:
        settings = Settings.of(self, self._default_metric)
        goes_on = hasattr(self, "network_") and (self.warm_start or incremental)
        x, y = validate_data(
            self, X, y, accept_sparse=True, multi_output=True, dtype=_kept_type(X), reset=not goes_on, **self._y_checks
        )
        x = x.toarray() if hasattr(x, "toarray") else x
        weight = None if sample_weight is None else _check_sample_weight(sample_weight, x)
        prepared = self._prepare(x, y, weight, goes_on=goes_on)
        random = check_random_state(self.random_state)
        layers = layers_of(settings, x.shape[1], prepared.n_out, scales_targets=self._scales_targets)
        if goes_on:
            network = self.network_
            if list(network.layers) != layers:
                expected = f"those of the network that goes on, {list(network.layers)}"
                raise ConfigurationError("layers", expected=expected, got=layers, hint="fit without warm_start")
        else:
            network = build(layers, settings.activation, random)
            if self.warm_start or incremental:
                self._take_given(network)
        train, held = self._split(prepared, settings, random)
        course = self._course if goes_on else Course()
        if settings.batch_size is not None and settings.batch_size > len(train):
            told = f"Got `batch_size` {settings.batch_size} larger than sample size. It is going to be clipped"
            warnings.warn(told, stacklevel=3)
        run = getattr(self, "_run", None) if goes_on and incremental else None
        trainer, column, is_higher = self._trainer(network, settings, prepared, settings.rows(len(train)), run)
        if run is None and settings.is_named:
            course.rate = settings.rate
        # From here on the estimator changes; a fit that is refused before its first step leaves it as it was.
        before, steps = dict(self.__dict__), trainer.steps
        self._course, self.network_, self.n_outputs_ = course, network, prepared.n_out
        self._run = None  # unless the fit comes to its end
        if prepared.labels is not None:
            self._labels, self.classes_ = prepared.labels, prepared.labels.classes
        try:
            self._follow(trainer, settings, prepared, train, held, column, is_higher, incremental=incremental)
        except BaseException:
            if trainer.steps == steps:
                self.__dict__.clear()
                self.__dict__.update(before)
            raise
        self._run = KeptRun(trainer, is_live=incremental)
        return self

    def _split(
        self, prepared: Prepared, settings: Settings, random: np.random.RandomState
    ) -> tuple[Dataset, Dataset | None]:
        """The rows to train on, and those held out for early stopping, the ones that scikit-learn takes."""
        if not settings.early_stopping:
            return Dataset(prepared.x, prepared.y, prepared.weight), None
        parts = train_test_split(
            np.arange(len(prepared.x)),
            random_state=random,
            test_size=settings.validation_fraction,
            stratify=prepared.stratify,
        )
        if len(parts[1]) < 2:
            hint = "The validation set is too small. Increase 'validation_fraction' or the size of your dataset."
            raise DataError("rows held out", expected="at least 2", got=len(parts[1]), hint=hint)
        rest, held = (
            Dataset(prepared.x[rows], prepared.y[rows], None if prepared.weight is None else prepared.weight[rows])
            for rows in parts
        )
        return rest, held

    def _trainer(
        self, network: Network, settings: Settings, prepared: Prepared, batch_rows: int, run: KeptRun | None
    ) -> tuple[Trainer, str | None, bool]:
        """A trainer of the network, or that of the run which goes on; the column of the score, and its direction."""
        metrics: list[Any] = []
        column, is_higher = None, True
        if settings.early_stopping:
            if callable(settings.metric):
                metrics, column = [{OWN_SCORE: settings.metric}], OWN_SCORE
            elif settings.metric == "loss":
                column, is_higher = "loss", False
            else:
                column = metric_name(settings.metric)
                metrics, is_higher = [column], find_metric(column).higher_is_better
            column = VALIDATION + column
        if run is not None and run.serves(batch_rows):
            return run.trainer, column, is_higher

        def make() -> Trainer:
            return Trainer(
                network,
                prepared.counted.loss,
                settings.optimizer_for(prepared.counted.gradient_factor),
                batch_size=batch_rows,
                backend=self.backend,
                precision=self.precision,
                metrics=metrics,
                class_weight=prepared.class_weight,
            )

        return (make() if run is None else run.taken_up(make)), column, is_higher

    def _follow(
        self,
        trainer: Trainer,
        settings: Settings,
        prepared: Prepared,
        train: Dataset,
        held: Dataset | None,
        column: str | None,
        is_higher: bool,
        *,
        incremental: bool,
    ) -> None:
        """Train, and leave what came of it in attributes, whatever ended the fit."""
        course, epochs = self._course, 1 if incremental else settings.max_iter
        follower = Follower(
            course,
            settings,
            prepared.counted,
            rows=len(train),
            batch_rows=trainer.batch_size,
            weight=1.0 if train.weight is None else float(train.weight.mean()),
            monitor=column,
            higher_is_better=is_higher,
            is_whole=not incremental,
        )
        tasks = EpochTasks.of(
            self,
            data={"X": prepared.x, "y": prepared.y, "metadata": {"sample_weight": prepared.weight}},
            epochs=epochs,
            follower=follower,
            fitted=lambda: {**self._fitted(settings, follower), "network_": self.network_.frozen()},
        )
        callbacks: Sequence[Callback] = [follower, *tasks]
        diverged: DivergenceError | None = None
        try:
            history = trainer.fit(
                train, epochs, validation=held, callbacks=callbacks, shuffle=settings.shuffle, progress=False
            )
            if history.interrupted:
                warnings.warn("Training interrupted by user.", stacklevel=4)
        except DataError as error:
            if not error.expected.startswith("numbers in the range"):
                raise
            hint = f"standardize=True takes float64, and so does precision='float64'; scikit-learn says: {NON_FINITE}"
            raise DataError(error.what, expected=error.expected, got=error.got, hint=hint) from error
        except DivergenceError as error:
            diverged = error
            course.losses.append(float("nan"))
            follower.epochs += 1
            if held is not None:
                course.scores.append(float("nan"))
                course.validation_losses.append(float("nan"))
        finally:
            self.__dict__.update(self._fitted(settings, follower))
        if diverged is not None and not follower.restore_best(trainer):
            what, expected, got = diverged.what, diverged.expected, diverged.got
            raise DivergenceError(what, expected=expected, got=got, hint=NON_FINITE) from diverged
        if diverged is not None:
            told = f"the training diverged in epoch {follower.epochs}; the network is that of the best epoch before"
            warnings.warn(told, ConvergenceWarning, stacklevel=4)
        elif not incremental and not follower.converged and follower.epochs == settings.max_iter:
            told = f"Stochastic Optimizer: Maximum iterations ({settings.max_iter}) reached and the optimization"
            warnings.warn(f"{told} hasn't converged yet.", ConvergenceWarning, stacklevel=4)

    def _fitted(self, settings: Settings, follower: Follower) -> dict[str, Any]:
        """The attributes that tell of a fit, by name."""
        course, held = self._course, settings.early_stopping
        output = self.network_.output
        return {
            "n_iter_": follower.epochs,
            "t_": course.samples,
            "_no_improvement_count": course.no_improvement,  # by scikit-learn's name
            "converged_": follower.converged,
            "learning_rate_": course.rate,
            "loss_curve_": course.losses,
            "loss_": course.losses[-1] if course.losses else float("nan"),
            "best_loss_": None if held else course.best_loss,
            "validation_scores_": course.scores if held else None,
            "validation_loss_curve_": course.validation_losses if held else None,
            "best_validation_score_": course.best_score if held else None,
            "n_layers_": len(dense_places(self.network_)) + 1,
            "out_activation_": "logistic" if output == "sigmoid" else output,
        }

    # --- what was fitted ---

    @property
    def coefs_(self) -> list[np.ndarray]:
        """The weights of each layer, (n_in, n_out), as they are now; copies.

        What is set before a first ``partial_fit``, or ``fit`` with a warm start, takes the place of initial values.
        """
        return self._values("weight")

    @coefs_.setter
    def coefs_(self, values: Sequence[np.ndarray]) -> None:
        self._set_values("weight", values)

    @property
    def intercepts_(self) -> list[np.ndarray]:
        """The biases of each layer, (n_out,), as ``coefs_`` has the weights."""
        return self._values("bias")

    @intercepts_.setter
    def intercepts_(self, values: Sequence[np.ndarray]) -> None:
        self._set_values("bias", values)

    def _values(self, name: str) -> list[np.ndarray]:
        state = vars(self)
        if "network_" not in state:
            if name in state.get("_given_values", {}):
                return state["_given_values"][name]
            raise AttributeError(f"{type(self).__name__} has no {name}s before it is fitted")
        network = state["network_"]
        return [network.parameters[f"{place}.{name}"] for place in dense_places(network)]

    def _set_values(self, name: str, values: Sequence[np.ndarray]) -> None:
        if "network_" in vars(self):
            _put_values(self.network_, name, values)
        else:
            self._given_values = {**vars(self).get("_given_values", {}), name: values}

    def _take_given(self, network: Network) -> None:
        """Put what was set before a first fit in place of initial values."""
        for name, values in vars(self).get("_given_values", {}).items():
            _put_values(network, name, values)

    # --- predicting ---

    def _outputs(self, X: Any) -> np.ndarray:
        """What the network predicts of checked rows: (rows,) or (rows, outputs)."""
        check_is_fitted(self, "network_")
        x = validate_data(self, X, accept_sparse=True, dtype=_kept_type(X), reset=False)
        x = x.toarray() if hasattr(x, "toarray") else x
        return self.network_.predict(x, backend=self.backend)

    # --- scikit-learn's protocols ---

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if state.get("_run") is not None:
            state["_run"] = state["_run"].at_rest()
        return state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def is_narrow(X: Any) -> bool:
    """Whether inputs are of a type that float32 holds."""
    return str(getattr(X, "dtype", "")) in NARROW_TYPES


def _kept_type(X: Any) -> Any:
    """The types that checked inputs may have: images of bytes take no more room than float32."""
    return np.float32 if is_narrow(X) else (np.float64, np.float32)


def _put_values(network: Network, name: str, values: Sequence[np.ndarray]) -> None:
    """Set the weights, or the biases, of all layers.

    Raises:
        ShapeError, DtypeError, DataError: they are of other shapes or numbers, or no finite numbers.
    """
    places = dense_places(network)
    if len(values) != len(places):
        raise ShapeError(f"{name}s", expected=f"arrays for {len(places)} layers", got=len(values))
    network.parameters = {f"{place}.{name}": value for place, value in zip(places, values, strict=True)}


def has_batches(estimator: Any) -> bool:
    """Whether the estimator's solver can take a part of the data; ``"lbfgs"`` could not.

    Raises:
        AttributeError: it cannot.
    """
    if estimator.solver == "lbfgs" or estimator.optimizer == "lbfgs":
        raise AttributeError("partial_fit is for optimizers that take batches; 'lbfgs' does not")
    return True
