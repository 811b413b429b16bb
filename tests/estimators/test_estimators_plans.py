"""Which kernels an estimator's updates take: those of a trainer."""

from __future__ import annotations

from typing import Any

import pytest
from sklearn.datasets import make_classification, make_regression

from mlpgpu.backends.cuda.lower.lowering import lower
from mlpgpu.backends.cuda.persistent.kernel import PersistentKernel
from mlpgpu.backends.cuda.select.persistent import choose_kernel
from mlpgpu.plan import Plan
from mlpgpu.sklearn import MLPClassifier, MLPRegressor
from mlpgpu.training.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


def plan_of(estimator: Any, data: Any, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The plan that the estimator trains by."""
    plans = []
    fit = Trainer.fit
    monkeypatch.setattr(Trainer, "fit", lambda self, *a, **k: plans.append(self.plan) or fit(self, *a, **k))
    estimator.fit(*data)
    (plan,) = plans
    return plan


@pytest.mark.parametrize("solver", ["adam", "sgd"])
@pytest.mark.parametrize("kind", [MLPClassifier, MLPRegressor])
def test_an_estimator_of_default_settings_trains_as_a_trainer_does(
    kind: Any, solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = make_classification if kind is MLPClassifier else make_regression
    data = make(200, 20, random_state=0)
    plan = plan_of(kind(solver=solver, max_iter=1, learning_rate_init=1e-5, backend="cpu"), data, monkeypatch)
    assert plan.optimizer is not None and plan.optimizer.alpha > 0.0
    chosen = choose_kernel(plan, multiprocessors=132, shared_bytes=227 << 10, arch="sm_90a")
    assert isinstance(chosen, PersistentKernel)
    # And where it trains launch by launch, products update in place: no gradient is stored.
    low = lower(plan, multiprocessors=132, source="float32", arch="sm_90a")
    assert low.bytes["partials"] == 0 and not any(launch.entry.name.startswith("update_") for launch in low.finish)
