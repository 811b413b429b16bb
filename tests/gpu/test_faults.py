"""Faults on a card: a clear error, no hang, a checkpoint that stands, and a next process that works."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu.backends.cuda.runtime import Arena, Device, memory
from mlpgpu.errors import BackendError

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_once")]

ROOT = Path(__file__).parents[2]
SECONDS = 240  # of a process, which may have to compile
DRAW = np.random.default_rng(2)
X = DRAW.normal(size=(600, 12)).astype(np.float32)
DATA = mg.Dataset(X, DRAW.integers(0, 3, 600))

PREAMBLE = """
import sys, time
from pathlib import Path
import numpy as np
import mlpgpu as mg
from mlpgpu.errors import MlpgpuError, BackendError

folder = Path(sys.argv[1])
draw = np.random.default_rng(2)
x = draw.normal(size=(600, 12)).astype(np.float32)
data = mg.Dataset(x, draw.integers(0, 3, 600))
path = folder / "run.h5"

def new_trainer(**options):
    network = mg.Network([mg.Dense(12, 40, "relu"), mg.Dropout(0.1), mg.Dense(40, 3)], seed=4)
    return mg.Trainer(network, "softmax_cross_entropy", mg.Adam(0.01), batch_size=16, backend="cuda", **options)

def told(name, call):
    try:
        call()
        print(name, "succeeded")
    except MlpgpuError as error:
        print(name, type(error).__name__, str(error).replace("\\n", " "))
"""


def new_trainer(**options: Any) -> mg.Trainer:
    network = mg.Network([mg.Dense(12, 40, "relu"), mg.Dropout(0.1), mg.Dense(40, 3)], seed=4)
    return mg.Trainer(network, "softmax_cross_entropy", mg.Adam(0.01), batch_size=16, backend="cuda", **options)


def fit(trainer: mg.Trainer, epochs: int = 4) -> bytes:
    trainer.fit(DATA, epochs, validation=0.1, callbacks=[mg.EarlyStopping(patience=100)], progress=False)
    return trainer.network.flat_parameters().tobytes()


def start(text: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREAMBLE + text, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)


def lines_of(text: str, *arguments: object) -> list[str]:
    """What a process prints; it ends by itself and says nothing else."""
    process = start(text, *arguments)
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out.splitlines()


FAULT = """
from mlpgpu.backends.cuda import kernels

class Fault(mg.Callback):
    every_steps = 50
    def step_end(self, trainer):
        if trainer.steps == 100:  # it shows in the steps that follow
            program = trainer._engine.program
            with program.device:
                program.workspace.launch_over(kernels.find_nonfinite(), 1000, (0, 1000, 0))

trainer = new_trainer(**eval(sys.argv[2]))
other = new_trainer()
other.step(x[:16], data.y[:16])
told("fit", lambda: trainer.fit(data, 6, callbacks=[mg.Checkpoint(path), Fault()], progress=False))
before = path.read_bytes()
for name, call in {
    "save": lambda: trainer.save(path),
    "step": lambda: trainer.step(x[:16], data.y[:16]),
    "read": lambda: trainer.network.flat_parameters(),
    "predict": lambda: trainer.network.predict(x, backend="cuda"),
    "other": lambda: other.step(x[:16], data.y[:16]),
    "new": lambda: new_trainer().step(x[:16], data.y[:16]),
}.items():
    told(name, call)
told("cpu", lambda: mg.load(path).predict(x, backend="cpu"))
try:
    trainer.close()
except BackendError:
    pass
assert path.read_bytes() == before
print("the file stands")
"""

RESUME = """
trainer = mg.Trainer.resume(path)
trainer.fit(data, 6, progress=False)
whole = new_trainer(**eval(sys.argv[2]))
whole.fit(data, 6, progress=False)
assert np.array_equal(trainer.network.flat_parameters(), whole.network.flat_parameters())
print("the same bits")
"""


@pytest.mark.parametrize("options", [{}, {"streams": 2}, {"precision": "float32-ieee"}])
def test_a_fault_in_the_middle_of_a_fit(options: dict[str, Any], tmp_path: Path) -> None:
    said = lines_of(FAULT, tmp_path, options)
    told = {line.split(" ", 1)[0]: line for line in said}
    assert "BackendError" in told["fit"] and "ILLEGAL_ADDRESS after launching" in told["fit"]
    for name in ("step", "read", "predict", "other", "new"):
        assert "GPU work needs a new process" in told[name], told[name]
    assert "Error" in told["save"] and told["cpu"] == "cpu succeeded" and said[-1] == "the file stands"
    assert lines_of(RESUME, tmp_path, options) == ["the same bits"]


class Refusals:
    """Has one allocation of a card's memory, or of page-locked memory, refused."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.place = self.count = -1
        for name in ("mem_alloc", "pagelocked_empty"):
            patch.setattr(memory.drv, name, self._refusing(getattr(memory.drv, name)))

    def _refusing(self, allocate: Any) -> Any:
        def refusing(*arguments: Any) -> Any:
            self.count += 1
            if self.count == self.place:
                raise memory.drv.MemoryError("planted by a test")
            return allocate(*arguments)

        return refusing


