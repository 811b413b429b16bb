"""Networks that several ranks train together, by real ones under mpirun."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from launched import mpirun, run, run_ranks
from left_runs import check_same, left_by

SCRIPT = Path(__file__).with_name("train_together.py")
RUNS = 30


def train(folder: Path, ranks: int, *options: str) -> list[list[Any]]:
    """What each rank has of each run, of so many ranks."""
    command = [sys.executable, str(SCRIPT), str(folder), "0", str(RUNS), *options]
    done = run([*mpirun(), "-n", str(ranks), *command] if ranks > 1 else command, seconds=200)
    assert done.code == 0, done.errors
    return left_by(folder, ranks, RUNS)


OPTIONS = {"data": (), "tensor": ("--tensor",), "auto": ("--auto",)}


@pytest.fixture(scope="module", params=OPTIONS)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[Any]]]:
    return request.param, train(tmp_path_factory.mktemp("alone"), 1, *OPTIONS[request.param])


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    "ranks", [pytest.param(ranks, marks=pytest.mark.thorough) if ranks > 2 else ranks for ranks in (2, 3, 4)]
)
def test_any_number_of_ranks_ends_with_the_same_bits(
    ranks: int, alone: tuple[str, list[list[Any]]], tmp_path: Path
) -> None:
    """Of random plans, data and callbacks: files, history, states, what the callbacks set, on every rank."""
    split, left = alone
    check_same(left, train(tmp_path, ranks, *OPTIONS[split]), ("one", "data") if split == "auto" else (None,))


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_parts_that_auto_chooses_end_with_the_bits_of_as_many_on_one_rank(ranks: int, tmp_path: Path) -> None:
    """Of random runs: what rank 0 alone does after a fit, such as saving, the others have no part in."""
    left, found = (train(tmp_path / str(n), n, "--parts", str(ranks)) for n in (1, ranks))
    for (expected,), got in zip(left, found, strict=True):
        assert (expected[0].pop("parallel"), got[0][0].pop("parallel")) == ("tensor", "auto")
    check_same(left, found, ["tensor"])


WAYS = pytest.mark.parametrize("way", ["auto", "data"])  # rank 0 for all, and all together
BEGINNING = """
    import os, time
    import numpy as np
    import mlpgpu as mg

    me, n = mg.rank(), mg.ranks()
    draw = np.random.default_rng(1)
    x, y = draw.standard_normal((50, 6)), draw.integers(0, 3, 50)
    def trainer(**options):
        options = {"parallel": os.environ.get("WAY", "auto"), **options}
        network = mg.Network([mg.Dense(6, 8, "tanh"), mg.Dense(8, 3)], seed=2)
        return mg.Trainer(network, "softmax_cross_entropy", mg.Adam(0.01), backend="cpu", batch_size=16, **options)
    def fit(t, *callbacks, **options):
        return t.fit((x, y), 3, callbacks=callbacks, progress=False, **options)
