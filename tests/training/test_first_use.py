"""What somebody meets who uses the package for the first time: traps that are refused, and hints that work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.sparse

import mlpgpu as mg
from mlpgpu.errors import (
    ConfigurationError,
    DataError,
    DivergenceError,
    DtypeError,
    MlpgpuError,
    ReadOnlyError,
    ShapeError,
)

DRAW = np.random.default_rng(5)
X = DRAW.standard_normal((40, 4)).astype(np.float32)
LABELS = np.arange(40) % 3
NAMES = np.array(["a", "b", "c"])
VALUES = X[:, 0] * 2.0 + 1.0
BYTES = DRAW.integers(0, 256, (40, 4)).astype(np.uint8)
FLOATS = BYTES.astype(np.float32) / 255


def classifier(**options: Any) -> mg.Trainer:
    network = mg.Network([mg.Dense(4, 5, "tanh"), mg.Dense(5, 3)], seed=1)
    return mg.Trainer(network, "softmax_cross_entropy", mg.Adam(0.01), batch_size=16, backend="cpu", **options)


def regressor(n_out: int = 1, loss: str = "mean_squared_error", **options: Any) -> mg.Trainer:
    network = mg.Network([mg.Dense(4, 5, "tanh"), mg.Dense(5, n_out)], seed=1)
    return mg.Trainer(network, loss, mg.Adam(0.01), batch_size=16, backend="cpu", **options)


def fit(trainer: mg.Trainer, data: Any, epochs: int = 2, **options: Any) -> mg.Trainer:
    trainer.fit(data, epochs, progress=False, **options)
    return trainer


def again(network: mg.Network, folder: Path) -> mg.Network:
    """The network after a save and a load."""
    network.save(folder / "network.h5")
    return mg.load(folder / "network.h5")


# --- bytes and floats ---


USES: dict[str, Callable[[mg.Trainer, Any], object]] = {
    "predict": lambda trainer, x: trainer.network.predict(x),
    "forward": lambda trainer, x: trainer.network.forward(x),
    "labels": lambda trainer, x: trainer.network.labels(x),
    "evaluate": lambda trainer, x: trainer.evaluate((x, LABELS)),
    "step": lambda trainer, x: trainer.step(x[:8], LABELS[:8]),
    "fit": lambda trainer, x: trainer.fit((x, LABELS), 1, progress=False),
    "adapt": lambda trainer, x: trainer.network.adapt(mg.Dataset(x, LABELS)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("trained", ["bytes", "floats"])
def test_bytes_for_floats_and_the_reverse_are_refused(trained: str, use: str) -> None:
    known, other = (BYTES, FLOATS) if trained == "bytes" else (FLOATS, BYTES)
    trainer = fit(classifier(), (known, LABELS))
    before = trainer.network.flat_parameters().tobytes()
    words = {"bytes": "bytes (uint8) times 1/255", "floats": "floats"}
    with pytest.raises(ConfigurationError) as caught:
        USES[use](trainer, other)
    assert caught.value.expected == f"{words[trained]}, as in training"
    assert caught.value.got == words["floats" if trained == "bytes" else "bytes"]
    assert "Dataset(x, scale=1/255" in caught.value.hint
    assert trainer.network.flat_parameters().tobytes() == before
    USES[use](trainer, known)


def test_whole_numbers_for_bytes_are_refused_too() -> None:
    network = fit(classifier(), (BYTES, LABELS)).network
    with pytest.raises(ConfigurationError, match=r"x\.astype\('uint8'\)"):
        network.predict(BYTES.astype(int))


def test_a_validation_set_of_bytes_beside_floats_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected floats, as in training, got bytes"):
        fit(classifier(), (FLOATS, LABELS), validation=(BYTES, LABELS))


def test_floats_that_say_what_they_are_go_with_bytes(tmp_path: Path) -> None:
    network = fit(classifier(), (BYTES, LABELS)).network
    told = mg.Dataset(FLOATS, LABELS, scale=1 / 255)
    for known in (network, again(network, tmp_path)):
        np.testing.assert_allclose(known.predict(told), known.predict(BYTES), rtol=1e-5)
        with pytest.raises(ConfigurationError, match="got floats that are bytes times 1/16"):
            known.predict(mg.Dataset(FLOATS, scale=1 / 16))


def test_bytes_go_with_floats_that_said_what_they_are(tmp_path: Path) -> None:
    trainer = fit(classifier(), mg.Dataset(FLOATS, LABELS, scale=1 / 255))
    for network in (trainer.network, again(trainer.network, tmp_path)):
        np.testing.assert_allclose(network.predict(BYTES), network.predict(FLOATS), rtol=1e-5)
    # Bytes that say what they stand for go with floats of which nobody said it.
    network = fit(classifier(), (FLOATS * 255, LABELS)).network
    told = mg.Dataset(BYTES, scale=1)
    np.testing.assert_allclose(network.predict(told), network.predict(FLOATS * 255), rtol=1e-5)


def test_single_steps_are_a_training_too() -> None:
    trainer = regressor()
    trainer.step(FLOATS[:8], VALUES[:8])
    with pytest.raises(ConfigurationError, match="expected floats, as in training, got bytes"):
        trainer.network.predict(BYTES)
    assert trainer.network.predict(FLOATS).shape == (40,)


def test_bytes_of_0_and_1_warn() -> None:
    bits = (X > 0).astype(np.uint8)
    with pytest.warns(UserWarning, match=r"only 0 and 1 are multiplied by 1/255; scale=1 keeps them") as caught:
        mg.Dataset(bits)
    assert caught[0].filename == __file__
    mg.Dataset(bits, scale=1)
    mg.Dataset(np.zeros((3, 4), np.uint8))  # nothing to tell
    mg.Dataset(bits.astype(bool))
    mg.Dataset(bits + 1)


# --- what a trainer was made with, and when it trains ---


@pytest.mark.parametrize("inner", ["step", "fit"])
def test_training_inside_a_callback_is_refused(inner: str) -> None:
    trainer = classifier()

    def train(record: Any) -> None:
        if inner == "step":
            trainer.step(X[:8], LABELS[:8])
        else:
            trainer.fit((X, LABELS), 1, progress=False)

    with pytest.raises(ConfigurationError, match=f"Trainer.{inner}: expected no training under way, got a call during"):
        fit(trainer, (X, LABELS), callbacks=[train])
    fit(trainer, (X, LABELS))  # an error leaves a trainer that works
    trainer.step(X[:8], LABELS[:8])


@pytest.mark.parametrize(
    "name", ["metrics", "batch_size", "optimizer", "loss", "network", "backend", "history", "plan"]
)
def test_what_a_trainer_was_made_with_is_read_only(name: str) -> None:
    trainer = classifier()
    with pytest.raises(ReadOnlyError, match=rf"Trainer\.{name}: expected to be read.*new Trainer\(trainer\.network, "):
        setattr(trainer, name, None)
    with pytest.raises(AttributeError):
        setattr(trainer, name, None)
    fit(trainer, (X, LABELS))


@pytest.mark.parametrize(("name", "near"), [("rates", "rate"), ("learning_rate", "rate")])
def test_what_a_trainer_does_not_have_cannot_be_set(name: str, near: str) -> None:
    with pytest.raises(ReadOnlyError, match=f"did you mean '{near}'"):
        setattr(classifier(), name, 0.1)


@pytest.mark.parametrize("name", ["layers", "seed", "n_in", "n_out", "dtype", "paramters"])
def test_what_a_network_was_made_with_is_read_only(name: str) -> None:
    with pytest.raises(ReadOnlyError, match=rf"Network\.{name}"):
        setattr(mg.Network([mg.Dense(2, 1)]), name, None)


@pytest.mark.parametrize("name", ["lr", "learning_rate"])
def test_a_rate_of_another_name_is_hinted_at(name: str) -> None:
    with pytest.raises(ReadOnlyError, match="did you mean 'rate'"):
        setattr(classifier(), name, 0.1)


@pytest.mark.parametrize("name", ["classes", "parameters", "output"])
def test_a_network_is_given_what_it_can_have(name: str) -> None:
    network = classifier().network
    for value in (3, ["softmax"], "argmax"):
        with pytest.raises(MlpgpuError, match=name):
            setattr(network, name, value)


@pytest.mark.parametrize("part", ["x", "y", "weight"])
def test_masked_values_are_refused(part: str) -> None:
    arrays = {"x": X, "y": LABELS, "weight": np.ones(len(X))}
    unmasked = {name: np.ma.masked_array(values) for name, values in arrays.items()}
    assert len(mg.Dataset(**unmasked)) == len(X)
    arrays[part] = np.ma.masked_array(arrays[part], np.arange(arrays[part].size).reshape(arrays[part].shape) == 5)
    with pytest.raises(DataError, match=rf"{part}: expected no masked values, got 1 of \d+ masked"):
        mg.Dataset(**arrays)


def test_a_rate_may_be_set() -> None:
    trainer, rates = classifier(), []

    def halve(record: Any) -> None:
        rates.append(record["rate"])
        trainer.rate = trainer.rate / 2

    fit(trainer, (X, LABELS), 3, callbacks=[halve])
    assert rates == [0.01, 0.005, 0.0025]
    trainer.rate = mg.ExponentialDecay(0.1, 0.5, steps=100)
    assert trainer.optimizer == mg.Adam(mg.ExponentialDecay(0.1, 0.5, steps=100))
    with pytest.raises(ConfigurationError, match="learning rate: expected a finite number >= 0"):
        trainer.rate = -1.0
    assert trainer.optimizer.rate == mg.ExponentialDecay(0.1, 0.5, steps=100)


def test_a_rate_set_trains_as_one_given() -> None:
    given, setting = classifier(), classifier()
    setting.rate = 0.5
    setting.rate = 0.01
    fit(given, (X, LABELS))
    fit(setting, (X, LABELS))
    assert given.network.flat_parameters().tobytes() == setting.network.flat_parameters().tobytes()


def test_a_run_is_resumed_at_another_rate(tmp_path: Path) -> None:
    trainer = fit(classifier(), (X, LABELS))
    trainer.save(tmp_path / "run.h5")
    resumed = mg.Trainer.resume(tmp_path / "run.h5", rate=0.5)
    assert fit(resumed, (X, LABELS), 4).history["rate"] == [0.01, 0.01, 0.5, 0.5]
    resumed.save(tmp_path / "run.h5")
    assert mg.Trainer.resume(tmp_path / "run.h5").rate == 0.5
    with pytest.raises(DtypeError, match="learning rate"):
        mg.Trainer.resume(tmp_path / "none.h5", rate="fast")


def test_a_resumed_fit_says_when_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(classifier(), (X, LABELS)).save(tmp_path / "run.h5")
    resumed = mg.Trainer.resume(tmp_path / "run.h5")
    fit(resumed, (X, LABELS), 2)
    said = capsys.readouterr().err
    assert "nothing is left to do: the resumed fit has finished 2 epochs of 2" in said
    assert "epochs=4 trains 2 more" in said


def test_a_resumed_fit_says_up_to_which_epoch_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = classifier()
    fit(first, (X, LABELS)).save(tmp_path / "run.h5")
    assert capsys.readouterr().err == ""  # of a first fit there is nothing to say
    resumed = mg.Trainer.resume(tmp_path / "run.h5")
    assert fit(resumed, (X, LABELS), 3).epochs == 3
    said = capsys.readouterr().err
    goes_on = f"the resumed fit goes on after step {first.steps}, in epoch 3, up to epoch 3: epochs=3 counts the 2 that"
    assert goes_on in said and said.count("\n") == 1


def test_a_further_fit_says_that_its_epochs_are_more(capsys: pytest.CaptureFixture[str]) -> None:
    """Once, since somebody may fit epoch by epoch; and nothing without a bar."""
    trainer = classifier()
    for epochs, said in ((2, ""), (3, "has trained 2 epochs: epochs=3 trains 3 more, up to epoch 5 ("), (1, "")):
        trainer.fit((X, LABELS), epochs)
        found = capsys.readouterr().err
        assert said in found and bool(found) == bool(said)
    other = classifier()
    for _ in range(2):
        other.fit((X, LABELS), 1, progress=False)
    assert other.epochs == 2 and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("schedule", "first", "second"),
    [
        (mg.CosineDecay(0.1, epochs=2), "", "ended before this fit, all of which is trained at its last rate, 0;"),
        (mg.OneCycle(0.1, steps=5, final_divisor=100), "OneCycle ends with step 5 of 6", "at its last rate, 0.001"),
        (mg.WarmUp(mg.CosineDecay(0.1, epochs=3, final=0.01), steps=3), "", "WarmUp ends with epoch 3 of 4"),
        (mg.ExponentialDecay(0.1, 0.5, epochs=1), "", ""),
    ],
)  # fmt: skip
def test_a_schedule_that_is_finished_is_told(
    schedule: Any, first: str, second: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = classifier()
    trainer.rate = schedule
    for words in (first, second):
        fit(trainer, (X, LABELS))
        said = capsys.readouterr().err
        assert words in said if words else said == ""


# --- shapes and classes ---


@pytest.mark.parametrize(
    ("loss", "y"),
    [("mean_squared_error", VALUES), ("huber", VALUES), ("binary_cross_entropy", (X[:, 0] > 0).astype(int))],
)
def test_one_output_is_predicted_in_the_shape_of_its_targets(loss: str, y: np.ndarray, tmp_path: Path) -> None:
    flat, column = fit(regressor(loss=loss), (X, y)), fit(regressor(loss=loss), (X, y[:, np.newaxis]))
    for network in (flat.network, again(flat.network, tmp_path)):
        assert network.predict(X).shape == (network.predict(X) - y).shape == (40,)
        assert network.forward(X).shape == (40, 1)
    for network in (column.network, again(column.network, tmp_path)):
        assert network.predict(X).shape == (40, 1)
    np.testing.assert_array_equal(flat.network.predict(X), column.network.predict(X)[:, 0])


def test_a_test_set_that_lacks_a_class_gets_a_hint_that_works() -> None:
    trainer = fit(classifier(metrics=["accuracy"]), (X, NAMES[LABELS]))
    lacking = LABELS != 1
    x, y = X[lacking], NAMES[LABELS][lacking]
    with pytest.raises(ConfigurationError, match=r"Dataset\(x, y, classes=network\.classes\)"):
        trainer.evaluate(mg.Dataset(x, y))
    network = trainer.network
    expected = trainer.evaluate(mg.Dataset(x, y, classes=network.classes))
    assert trainer.evaluate((x, y)) == expected == trainer.evaluate((x, LABELS[lacking]))


def test_a_validation_set_that_lacks_a_class_gets_a_hint_that_works() -> None:
    train = mg.Dataset(X, NAMES[LABELS])
    lacking = LABELS != 1
    x, y = X[lacking], NAMES[LABELS][lacking]
    with pytest.raises(ConfigurationError, match=r"classes=train\.classes"):
        fit(classifier(), train, validation=mg.Dataset(x, y))
    fit(classifier(), train, validation=mg.Dataset(x, y, classes=train.classes))
    fit(classifier(), train, validation=(x, y))
    # As many classes, but others: their numbers would mean something else.
    others = mg.Dataset(X, np.array(["b", "c", "d"])[LABELS])
    with pytest.raises(ConfigurationError, match=r"classes: expected \('a', 'b', 'c'\), got \('b', 'c', 'd'\)"):
        fit(classifier(), train, validation=others)


def test_a_ranking_metric_of_a_set_without_a_class_gets_a_hint() -> None:
    trainer = fit(classifier(metrics=["accuracy", "roc_auc"]), (X, LABELS))
    with pytest.raises(DataError, match=r"metrics=\[…\]\) without roc_auc"):
        trainer.evaluate((X[LABELS < 2], LABELS[LABELS < 2]))


@pytest.mark.parametrize(
    ("y", "hint"),
    [
        (LABELS + 1, "labels that count from 1 to 3 are y - 1"),
        (LABELS * 2, "labels up to 4 are for a last layer of n_out=5"),
        (LABELS[:, np.newaxis], r"labels of classes are \(rows,\): np\.ravel\(y\)"),
        (NAMES[LABELS][:, np.newaxis], r"np\.ravel\(y\)"),
    ],
)
def test_labels_that_do_not_fit_get_a_hint(y: np.ndarray, hint: str) -> None:
    with pytest.raises(MlpgpuError, match=hint):
        fit(classifier(), (X, y))


def test_floats_that_are_whole_are_classes_when_asked() -> None:
    y = LABELS.astype(np.float64)
    data = mg.Dataset(X, y, classes=["a", "b", "c"])
    assert (data.y.dtype, data.classes) == (np.dtype(np.int64), ("a", "b", "c"))
    held_out = mg.Dataset(X, np.sort(y)).split(0.2, stratify=True)[1]
    assert np.bincount(held_out.labels(3)).tolist() == [3, 3, 2]
    with pytest.raises(ConfigurationError, match="integer or string labels"):
        mg.Dataset(X, y + 0.5, classes=["a", "b", "c"])
    with pytest.raises(DataError, match="stratify"):
        mg.Dataset(X, y + 0.5).split(0.2, stratify=True)


# --- divergence ---


def test_divergence_says_what_may_help_and_what_stands(tmp_path: Path) -> None:
    def diverge(*layers: mg.Dense | mg.Standardize, callbacks: Any = (), **options: Any) -> DivergenceError:
        network = mg.Network([*layers, mg.Dense(4, 1)], seed=1)
        trainer = mg.Trainer(network, "mean_squared_error", mg.SGD(1e30, **options), batch_size=8, backend="cpu")
        with pytest.raises(DivergenceError) as caught:
            fit(trainer, (X * 100, VALUES), 9, callbacks=callbacks)
        with pytest.raises(DivergenceError, match=r"parameters of the network.*a new network at a lower rate"):
            network.predict(X * 100)
        with pytest.raises(DivergenceError):
            trainer.evaluate((X * 100, VALUES))
        return caught.value

    plain = diverge().hint
    assert "lower rate" in plain and "clip_norm=" in plain and "Standardize" in plain and "checkpoint" not in plain
    assert "inputs" not in diverge(mg.Standardize(4)).hint
    saved = diverge(callbacks=[mg.Checkpoint(tmp_path / "run.h5", unit="step")]).hint
    assert "run.h5" in saved and mg.Trainer.resume(tmp_path / "run.h5").steps > 0
    never = diverge(callbacks=[mg.Checkpoint(tmp_path / "never.h5", every=1000)]).hint
    assert "never.h5" not in never and not (tmp_path / "never.h5").exists()


def test_what_diverged_is_not_trained_on() -> None:
    """A lower rate would not help it, whoever trains it."""
    network = mg.Network([mg.Standardize(4), mg.Dense(4, 1)], seed=1)
    trainer = mg.Trainer(network, "mean_squared_error", mg.SGD(1e30), batch_size=8, backend="cpu")
    with pytest.raises(DivergenceError, match=r"targets standardized by mlpgpu\.Standardize as the last layer"):
        fit(trainer, (X, VALUES), 9)
    steps = trainer.steps
    for other in (trainer, mg.Trainer(network, "mean_squared_error", mg.SGD(1e-3), backend="cpu")):
        with pytest.raises(DivergenceError, match=r"parameters of the network.*train a new network"):
            fit(other, (X, VALUES))
    assert trainer.steps == steps


def test_what_overflows_without_a_divergence_is_predicted() -> None:
    network = mg.Network([mg.Dense(1, 1)], seed=1)
    network.parameters = {"0.weight": [[3e38]], "0.bias": [0.0]}
    assert np.isinf(network.predict(np.array([[1e30]], np.float32))).all()


# --- fit((x, y)), and what people write instead ---


def test_arrays_go_wherever_a_data_set_does() -> None:
    weight = np.linspace(0.5, 1.5, 40)
    sets, arrays = classifier(metrics=["accuracy"]), classifier(metrics=["accuracy"])
    data = mg.Dataset(X, LABELS, weight)
    fit(sets, data, validation=mg.Dataset(X, LABELS))
    fit(arrays, (X, LABELS, weight), validation=(X, LABELS))
    assert sets.network.flat_parameters().tobytes() == arrays.network.flat_parameters().tobytes()
    assert sets.history["validation_loss"] == arrays.history["validation_loss"]
    assert sets.evaluate(data) == arrays.evaluate((X, LABELS, weight))
    assert fit(classifier(), (X.tolist(), LABELS.tolist())).epochs == 2
    network = mg.Network([mg.Standardize(4), mg.Dense(4, 1), mg.Standardize(1)])
    network.adapt((X, VALUES))
    assert network.adapted
    inputs = mg.Network([mg.Standardize(4), mg.Dense(4, 1)])
    inputs.adapt(X)
    np.testing.assert_array_equal(inputs.flat_statistics(), network.flat_statistics()[:8])


def test_a_share_is_held_out_for_validation() -> None:
    share, by_hand = classifier(), classifier()
    fit(share, (X, LABELS), validation=0.25)
    rest, held_out = mg.Dataset(X, LABELS).split(0.25, seed=1)
    fit(by_hand, rest, validation=held_out)
    assert share.history["validation_loss"] == by_hand.history["validation_loss"]
    assert share.network.flat_parameters().tobytes() == by_hand.network.flat_parameters().tobytes()


def test_a_run_with_a_share_held_out_resumes(tmp_path: Path) -> None:
    unbroken = fit(classifier(), (X, LABELS), 4, validation=0.25)
    fit(classifier(), (X, LABELS), 2, validation=0.25).save(tmp_path / "run.h5")
    resumed = fit(mg.Trainer.resume(tmp_path / "run.h5"), (X, LABELS), 4, validation=0.25)
    assert resumed.history["validation_loss"] == unbroken.history["validation_loss"]
    assert resumed.network.flat_parameters().tobytes() == unbroken.network.flat_parameters().tobytes()


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 2, True, 0.001, np.float32(7)])
def test_a_share_that_is_none_is_refused(share: Any) -> None:
    with pytest.raises(MlpgpuError, match=r"^validation: expected|^fraction: expected at least one row in each part"):
        fit(classifier(), (X, LABELS), validation=share)


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda trainer: trainer.fit(X, LABELS), r"fit\(\(x, y\), epochs=10\)"),
        (lambda trainer: trainer.fit(X, LABELS, 10), r"fit\(\(x, y\), epochs=10\)"),
        (lambda trainer: trainer.fit(X, LABELS, epochs=10), r"fit\(\(x, y\), epochs=10\)"),
        (lambda trainer: trainer.fit(X, y=LABELS, epochs=10), r"fit\(\(x, y\), epochs=10\)"),
        (lambda trainer: trainer.fit(X, LABELS.tolist()), r"fit\(\(x, y\), epochs=10\)"),
        (lambda trainer: trainer.evaluate(X, LABELS), r"evaluate\(\(x, y\)\)"),
        (lambda trainer: trainer.evaluate(X, NAMES[LABELS]), r"evaluate\(\(x, y\)\)"),
        (lambda trainer: trainer.evaluate(X), r"a tuple of arrays, \(x, y\)"),
        (lambda trainer: trainer.fit(X, 3), r"a tuple of arrays, \(x, y\)"),
    ],
)
def test_targets_beside_inputs_get_a_hint(call: Callable[[mg.Trainer], object], hint: str) -> None:
    with pytest.raises(DtypeError, match=hint):
        call(classifier())


# --- tables with named columns ---


class Table:
    """As much of a pandas DataFrame as a data set looks at."""

    def __init__(self, columns: dict[Any, Any]) -> None:
        self.held = {name: np.asarray(values) for name, values in columns.items()}

    @property
    def columns(self) -> list[Any]:
        return list(self.held)

    def __getitem__(self, name: Any) -> Any:
        return Table({key: self.held[key] for key in name}) if isinstance(name, list) else self.held[name]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        kinds = {values.dtype.kind for values in self.held.values()}
        mixed = len(kinds) > 1 and kinds & set("bOU")
        columns = [values.astype(object) if mixed else values for values in self.held.values()]
        return np.stack(columns, axis=1).astype(dtype or columns[0].dtype)


NUMBERS = Table({"age": X[:, 0], "height": X[:, 1], "pulse": X[:, 2], "is_old": X[:, 3] > 0})


def test_columns_of_numbers_of_several_types_are_taken() -> None:
    data = mg.Dataset(NUMBERS, LABELS)
    assert data.columns == ("age", "height", "pulse", "is_old")
    np.testing.assert_array_equal(data.x, np.column_stack([X[:, :3], X[:, 3] > 0]))
    assert data.split(0.5)[0].columns == data.columns
    assert mg.Dataset(Table({0: X[:, 0], 1: X[:, 1]})).columns is None


class DatedTable(Table):
    """A table, as of Polars, that has no array of all its columns."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError("no common type")


