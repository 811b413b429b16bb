"""Every public callable: works with usual arguments, and takes hostile ones as ``attack_callables`` says."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from attack_callables import Attack, Call, attack_all, is_allowed, survive
from hostile_values import hostile_values
from public_callables import USUAL, World

import mlpgpu as mg

SEED, CALLS = 14, 800  # of the part that make test-all runs; make fuzz draws another seed each time

# Calls that once came to something else than a result or an error of ours, by the class of what they came to.
KEPT: list[tuple[str, dict[str, str]]] = [
    # could not be saved
    ("Dense", {"n_out": "numpy int64 3"}),
    ("LocallyConnected", {"window": "numpy uint8 3"}),
    ("Dropout", {"rate": "numpy d 0.5"}),
    ("Adam", {"epsilon": "numpy float64 127"}),
    ("AdamW", {"weight_decay": "Decimal"}),
    ("CosineDecay", {"epochs": "numpy float32 3"}),
    ("WarmUp", {"rate": "numpy float64 3"}),
    ("ReduceOnPlateau", {"patience": "numpy int16 3"}),
    ("Network.adapted=", {"value": "numpy bool 1"}),
    ("Trainer", {"class_weight": "dict numpy keys"}),
    # were silently wrong
    ("Trainer.fit", {"shuffle": "str 'no'"}),
    ("Trainer.fit", {"drop_last": "float 2.5"}),
    ("Checkpoint", {"keep_best": "list of None"}),
    ("EarlyStopping", {"monitor": "array rows U2"}),
    ("Dataset.first", {"rows": "int -1"}),
    ("Dataset.first", {"rows": "int 0"}),
    ("Dataset.with_weight", {"weight": "array rows f8"}),
    ("Dataset", {"x": "list of masked"}),
    ("Trainer", {"class_weight": "dict float key"}),
    ("Trainer.resume", {"threads": "int 0"}),
    ("Trainer.step", {"weight": "array rows 1e-50"}),
    ("Trainer.fit", {"data": "triple of huge weights"}),
    ("Trainer.evaluate", {"data": "triple of huge weights"}),
    ("Parameters.__setitem__", {"values": "array masked of parameters"}),
    ("datasets.write_idx", {"array": "array of masked bytes"}),
    # were errors of others
    ("Trainer", {"metrics": "None"}),
    ("Trainer", {"batch_size": "int 2**40"}),
    ("Trainer", {"streams": "int 2**63"}),
    ("Trainer", {"threads": "int 10**400"}),
    ("Trainer.fit", {"epochs": "int 2**70"}),
    ("Trainer.histograms", {"of": "object"}),
    ("Predictor", {"network": "int 1"}),
    ("Network.predict", {"batch_size": "dict empty"}),
    ("Network.predict", {"backend": "array x nan"}),
    ("Network.predict", {"x": "tensor that requires gradients"}),
    ("Network.save", {"path": "path with a surrogate"}),
    ("Network.save", {"path": "path with a NUL"}),
    ("Network.classes=", {"value": "list of surrogate"}),
    ("Dataset", {"classes": "list of surrogate"}),
    ("Dataset", {"y": "array of surrogates"}),
    ("History", {"records": "list of numbers"}),
    ("datasets.load", {"folder": "path of bytes"}),
    ("datasets.write_idx", {"array": "None"}),
    ("Quantile", {"level": "no number"}),
    ("Dropout", {"rate": "unprintable"}),
    # warned of what is none of the caller's business
    ("Dropout", {"rate": "masked constant"}),
    ("Huber", {"delta": "numpy complex128 1"}),
    ("Predictor.__call__", {"x": "array x u1"}),
    ("Adam", {"rate": "float 1e+308"}),
    # said neither which argument it was, nor what it was checked to be
    ("tables.CSV", {"delimiter": "numpy <U3 1"}),
]


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> Attack:
    return Attack(SEED, tmp_path_factory.mktemp("attack"))


def test_usual_arguments_of_every_callable_are_known(attack: Attack) -> None:
    lacking = {target.name: target.lacking for target in attack.targets if target.lacking}
    assert not lacking, "USUAL in public_callables.py is to have arguments for these"


@pytest.mark.thorough
def test_every_callable_works_with_usual_arguments(attack: Attack, tmp_path: Path) -> None:
    for target in (target for target in attack.targets if target.name in USUAL):
        world = World(tmp_path, Random(1))
        world.classifies = "targets" not in target.name
        target.invoke(target.owner(world) if target.owner else None, target.usual(world))


def test_what_no_target_is_made_of_is_still_there(attack: Attack) -> None:
    names = {target.name for target in attack.targets}
    assert {"Trainer.fit", "Trainer.resume", "Trainer.rate=", "Network.classes=", "Dataset.split", "load"} <= names
    assert {"Dense", "Huber", "AdamW", "OneCycle", "Histograms", "datasets.read_idx", "Parameters.__setitem__"} <= names


@pytest.mark.parametrize(("name", "hostile"), KEPT, ids=[f"{name}-{'-'.join(h.values())}" for name, h in KEPT])
def test_kept_calls(name: str, hostile: dict[str, str], attack: Attack, tmp_path: Path) -> None:
    target = next(target for target in attack.targets if target.name == name)
    outcome = attack.run(Call(target, hostile, World(tmp_path, Random(3))))
    assert outcome.kind == "ok", outcome


@pytest.mark.thorough
def test_random_calls() -> None:
    counts, found = attack_all(SEED, CALLS, processes=1)
    assert not found
    assert counts["ok"] == CALLS


def test_a_call_is_the_same_whenever_it_is_made(attack: Attack, tmp_path: Path) -> None:
    calls = [str(attack.call(index)) for index in range(5)]
    again = Attack(SEED, tmp_path)
    assert calls == [str(again.call(index)) for index in range(5)]
    assert len(set(calls)) == 5


def test_annotations_tell_what_is_allowed(tmp_path: Path) -> None:
    values = {name: make() for name, make in hostile_values(tmp_path).items()}
    allowed = {kind: {name for name, value in values.items() if is_allowed(kind, value)} for kind in ("bool", "int")}
    assert {"True", "numpy bool 1"} <= allowed["bool"]
    assert not allowed["bool"] & {"str 'no'", "None", "int 1", "numpy int8 1"}
    assert {"int 1", "IntEnum", "numpy uint8 3"} <= allowed["int"]
    assert not allowed["int"] & {"True", "numpy bool 1", "float 3.0", "str '3'"}


def test_a_judge_finds_what_does_not_survive(tmp_path: Path) -> None:
    layer = mg.Dense(5, 4)
    object.__setattr__(layer, "init", 3.5)  # as a constructor that kept what it did not check
    with pytest.raises(Exception, match=r"init|3\.5"):
        survive(World(tmp_path, Random(0)), layer)
