"""What one sees of objects: in a terminal, in a notebook, and by Tab."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlpgpu as mg

pytestmark = pytest.mark.xdist_group("views")  # one process makes what its tests share

X = np.random.default_rng(3).standard_normal((40, 4))
LABELS = np.arange(40) % 3


@pytest.fixture(scope="module")
def trainer() -> mg.Trainer:
    network = mg.Network([mg.Standardize(4), mg.Dense(4, 5, "tanh"), mg.Dense(5, 3)], seed=1)
    made = mg.Trainer(network, "softmax_cross_entropy", mg.SGD(0.1), batch_size=16, backend="cpu", metrics=["accuracy"])
    made.fit((X, np.array(["<a>", "b", "c"])[LABELS]), 2, validation=0.25, progress=False)
    return made


def objects(trainer: mg.Trainer) -> dict[str, Any]:
    return {
        "network": trainer.network,
        "trainer": trainer,
        "plan": trainer.plan,
        "history": trainer.history,
        "dataset": mg.Dataset(X, np.array(["<a>", "b", "c"])[LABELS], np.ones(40)),
    }


REPRS = {
    "network": "Network([Standardize(n_in=4), Dense(n_in=4, n_out=5, activation='tanh', bias=True, init=None), ",
    "trainer": "Trainer(4 → 3, loss='softmax_cross_entropy', optimizer=SGD(rate=0.1",
    "plan": "Plan(4 → 3, 43 parameters, float32, up to 16 rows in 1 shard, ordered, ",
    "history": "History of 2 epochs\nepoch",
    "dataset": "Dataset(40 rows, 4 features, float64, y: int64 (40,), classes: <a>, b, c)",
}
SHOWN = {
    "network": ("Dense(n_in=4, n_out=5", "43 parameters in float32, output softmax"),
    "trainer": ("softmax_cross_entropy", "after 2 epochs, 4 steps", "Dense(n_in=4, n_out=5"),
    "plan": ("loss softmax_cross_entropy", "MFLOP a step", "up to 16 rows"),
    "history": ("History of 2 epochs", "validation_accuracy"),
    "dataset": ("Dataset of 40 rows", "floats, 4 features", "int64 (40,)", "&lt;a&gt;, b, c"),
}


@pytest.mark.parametrize("name", REPRS)
def test_an_object_is_shown_in_a_few_words(name: str, trainer: mg.Trainer) -> None:
    shown = repr(objects(trainer)[name])
    assert shown.startswith(REPRS[name])
    assert " at 0x" not in shown and len(shown) < 500


@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_shows_a_table(name: str, trainer: mg.Trainer) -> None:
    shown = objects(trainer)[name]._repr_html_()
    assert shown.startswith("<table>") and shown.count("<table>") == shown.count("</table>")
    assert all(words in shown for words in SHOWN[name])
    assert "<a>" not in shown  # what a user named is text, not HTML


def test_a_history_without_epochs_is_shown() -> None:
    assert mg.History()._repr_html_() == "<p>History of 0 epochs</p>"


TABBED = {
    "network": {"layers", "seed", "parameters", "predict", "forward", "labels", "adapt", "save", "summary", "classes"},
    "trainer": {"fit", "step", "evaluate", "save", "resume", "rate", "history", "network", "plan", "epochs"},
    "history": {"best", "columns", "interrupted", "last", "plot", "records"},
    "dataset": {"x", "y", "weight", "classes", "columns", "scale", "split", "n_in", "with_weight"},
}


@pytest.mark.parametrize("name", TABBED)
def test_tab_shows_public_names_only(name: str, trainer: mg.Trainer) -> None:
    shown = objects(trainer)[name]
    names = dir(shown)
    assert set(names) >= TABBED[name]
    assert not [each for each in names if each.startswith("_")]
    for each in names:
        getattr(shown, each)
    internal = {"storage_x", "values", "flat_parameters", "state", "start", "lower", "append", "identity", "contents"}
    assert not internal & set(names)


def test_tab_shows_the_packages_names() -> None:
    assert set(dir(mg)) == set(mg.__all__)
    assert "backends" not in dir(mg)


def test_a_plot_without_a_path_is_a_figure(trainer: mg.Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # another test may have imported it
    figure_module = pytest.importorskip("matplotlib.figure")
    histograms = mg.Histograms(bins=4, of=["parameters"])
    trainer.network.classes = ["a", "b", "c"]
    fresh = mg.Trainer(mg.Network([mg.Dense(4, 3)], seed=1), "cross_entropy", mg.SGD(0.1), backend="cpu")
    fresh.fit((X, LABELS), 1, callbacks=[histograms], progress=False)
    for figure in (trainer.history.plot(), histograms.plot()):
        assert isinstance(figure, figure_module.Figure)
        assert figure._repr_png_().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.filterwarnings("ignore")  # of what runs notebooks
def test_a_notebook_shows_bar_table_and_picture(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    cells = [
        "import numpy as np, mlpgpu as mg\n"
        "x, y = np.random.default_rng(1).standard_normal((40, 4)), np.arange(40) % 3\n"
        "net = mg.Network([mg.Dense(4, 3)], seed=1)\n"
        "trainer = mg.Trainer(net, 'cross_entropy', mg.SGD(0.1), backend='cpu')\n"
        "history = trainer.fit((x, y), epochs=3)",
        "net",
        "history.plot()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    environment = {**os.environ, "PYTHONPATH": str(Path(mg.__file__).parents[1]), "IPYTHONDIR": str(tmp_path)}
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute(cwd=str(tmp_path), env=environment)
    fitted, shown, plotted = (cell.outputs for cell in notebook.cells)
    texts = "".join(str(output.get("text", "")) + str(output.get("data", "")) for output in fitted)
    assert "3/3" in texts or "widget" in texts  # a bar of text, or one of ipywidgets
    assert shown[0].data["text/html"].startswith("<table>")
    assert "image/png" in plotted[0].data


def test_a_script_without_a_terminal_shows_no_bar() -> None:
    script = (
        "import mlpgpu as mg; t = mg.Trainer(mg.Network([mg.Dense(1, 1)]), 'mse', mg.SGD(0.1), backend='cpu');"
        "t.fit(([[1.0], [2.0]], [1.0, 2.0]), 2)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(mg.__file__).parents[1])}
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert (done.stdout, done.stderr) == ("", "")