def test_a_table_without_an_array_is_read_by_column() -> None:
    columns = {name: NUMBERS[name] for name in NUMBERS.columns}
    np.testing.assert_array_equal(mg.Dataset(DatedTable(columns)).x, mg.Dataset(NUMBERS).x)
    with pytest.raises(DtypeError, match=r"'day' of datetime64\[D\], such as"):
        mg.Dataset(DatedTable({**columns, "day": np.full(40, np.datetime64("2020-01-01"))}))


def test_a_sparse_matrix_gets_a_hint() -> None:
    with pytest.raises(DtypeError, match=r"got a csr_array \(x\.toarray\(\)\)"):
        mg.Dataset(scipy.sparse.csr_array(X))


def test_columns_of_no_numbers_are_refused_by_name() -> None:
    mixed = Table({"age": X[:, 0], "city": NAMES[LABELS].astype(object), "when": np.full(40, None)})
    with pytest.raises(DtypeError, match=r"'city' of object, such as 'a'.*leave them out") as caught:
        mg.Dataset(mixed)
    assert "'age'" not in str(caught.value)
    holes = Table({"age": X[:, 0], "pulse": np.where(LABELS == 1, np.nan, X[:, 1])})
    with pytest.raises(DataError, match="got nan at row 1, column 'pulse'"):
        mg.Dataset(holes)


