"""Files of networks in parts: written piece by piece, the same as of one process, whole or not at all."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from launched import ROOT, run
from test_tensor_training import printed

from mlpgpu import storage
from mlpgpu.errors import ConfigurationError, DtypeError, FileFormatError, StorageError
from mlpgpu.storage import Contents, Pieces, write_pieces


def arrays() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        "/layers/dense/vars/0": draw.standard_normal((300, 500)).astype(np.float32),
        "/layers/dense/vars/1": draw.standard_normal(7),
        "/mlpgpu/run/slots/m": draw.standard_normal(100_000),
        "/z/empty": np.empty((0, 3)),
        "/z/number": np.array(3),
    }


def in_pieces(array: np.ndarray, rows: int = 37) -> Iterator[np.ndarray]:
    for first in range(0, len(array), rows):
        yield array[first : first + rows]


def test_a_file_by_pieces_has_the_bytes_of_one_at_once(tmp_path: Path) -> None:
    whole = arrays()
    contents = Contents({"a": [1, 2]}, whole, ("/layers/dense/vars", "/empty"))
    storage.write(tmp_path / "whole.h5", contents)
    for coming in ({"/layers/dense/vars/0"}, {"/mlpgpu/run/slots/m", "/z/empty"}, {*whole} - {"/z/number"}):
        pieces = {name: Pieces(whole[name].shape, whole[name].dtype, in_pieces(whole[name])) for name in coming}
        write_pieces(tmp_path / "pieces.h5", contents, pieces)
        assert (tmp_path / "pieces.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_what_breaks_a_file_by_pieces_off_leaves_the_old_one(tmp_path: Path) -> None:
    path, whole = tmp_path / "run.h5", arrays()
    storage.write(path, Contents({}, whole))
    before, name = path.read_bytes(), "/mlpgpu/run/slots/m"
    form = whole[name].shape, whole[name].dtype

    def broken() -> Iterator[np.ndarray]:
        yield whole[name][:100]
        raise KeyError("a plain mistake")

    with pytest.raises(KeyError, match="a plain mistake"):
        write_pieces(path, Contents({}, whole), {name: Pieces(*form, broken())})
    with pytest.raises(FileFormatError, match=r"pieces of 100000 rows in all, got 99999"):
        write_pieces(path, Contents({}, whole), {name: Pieces(*form, in_pieces(whole[name][1:]))})
    with pytest.raises(DtypeError, match=r"/a: expected float32, float64, int64 or uint8, got float16"):
        write_pieces(path, Contents({}, whole), {"/a": Pieces((3,), np.dtype("f2"), iter(()))})
    with pytest.raises(ConfigurationError, match="as an array and as a group"):
        write_pieces(path, Contents({}, whole), {"/z": Pieces((3,), np.dtype("f4"), iter(()))})
    with pytest.raises(StorageError, match="No such file or directory"):
        write_pieces(tmp_path / "nowhere" / "run.h5", Contents({}), {name: Pieces(*form, in_pieces(whole[name]))})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["run.h5"]


@pytest.mark.skipif(sys.platform != "linux", reason="whose file systems say beforehand whether there is room")
def test_a_disk_without_room_is_told_before_anything_is_asked_for(tmp_path: Path) -> None:
    script = f"""
import resource, signal
import numpy as np
from mlpgpu.errors import StorageError
from mlpgpu.storage import Contents, Pieces, write_pieces
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
asked = []
def pieces():
    asked.append(1)
    yield np.zeros(1 << 20, np.float32)
try:
    write_pieces({str(tmp_path / "run.h5")!r}, Contents({{}}), {{"/a": Pieces((1 << 20,), np.dtype("f4"), pieces())}})
except StorageError as error:
    print(asked, error.got)
