"""Networks in parts, trained by real ranks under mpirun: what all ranks call together, and what callbacks ask for."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from launched import run_ranks

BEGINNING = """
    import copy, os, pickle, time, zlib
    import numpy as np
    import mlpgpu as mg
    from mlpgpu.plan import tensor_split

    tensor_split.LEAST_WEIGHTS = 20
    me, n = mg.rank(), mg.ranks()
    draw = np.random.default_rng(1)
    x, y = draw.standard_normal((50, 8)), draw.integers(0, 3, 50)
    def trainer(*layers, loss="softmax_cross_entropy", **options):
        layers = layers or (mg.Dense(8, 16, "tanh"), mg.Dense(16, 9, "gelu"), mg.Dense(9, 3))
        options = {"parallel": "tensor", "parts": 4, "batch_size": 16, **options}
        return mg.Trainer(mg.Network(layers, seed=2), loss, mg.Adam(0.01), backend="cpu", **options)
    def fit(t, *callbacks, epochs=3, **options):
        return t.fit((x, y), epochs, callbacks=callbacks, progress=False, **options)
    def crc(array):
        return zlib.crc32(np.ascontiguousarray(array))
"""


def printed(folder: Path, ranks: int, script: str, **variables: str) -> list[str]:
    """What each rank prints; a failure of one fails the test."""
    begin = f"import os; os.chdir({str(folder)!r})\n"
    done = run_ranks(folder, ranks, begin + dedent(BEGINNING + script), **variables)
    assert done.code == 0, done.errors
    return sorted(done.output.splitlines())


def test_what_all_ranks_call_together(tmp_path: Path) -> None:
    """Reading, predicting, evaluating, saving, copying, closing: each on all ranks, with the bits of one."""
    script = """
    t = trainer(metrics=["accuracy", "roc_auc", "confusion_matrix"])
    seen = []
    def look(t):
        seen.append(crc(t.network.parameters["0.weight"]))
        seen.append(crc(t.network.predict(x)))
        seen.append(repr(t.evaluate((x, y))))
        seen.append(repr(t.evaluate((x, y), {"total": lambda y, p: float(p.sum())})))
    look(t)
    h = fit(t, validation=0.2)
    look(t)
    t.step(x[:5], y[:5])
    t.save("run.h5")
    look(t)
    twin, other = copy.deepcopy(t), pickle.loads(pickle.dumps(t))
    for each in (t, twin, other):
        fit(each)
    assert len({crc(each.network.flat_parameters()) for each in (t, twin, other)}) == 1
    t.network.parameters["1.bias"] = np.arange(9.0)
    fit(t)
    t.network.save(f"net{me}.h5")
    look(t)
    mg.load(f"net{me}.h5")
    t.close()
    seen += [crc(t.network.flat_parameters()), h["validation_loss"], h["validation_accuracy"]]
    print(seen, flush=True)
    """
    expected = printed(tmp_path, 1, script)
    for ranks in (2, 4):
        assert printed(tmp_path, ranks, script) == expected * ranks


def test_callbacks_ask_on_rank_0_and_the_others_do_their_part(tmp_path: Path) -> None:
    script = """
    seen = []
    class Look(mg.Callback):
        every_steps = 5
        def begin(self, trainer):
            self.step_end(trainer)
        def step_end(self, trainer):
            seen.append(crc(trainer.network.parameters["1.weight"]))
            seen.append(float(trainer.network.values.square_sum([slice(3, 200)])))
            seen.append(crc(trainer.network.predict(x)))
            seen.append(repr(trainer.evaluate((x[:20], y[:20]), {"first": lambda y, p: float(p[0, 0])})))
            trainer.save("step.h5")
            seen.append(crc(trainer.network.flat_parameters()))
        def epoch_end(self, trainer, record):
            if trainer.epochs == 1:
                trainer.keep()
                trainer.network.parameters["2.bias"] = [1.0, 2.0, 3.0]
                trainer.evaluate((x, y))
                trainer.keep()
            seen.append(crc(trainer.network.predict(x)))
            found = trainer.histograms(7, ("parameters", "activations", "gradients"))
            seen.append([(name, crc(counted), crc(edges)) for name, (counted, edges) in sorted(found.items())])
            seen.append(crc(copy.deepcopy(trainer).network.flat_parameters()))
            try:
                trainer.evaluate((x, y + 7))
            except mg.errors.MlpgpuError as error:
                seen.append(type(error).__name__)
        def end(self, trainer):
            trainer.restore_kept()
            trainer.save("end.h5")
    t = trainer(metrics=["accuracy"])
    stop = mg.EarlyStopping("validation_loss", patience=1, min_delta=10.0)
    h = fit(t, Look(), stop, mg.Checkpoint("run.h5", keep_best=True), epochs=9, validation=(x[:7], y[:7]))
    assert len(h) == 2 and stop.stopped
    left = crc(t.network.flat_parameters()), crc(mg.load("end.h5").flat_parameters())
    if me == 0:
        print(seen, left, h["validation_loss"], flush=True)
    """
    (expected,) = printed(tmp_path, 1, script)
    for ranks in (2, 3):
        assert printed(tmp_path, ranks, script, MLPGPU_RANKS_TIMEOUT="20") == [expected]


def test_a_metric_of_ones_own_may_look_at_the_network(tmp_path: Path) -> None:
    """Of a validation rank 0 computes it; what it reads then the others send."""
    script = """
    seen = []
    def norm(y, prediction):
        seen.append(me)
        return float(np.abs(t.network.parameters["0.weight"]).sum() + prediction.sum())
    t = trainer(metrics=[norm])
    h = fit(t, validation=(x, y))
    assert seen == [0] * 3 * (me == 0)
    print(h["validation_norm"], t.evaluate((x, y))["norm"], flush=True)
    """
    expected = printed(tmp_path, 1, script)
    assert printed(tmp_path, 2, script, MLPGPU_RANKS_TIMEOUT="10") == expected * 2


def test_a_run_goes_on_with_its_parts_on_another_number_of_ranks(tmp_path: Path) -> None:
    begin = """
    t = trainer(parts=None if n > 1 else 4)
    assert t.parts == 4
    fit(t, epochs=2)
    t.save(f"of{n}.h5")
    fit(t, epochs=3)
    print(crc(t.network.flat_parameters()), flush=True)
    """
    (expected,) = printed(tmp_path, 1, begin)
    assert printed(tmp_path, 4, begin) == [expected] * 4
    go_on = """
    for name in ("of1.h5", "of4.h5"):
        t = mg.Trainer.resume(name)
        assert (t.parallel, t.parts, t.plan.tensor.parts.ranks) == ("tensor", 4, n)
        fit(t, epochs=2)
        fit(t, epochs=3)
        print(crc(t.network.flat_parameters()), flush=True)
    """
    for ranks in (1, 2, 3):
        assert printed(tmp_path, ranks, go_on) == [expected] * 2 * ranks
    refused = """
    try:
        mg.Trainer.resume("of1.h5")
    except mg.errors.MlpgpuError as error:
        print(error, flush=True)
    """
    for line in printed(tmp_path, 5, refused):
        assert "at least one for each of 5 ranks" in line
        assert "got 4" in line


def test_no_rank_draws_or_has_the_whole_network_unless_it_asks(tmp_path: Path) -> None:
    """A fit with a validation and a file allocates arrays of a rank's parts alone; counted by size."""
    script = """
    import tracemalloc
    t = trainer(mg.Dense(8, 2048, "relu"), mg.Dense(2048, 2048, "relu"), mg.Dense(2048, 3), parts=None)
    whole = t.network.parameter_count * 4
    tracemalloc.start()
    t.fit((x, y), 1, progress=False, validation=0.2)
    t.evaluate((x, y))
    # Of parameters, partials, gradients and two slots each rank has its parts.
    _, most = tracemalloc.get_traced_memory()
    assert t.network.is_new is False
    print(round(most / (4 * whole), 3), flush=True)
    """
    for ranks in (2, 4):
        for share in printed(tmp_path, ranks, script):
            assert float(share) < 1.25 / ranks


