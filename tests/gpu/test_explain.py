"""`explain` on a card: launches measured one by one make up the step."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu.__main__ import main
from mlpgpu.backends.cuda.profile.explain import Profile, profile
from mlpgpu.backends.cuda.profile.probe import PIECES
from mlpgpu.backends.cuda.runtime import Device

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def measured(
    device: Device, widths: list[int], batch_size: int, *, timeline: bool = False, **options: object
) -> Profile:
    layers = [mg.Dense(n_in, n_out, activation="relu") for n_in, n_out in pairwise(widths)]
    network = mg.Network(layers, seed=1)
    chosen = {"loss": "softmax_cross_entropy", "optimizer": mg.Momentum(0.1), **options}
    plan = network.lower(capacity=batch_size, **chosen)
    return profile(plan, device, network.state(plan.optimizer), scale=1 / 255, timeline=timeline)


@pytest.mark.parametrize(("widths", "batch_size"), [([784, 128, 10], 128), ([784, 1024, 1024, 10], 1024)])
def test_the_launches_make_up_the_step(device: Device, widths: list[int], batch_size: int) -> None:
    found = measured(device, widths, batch_size)
    print(found)
    assert found.kernel_seconds == pytest.approx(found.seconds, rel=0.25)


def test_it_says_which_way_a_plan_trains(device: Device) -> None:
    inside, by_launches = (str(measured(device, [50, 33, 7], 31, shards=shards)) for shards in (1, 2))
    assert "trains inside one kernel, persistent_50_33_7" in inside and "a step takes" in inside
    assert "trains launch by launch, since the batch is split over streams" in by_launches


def test_no_launch_is_faster_than_its_floor(device: Device) -> None:
    found = measured(device, [784, 1024, 1024, 10], 1024)
    assert found.rates.copied > 1e11 and found.rates.cached >= found.rates.copied and found.rates.computed > 1e12
    assert [each.launch.entry.name for each in found.launches if each.seconds < each.floor] == []


def test_an_evaluation_has_no_update(device: Device) -> None:
    found = measured(device, [50, 33, 7], 31, loss=None, optimizer=None)
    assert [each.launch.operation for each in found.launches] == ["0 Gather", "1 Dense", "2 Dense", "3 Output"]
    assert all(each.registers > 0 and each.seconds > 0 for each in found.launches)


def test_a_timeline_keeps_the_order_of_each_stream(device: Device) -> None:
    found = measured(device, [784, 256, 10], 512, timeline=True, shards=2)
    step, epoch = found.timelines.values()
    assert len(step) == sum(math.ceil(each.count) for each in found.launches)
    assert {span.stream for span in step} == {"0", "1"}
    for stream in ("0", "1"):
        spans = [span for span in step if span.stream == stream]
        assert all(span.start <= span.end for span in spans)
        assert all(first.end <= second.start for first, second in pairwise(spans))
    last_of_shards = max(span.end for span in step if span.stream == "1")
    assert next(span for span in step if span.name == "total_error").start >= last_of_shards
    assert max(span.end for span in step) < 0.005  # the host had put all on the streams before the card began

    copies, steps = ({s.name: s for s in epoch if s.stream == stream} for stream in ("copies", "0"))
    assert len(steps) == PIECES and len(copies) == PIECES + 1
    for name, piece in ((name, name.removeprefix("steps from ")) for name in steps):
        assert copies[piece].end <= steps[name].end and copies[piece].start < steps[name].start


@pytest.mark.parametrize("options", [[], ["--loss", "softmax_cross_entropy", "--timeline"]])
def test_explain_prints_it(
    options: list[str], device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = mg.Network([mg.Standardize(5), mg.Dense(5, 9, activation="tanh"), mg.Dense(9, 3)], seed=1)
    network.save(tmp_path / "network.h5")
    assert main(["explain", str(tmp_path / "network.h5"), "--backend", "cuda", *options]) == 0
    printed = capsys.readouterr().out
    assert "peak rates of this card: copying" in printed and "sum of the launches" in printed
    assert ("start µs" in printed) == bool(options)
    assert f"on {device.name}, measured on random data" in printed
    assert "a prediction of 1 row: one launch" in printed and "a prediction of 100,000 rows: " in printed


def test_a_run_is_explained_on_its_card(device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network = mg.Network([mg.Dense(6, 4, activation="relu"), mg.Dropout(0.5), mg.Dense(4, 2)], seed=1)
    trainer = mg.Trainer(
        network, "squared_error", mg.Adam(0.01, clip_norm=1.0), batch_size=16, backend="cuda", streams=3
    )
    x = np.random.default_rng(1).integers(0, 256, (100, 6), np.uint8)
    trainer.fit(mg.Dataset(x, x[:, :2] / 255), 2, progress=False)
    trainer.save(tmp_path / "run.h5")
    assert main(["explain", str(tmp_path / "run.h5")]) == 0
    printed = capsys.readouterr().out
    assert "a step of 16 rows" in printed and "gather_uint8" in printed and "update_Adam" in printed


def test_info_names_the_card(device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert device.name in printed and "auto means cuda" in printed and "NVIDIA driver" in printed
