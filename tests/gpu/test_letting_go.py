"""What is dropped or closed gives a card's memory back at once; and a forked child, which may use nothing of it."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from children import answer_of_child

import mlpgpu as mg
from mlpgpu.backends.cuda.runtime import Device
from mlpgpu.errors import BackendError

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_once", "without_collector")]

DRAW = np.random.default_rng(2)
X = DRAW.normal(size=(400, 12)).astype(np.float32)
DATA = mg.Dataset(X, DRAW.integers(0, 3, 400))
WIDTH = 1500  # so that a program is large beside the 2 MiB that the driver takes at a time


def new_trainer(width: int = WIDTH, batch_size: int = 16) -> mg.Trainer:
    network = mg.Network([mg.Dense(12, width, "relu"), mg.Dense(width, width), mg.Dense(width, 3)], seed=4)
    return mg.Trainer(network, "softmax_cross_entropy", mg.Adam(0.001), batch_size=batch_size, backend="cuda")


USES: dict[str, Callable[[mg.Trainer], object]] = {
    "step": lambda trainer: trainer.step(X[:16], DATA.y[:16]),
    "fit": lambda trainer: trainer.fit(DATA, 2, validation=0.1, progress=False),
    "evaluate": lambda trainer: trainer.evaluate(DATA),
    "other targets": lambda trainer: (trainer.evaluate(DATA), trainer.evaluate((X, np.eye(3, dtype="f4")[DATA.y]))),
    "histograms": lambda trainer: (
        trainer.fit(DATA, 1, progress=False),
        trainer.histograms(8, of=("parameters", "activations", "gradients")),
    ),
    "early stopping": lambda trainer: trainer.fit(
        DATA, 1, callbacks=[mg.EarlyStopping(monitor="loss")], progress=False
    ),
    "predict": lambda trainer: (trainer.step(X[:16], DATA.y[:16]), trainer.network.predict(X, backend="cuda")),
}


def free_bytes(device: Device) -> int:
    with device:
        device.synchronize()
        return device.free_bytes


@pytest.mark.alone
@pytest.mark.parametrize("way", ["dropped", "closed", "a block"])
@pytest.mark.parametrize("use", USES)
def test_memory_is_given_back_without_the_collector(use: str, way: str, device: Device) -> None:
    USES[use](new_trainer())  # kernels and pools of the driver stay
    before = free_bytes(device)
    trainer = new_trainer()
    USES[use](trainer)
    assert free_bytes(device) < before - (8 << 20)
    program = weakref.ref(trainer._engine.program)  # type: ignore[arg-type]
    if way == "a block":
        with trainer:
            pass
    elif way == "closed":
        trainer.close()
    if way != "dropped":
        assert trainer.network.flat_parameters().shape == (trainer.network.parameter_count,)
    if way == "dropped" or use == "predict":  # a network keeps what it predicts by
        del trainer
    assert program() is None
    assert free_bytes(device) >= before - (2 << 20)


@pytest.mark.alone
def test_ten_dropped_trainers_take_no_memory(device: Device) -> None:
    USES["fit"](new_trainer())
    before = free_bytes(device)
    for _ in range(10):
        USES["fit"](new_trainer())
    assert free_bytes(device) >= before - (2 << 20)


def test_copies_go_on_with_the_same_bits() -> None:
    trainer = new_trainer(40)
    trainer.fit(DATA, 2, progress=False)
    twins = [pickle.loads(pickle.dumps(trainer)), copy.deepcopy(trainer)]
    for each in (trainer, *twins):
        each.fit(DATA, 2, progress=False)
        assert np.array_equal(each.network.flat_parameters(), trainer.network.flat_parameters())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_and_the_parent_goes_on() -> None:
    trainer, twin = new_trainer(40), new_trainer(40)
    for each in (trainer, twin):
        each.fit(DATA, 1, progress=False)
    predictor = trainer.network.predictor("cuda")
    predictor(X[:3])

    def of_child() -> list[str]:
        said = []
        for call in (
            lambda: trainer.step(X[:16], DATA.y[:16]),
            lambda: trainer.fit(DATA, 1, progress=False),
            lambda: trainer.evaluate(DATA),
            lambda: trainer.network.predict(X),
            lambda: trainer.network.flat_parameters().copy() + trainer._engine.program.read().parameters,  # type: ignore[union-attr]
            lambda: predictor(X[:3]),
            lambda: new_trainer(40),
        ):
            with pytest.raises(BackendError, match="CUDA does not survive a fork") as caught:
                call()
            said.append(str(caught.value))
        predictor.close()
        on_cpu = mg.Trainer(mg.Network([mg.Dense(12, 3)], seed=1), "softmax_cross_entropy", backend="cpu")
        on_cpu.fit(DATA, 1, progress=False)
        return said

    assert len(answer_of_child(of_child)) == 7
    for each in (trainer, twin):
        each.fit(DATA, 1, progress=False)
    assert np.array_equal(trainer.network.flat_parameters(), twin.network.flat_parameters())


SCRIPT = """
import os, sys, warnings
import numpy as np, mlpgpu as mg

warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
x, y = np.zeros((8, 4), np.float32), np.arange(8) % 2

def train(backend):
    network = mg.Network([mg.Dense(4, 2)], seed=1)
    trainer = mg.Trainer(network, "softmax_cross_entropy", batch_size=4, backend=backend)
    trainer.fit((x, y), 1, progress=False)
    return trainer

if __name__ == "__main__":
    kept = train("cuda")
    child = os.fork()
    if child == 0:
        del kept
        sys.exit(7)  # all of Python's end, with what the parent has on the card
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    import multiprocessing
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        other = pool.apply(train, ("cuda",))
    assert np.array_equal(other.network.flat_parameters(), kept.network.flat_parameters())
    print("done")
"""


def test_a_forked_child_ends_quietly_and_spawn_works(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    folders = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": folders}
    subprocess.run([sys.executable, str(path)], capture_output=True, timeout=240, env=environment)  # which compiles
    command = [sys.executable, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
