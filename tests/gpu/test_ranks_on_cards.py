"""Ranks that train one network on two cards or more, under mpirun: the bits of one card, and how such runs end.

On a machine with two cards, with PyCUDA, cuda-bindings, mpi4py with an mpirun, nccl4py and NCCL's library
(``pip install -e ".[cuda,mpi,nccl,test]"``):

    python -m pytest tests/gpu/test_ranks_on_cards.py -m gpu -v
    python benchmarks/ranks.py --backend cuda --json ranks_on_cards.jsonl

With ``MLPGPU_REQUIRE_GPU=1`` fewer than two cards are a failure.  NCCL_DEBUG=INFO has NCCL print what it does.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launched import Done, run
from left_runs import check_same, left_by
from train_on_cards import CASES, ENDLESS, PARTS

import mlpgpu
from mlpgpu.backends.cuda.runtime import Device, count_devices

SCRIPT = Path(__file__).with_name("train_on_cards.py")
RANDOM_SCRIPT = Path(__file__).parents[1] / "ranks" / "train_together.py"
RANDOM_RUNS, RANDOM_SECONDS = 30, 900.0  # each has kernels to compile
SECONDS = 300.0  # kernels are compiled meanwhile
KILLED_SECONDS = 10.0  # in which all others end once a rank is killed
ENDING_SECONDS = 120.0  # that a run takes whose rank 1 is killed or stopped after some seconds

# Each process has a card; tests of this file take turns, and no other test may run beside them.
pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.usefixtures("device")]


@pytest.fixture(scope="module")
def cards(device: Device) -> int:
    """How many there are, two or more."""
    found = count_devices()
    if found < 2:
        said = f"{found} card, and ranks need two"
        if os.environ.get("MLPGPU_REQUIRE_GPU") == "1":
            pytest.fail(said)
        pytest.skip(said)
    return found


def start(folder: Path, case: str, ranks: int, *others: str, seconds: float = SECONDS, **variables: str) -> Done:
    """Run a case on so many ranks."""
    folder.mkdir(exist_ok=True)
    launcher = ["-m", "mlpgpu", "launch", "-n", str(ranks)] if ranks > 1 else []
    given = {**environment(), **variables}
    return run([sys.executable, *launcher, str(SCRIPT), str(folder), case, *others], seconds=seconds, **given)


def environment() -> dict[str, str]:
    """Variables of ranks on cards: multicast over NVLink is for NCCL's own sums, of which there are none here."""
    return {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[2]), *filter(None, sys.path)]), "NCCL_NVLS_ENABLE": "0"}


def left(folder: Path, ranks: int) -> list[Any]:
    """What each rank ended with."""
    return [pickle.loads((folder / f"rank{rank}of{ranks}.pickle").read_bytes()) for rank in range(ranks)]


@pytest.mark.parametrize("case", CASES)
def test_two_cards_have_the_bits_of_one(case: str, cards: int, tmp_path: Path) -> None:
    """Parameters, losses and validations of every rank, to the bit."""
    for ranks in (1, 2, *([4] if cards >= 4 else ())):
        done = start(tmp_path, case, ranks)
        assert done.code == 0, done.output + done.errors
        (expected,) = left(tmp_path, 1)
        assert all(got == expected for got in left(tmp_path, ranks)), ranks


@pytest.mark.parametrize("options", [(), ("--tensor",)], ids=["shards", "parts"])
def test_two_cards_end_random_runs_with_the_bits_of_one(options: tuple[str, ...], cards: int, tmp_path: Path) -> None:
    """Of random plans, data and callbacks: files, history, states, what the callbacks set, on each."""
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        launcher = ["-m", "mlpgpu", "launch", "-n", str(ranks)] if ranks > 1 else []
        asked = [str(RANDOM_SCRIPT), str(folder), "0", str(RANDOM_RUNS), "--cuda", *options]
        done = run([sys.executable, *launcher, *asked], seconds=RANDOM_SECONDS, **environment())
        assert done.code == 0, done.output + done.errors
        found.append(left_by(folder, ranks, RANDOM_RUNS))
    check_same(*found, (None,))


