"""The runtime on a card: every call of it once, its errors, and its manners in a shared process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mlpgpu.backends.cuda.kernels import Entry, arguments, units
from mlpgpu.backends.cuda.runtime import (
    Arena,
    Device,
    Event,
    ExtendedModule,
    Function,
    Module,
    Stream,
    Texture,
    bindings,
    capture,
    describe_machine,
    find_device,
    pack,
    pinned,
)
from mlpgpu.backends.cuda.runtime.compiler import Cubin, compile_units
from mlpgpu.errors import BackendError

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
N = 1000
SHARED_BYTES = 60_000

SOURCE = """
#include <cooperative_groups.h>
#include <stdint.h>

namespace mlpgpu {
using Texture = cudaTextureObject_t;

extern "C" {
__constant__ float line[2];
}

__device__ __forceinline__ int place() { return blockIdx.x * blockDim.x + threadIdx.x; }

__device__ void add(const float* x, const float* y, float* z, int n) {
    const int i = place();
    if (i < n) z[i] = x[i] + y[i];
}

__device__ void along(const float* x, float* z, int n) {
    const int i = place();
    if (i < n) z[i] = line[0] * x[i] + line[1];
}

__device__ void fetch(Texture x, float* z, int n) {
    const int i = place();
    if (i < n) z[i] = tex1Dfetch<float>(x, i);
}

__device__ void reverse(float* x, int n) {
    extern __shared__ float copy[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) copy[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = copy[n - 1 - i];
}

__device__ void wander(float* x, int64_t steps) {
    for (int64_t i = 0; i < steps; ++i) x[0] = x[0] * 0.5f + 1.0f;
}

__device__ void meet(int* arrived, int* seen) {
    if (threadIdx.x == 0) atomicAdd(arrived, 1);
    cooperative_groups::this_grid().sync();
    if (threadIdx.x == 0) seen[blockIdx.x] = *arrived;
}
}
"""


def entry(name: str, signature: str, threads: int = 128, shared_bytes: int = 0, cooperative: bool = False) -> Entry:
    return Entry(name, "toys.cuh", name, arguments(signature), threads, shared_bytes, cooperative, block=None)


ADD = entry("add", "const float* x, const float* y, float* z, int n")
ALONG = entry("along", "const float* x, float* z, int n")
FETCH = entry("fetch", "Texture x, float* z, int n")
REVERSE = entry("reverse", "float* x, int n", shared_bytes=SHARED_BYTES)
WANDER = entry("wander", "float* x, int64_t steps", threads=1)
MEET = entry("meet", "int* arrived, int* seen", cooperative=True)
ENTRIES = [ADD, ALONG, FETCH, REVERSE, WANDER, MEET]


@pytest.fixture(scope="module")
def cubin(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Cubin:
    folder = tmp_path_factory.mktemp("toys")
    (folder / "toys.cuh").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLPGPU_CACHE", str(folder))
        return compile_units(units(ENTRIES), device.arch, sources=folder)["toys.cuh"]


@pytest.fixture
def current(device: Device) -> Iterator[Device]:
    """The card, its context current."""
    with device:
        yield device


@pytest.fixture
def module(current: Device, cubin: Cubin) -> Iterator[Module]:
    loaded = Module(current, cubin.image)
    yield loaded
    loaded.close()


class Bench:
    """A stream, and arrays of N floats in device memory, poisoned with NaN."""

    def __init__(self, device: Device) -> None:
        self.stream, self.arena = Stream(device), Arena(device, 64 << 10)

    def array(self, values: np.ndarray | None = None) -> int:
        values = np.full(N, np.nan, np.float32) if values is None else values
        address = self.arena.take(values.nbytes)
        self.stream.upload(address, values)
        return address

    def read(self, address: int, count: int = N, dtype: type = np.float32) -> np.ndarray:
        values = np.zeros(count, dtype)
        self.stream.download(values, address)
        self.stream.synchronize()
        return values

    def launch(self, function: Function, *values: float, blocks: int = 8) -> None:
        function.launch(self.stream, (blocks,), pack(function.entry, values))


@pytest.fixture
def bench(current: Device) -> Bench:
    return Bench(current)


X, Y = np.arange(N, dtype=np.float32), np.arange(N, dtype=np.float32)[::-1] * np.float32(0.5)


# ---- memory, launches


def test_a_kernel_runs_on_what_was_uploaded(bench: Bench, module: Module) -> None:
    x, y, z = bench.array(X), bench.array(np.ascontiguousarray(Y)), bench.array()
    bench.launch(module.function(ADD), x, y, z, N)
    np.testing.assert_array_equal(bench.read(z), X + Y)


def test_copies_and_fills(bench: Bench) -> None:
    x, z = bench.array(X), bench.array()
    bench.stream.copy(z, x, X.nbytes)
    bench.stream.fill(x, X.nbytes // 2)
    np.testing.assert_array_equal(bench.read(z), X)
    np.testing.assert_array_equal(bench.read(x), np.where(np.arange(N) < N // 2, 0, X))


def test_a_copy_needs_a_contiguous_array(device: Device) -> None:
    with pytest.raises(BackendError, match="C-contiguous"), device:
        bench = Bench(device)
        bench.stream.upload(bench.array(), Y[::2])


def test_page_locked_arrays_outlive_their_name(bench: Bench, current: Device) -> None:
    host = pinned(current, (N,), np.float32)
    host[:] = X
    view = host[N // 2 :]
    del host
    z = bench.array()
    bench.stream.upload(z, view)
    np.testing.assert_array_equal(bench.read(z, view.size), X[N // 2 :])


def test_an_arena_hands_out_aligned_pieces(device: Device) -> None:
    with pytest.raises(BackendError, match="512 bytes left, got 513"), device:
        arena = Arena(device, 1536)
        first, second = arena.take(1), arena.take(512)
        assert (first % 512, second - first, arena.left_bytes) == (0, 512, 512)
        arena.take(513)


def test_out_of_memory_says_how_much_is_free(device: Device) -> None:
    asked = 2 * device.total_bytes
    with pytest.raises(BackendError, match=f"{asked:,} bytes free, got .*lower the batch size"), device:
        Arena(device, asked)
    with device:
        Arena(device, 1024).close()


@pytest.mark.alone
def test_closing_gives_memory_back(current: Device) -> None:
    Arena(current, 1024).close()
    before = current.free_bytes
    for _ in range(4):
        arena = Arena(current, 256 << 20)
        assert current.free_bytes < before
        arena.close()
        arena.close()
    assert current.free_bytes == before


def test_more_shared_memory_than_the_default(bench: Bench, module: Module) -> None:
    count = SHARED_BYTES // 4
    values = np.arange(count, dtype=np.float32)
    x = bench.arena.take(values.nbytes)
    bench.stream.upload(x, values)
    bench.launch(module.function(REVERSE), x, count, blocks=1)
    np.testing.assert_array_equal(bench.read(x, count), values[::-1])


def test_more_shared_memory_than_there_is(module: Module, current: Device) -> None:
    greedy = entry("reverse", "float* x, int n", shared_bytes=current.shared_bytes + 16)
    with pytest.raises(BackendError, match=f"at most {current.shared_bytes:,} bytes of dynamic shared memory"):
        module.function(greedy)


def test_resources_are_those_that_ptxas_tells(module: Module, cubin: Cubin) -> None:
    function = module.function(ADD)
    took = cubin.resources["add"]
    assert (function.registers, function.local_bytes) == (took.registers, took.stack_bytes)
    assert function.static_shared_bytes >= took.shared_bytes


def test_arguments_are_packed_as_c_does() -> None:
    mixed = entry("mixed", "float* x, int n, int64_t m, float a, Texture t")
    packed = pack(mixed, [None, -1, 2, 0.5, 3])
    layout = np.dtype([("x", "u8"), ("n", "i4"), ("m", "i8"), ("a", "f4"), ("t", "u8")], align=True)
    assert np.frombuffer(packed, layout).item() == (0, -1, 2, 0.5, 3)


@pytest.mark.parametrize("values", [(1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 3, 2**31), (1, 2, 3, 0.5)])
def test_arguments_that_do_not_fit(values: tuple[float, ...]) -> None:
    with pytest.raises(BackendError, match=r"arguments of add: expected \(const float\* x"):
        pack(ADD, values)


# ---- streams, events, graphs


def test_events_time_what_lies_between_them(bench: Bench, module: Module, current: Device) -> None:
    wander, x = module.function(WANDER), bench.array(X)
    bench.launch(wander, x, 10, blocks=1)
    marks = [Event(current, timing=True) for _ in range(3)]
    bench.stream.record(marks[0])
    bench.launch(wander, x, 20_000, blocks=1)
    bench.stream.record(marks[1])
    bench.launch(wander, x, 200_000, blocks=1)
    bench.stream.record(marks[2])
    marks[2].synchronize()
    short, long = marks[1].seconds_since(marks[0]), marks[2].seconds_since(marks[1])
    assert 0 < short < long < 10


def test_an_event_without_timing_has_no_time(device: Device) -> None:
    with pytest.raises(BackendError, match="cuEventElapsedTime"), device:
        stream, mark = Stream(device), Event(device)
        stream.record(mark)
        mark.synchronize()
        mark.seconds_since(mark)


def test_a_stream_waits_for_another(bench: Bench, module: Module, current: Device) -> None:
    x, z, other, done = bench.array(X), bench.array(), Stream(current), Event(current)
    bench.launch(module.function(WANDER), x, 200_000, blocks=1)
    bench.stream.copy(z, x, X.nbytes)
    bench.stream.record(done)
    other.wait(done)
    got = np.zeros(N, np.float32)
    other.download(got, z)
    other.synchronize()
    np.testing.assert_array_equal(got, np.concatenate([[2], X[1:]]))


def test_a_graph_forks_joins_and_replays(bench: Bench, module: Module, current: Device) -> None:
    add, other = module.function(ADD), Stream(current)
    x, y = bench.array(X), bench.array(np.ascontiguousarray(Y))
    z, left, right, w = (bench.array() for _ in range(4))
    forked, joined = Event(current), Event(current)
    bench.stream.synchronize()
    with capture(bench.stream, "diamond") as graph:
        bench.launch(add, x, y, z, N)
        bench.stream.record(forked)
        other.wait(forked)
        add.launch(other, (8,), pack(ADD, [z, x, left, N]))
        bench.launch(add, z, y, right, N)
        other.record(joined)
        bench.stream.wait(joined)
        bench.launch(add, left, right, w, N)
    assert graph.nodes == 4
    replay = graph.instantiate()
    graph.close()
    assert np.isnan(bench.read(w)).all()
    replay.launch(bench.stream)
    np.testing.assert_array_equal(bench.read(w), 3 * (X + Y))
    bench.stream.upload(x, 2 * X)
    replay.launch(bench.stream)
    replay.launch(bench.stream)
    np.testing.assert_array_equal(bench.read(w), 3 * (2 * X + Y))


def test_an_error_in_a_capture_leaves_the_stream_usable(bench: Bench, module: Module) -> None:
    add, x = module.function(ADD), bench.array(X)
    with pytest.raises(ZeroDivisionError), capture(bench.stream):
        bench.launch(add, x, x, x, N)
        raise ZeroDivisionError
    np.testing.assert_array_equal(bench.read(x), X)


def test_a_capture_that_is_not_joined_is_an_error(device: Device) -> None:
    with device:
        stream, other, forked = Stream(device), Stream(device), Event(device)
        address = Arena(device, 256)
    with pytest.raises(BackendError, match="UNJOINED"), device, capture(stream):
        stream.record(forked)
        other.wait(forked)
        other.fill(int(address.handle), 4)
    with device:
        stream.synchronize()


# ---- textures, constants, cooperative launches


def test_a_texture_reads_linear_memory(bench: Bench, module: Module, current: Device) -> None:
    z = bench.array()
    texture = Texture(current, bench.array(X), N)
    bench.launch(module.function(FETCH), int(texture), z, N)
    np.testing.assert_array_equal(bench.read(z), X)
    texture.close()


def test_a_texture_has_a_limit(current: Device, bench: Bench) -> None:
    for texels in (0, current.most_texels + 1):
        with pytest.raises(BackendError, match=f"1 to {current.most_texels:,} texels"):
            Texture(current, bench.array(), texels)


def test_constants_change_between_launches(bench: Bench, module: Module) -> None:
    along, x = module.function(ALONG), bench.array(X)
    address, nbytes = module.constant("line")
    assert nbytes == 8
    outputs = []
    for line in ([2, 1], [3, -1]):
        outputs.append(bench.array())
        bench.stream.upload(address, np.array(line, np.float32))
        bench.launch(along, x, outputs[-1], N)
    np.testing.assert_array_equal(bench.read(outputs[0]), 2 * X + 1)
    np.testing.assert_array_equal(bench.read(outputs[1]), 3 * X - 1)


def test_blocks_that_wait_for_each_other(bench: Bench, cubin: Cubin, current: Device) -> None:
    module = ExtendedModule(current, cubin.image)
    meet, blocks = module.function(MEET), current.multiprocessors
    counter, seen = bench.array(np.zeros(1, np.int32)), bench.array(np.zeros(blocks, np.int32))
    bench.launch(meet, counter, seen, blocks=blocks)
    np.testing.assert_array_equal(bench.read(seen, blocks, np.int32), blocks)
    assert meet.registers > 0
    assert module.constant("line")[1] == 8


def test_more_blocks_that_wait_than_fit(device: Device, cubin: Cubin) -> None:
    with pytest.raises(BackendError, match="COOPERATIVE_LAUNCH_TOO_LARGE"), device:
        bench, meet = Bench(device), ExtendedModule(device, cubin.image).function(MEET)
        bench.launch(meet, bench.array(), bench.array(), blocks=100_000)
    with device:
        device.synchronize()


def test_a_cooperative_kernel_is_not_launched_plainly(module: Module) -> None:
    with pytest.raises(BackendError, match="ExtendedModule"):
        module.function(MEET)


# ---- errors, threads, neighbours


@pytest.mark.parametrize("load", [Module, ExtendedModule])
def test_a_module_must_be_a_cubin(device: Device, load: Callable[[Device, bytes], Module]) -> None:
    with pytest.raises(BackendError, match=f"a cubin for {device.arch}"), device:
        load(device, b"no cubin")


def test_a_card_that_is_not_there(device: Device) -> None:
    with pytest.raises(BackendError, match="GPU number: expected a number from 0 to"):
        find_device(1000)
    assert find_device(device.index) is device


def test_the_machine_is_described(device: Device) -> None:
    assert device.name in describe_machine()[f"GPU {device.index}"]


def test_another_thread_may_use_and_drop_what_the_first_made(device: Device, cubin: Cubin) -> None:
    with device:
        kept = [(Bench(device), Module(device, cubin.image), Event(device)) for _ in range(2)]
    results = []

    def work() -> None:
        bench, module, event = kept.pop()
        with device:
            x, z = bench.array(X), bench.array()
            bench.launch(module.function(ADD), x, x, z, N)
            bench.stream.record(event)
            event.synchronize()
            results.append(bench.read(z))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept == []
    np.testing.assert_array_equal(results, [2 * X, 2 * X])


def test_the_context_that_was_current_is_so_again(device: Device) -> None:
    cu = bindings.cu
    _, before = cu.cuCtxGetCurrent()
    with device:
        _, inside = cu.cuCtxGetCurrent()
        with device:
            pass
        assert int(cu.cuCtxGetCurrent()[1]) == int(inside) != 0
    assert int(cu.cuCtxGetCurrent()[1]) == int(before)
    # As a library on the runtime API leaves it: the primary context current, on no stack of PyCUDA's.
    cu.cuCtxPushCurrent(inside)
    with pytest.raises(ZeroDivisionError), device:
        raise ZeroDivisionError
    assert int(cu.cuCtxGetCurrent()[1]) == int(inside)
    cu.cuCtxPopCurrent()


def test_beside_pytorch(device: Device, cubin: Cubin) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    theirs = torch.arange(N, dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()
    with device:
        bench, module = Bench(device), Module(device, cubin.image)
        z = bench.array()
        bench.launch(module.function(ADD), theirs.data_ptr(), theirs.data_ptr(), z, N)
        np.testing.assert_array_equal(bench.read(z), 2 * X)
        inside = (theirs * 3).cpu().numpy()
    np.testing.assert_array_equal(inside, 3 * X)
    np.testing.assert_allclose((theirs @ theirs).item(), X.astype(float) @ X, rtol=N * np.finfo(np.float32).eps)


PREAMBLE = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from mlpgpu.backends.cuda.runtime import Arena, Event, Module, Stream, find_device, pack, pinned
from mlpgpu.backends.cuda.kernels import Entry, arguments
from mlpgpu.errors import BackendError
device = find_device(0)
image = open(sys.argv[2], "rb").read()
with device:
    stream, event, arena, module = Stream(device), Event(device), Arena(device, 1024), Module(device, image)
    host = pinned(device, (4,), np.float32)
    wander = module.function(Entry("wander", "toys.cuh", "wander", arguments("float* x, int64_t steps"), 1, block=None))
    wander.launch(stream, (1,), pack(wander.entry, [arena.take(4), 5]))
    stream.synchronize()
"""
FAULT = """
for attempt in range(2):
    try:
        with device:
            wander.launch(stream, (1,), pack(wander.entry, [None, 5]))
            stream.synchronize()
    except BackendError as error:
        print(error)
"""


def script(text: str, cubin: Cubin, folder: Path) -> subprocess.CompletedProcess[str]:
    image = folder / "toys.cubin"
    image.write_bytes(cubin.image)
    command = [sys.executable, "-c", PREAMBLE + text, str(ROOT), str(image)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_process_ends_quietly_with_everything_alive(cubin: Cubin, tmp_path: Path) -> None:
    done = script("print('done')", cubin, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_a_fault_names_its_launch_and_does_not_abort(cubin: Cubin, tmp_path: Path) -> None:
    done = script(FAULT, cubin, tmp_path)
    first, second = done.stdout.splitlines()
    for said in (first, second):
        assert "CUDA_ERROR_ILLEGAL_ADDRESS after launching wander" in said
        assert "GPU work needs a new process" in said
    assert (done.returncode, done.stderr) == (0, "")
