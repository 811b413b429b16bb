"""What ranks tell each other, by real ones under mpirun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launched import run_ranks

pytestmark = pytest.mark.xdist_group("ranks")  # which would take each other's cores

BEGINNING = """
    import numpy as np
    from mlpgpu.errors import MlpgpuError
    from mlpgpu.ranks import check_agreement, communicator, local_rank, rank, ranks

    c = communicator()
    me, n = c.rank, c.size
    def raised(call):
        try:
            call()
        except MlpgpuError as error:
            print(f"{me}: {type(error).__name__}: {error}", flush=True)
        else:
            raise AssertionError("nothing was raised")
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_call_brings_what_the_others_sent(ranks: int, tmp_path: Path) -> None:
    script = """
    assert communicator() is c and (rank(), ranks(), local_rank()) == (me, n, me)
    for value in ({"rank": me}, None, b"x" * 3_000_000):
        assert c.broadcast(value if me == 0 else "ignored") == ({"rank": 0} if isinstance(value, dict) else value)
    assert c.broadcast(me, patient=True) == 0
    assert c.gather((me, "x" * 100_000 * me)) == [(r, "x" * 100_000 * r) for r in range(n)]
    for dtype in (np.float32, np.float64):
        for length in (0, 1, 7, 100_000):
            parts, begin = [], 0  # of unequal lengths, the first one empty
            for r in range(n):
                parts.append(slice(begin, begin + r * length))
                begin += r * length
            array = np.full(begin, -1, dtype)
            array[parts[me]] = me + 0.5
            c.all_gather(array, parts)
            assert np.array_equal(array, np.concatenate([np.full(r * length, r + 0.5, dtype) for r in range(n)]))
            # Rank s sends (s + 2 r) % 3 times the length to rank r: none of it for some.
            sent = [np.full((me + 2 * r) % 3 * length, 10 * me + r, dtype) for r in range(n)]
            received = [np.full((s + 2 * me) % 3 * length, -1, dtype) for s in range(n)]
            c.exchange(sent, received)
            for s, array in enumerate(received):
                assert np.array_equal(array, np.full((s + 2 * me) % 3 * length, 10 * s + me, dtype))
    c.barrier()
    print("done", me, flush=True)
    """
    done = run_ranks(tmp_path, ranks, BEGINNING + script)
    assert done.code == 0, done.errors
    assert sorted(done.output.split("\n")) == ["", *(f"done {rank}" for rank in range(ranks))]


def test_what_is_too_long_for_a_message_comes_in_pieces_also_right_before_the_end(tmp_path: Path) -> None:
    script = """
    import sys
    sys.modules["mlpgpu.ranks.communicator"].MOST_BYTES = 4096
    assert c.broadcast(b"x" * 10_001 if me == 0 else None) == b"x" * 10_001
    sent = [np.arange(1_000_000.0) + r for r in range(n)]
    received = [np.zeros(1_000_000) for _ in range(n)]
    c.exchange(sent, received)
    assert all(np.array_equal(array, np.arange(1_000_000.0) + me) for array in received)
    """
    done = run_ranks(tmp_path, 2, BEGINNING + script)
    assert (done.code, done.errors) == (0, "")


def test_several_arrays_go_to_each_rank_at_once(tmp_path: Path) -> None:
    """Of other types and sizes, as many to one as to none."""
    script = """
    sent = [[np.full(r + 1, me), np.full((2, 3), 0.5 * r)][: 2 - (me == 0)] for r in range(n)]
    received = [[np.zeros(me + 1, int), np.zeros((2, 3))][: 2 - (r == 0)] for r in range(n)]
    c.exchange_several(sent, received)
    for r in range(n):
        if r != me:
            assert (received[r][0] == r).all()
            assert r == 0 or (received[r][1] == 0.5 * me).all()
    assert not any(array.any() for array in received[me])
    raised(lambda: c.exchange_several(sent, [[np.zeros((4, 4))[:, 1]]] * n))
    """
    done = run_ranks(tmp_path, 3, BEGINNING + script)
    assert (done.code, done.errors) == (0, "")
    assert done.output.count("ShapeError: exchange's received: expected contiguous, writeable arrays") == 3


@pytest.mark.thorough
@pytest.mark.parametrize(("sent", "received"), [(10, 9), (9, 10)])
def test_arrays_of_other_sizes_than_expected_are_an_error(sent: int, received: int, tmp_path: Path) -> None:
    script = f"""
    sent = [np.zeros({sent} if me == 0 and r == 1 else 5) for r in range(n)]
    received = [np.zeros({received} if me == 1 and r == 0 else 5) for r in range(n)]
    if me == 1:
        raised(lambda: c.exchange(sent, received))
    else:
        c.exchange(sent, received)
    """
    done = run_ranks(tmp_path, 2, BEGINNING + script)
    assert done.output.startswith("1: RankError: exchange of rank 1 of 2: expected "), done.errors


def test_a_rank_in_another_call_is_an_error_on_all(tmp_path: Path) -> None:
    script = """
    a = np.zeros(n, np.float32)
    def other():
        c.all_gather(a, [slice(r, r + 1) for r in range(n)])
    raised(c.barrier if me == 1 else other)
    """
    done = run_ranks(tmp_path, 3, BEGINNING + script)
    assert "expected all_gather on all of them, as on rank 0, got barrier on rank 1" in done.output
    assert "expected all_gather on all of them, as on rank 2, got barrier on rank 1" in done.output
    assert "expected barrier on all of them, as on rank 1, got all_gather on rank" in done.output


@pytest.mark.thorough
def test_ranks_that_do_not_come_in_time_are_named(tmp_path: Path) -> None:
    script = """
    import time
    c.barrier()
    c._seconds = 1.0
    if me in (0, 2):
        raised(c.barrier)
    time.sleep(2)
    """
    done = run_ranks(tmp_path, 4, BEGINNING + script)
    for rank in (0, 2):
        expected = (
            rf"{rank}: RankError: barrier, call \d+ of rank {rank} of 4: expected ranks 1, 3 within 1 s, got nothing"
        )
        assert re.search(expected, done.output), done.output + done.errors


def test_disagreement_names_the_ranks_the_key_and_the_values(tmp_path: Path) -> None:
    script = """
    same = {"version": "1.0", "seed": 7, "rate": float("nan")}
    check_agreement(c, same)
    check_agreement(None, same)
    raised(lambda: check_agreement(c, {**same, "seed": 8 if me == 3 else 7}))
    raised(lambda: check_agreement(c, {"rows": 10, **({"columns": 3} if me in (0, 2, 3) else {})}))
    """
    done = run_ranks(tmp_path, 4, BEGINNING + script)
    assert done.code == 0, done.errors
    for rank in range(4):
        assert f"{rank}: RankError: seed of 4 ranks: expected int 7 on all of them, got int 8 on rank 3" in done.output
        assert (
            f"{rank}: RankError: columns of 4 ranks: expected int 3 on all of them, got nothing on rank 1"
            in done.output
        )