"""


@WAYS
def test_what_one_rank_asks_for_waits_for_no_other(way: str, tmp_path: Path) -> None:
    script = """
    if me == 0:  # before anything that all ranks do
        t = trainer()
        assert t.network.parameters["0.weight"].shape == (6, 8)
        assert 0.0 < t.evaluate((x, y))["loss"] < 2.0
        t.save("new.h5")
        assert mg.Trainer.resume("new.h5").steps == 0
    t = trainer()
    if me == 0:
        assert t.network.parameters["0.weight"].shape == (6, 8)
    fit(t)
    if me == 0:
        assert t.network.parameters["0.weight"].shape == (6, 8)
        assert 0.0 < t.evaluate((x, y))["loss"] < 2.0
        t.network.predict(x), t.network.labels(x)
        t.save("alone.h5")
        assert mg.Trainer.resume("alone.h5").steps == t.steps
    if me == 1:
        t.network.save("one.h5")
        assert np.isfinite(mg.load("one.h5").predict(x)).all()
    t.network.save("net.h5")  # of all ranks at once
    t.save("all.h5")
    losses = [t.step(x[:16], y[:16]) for _ in range(3)]
    t.save("stepped.h5")  # after single steps all ranks are needed
    if me == 0:
        again = mg.Trainer.resume("stepped.h5")
        assert (again.steps, again.streams) == (t.steps, n)
        t.save("again.h5")  # they have told each other
    print("done", flush=True)
    """
    done = run_ranks(tmp_path, 2, f"import os; os.chdir({str(tmp_path)!r})\n" + dedent(BEGINNING + script), WAY=way)
    assert (done.code, done.output) == (0, "done\n" * 2), done.errors


@WAYS
def test_shards_that_lack_rows_or_ranks(way: str, tmp_path: Path) -> None:
    """A last batch smaller than S, a batch of one row, more ranks than shards, and each rank for itself."""
    script = """
    import zlib
    def crc(t):
        return zlib.crc32(t.network.flat_parameters())
    ends = []
    for streams, rows in ((4, 18), (7, 17), (1, 50), (3, 50)):
        t = trainer(streams=streams)
        t.fit((x[:rows], y[:rows]), 2, progress=False)
        t.step(x[:1], y[:1])
        ends.append(crc(t))
    assert trainer().streams == n and trainer(parallel="none").streams == 1
    own = trainer(parallel="none")
    own.fit((x[me:], y[me:]), 2, progress=False)
    print(*ends, own.plan.ranks, flush=True)
    """
    printed = {}
    for ranks in (1, 2, 3):
        done = run_ranks(tmp_path, ranks, dedent(BEGINNING + script), WAY=way)
        assert done.code == 0, done.errors
        printed[ranks] = set(done.output.splitlines())
    assert printed[1] == printed[2] == printed[3]
    assert len(printed[1]) == 1


@pytest.mark.parametrize("chosen", ["one", "data"])
def test_what_auto_chose_is_kept_and_changes_no_bits(chosen: str, tmp_path: Path) -> None:
    """By a plan that says why, in the run file, on resume and in copies; all ranks end alike either way."""
    script = f"""
    import copy, zlib
    from mlpgpu.plan import costs
    os.chdir({str(tmp_path)!r})
    def crc(t):
        return zlib.crc32(t.network.flat_parameters())
    costs.LEAST_GAIN = {1.0 if chosen == "one" else -1000.0}
    t = trainer(streams=4)
    fit(t, validation=0.2)
    t.step(x[:16], y[:16])
    t.save(f"run{{n}}.h5")
    if n > 1:
        from mlpgpu.ranks import communicator
        communicator().barrier()  # rank 0 has written
        assert t.plan.choice.way == {chosen!r} and t.plan.ranks == {1 if chosen == "one" else 2}
        told = "rank 0 of 2 trains for all" if {chosen!r} == "one" else "2 ranks train together"
        assert f"parallel='auto': {{told}}: by counts a step takes one " in str(t.plan)
        assert "by parts" not in str(t.plan)  # nothing is split where shards were asked for
        wide = mg.Network([mg.Dense(6, 4096, "tanh"), mg.Dense(4096, 3)])
        wide = mg.Trainer(wide, "softmax_cross_entropy", backend="cpu")
        assert ", by parts " in str(wide.plan)
    costs.LEAST_GAIN = {-1000.0 if chosen == "one" else 1.0}  # by which it would choose otherwise
    c = copy.deepcopy(t)
    again = mg.Trainer.resume(f"run{{n}}.h5")
    for each in (t, c, again):
        if n > 1:
            assert each.plan.choice.way == {chosen!r}
        each.rate = 0.005
        each.fit((x[:20], y[:20]), 2, progress=False)
    assert n == 1 or "as the run was begun" in str(again.plan)
    assert crc(t) == crc(c) == crc(again)
    told = [t.history[name] for name in ("loss", "validation_loss") if name in t.history.records[0]]
    print(crc(t), told, t.steps, t.epochs, flush=True)
    """
    printed = {}
    for ranks in (1, 2):
        done = run_ranks(tmp_path, ranks, dedent(BEGINNING) + dedent(script), WAY="auto")
        assert done.code == 0, done.errors
        printed[ranks] = set(done.output.splitlines())
    assert printed[1] == printed[2]
    assert len(printed[1]) == 1


def test_fast_repeats_on_as_many_ranks_and_warns_on_others(tmp_path: Path) -> None:
    script = f"""
    import warnings, zlib
    from mlpgpu.ranks import communicator
    os.chdir({str(tmp_path)!r})
    def end(reduction, streams=5):
        t = trainer(streams=streams, reduction=reduction)
        fit(t, validation=0.2)
        return t, t.network.flat_parameters()
    (t, fast), (_, again), (_, ordered) = end("fast"), end("fast"), end("ordered")
    assert np.array_equal(fast, again)
    assert np.allclose(fast, ordered, rtol=1e-4, atol=1e-6)
    assert np.array_equal(fast, ordered) == (n == 1)
    assert np.array_equal(end("fast", n)[1], end("ordered", n)[1])  # one shard each: nothing to add before
    if n > 1:
        t.save("fast.h5")
        communicator().barrier()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        r = mg.Trainer.resume("fast.h5")
    assert len(told) == (n != 3), told
    assert not told or "'ranks': (3, " in str(told[0].message), told[0].message
    fit(r, validation=0.2)
    print(zlib.crc32(fast), flush=True)
    """
    for ranks in (3, 2, 1):
        if ranks == 2:
            script = script.replace('t.save("fast.h5")', "pass")  # that of three stays
        done = run_ranks(tmp_path, ranks, dedent(BEGINNING + script), WAY="data")
        assert done.code == 0, done.errors
        assert len(set(done.output.splitlines())) == 1


def test_a_step_makes_the_exchanges_that_its_plan_tells(tmp_path: Path) -> None:
    """Messages and bytes of each rank, as the plan counts them, and nothing else between them."""
    script = """
    from mlpgpu.bench import Epochs
    from mlpgpu.ranks import Communicator
    made, swap = [], Communicator._swap
    def counted(self, call, sent, received, *rest):
        arrays = [array for arrays in (*sent.values(), *received.values()) for array in arrays if array.size]
        made.append((sum(array.nbytes for arrays in sent.values() for array in arrays), len(arrays)))
        return swap(self, call, sent, received, *rest)
    Communicator._swap = counted
    for width, clip_norm, expected in ((8, None, 1), (8, 1.0, 1), (1500, None, 2), (1500, 1.0, 3)):
        network = mg.Network([mg.Dense(6, width, "tanh"), mg.Dense(width, 95)], seed=2)
        optimizer = mg.Adam(0.01, clip_norm=clip_norm)
        options = {"batch_size": 25, "streams": 3, "parallel": "data"}
        t = mg.Trainer(network, "softmax_cross_entropy", optimizer, backend="cpu", **options)
        run = Epochs(t, mg.Dataset(x, y))
        run()
        made.clear()
        run()  # of two steps
        told = [t.plan.traffic(operation, me) for operation in t.plan.training]
        assert made == [(each.sent, each.messages) for each in told if each.messages] * 2, (made, told)
        assert len(made) == 2 * expected
    """
    done = run_ranks(tmp_path, 2, dedent(BEGINNING + script))
    assert done.code == 0, done.errors


DISAGREEMENTS = {
    "data": ("fit(trainer()) if me != 1 else trainer().fit((x + 1, y), 3, progress=False)", "data of 3 ranks"),
    "epochs": ("trainer().fit((x, y), 3 + (me == 2), progress=False)", "epochs of 3 ranks.* 4 on rank 2|'4' on rank 2"),
    "batches": ("t = trainer(); t.network.parameters['1.bias'] = [me, 0, 0]; fit(t)", "the network's parameters"),
    "seeds": (
        "t = mg.Trainer(mg.Network([mg.Dense(6, 3)], seed=me), 'softmax_cross_entropy', backend='cpu'); fit(t)",
        "the network's seed of 3 ranks",
    ),
    "callbacks": ("fit(trainer(), *([mg.EarlyStopping('loss')] if me == 0 else []))", "callback EarlyStopping 1"),
    "steps": ("t = trainer(); t.step(x[me:8], y[me:8])", "data of 3 ranks"),
    "arguments": (
        "t = mg.Trainer(mg.Network([mg.Dense(6, 3)]), 'softmax_cross_entropy', mg.SGD(0.1 * (me + 1)), backend='cpu')\n"
        "    fit(t)",
        "Trainer's optimizer of 3 ranks",
    ),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree_are_told_so_at_the_start(name: str, tmp_path: Path) -> None:
    script, told = DISAGREEMENTS[name]
    caught = f"""
    try:
        {script.replace(chr(10) + "    ", chr(10) + "        ")}
    except mg.errors.RankError as error:
        print(error, flush=True)
    """
    done = run_ranks(tmp_path, 3, dedent(BEGINNING + caught))
    assert done.code == 0, done.errors
    lines = done.output.splitlines()
    assert len(lines) == 3
    assert all(re.search(told, line) for line in lines), lines


@WAYS
def test_rank_0_alone_calls_callbacks_and_all_end_alike(way: str, tmp_path: Path) -> None:
    """What a callback keeps, returns, raises or sets; time limits do not run while it is at work."""
    script = """
    called = []
    def slow(record):
        called.append(record["epoch"])
        time.sleep(1.5)  # longer than a rank may be late
        record["mine"] = 2.0 * record["epoch"]
        return record["epoch"] == 2
    slow.columns = ("mine",)
    t = trainer()
    h = fit(t, slow)
    assert called == ([1, 2] if me == 0 else [])
    assert h["mine"] == [2.0, 4.0] and len(h) == 2, h.records
    stop = mg.EarlyStopping("loss", patience=1, min_delta=10.0)
    h = trainer().fit((x, y), 9, callbacks=[stop], progress=False)
    assert len(h) == 2 and stop.stopped and stop.best_epoch == 1

    def wrong(record):
        raise KeyError("a plain mistake")
    try:
        fit(trainer(), wrong)
    except KeyError as error:
        print("KeyError", error.args[0], flush=True)
    t = trainer()
    try:
        fit(t, mg.Checkpoint("/nowhere/run.h5"))
    except mg.errors.StorageError as error:
        print(error.what, flush=True)
    fit(t)
    def own(y, prediction):
        return float(len(called))  # which rank 0 alone knows
    h = fit(trainer(metrics=[own]), validation=(x, y))
    assert h["validation_own"] == [2.0] * 3
    """
    done = run_ranks(tmp_path, 2, dedent(BEGINNING + script), WAY=way, MLPGPU_RANKS_TIMEOUT="1")
    assert done.code == 0, done.errors
    assert sorted(done.output.splitlines()) == [
        *["Checkpoint path /nowhere/run.h5"] * 2,
        *["KeyError a plain mistake"] * 2,
    ]


@WAYS
def test_parameters_are_compared_where_somebody_may_have_set_them(way: str, tmp_path: Path) -> None:
    script = """
    t = trainer()
    t.step(x[:8], y[:8])
    if me == 0:
        t.evaluate((x, y))
    t.step(x[:8], y[:8])
    t.network.parameters["1.bias"] = [1.0, 2.0, 3.0]  # alike on all
    if me == 0:
        t.evaluate((x, y))
    t.step(x[:8], y[:8])
    t.network.parameters["1.bias"] = [0.0, 0.0, me]
    t.evaluate((x, y))
    try:
        t.step(x[:8], y[:8])
    except mg.errors.RankError as error:
        assert "the network's parameters" in str(error), error
        print(t.steps, flush=True)
    """
    done = run_ranks(tmp_path, 2, dedent(BEGINNING + script), WAY=way)
    assert (done.code, done.output) == (0, "3\n" * 2), done.errors


@WAYS
def test_what_else_a_trainer_does_is_the_same(way: str, tmp_path: Path) -> None:
    """Histograms of activations and gradients, copies, float64, estimators, a set of validation with few rows."""
    script = """
    import copy, pickle, warnings, zlib
    from mlpgpu.sklearn import MLPClassifier
    def crc(array):
        return zlib.crc32(np.ascontiguousarray(array))
    seen = []
    def counts(trainer):
        found = trainer.histograms(7, ("parameters", "activations", "gradients"))
        seen.append([(name, crc(counted), crc(edges)) for name, (counted, edges) in sorted(found.items())])
    class Look(mg.Callback):
        def epoch_end(self, trainer, record):
            counts(trainer)
    t = trainer(streams=3, precision="float64", metrics=["accuracy", "roc_auc", "confusion_matrix"])
    h = fit(t, Look(), validation=(x[:3], [0, 1, 2]))
    if me == 0:
        print(seen, [h[name] for name in h.records[0] if name != "seconds"], flush=True)
    twin, other = copy.deepcopy(t), pickle.loads(pickle.dumps(t))
    for each in (t, twin, other):
        each.fit((x, y), 2, progress=False)
    ends = {crc(each.network.flat_parameters()) for each in (t, twin, other)}
    assert len(ends) == 1, ends
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has not converged
        e = MLPClassifier((8,), max_iter=3, early_stopping=True, validation_fraction=0.2, random_state=1, backend="cpu")
        e.fit(x, y)
        e.partial_fit(x, y)
    print(ends, [crc(w) for w in e.coefs_] if n == 1 else len(e.coefs_), flush=True)
    """
    printed = {}
    for ranks in (1, 2):
        done = run_ranks(tmp_path, ranks, dedent(BEGINNING + script), WAY=way)
        assert done.code == 0, done.errors
        printed[ranks] = done.output.splitlines()
    assert printed[1][0] == next(line for line in printed[2] if line.startswith("[["))
    ends = printed[1][1].split("}")[0]
    assert [line.split("}")[0] for line in printed[2] if line.startswith("{")] == [ends] * 2