# --- parts that "auto" chooses ---

CHOSEN = """
    from mlpgpu.plan import costs
    costs.choose_way = lambda one, data, tensor: "tensor" if tensor is not None else "data"
    OF_PARTS = {"parallel": "tensor", "parts": 2} if n == 1 else {"parallel": "auto", "parts": None}
"""


def test_between_fits_each_rank_has_all_of_what_auto_split(tmp_path: Path) -> None:
    """So that a rank may look, save and change alone; each call with the bits of as many parts on one rank."""
    script = (
        CHOSEN
        + """
    seen = []
    t = trainer(metrics=["accuracy"], **OF_PARTS)
    assert (t.parts, t.streams, t.plan.tensor.parts.ranks) == (2, 1, n)
    def look(t):
        seen.append(crc(t.network.parameters["0.weight"]))
        seen.append(crc(t.network.predict(x)))
        seen.append(repr(t.evaluate((x, y))))
        seen.append(repr(t.evaluate((x, np.eye(3)[y]))))  # targets of the other kind
        seen.append(crc(t.own_parts("1.bias")[0][1]))
        found = t.histograms(7, ("parameters", "activations", "gradients") if t.steps else ("parameters",))
        seen.append([(name, crc(counted), crc(edges)) for name, (counted, edges) in sorted(found.items())])
        t.save("run.h5")
        t.network.save("net.h5")
        seen.append([crc(mg.load(name).flat_parameters()) for name in ("run.h5", "net.h5")])
        twin = pickle.loads(pickle.dumps(t))
        seen.append(crc(twin.network.flat_parameters()))
    if me == 0:
        look(t)
        t.close()
        t = trainer(metrics=["accuracy"], **OF_PARTS)
    fit(t, mg.EarlyStopping("validation_loss", patience=1, min_delta=10.0), validation=0.2)
    if me == 0:
        look(t)
    fit(t)
    if me == 0:
        look(t)
    t.step(x[:5], y[:5])
    if me == 0:
        seen.append(crc(t.network.flat_parameters()))
    t.keep()
    fit(t)
    t.restore_kept()
    t.rate = 0.03
    t.network.parameters["2.bias"] = [1.0, 2.0, 3.0]
    fit(t)
    if me == 0:
        look(t)
        t.close()
        seen.append(crc(t.network.flat_parameters()))
        print(seen, flush=True)
    """
    )
    (expected,) = printed(tmp_path, 1, script)
    assert printed(tmp_path, 2, script, MLPGPU_RANKS_TIMEOUT="10") == [expected]