def test_columns_in_another_order_are_refused_by_name(tmp_path: Path) -> None:
    trainer = fit(classifier(), (NUMBERS, LABELS))
    swapped = NUMBERS[["height", "age", "pulse", "is_old"]]
    for network in (trainer.network, again(trainer.network, tmp_path)):
        with pytest.raises(
            ConfigurationError, match=r"'age' at place 0.*got 'height' \(x\[list\(network\.columns\)\]\)"
        ):
            network.predict(swapped)
        np.testing.assert_array_equal(network.predict(swapped[list(network.columns)]), network.predict(NUMBERS))
        network.predict(np.asarray(NUMBERS, np.float32))  # without names, as before
        with pytest.raises(ShapeError, match=r"no 'pulse'$"):
            network.predict(NUMBERS[["age", "height", "is_old"]])
        with pytest.raises(ShapeError, match="no 'age', and 'weight' as well"):
            network.predict(Table({"weight": X[:, 0], **{name: NUMBERS[name] for name in NUMBERS.columns[1:]}}))
    with pytest.raises(ConfigurationError, match="columns of x"):
        fit(classifier(), (NUMBERS, LABELS), validation=(swapped, LABELS))


def test_a_table_of_bytes_is_bytes() -> None:
    pixels = Table({f"p{k}": BYTES[:, k] for k in range(4)})
    network = fit(classifier(), mg.Dataset(pixels, LABELS, scale=1 / 16)).network
    np.testing.assert_array_equal(network.predict(pixels), network.predict(BYTES))