"""
    done = run([sys.executable, "-c", script])
    assert (done.code, done.output) == (0, "[] File too large\n"), done.errors
    assert list(tmp_path.iterdir()) == []


def test_ranks_write_the_file_that_one_process_writes(tmp_path: Path) -> None:
    """In small pieces, of layers split both ways and whole ones, with kept parameters and without slots."""
    script = """
    from mlpgpu.backends.cpu import tensor_program
    tensor_program.PIECE = 20
    for name, optimizer, layers in (
        ("adam", mg.Adam(0.01), (mg.Dense(8, 16, "tanh"), mg.Dense(16, 9, "gelu"), mg.Dense(9, 3))),
        ("sgd", mg.SGD(0.01), (mg.Standardize(8), mg.Dense(8, 9), mg.Dense(9, 2), mg.Dense(2, 3))),
    ):
        t = mg.Trainer(mg.Network(layers, seed=2), "softmax_cross_entropy", optimizer, backend="cpu",
                       parallel="tensor", parts=4, batch_size=16)
        t.network.adapt(x)
        t.save(f"{name}0of{n}.h5")  # before the first step
        t.step(x[:16], y[:16])
        t.keep()
        t.step(x[16:32], y[16:32])
        t.save(f"{name}2of{n}.h5")
    """
    for ranks in (1, 2, 3, 4):
        assert printed(tmp_path, ranks, script) == []
    for name in ("adam0", "adam2", "sgd0", "sgd2"):
        expected = (tmp_path / f"{name}of1.h5").read_bytes()
        assert [ranks for ranks in (2, 3, 4) if (tmp_path / f"{name}of{ranks}.h5").read_bytes() != expected] == []
        assert storage.read(tmp_path / f"{name}of4.h5").description["run"]["parts"] == 4


def test_what_keeps_rank_0_from_writing_all_of_them_are_told(tmp_path: Path) -> None:
    script = """
    t = trainer()
    fit(t)
    try:
        t.save("/nowhere/run.h5")
    except mg.errors.StorageError as error:
        print("StorageError", error.what, flush=True)
    fit(t)
    try:
        fit(t, mg.Checkpoint("/nowhere/run.h5"))
    except mg.errors.StorageError as error:
        print("StorageError", error.what, flush=True)
    class Save(mg.Callback):
        def epoch_end(self, trainer, record):
            try:
                trainer.save("/nowhere/run.h5")
            except mg.errors.StorageError:
                record["failed"] = 1.0
        columns = ("failed",)
    h = fit(t, Save())
    assert h["failed"][-3:] == [1.0] * 3
    t.save("run.h5")
    assert mg.Trainer.resume("run.h5").steps == t.steps
    """
    told = ["StorageError Checkpoint path /nowhere/run.h5"] * 2 + ["StorageError file /nowhere/run.h5"] * 2
    assert printed(tmp_path, 2, script) == told


def test_no_process_holds_the_whole_state(tmp_path: Path) -> None:
    """The benchmark at a small size: while it is made, trained, saved and read again."""
    script = ROOT / "benchmarks" / "parts.py"
    command = [sys.executable, str(script), "--width", "2048", "--ranks", "4", "--path", str(tmp_path / "parts.h5")]
    for options in ([], ["--resume"]):
        done = run([*command, *options])
        assert done.code == 0, done.errors
        shares = re.findall(r"trained, saved: [\d.]+, [\d.]+, ([\d.]+)\)", done.output)
        assert len(shares) == 4, done.output
        assert max(map(float, shares)) < 0.9, done.output
    assert (tmp_path / "parts.h5").stat().st_size > 3 * 3 * 4 * 2048**2


def test_an_open_file_is_refused_where_one_that_is_read_is(tmp_path: Path) -> None:
    """Of a file with a byte changed here and there, or cut off."""
    path = tmp_path / "run.h5"
    whole = {"/layers/dense/vars/0": np.arange(60.0).reshape(6, 10), "/z/empty": np.empty((0, 3))}
    storage.write(path, Contents({"a": [1, 2]}, whole))
    image = path.read_bytes()
    file = storage.open_file(path)
    refused = 0
    for place in range(0, len(image), 41):
        for damaged in (image[:place], image[:place] + bytes([image[place] ^ 1]) + image[place + 1 :]):
            path.write_bytes(damaged)
            are_refused = []  # HDF5 words its reasons by what happens to lie in memory
            for open_it in (storage.read, storage.open_file):
                try:
                    open_it(path)
                    are_refused.append(False)
                except FileFormatError:
                    are_refused.append(True)
            assert are_refused[0] == are_refused[1]
            refused += are_refused[0]
    assert refused > len(image) // 41
    with pytest.raises(StorageError, match="No such file"):
        storage.open_file(tmp_path / "nowhere.h5")
    path.unlink()
    with pytest.raises(StorageError, match="a readable file"):
        file.read("/layers/dense/vars/0", 59, 2_000_000)


def test_an_open_file_stays_what_it_was(tmp_path: Path) -> None:
    path, whole = tmp_path / "run.h5", arrays()
    storage.write(path, Contents({"a": [1, 2]}, whole))
    file = storage.open_file(path)
    storage.write(path, Contents({}, {}))
    assert file.description == {"a": [1, 2]}
    for name, array in whole.items():
        assert file.form(name) == (array.shape, array.dtype)
        assert file.read(name, 0, array.size).tobytes() == array.tobytes()
    np.testing.assert_array_equal(
        file.read("/layers/dense/vars/0", 501, 9), whole["/layers/dense/vars/0"].ravel()[501:510]
    )
    assert file.form("/nothing") is None
    assert {*file.contents("/z/", "/mlpgpu/").arrays} == {"/z/empty", "/z/number", "/mlpgpu/run/slots/m"}


def test_what_is_asked_of_a_resumed_run_before_it_goes_on(tmp_path: Path) -> None:
    """Its parameters by one rank alone, from the file; setting them, copies; another file on one of the ranks."""
    script = """
    t = trainer()
    fit(t, mg.EarlyStopping("loss", patience=9))
    t.save("run.h5")
    def resumed():
        return mg.Trainer.resume("run.h5")
    if me == 0:  # while the others ask for nothing
        alone = resumed()
        assert alone.network.parameters["0.weight"].shape == (8, 16)
        assert np.isfinite(alone.network.predict(x)).all()
        assert mg.load("run.h5").n_in == 8
    ends = []
    def end(t):
        fit(t, mg.EarlyStopping("loss", patience=9), epochs=5)
        ends.append(crc(t.network.flat_parameters()))
    end(resumed())
    end(copy.deepcopy(resumed()))
    asked = resumed()
    if me == 0:
        asked.network.parameters["0.weight"]
    end(asked)
    again = resumed()
    again.save("again.h5")
    end(mg.Trainer.resume("again.h5"))
    assert len({*ends}) == 1, ends
    moved = resumed()
    moved.network.parameters["2.bias"] = [1.0, 2.0, 3.0]
    end(moved)
    kept = resumed()
    kept.restore_kept()
    print(ends, crc(kept.network.flat_parameters()), flush=True)
    """
    expected = printed(tmp_path, 1, script)
    for ranks in (2, 3):
        assert printed(tmp_path, ranks, script) == expected * ranks
    differ = """
    t = trainer()
    fit(t, epochs=1)
    t.save("a.h5")
    t.step(x[:7], y[:7])
    t.save("b.h5")
    t = mg.Trainer.resume("a.h5" if me else "b.h5")
    try:
        t.step(x[:9], y[:9])
    except mg.errors.RankError as error:
        print(error, flush=True)
    """
    for line in printed(tmp_path, 2, differ):
        assert re.search("finished steps of 2 ranks|the network's parameters of 2 ranks", line), line
