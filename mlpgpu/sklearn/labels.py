"""Labels of a classifier: what a network trains on, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.multiclass import check_classification_targets, type_of_target

from ..errors import ConfigurationError, DataError


def kind_of(y: Any) -> bool:
    """Whether y is of labels, (rows, labels) of 0 and 1, and not of one class a row.

    Raises:
        ValueError: scikit-learn's, where y is continuous.
        DataError: it has several classes a row.
    """
    check_classification_targets(y)
    kind = type_of_target(y, input_name="y")
    if kind == "multiclass-multioutput":
        expected = "one class a row, or labels of 0 and 1 (rows, labels)"
        raise DataError("y", expected=expected, got="several classes a row", hint="MultiOutputClassifier fits such y")
    return kind == "multilabel-indicator"


class Labels:
    """The classes of a classifier, or its labels.

    Attributes:
        classes: (classes,), sorted; of labels their numbers.
        is_multilabel: whether a row may have several.
    """

    def __init__(self, classes: np.ndarray, *, is_multilabel: bool) -> None:
        self.classes, self.is_multilabel = classes, is_multilabel

    @classmethod
    def of(cls, y: Any, classes: Any = None) -> Labels:
        """Those in y, or these ``classes``, which y must be among.

        Raises:
            ValueError, DataError: as :func:`kind_of`; labels of another number than ``classes`` are refused.
        """
        if kind_of(y):
            count = y.shape[1]
            if classes is not None and len(np.unique(classes)) != count:
                raise ConfigurationError("classes", expected=f"one for each of {count} labels", got=list(classes))
            return cls(np.arange(count), is_multilabel=True)
        return cls(np.unique(y if classes is None else np.asarray(classes)), is_multilabel=False)

    def check_same(self, y: Any) -> None:
        """Refuse to go on, warm, with other classes than before."""
        found = Labels.of(y)
        same = found.is_multilabel == self.is_multilabel and np.array_equal(found.classes, self.classes)
        if not same:
            what = "warm_start can only be used where `y` has the same classes as in the previous call to fit; classes"
            raise DataError(what, expected=self.classes, got=found.classes)

    def encode(self, y: Any) -> np.ndarray:
        """y as numbers of classes (rows,), as truth values (rows,) of two classes, or (rows, labels) float32.

        Raises:
            DataError: y has a class that is not known, or labels of another number.
        """
        if kind_of(y) != self.is_multilabel or (self.is_multilabel and y.shape[1] != len(self.classes)):
            expected = f"{len(self.classes)} labels a row" if self.is_multilabel else "one class a row"
            raise DataError("y", expected=expected, got=f"shape {y.shape}")
        if self.is_multilabel:
            dense = y.toarray() if hasattr(y, "toarray") else np.asarray(y)
            return np.ascontiguousarray(dense, np.float32)
        y = np.asarray(y)
        codes = np.minimum(np.searchsorted(self.classes, y), len(self.classes) - 1)
        unknown = self.classes[codes] != y
        if unknown.any():
            got = np.unique(y[unknown])
            raise DataError("y", expected=f"classes of the first call, {self.classes}", got=got)
        return codes.astype(np.int64)

    def decode(self, predictions: np.ndarray) -> np.ndarray:
        """What a network's predictions, (rows,) or (rows, outputs), say: (rows,), or (rows, labels) of 0 and 1."""
        if self.is_multilabel:
            return (predictions.reshape(len(predictions), -1) > 0.5).astype(np.int64)
        if len(self.classes) == 1:
            return np.repeat(self.classes, len(predictions))
        if predictions.ndim == 2 and predictions.shape[1] > 1:
            return self.classes[predictions.argmax(axis=1)]
        return self.classes[(predictions.ravel() > 0.5).astype(np.intp)]

    def probabilities(self, predictions: np.ndarray) -> np.ndarray:
        """Of each class or label, (rows, classes)."""
        if self.is_multilabel:
            return predictions.reshape(len(predictions), -1)
        if len(self.classes) == 1:
            return np.ones((len(predictions), 1), predictions.dtype)
        if predictions.ndim == 2 and predictions.shape[1] > 1:
            return predictions
        second = predictions.ravel()
        return np.stack([1.0 - second, second], axis=1)

    def weights(self, class_weight: Any) -> dict[int, float] | str | None:
        """A classifier's ``class_weight`` by the numbers of classes, as a trainer takes it.

        Raises:
            ConfigurationError: it names a class that is not there, or there are labels.
        """
        if class_weight is None:
            return None
        if self.is_multilabel:
            raise ConfigurationError("class_weight", expected="None where y has labels", got=class_weight)
        if not hasattr(class_weight, "items"):
            return class_weight  # "balanced", or what a trainer refuses
        places = {label: place for place, label in enumerate(self.classes.tolist())}
        unknown = [label for label in class_weight if label not in places]
        if unknown:
            expected = f"classes of y, {self.classes}"
            raise ConfigurationError("class in class_weight", expected=expected, got=unknown[0])
        return {places[label]: weight for label, weight in class_weight.items()}