# --- files that others read ---


def test_statistics_stand_where_keras_looks_for_them(tmp_path: Path) -> None:
    network = mg.Network([mg.Standardize(4), mg.Dense(4, 1), mg.Standardize(1)], seed=1)
    network.adapt((X * 3.0 + 7.0, VALUES))
    network.save(tmp_path / "net.weights.h5")
    statistics = network.flat_statistics()
    with h5py.File(tmp_path / "net.weights.h5") as file:
        for group, mean, scale in (("normalization", slice(0, 4), slice(4, 8)), ("normalization_1", 8, 9)):
            stored = file[f"layers/{group}/vars"]
            assert sorted(stored) == ["0", "1", "2"]
            np.testing.assert_array_equal(stored["0"][()].squeeze(), statistics[mean])
            np.testing.assert_array_equal(stored["1"][()].squeeze(), statistics[scale] ** 2)
            assert stored["2"].shape == () and stored["2"].dtype == np.int64
    loaded = mg.load(tmp_path / "net.weights.h5")
    np.testing.assert_array_equal(loaded.flat_statistics(), statistics)


@pytest.mark.parametrize("validation", [(X,), "test"], ids=["without targets", "text"])
def test_what_is_no_data_set_is_called_validation(validation: Any) -> None:
    with pytest.raises(MlpgpuError, match=r"^validation: expected"):
        fit(classifier(), (X, LABELS), validation=validation)