@pytest.mark.parametrize("case", PARTS)
def test_two_cards_with_parts_have_the_bits_of_one(case: str, cards: int, tmp_path: Path) -> None:
    """Of one that has as many parts: parameters, losses, validations and predictions of every rank, and the file."""
    for ranks in (1, 2, *([4] if cards >= 4 and PARTS[case].options["parts"] >= 4 else ())):
        done = start(tmp_path, case, ranks)
        assert done.code == 0, done.output + done.errors
        (expected,) = left(tmp_path, 1)
        assert all(got == expected for got in left(tmp_path, ranks)), ranks
        files = [(tmp_path / f"saved{count}.h5") for count in (1, ranks)]
        assert [mlpgpu.load(file).flat_parameters().tobytes() for file in files] == [expected[1]] * 2


@pytest.mark.parametrize("case", ["deep", "clipped, validated", "tensor cores, float32", "tall"])
def test_a_network_in_parts_is_the_same_network(case: str, cards: int, tmp_path: Path) -> None:
    """Its losses are those of a card that has it whole, but for their last digits."""
    ends = []
    for how in ((), ("whole",)):
        done = start(tmp_path, case, 1, *how)
        assert done.code == 0, done.output + done.errors
        ends.append(left(tmp_path, 1)[0])
    for one, other in zip(ends[0][0], ends[1][0], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-3), (one, other)


def test_auto_trains_in_parts_where_that_is_counted_less(cards: int, tmp_path: Path) -> None:
    """With the bits of one card that has as many parts, and all of the network on each card after the fit."""
    assert start(tmp_path, "tall", 1).code == 0
    done = start(tmp_path, "tall", 2, "auto")
    assert done.code == 0, done.output + done.errors
    (expected,) = left(tmp_path, 1)
    assert left(tmp_path, 2) == [expected] * 2


@pytest.mark.parametrize("case", ["two shards", "deep"])
def test_a_run_of_two_cards_goes_on_on_one(case: str, cards: int, tmp_path: Path) -> None:
    """And the other way: each rank has the slots of its slice or of its parts, and the file all of them."""
    ends = []
    for first, then in ((1, 1), (2, 1), (1, 2)):
        folder = tmp_path / f"{first}{then}"
        assert start(folder, case, first).code == 0
        (folder / f"saved{first}.h5").rename(folder / "run.h5")
        done = start(folder, case, then)
        assert done.code == 0, done.output + done.errors
        ends.append(left(folder, then)[0])
    assert ends[0] == ends[1] == ends[2]


@pytest.mark.parametrize("case", ENDLESS)
def test_a_rank_that_hangs_is_left_after_the_time_limit(case: str, cards: int, tmp_path: Path) -> None:
    done = start(tmp_path, case, 2, "stopped", seconds=ENDING_SECONDS, MLPGPU_RANKS_TIMEOUT="10")
    assert done.code != 0
    assert "RankError" in done.errors and "within 10 s" in done.errors, done.errors


@pytest.mark.parametrize("case", ENDLESS)
def test_a_rank_that_is_killed_ends_the_other(case: str, cards: int, tmp_path: Path) -> None:
    done = start(tmp_path, case, 2, "killed", seconds=ENDING_SECONDS)
    since = time.time() - (tmp_path / "ended").stat().st_mtime
    assert done.code != 0
    assert "mlpgpu: rank 0 of 2 ends: rank 1 was killed or crashed" in done.errors, done.errors
    assert since < KILLED_SECONDS, since


def test_more_ranks_than_cards_are_refused(cards: int, tmp_path: Path) -> None:
    done = start(tmp_path, "two shards", cards + 1)
    assert done.code != 0 and "one for each rank" in done.errors, done.errors


def test_two_ranks_on_one_card_are_refused(cards: int, tmp_path: Path) -> None:
    done = start(tmp_path, "two shards", 2, CUDA_VISIBLE_DEVICES="0")
    assert done.code != 0 and "on ranks 0 and 1" in done.errors, done.errors
