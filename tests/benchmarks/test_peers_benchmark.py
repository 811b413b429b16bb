"""The contenders of benchmarks/peers.py on the CPU: each trains as mlpgpu does, in each of its forms."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu import bench
from mlpgpu.backends import Sampling

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # the peers' own, about themselves

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WORKLOADS = [  # the first one's last batch is smaller
    bench.Workload((20, 16, 5), batch_size=8, rows=44, rate=0.1),
    bench.Workload((20, 16, 16, 6), batch_size=8, rows=40, rate=0.01, loss="squared_error"),
]
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import peers

    return peers


VARIANTS = [  # by other optimizers, activations and inputs
    dataclasses.replace(WORKLOADS[0], optimizer="adam", activation="gelu", source="uint8", rate=0.01),
    dataclasses.replace(WORKLOADS[1], optimizer="adam", activation="elu", rate=0.001),
    dataclasses.replace(WORKLOADS[0], activation="leaky_relu", source="uint8"),
]


def orders(workload: bench.Workload) -> list[np.ndarray]:
    return [Sampling(workload.rows, workload.batch_size, seed=0).order(epoch) for epoch in range(2)]


def our_losses(workload: bench.Workload) -> list[float]:
    run = bench.Epochs(workload.trainer(backend="cpu"), mg.Dataset(*workload.arrays()))
    return [run(), run()]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.loss)
@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("form", ["eager", "compiled graph", "compiled step"])
def test_pytorch_trains_alike(form: str, precision: str, workload: bench.Workload, peers: ModuleType) -> None:
    import torch

    chosen = next(each for each in peers.peers_torch.FORMS if each.name == form)
    x, y = map(torch.from_numpy, workload.arrays())
    on_cpu = dataclasses.replace(chosen, captured=False)
    contender = peers.peers_torch.Contender(workload, on_cpu, precision, x, y, epochs=2)
    found = [contender(order) for order in orders(workload)]
    peers.peers_torch.forget()
    np.testing.assert_allclose(found, our_losses(workload), rtol=TOLERANCES[precision])
    assert contender() < found[1]  # two epochs later


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.loss)
@pytest.mark.parametrize("precision", TOLERANCES)
def test_jax_trains_alike(precision: str, workload: bench.Workload, peers: ModuleType) -> None:
    algorithm = peers.peers_jax.ALGORITHMS[precision][0]
    made = [peers.peers_jax.Contender(workload, algorithm, form, epochs=3) for form in peers.peers_jax.FORMS]
    peers.peers_jax.compile_all(made)
    x, y = peers.peers_jax.on_card(workload.arrays(), algorithm.dtype)
    first, second = orders(workload)
    for contender in made:
        losses = our_losses(workload)
        assert contender.start(x, y)(first) == pytest.approx(losses[0], rel=TOLERANCES[precision])
        assert contender.epochs == 3 and max(contender(), contender(second)) < losses[1]  # epochs later
    peers.peers_jax.forget()


@pytest.mark.parametrize("workload", VARIANTS, ids=lambda workload: workload.activation)
def test_variants_train_alike_and_give_a_step(workload: bench.Workload, peers: ModuleType) -> None:
    arrays, (first, second) = workload.arrays(), orders(workload)
    run = bench.Epochs(workload.trainer(backend="cpu"), workload.dataset(arrays))
    losses = [run(), run()]
    run.reset()
    run.program.run(0, np.full(1, workload.rate))
    slot = run.program.read().slots[0, 0]

    x, y = peers.peers_torch.on_device(arrays, workload.scale, "cpu")
    forms = {form.name: dataclasses.replace(form, captured=False, mode=None) for form in peers.peers_torch.FORMS}
    made = [peers.peers_torch.Contender(workload, forms[name], "float32", x, y) for name in ("eager", "compiled step")]
    algorithm, form = peers.peers_jax.ALGORITHMS["float32"][0], peers.peers_jax.FORMS[0]
    made.append(peers.peers_jax.Contender(workload, algorithm, form))
    peers.peers_jax.compile_all(made[-1:])
    made[-1].start(*peers.peers_jax.on_card(arrays, algorithm.dtype, workload.scale))
    for contender in made:
        step = np.concatenate([value.ravel() for value in contender.first_step(first)])
        assert np.linalg.norm(step - slot) <= 1e-5 * np.linalg.norm(slot)
        np.testing.assert_allclose([contender(first), contender(second)], losses, rtol=1e-5)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_dropout_drops_its_share(optimizer: str, peers: ModuleType) -> None:
    """With no hidden layer's output left, the loss is that of the last layer's biases, which are equal."""
    rate = 1.0 - 2.0**-16
    workload = dataclasses.replace(WORKLOADS[0], dropout=rate, optimizer=optimizer, rate=0.0)
    arrays = workload.arrays()
    biases = workload.initial()[-1][1]
    expected = np.mean(np.log(np.exp(biases).sum()) - biases[arrays[1]])
    algorithm, form = peers.peers_jax.ALGORITHMS["float32"][0], peers.peers_jax.FORMS[1]
    of_jax = peers.peers_jax.Contender(workload, algorithm, form)
    peers.peers_jax.compile_all([of_jax])
    of_jax.start(*peers.peers_jax.on_card(arrays, algorithm.dtype))
    x, y = peers.peers_torch.on_device(arrays, None, "cpu")
    forms = {form.name: dataclasses.replace(form, captured=False, mode=None) for form in peers.peers_torch.FORMS}
    of_torch = [peers.peers_torch.Contender(workload, forms[name], "float32", x, y) for name in ("eager", "graph")]
    for contender in (of_jax, *of_torch):
        assert contender() == pytest.approx(expected, rel=1e-5)


def test_an_epoch_in_jax_visits_each_row_once(peers: ModuleType) -> None:
    """Each row's target is its own, and no step moves anything: the loss is the mean over all rows in any order."""
    workload = dataclasses.replace(WORKLOADS[1], rate=0.0)
    algorithm, form = peers.peers_jax.ALGORITHMS["float32"][0], peers.peers_jax.FORMS[0]
    contender = peers.peers_jax.Contender(workload, algorithm, form, epochs=2)
    peers.peers_jax.compile_all([contender])
    contender.start(*peers.peers_jax.on_card(workload.arrays(), "float32"))
    expected = contender(np.arange(workload.rows))
    assert [contender() for _ in range(3)] == pytest.approx([expected] * 3, rel=1e-6)


def test_larger_networks_get_fewer_epochs_a_call(peers: ModuleType) -> None:
    assert peers.epochs_of(bench.WORKLOADS["large"], "float32") == 1
    assert (
        1 < peers.epochs_of(bench.WORKLOADS["medium"], "float32") < peers.epochs_of(bench.WORKLOADS["medium"], "tf32")
    )


def test_forms_that_take_long_to_tune_are_left_out(peers: ModuleType) -> None:
    def names(workload: str, precision: str) -> set[str]:
        return {form.name for form in peers.torch_forms(bench.WORKLOADS[workload], precision, peers.FORMS)}

    assert names("tiny", "float32") == {"eager", "compiled graph", "compiled step", "autotuned step"}
    assert names("large", "bfloat16") == {"compiled graph", "compiled step"}
