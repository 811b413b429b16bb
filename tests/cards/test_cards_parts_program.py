"""Programs of ranks that have parts of a network on cards, whole, on the host in place of cards."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from helpers import dataset, numpy_alone
from host_card import HostCard, take_over
from test_cards_program import Team

import mlpgpu as mg
from mlpgpu.backends import Sampling, State, get_backend, parts
from mlpgpu.backends.base import Source
from mlpgpu.backends.cuda.exchange import BoundExchange, Exchange
from mlpgpu.backends.cuda.run import program as programs
from mlpgpu.backends.cuda.run import state as states
from mlpgpu.backends.cuda.tensor_program import CudaTensorProgram
from mlpgpu.errors import ConfigurationError
from mlpgpu.plan import Parts, plan, tensor_split

ROWS, BATCH = 21, 8
NETWORKS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "columns and rows": (
        [mg.Standardize(8), mg.Dense(8, 16, "tanh"), mg.Dropout(0.2), mg.Dense(16, 9, "gelu"), mg.Dense(9, 3)],
        {"optimizer": mg.Adam(0.02)},
    ),
    "clipped": (
        [mg.Dense(8, 16, "relu", init="fan_in_uniform"), mg.Dense(16, 3, init="he_normal")],
        {"optimizer": mg.Momentum(0.1, clip_norm=0.05)},
    ),
    "columns of the data": (
        [mg.Dense(8000, 6, "relu"), mg.Dense(6, 3)],
        {"optimizer": mg.Momentum(0.001)},
    ),
}


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    take_over(monkeypatch)
    monkeypatch.setattr(tensor_split, "LEAST_WEIGHTS", 20)
    monkeypatch.setattr(plan, "NORM_BLOCK", 16)
    monkeypatch.setattr(parts, "PIECE", 32)
    monkeypatch.setattr(states, "by_kernel", lambda count: count > 4)  # so that both draw


class Ranks(Team):
    """Ranks that also send each other arrays, as by MPI."""

    def broadcast(self, value: Any = None) -> Any:
        return self.gather(value)[0]

    def all_gather(self, values: np.ndarray, slices: list[slice]) -> None:
        told = self.gather(values[slices[self.rank]].copy())
        for own, theirs in zip(slices, told, strict=True):
            values[own] = theirs

    def exchange(self, sent: list[np.ndarray], received: list[np.ndarray]) -> None:
        told = self.gather([array.copy() for array in sent])
        for place, array in enumerate(received):
            if array.size:
                array[...] = told[place][self.rank]


def data_of(n_in: int) -> mg.Dataset:
    data = dataset("softmax_cross_entropy", "index", rows=ROWS, n_in=n_in, n_out=3, weighted=True)
    return type(data)(data.x.astype(np.float32), data.y, data.weight)


def program_of(
    name: str, count: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Ranks, mg.Network, mg.Dataset, Any]:
    """The ranks, the network, the data, and what makes a rank's program."""
    layers, options = NETWORKS[name]
    network, team = mg.Network(layers, seed=3), Ranks(ranks)
    cards: Any = team
    monkeypatch.setattr(parts, "communicator", lambda: team)
    monkeypatch.setattr(programs, "join", lambda card: Exchange(cards, cards, [("host", "sm_80", 2)]))

    def program() -> CudaTensorProgram:
        own = network.lower(
            capacity=BATCH, loss="softmax_cross_entropy", parts=Parts(count, team.rank, ranks), **options
        )
        card: Any = HostCard(team.rank if ranks > 1 else 0)
        return CudaTensorProgram(own, card, 0.5)

    n_in = next(layer.n_in for layer in layers if isinstance(layer, mg.Dense))
    data = data_of(n_in)
    network.adapt(data)
    return team, network, data, program


def saved(program: CudaTensorProgram, rank: int) -> list[np.ndarray] | None:
    """All arrays of parameters, the snapshot and slots, as rank 0 gets them piece by piece."""
    if rank:
        assert program.send_pieces() == "told"
        return None
    whole = program._whole
    found = []
    sources: list[Source] = ["parameters", "snapshot", *program._slots()]
    for source in sources:
        pieces = program.pieces(source, range(len(whole.parameters)))
        found.append(np.concatenate([piece.reshape(-1).copy() for piece in pieces]))
    program.end_pieces("told")
    return found


def train(name: str, count: int, ranks: int, monkeypatch: pytest.MonkeyPatch, begin: State | None = None) -> list[Any]:
    """What each rank has after two epochs and an evaluation."""
    team, network, data, make = program_of(name, count, ranks, monkeypatch)

    def work() -> Any:
        program = make()
        if begin is None:
            program.draw(3, network.state(None).statistics)
        else:
            program.load(begin)
        drawn = program.read_parameters()
        program.attach(data, Sampling(ROWS, BATCH, seed=11))
        losses = [program.run(0, np.full(4, 0.05))]
        program.snapshot()
        losses.append(program.run(4, np.full(2, 0.02)))
        sums = program.evaluate(data, ["accuracy"], shared=True)
        predictions = program.predict(data)
        assert program.is_finite()
        pieces = saved(program, team.rank)
        state, kept = program.read(), program.read(snapshot=True).parameters
        histograms, sample = program.histograms(5), program.sample(5, 6, 4)
        own = program.own_parts("1.weight")
        program.restore()
        back = program.read_parameters()
        program.close()
        return {
            "drawn": drawn, "losses": np.concatenate(losses), "loss": sums["loss"], "predictions": predictions,
            "parameters": state.parameters, "slots": state.slots, "kept": kept, "back": back,
            "histograms": np.array([counts for counts, _ in histograms.values()]),
            "sample": np.array([counts for counts, _ in sample.values()]),
        }, pieces, own, state  # fmt: skip

    return team.run(work)


