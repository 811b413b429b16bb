"""A plain PyTorch loop with the settings and the stopping rule of the estimators in benchmarks/estimators.py."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch


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
