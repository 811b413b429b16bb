"""PyTorch with the settings of the estimators in benchmarks/estimators.py: a plain loop with their stopping rule, and
skorch with its own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

try:
    import skorch
    from skorch.callbacks import EarlyStopping
except ImportError:
    skorch = None

HAS_SKORCH = skorch is not None


class TorchMLP:
    """One hidden layer of ReLU, Adam, shuffled batches, on the CPU; as scikit-learn's defaults have it.

    Arguments:
        is_classifier: y are classes (rows,), else values (rows, outputs).
        hidden, rate, batch_rows, most_epochs, tol, patience: as the estimators' arguments.
    """

    def __init__(
        self,
        is_classifier: bool,
        *,
        hidden: int = 100,
        rate: float = 0.001,
        batch_rows: int = 200,
        most_epochs: int = 200,
        tol: float = 1e-4,
        patience: int = 10,
    ) -> None:
        self.is_classifier, self._hidden, self._rate, self._batch_rows = is_classifier, hidden, rate, batch_rows
        self._most_epochs, self._tol, self._patience = most_epochs, tol, patience

    def fit(self, x: np.ndarray, y: np.ndarray) -> TorchMLP:
        """Train until the loss no longer improves."""
        torch.manual_seed(0)
        rows = torch.from_numpy(np.ascontiguousarray(x, np.float32))
        outputs = int(y.max()) + 1 if self.is_classifier else y.reshape(len(y), -1).shape[1]
        targets = torch.from_numpy(y if self.is_classifier else y.reshape(len(y), -1).astype(np.float32))
        widths = (x.shape[1], self._hidden, outputs)
        hidden, last = (torch.nn.Linear(a, b) for a, b in pairwise(widths))
        self._net = torch.nn.Sequential(hidden, torch.nn.ReLU(), last)
        loss_of = torch.nn.CrossEntropyLoss() if self.is_classifier else torch.nn.MSELoss()
        optimizer = torch.optim.Adam(self._net.parameters(), lr=self._rate)
        best, since = np.inf, 0
        for _ in range(self._most_epochs):
            total = 0.0
            for batch in torch.randperm(len(rows)).split(self._batch_rows):
                optimizer.zero_grad()
                loss = loss_of(self._net(rows[batch]), targets[batch])
                loss.backward()
                optimizer.step()
                total += loss.item() * len(batch)
            mean = total / len(rows) * (1.0 if self.is_classifier else 0.5)
            since = since + 1 if mean > best - self._tol else 0
            best = min(best, mean)
            if since > self._patience:
                break
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Classes (rows,), or values (rows, outputs)."""
        with torch.inference_mode():
            outputs = self._net(torch.from_numpy(np.ascontiguousarray(x, np.float32))).numpy()
        return outputs.argmax(axis=1) if self.is_classifier else outputs


class SkorchMLP:
    """The same by skorch's estimators, with no rows held out.

    Its callback for stopping compares with the last loss that counted as better, where the others take the least.
    """

    def __init__(
        self,
        is_classifier: bool,
        *,
        hidden: int = 100,
        rate: float = 0.001,
        batch_rows: int = 200,
        most_epochs: int = 200,
        tol: float = 1e-4,
        patience: int = 10,
    ) -> None:
        self.is_classifier, self._hidden = is_classifier, hidden
        kind = skorch.NeuralNetClassifier if is_classifier else skorch.NeuralNetRegressor
        stopping = EarlyStopping(
            monitor="train_loss", patience=patience + 1, threshold=tol * (1.0 if is_classifier else 2.0),
            threshold_mode="abs",
        )  # fmt: skip
        self._make: Callable[[Any], Any] = lambda module: kind(
            module, criterion=torch.nn.CrossEntropyLoss if is_classifier else torch.nn.MSELoss,
            optimizer=torch.optim.Adam, lr=rate, max_epochs=most_epochs, batch_size=batch_rows,
            iterator_train__shuffle=True, train_split=None, callbacks=[stopping], verbose=0,
        )  # fmt: skip

    def fit(self, x: np.ndarray, y: np.ndarray) -> SkorchMLP:
        """Train until the loss no longer improves."""
        torch.manual_seed(0)
        columns = y.reshape(len(y), -1)
        outputs = int(y.max()) + 1 if self.is_classifier else columns.shape[1]
        module = torch.nn.Sequential(
            torch.nn.Linear(x.shape[1], self._hidden), torch.nn.ReLU(), torch.nn.Linear(self._hidden, outputs)
        )
        self._net = self._make(module)
        self._net.fit(x.astype(np.float32), y.astype(np.int64) if self.is_classifier else columns.astype(np.float32))
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Classes (rows,), or values (rows, outputs)."""
        return np.asarray(self._net.predict(x.astype(np.float32)))