def test_memory_that_graphs_of_evaluations_send_to_stays_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was bound maps it, as long as it lives; the graphs themselves know addresses alone."""
    team, network, data, make = program_of("clipped", 2, 2, monkeypatch)
    bind, bound = Exchange.bind, list[weakref.ref[BoundExchange]]()

    def told(exchange: Exchange, *arguments: Any) -> BoundExchange:
        made = bind(exchange, *arguments)
        bound.append(weakref.ref(made))
        return made

    def work() -> None:
        program = make()
        program.draw(3, network.state(None).statistics)
        program.evaluate(data, ["accuracy"], shared=True)
        program.predict(data)
        team.gather(None)
        gc.collect()
        assert len(bound) >= 4 and all(each() is not None for each in bound)
        team.gather(None)
        program.close()

    monkeypatch.setattr(Exchange, "bind", told)
    team.run(work)


@pytest.mark.parametrize("name", NETWORKS)
def test_programs_in_parts_end_alike_on_any_number_of_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, state, evaluations, predictions, samples and files; initial values are those of the whole network."""
    ((expected, pieces, own, _),) = train(name, 3, 1, monkeypatch)
    assert np.isfinite(expected["parameters"]).all() and (expected["kept"] == expected["back"]).all()
    assert (expected["kept"] != expected["parameters"]).any()
    network = mg.Network(NETWORKS[name][0], seed=3)
    np.testing.assert_array_equal(expected["drawn"], network.flat_parameters())
    state = [expected["parameters"][0], expected["kept"][0], *expected["slots"][:, 0]]
    whole = len(own)
    for ranks in (2, 3):
        of_ranks = train(name, 3, ranks, monkeypatch)
        for got, _, mine, _ in of_ranks:
            for key, value in expected.items():
                np.testing.assert_array_equal(got[key], value, err_msg=f"{key} of {ranks}")
            assert len(mine) < whole or whole == 1
        for piece, other, flat in zip(of_ranks[0][1], pieces, state, strict=True):
            np.testing.assert_array_equal(piece, other)
            np.testing.assert_array_equal(piece, flat)


def test_programs_in_parts_are_near_to_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (layers, options) in NETWORKS.items():
        ((got, *_),) = train(name, 2, 1, monkeypatch)
        network = mg.Network(layers, seed=3)
        data = data_of(network.layers[0].n_in if isinstance(network.layers[0], mg.Dense) else 8)
        network.adapt(data)
        whole = network.lower(
            capacity=BATCH, loss="softmax_cross_entropy", parts=Parts(2), precision="float64", **options
        )
        with numpy_alone():
            program = get_backend("cpu").compile(whole, threads=1)
        program.draw(3, network.state(None).statistics)
        program.attach(data, Sampling(ROWS, BATCH, seed=11))
        losses = [program.run(0, np.full(4, 0.05)), program.run(4, np.full(2, 0.02))]
        np.testing.assert_allclose(got["losses"], np.concatenate(losses), rtol=1e-4)
        np.testing.assert_allclose(got["parameters"], program.read().parameters, atol=2e-4)
        np.testing.assert_allclose(got["predictions"], program.predict(data), atol=1e-4)


def test_a_run_goes_on_from_a_state_and_from_pieces_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "columns and rows"
    ((_, pieces, _, begin),) = train(name, 3, 1, monkeypatch)
    ((expected, *_),) = train(name, 3, 1, monkeypatch, begin)
    for got, *_ in train(name, 3, 2, monkeypatch, begin):
        np.testing.assert_array_equal(got["parameters"], expected["parameters"])
        np.testing.assert_array_equal(got["slots"], expected["slots"])
    team, network, data, make = program_of(name, 3, 3, monkeypatch)

    def work() -> Any:
        program = make()
        arrays = program._whole.parameters
        for source, flat in zip(("parameters", "snapshot", *program._slots()), pieces, strict=True):

            def rows(place: int, first: int, end: int, flat: np.ndarray = flat) -> np.ndarray:
                array = arrays[place]
                return flat[array.offset : array.end].reshape(array.shape)[first:end]

            program.load_pieces(source, rows)
        program.load_statistics(network.flat_statistics())
        state, kept = program.read(), program.read(snapshot=True).parameters[0]
        program.attach(data, Sampling(ROWS, BATCH, seed=11))
        program.run(0, np.full(4, 0.05))
        program.run(4, np.full(2, 0.02))
        return state, kept, program.read()

    for state, kept, end in team.run(work):
        np.testing.assert_array_equal(state.parameters, begin.parameters)
        np.testing.assert_array_equal(state.slots, begin.slots)
        np.testing.assert_array_equal(kept, pieces[1])
        np.testing.assert_array_equal(end.parameters, expected["parameters"])


def test_inputs_on_a_card_are_refused_where_ranks_have_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    team, _, data, make = program_of("columns of the data", 2, 1, monkeypatch)
    team.own.rank = 0
    monkeypatch.setattr(type(data), "card", property(lambda self: 0))
    with pytest.raises(ConfigurationError, match=r"data with parallel='tensor': expected inputs on the host"):
        make().attach(data, Sampling(ROWS, BATCH, seed=11))