def test_what_auto_split_goes_on_in_as_many_parts(tmp_path: Path) -> None:
    """On at most as many ranks; a copy as well."""
    begin = (
        CHOSEN
        + """
    t = trainer(**OF_PARTS)
    fit(t, epochs=2)
    t.save(f"of{n}.h5")
    c = copy.deepcopy(t)
    fit(t, epochs=3)
    fit(c, epochs=3)
    print(crc(t.network.flat_parameters()), crc(c.network.flat_parameters()), flush=True)
    """
    )
    (expected,) = printed(tmp_path, 1, begin)
    assert printed(tmp_path, 2, begin) == [expected] * 2
    go_on = """
    t = mg.Trainer.resume("of2.h5")
    assert (t.parallel, t.parts, t.streams, t.plan.tensor.parts.ranks) == ("auto", 2, 1, n)
    assert n == 1 or "2 ranks train together, each a part of the network, as the run was begun" in str(t.plan)
    fit(t, epochs=2)
    t.save(f"again{n}.h5")
    if n > 1:
        from mlpgpu.ranks import communicator
        communicator().barrier()  # rank 0 has written
    t = mg.Trainer.resume(f"again{n}.h5")
    fit(t, epochs=2)
    fit(t, epochs=3)
    print(crc(t.network.flat_parameters()), crc(t.network.flat_parameters()), flush=True)
    """
    for ranks in (1, 2):
        assert printed(tmp_path, ranks, go_on) == [expected] * ranks
    refused = """
    try:
        mg.Trainer.resume("of2.h5")
    except mg.errors.MlpgpuError as error:
        print(error, flush=True)
    """
    for line in printed(tmp_path, 3, refused):
        assert "at least one for each of 3 ranks" in line
        assert "got 2" in line


def test_a_fit_that_an_exception_ends_leaves_each_rank_all_parts(tmp_path: Path) -> None:
    script = (
        CHOSEN
        + """
    def fails(record):
        raise KeyError("so")
    t = trainer(**OF_PARTS)
    try:
        fit(t, fails)
    except (KeyError, mg.errors.RankError):
        pass
    if me == 0:
        print(crc(t.network.flat_parameters()), t.steps, t.evaluate((x, y)), flush=True)
    fit(t)
    diverging = trainer(loss="squared_error", **OF_PARTS)
    diverging.rate = 1e20
    try:
        diverging.fit((x, np.full((50, 3), 1e18)), 3, progress=False)
    except mg.errors.DivergenceError as error:
        if me == 0:
            print(error.step, np.isfinite(diverging.network.flat_parameters()).all(), flush=True)
    """
    )
    expected = printed(tmp_path, 1, script)
    assert len(expected) == 2
    assert printed(tmp_path, 2, script, MLPGPU_RANKS_TIMEOUT="10") == expected


def test_auto_splits_nothing_where_shards_were_asked_for(tmp_path: Path) -> None:
    script = (
        CHOSEN
        + """
    for options in ({"streams": 2}, {"streams": 1}, {"reduction": "fast"}):
        t = trainer(parallel="auto", parts=None, **options)
        assert t.parts is None and t.plan.tensor is None and t.plan.choice.way == "data", options
    alike = mg.Dense(9, 9)
    t = trainer(mg.Dense(8, 9), alike, alike, mg.Dense(9, 1), loss="squared_error", **OF_PARTS)
    print(t.plan.choice.way, flush=True)
    """
    )
    assert len(printed(tmp_path, 2, script)) == 2


DISAGREEMENTS = {
    "layers": "trainer(mg.Dense(8, 32 + me), mg.Dense(32 + me, 3))",
    "parts": "trainer(parts=4 + me)",
    "values": "t = trainer(); t.network.parameters['1.bias'] = np.full(9, float(me)); fit(t)",
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree_are_told_so(name: str, tmp_path: Path) -> None:
    script = f"""
    try:
        fit(eval({DISAGREEMENTS[name]!r})) if ";" not in {DISAGREEMENTS[name]!r} else exec({DISAGREEMENTS[name]!r})
    except mg.errors.RankError as error:
        print(error, flush=True)
    """
    lines = printed(tmp_path, 2, script)
    assert len(lines) == 2
    assert all("of 2 ranks: expected" in line for line in lines), lines