@pytest.mark.alone  # since it measures free memory
@pytest.mark.parametrize("options", [{}, {"streams": 2}, {"memory_share": 1e-7}])
def test_each_allocation_in_turn_is_refused(
    options: dict[str, Any], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(trainer: mg.Trainer) -> list[bytes]:
        found = [fit(trainer)]
        trainer.histograms(8, of=("parameters", "activations"))
        evaluated = trainer.evaluate(DATA)["loss"]
        predicted = trainer.network.predict(X, backend="cuda"), trainer.network.predict(X[:1], backend="cuda")
        return [*found, repr(evaluated).encode(), *(each.tobytes() for each in predicted)]

    expected, refusals = work(new_trainer(**options)), Refusals(monkeypatch)
    with device:
        device.synchronize()
        before = device.free_bytes
    for place in range(500):
        trainer, refusals.place, refusals.count = new_trainer(**options), place, -1
        try:
            assert work(trainer) == expected
            break  # it asks for no more than that
        except BackendError as error:
            assert "memory" in str(error) and "expected" in str(error), str(error)
        refusals.place = -1
        steps = trainer.steps
        trainer.network.flat_parameters()  # it stands at a finished step, and
        if steps == 0:  # where nothing had begun, the same call succeeds now
            assert work(trainer) == expected, place
        else:
            assert np.isfinite(trainer.evaluate(DATA)["loss"]), place
    assert 5 < place < 499
    del trainer
    with device:
        device.synchronize()
        assert device.free_bytes >= before - (4 << 20)  # the driver takes memory 2 MiB at a time


EATER = """
from mlpgpu.backends.cuda.runtime import Arena, find_device
with find_device(0) as device:
    pieces = []
    for size in (1 << 30, 32 << 20):
        while device.free_bytes > size + (96 << 20):
            try:
                pieces.append(Arena(device, size))
            except BackendError:
                break
    print("full", flush=True)
    sys.stdin.read()
"""


@pytest.mark.alone
def test_another_process_that_eats_the_memory(device: Device, tmp_path: Path) -> None:
    expected = fit(new_trainer())
    large = mg.Network([mg.Dense(12, 8192), mg.Dense(8192, 8192), mg.Dense(8192, 3)], seed=1)
    eater = start(EATER, tmp_path)
    try:
        assert eater.stdout is not None and eater.stdout.readline() == "full\n"
        trainer = mg.Trainer(large, "softmax_cross_entropy", mg.Adam(0.001), batch_size=16, backend="cuda")
        with pytest.raises(BackendError, match=r"memory of GPU 0: expected .*bytes.* free"):
            trainer.step(X[:16], DATA.y[:16])
        assert trainer.steps == 0
    finally:
        eater.communicate(timeout=SECONDS)
    trainer.step(X[:16], DATA.y[:16])
    assert fit(new_trainer()) == expected


TRAIN = """
trainer = new_trainer()
print("ready", flush=True)
sys.stdin.readline()
for _ in range(10):
    trainer = new_trainer()
    trainer.fit(data, 20, progress=False)
trainer.save(folder / sys.argv[2])
"""


def test_two_processes_on_one_card(tmp_path: Path) -> None:
    processes = [start(TRAIN, tmp_path, name) for name in ("a.h5", "b.h5")]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            _, err = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, err
    finally:
        for process in processes:
            process.kill()
    alone = new_trainer()
    alone.fit(DATA, 20, progress=False)
    for name in ("a.h5", "b.h5"):
        assert np.array_equal(mg.load(tmp_path / name).flat_parameters(), alone.network.flat_parameters())


def test_a_process_that_is_killed_leaves_the_card_usable(device: Device, tmp_path: Path) -> None:
    expected = fit(new_trainer())
    with device:
        before = device.free_bytes
    process = start(TRAIN, tmp_path, "killed.h5")
    assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == "ready\n"
    process.stdin.write("go\n")
    process.stdin.flush()
    time.sleep(0.5)
    process.kill()
    process.communicate(timeout=SECONDS)
    assert fit(new_trainer()) == expected
    with device:
        for _ in range(50):  # the driver clears up after the process is gone
            if device.free_bytes >= before - (8 << 20):
                break
            time.sleep(0.1)
        Arena(device, 1 << 20).close()
