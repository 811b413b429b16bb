"""What predicts in benchmarks/predict.py: mlpgpu, scikit-learn, PyTorch, ONNX Runtime and JAX, each in several forms.

A library is a function of a task that yields names of forms, and for each a function that compiles it and returns what
is timed: a call without arguments.  "To the host" it reads the inputs, an ordinary NumPy array, and returns the
probabilities in ordinary memory that later calls do not write to.  "On the card" inputs and labels lie there already,
and it returns the mean loss and the accuracy.  All have the same parameters.  Bytes go to the card as bytes; that a
byte stands for 1/255 is in the first weights of all but mlpgpu, which costs them nothing.
"""

from __future__ import annotations

import importlib.util
import os
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np

import mlpgpu as mg

BASE_ROWS = 1000  # different rows; larger inputs repeat them in a drawn order
BYTE = 1.0 / 255.0
PIECE_BYTES, SLOTS = 8 << 20, 3  # of inputs that go to the card in pieces, while others are computed
MOST_COMPILING = 4
COPIED_BY_NUMPY = 1 << 20  # bytes up to which one thread copies faster than PyTorch's threads start

Run = Callable[[], np.ndarray]
Forms = Iterator[tuple[str, Callable[[], Run]]]


@dataclass(frozen=True)
class Network:
    """Dense layers, a softmax after the last."""

    widths: tuple[int, ...]
    activation: str = "relu"

    @property
    def name(self) -> str:
        joined = "-".join(map(str, self.widths))
        return joined if self.activation == "relu" else f"{joined} {self.activation}"

    @property
    def layers(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Weights (n_in, n_out) and biases (n_out,), float32."""
        rng = np.random.default_rng(self.widths)
        return [
            (
                rng.standard_normal((n_in, n_out), dtype=np.float32) * np.float32(np.sqrt(2.0 / n_in)),
                rng.standard_normal(n_out, dtype=np.float32) * np.float32(0.1),
            )
            for n_in, n_out in pairwise(self.widths)
        ]


@dataclass(frozen=True)
class Task:
    """What is predicted, and where.

    Attributes:
        dtype: of the inputs, ``"float32"`` or ``"uint8"``.
        place: ``"host"`` from host to host, ``"card"`` of data on the card.
        threads: what a peer on the CPU may use.
    """

    network: Network
    dtype: str
    rows: int
    place: str
    backend: str
    threads: int

    @property
    def base(self) -> np.ndarray:
        """The rows that inputs consist of, (BASE_ROWS, n_in)."""
        rng = np.random.default_rng(1)
        shape = BASE_ROWS, self.network.widths[0]
        return rng.integers(256, size=shape, dtype=np.uint8) if self.dtype == "uint8" else rng.random(shape, "float32")

    @property
    def index(self) -> np.ndarray:
        """Which of the base's rows each row is, (rows,)."""
        if self.rows <= BASE_ROWS:
            return np.arange(self.rows)
        return np.random.default_rng(2).integers(BASE_ROWS, size=self.rows)

    @cached_property
    def x(self) -> np.ndarray:
        """Inputs (rows, n_in)."""
        return self.base[self.index]

    @property
    def base_labels(self) -> np.ndarray:
        return np.random.default_rng(3).integers(self.network.widths[-1], size=BASE_ROWS)

    @property
    def labels(self) -> np.ndarray:
        """(rows,), int64."""
        return self.base_labels[self.index]

    @property
    def layers(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The network's, for inputs as numbers: a byte's meaning is in the first weights."""
        (weight, bias), *others = self.network.layers
        return [(weight * np.float32(BYTE) if self.dtype == "uint8" else weight, bias), *others]


# --- mlpgpu ---


def mlpgpu(task: Task) -> Forms:
    """``Network.predict``, and a predictor where there is one; ``Trainer.evaluate`` on the card."""
    *hidden, last = pairwise(task.network.widths)
    layers = [mg.Dense(*widths, activation=task.network.activation) for widths in hidden]  # type: ignore[arg-type]
    net = mg.Network([*layers, mg.Dense(*last)], seed=0)
    for place, (weight, bias) in enumerate(task.network.layers):
        net.parameters[f"{place}.weight"], net.parameters[f"{place}.bias"] = weight, bias
    trainer = mg.Trainer(net, "softmax_cross_entropy", mg.SGD(0.1), metrics=["accuracy"], backend=task.backend)
    if task.place == "card":
        data = mg.Dataset(task.x, task.labels)

        def evaluate() -> np.ndarray:
            found = trainer.evaluate(data)
            return np.array([found["loss"], found["accuracy"]])

        yield "evaluate", lambda: evaluate
        return
    yield "predict", lambda: lambda: net.predict(task.x, backend=task.backend)
    if hasattr(net, "predictor"):

        def predictor() -> Run:
            run = net.predictor(backend=task.backend)
            return lambda: run(task.x)

        yield "predictor", predictor


# --- scikit-learn ---


def scikit_learn(task: Task) -> Forms:
    """``predict_proba``, with and without its checks; also the method that it calls, which is not public."""
    import sklearn
    from sklearn.neural_network import MLPClassifier

    layers, names = task.layers, {"sigmoid": "logistic"}
    model = MLPClassifier(
        task.network.widths[1:-1], activation=names.get(task.network.activation, task.network.activation)
    )
    model.coefs_, model.intercepts_ = ([layer[part] for layer in layers] for part in range(2))
    model.n_layers_, model.n_outputs_, model.out_activation_ = len(layers) + 1, task.network.widths[-1], "softmax"
    model.n_features_in_, model.classes_ = task.network.widths[0], np.arange(task.network.widths[-1])

    def unchecked() -> np.ndarray:
        with sklearn.config_context(assume_finite=True, skip_parameter_validation=True):
            return model.predict_proba(task.x)

    def private() -> np.ndarray:
        x = task.x if task.dtype == "float32" else task.x.astype(np.float32)
        return model._forward_pass_fast(x, check_input=False)

    yield "predict_proba", lambda: lambda: model.predict_proba(task.x)
    yield "predict_proba, assume_finite", lambda: unchecked
    yield "its private method, no checks", lambda: private


# --- PyTorch ---


def pytorch(task: Task) -> Forms:
    import torch

    torch.set_grad_enabled(False)
    if task.backend == "cpu":
        torch.set_num_threads(task.threads)
    device = torch.device(task.backend)
    layers = [tuple(torch.from_numpy(each).to(device) for each in layer) for layer in task.layers]
    activation = getattr(torch, task.network.activation)

    def logits(x: Any) -> Any:
        h = x.float()
        for place, (weight, bias) in enumerate(layers):
            h = torch.addmm(bias, h, weight)
            h = activation(h) if place < len(layers) - 1 else h
        return h

    def probabilities(x: Any) -> Any:
        return torch.softmax(logits(x), 1)

    def compiled(function: Any, **options: Any) -> Any:
        # Dynamo keeps what it compiled by the function's code, of which it compiles a few cases only: each has a copy.
        copied = types.FunctionType(function.__code__.replace(), globals(), closure=function.__closure__)
        return torch.compile(copied, dynamic=False, fullgraph=True, options=options or None)

    if task.backend == "cuda":
        run = _torch_card if task.place == "card" else _torch_staged
        yield from run(task, logits, probabilities, compiled)
        return

    def on_host(function: Any) -> Run:
        def run() -> np.ndarray:
            with torch.inference_mode():
                return function(torch.from_numpy(task.x)).numpy()

        return run

    def in_place(x: Any) -> Any:
        h = x.float()
        for place, (weight, bias) in enumerate(layers):
            h = torch.addmm(bias, h, weight)
            h = getattr(h, f"{task.network.activation}_")() if place < len(layers) - 1 else h
        return torch.softmax(h, 1)

    def traced() -> Run:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that TorchScript will go
            modules: list[Any] = []
            for weight, bias in layers:
                linear = torch.nn.Linear(*weight.shape)
                linear.weight.copy_(weight.T)
                linear.bias.copy_(bias)
                modules += [linear, {"relu": torch.nn.ReLU, "tanh": torch.nn.Tanh}.get(
                    task.network.activation, torch.nn.Sigmoid)()]  # fmt: skip
            model = torch.nn.Sequential(*modules[:-1], torch.nn.Softmax(dim=1)).eval()
            sample = torch.from_numpy(task.x).float()
            script = torch.jit.optimize_for_inference(torch.jit.trace(model, sample))
        return on_host(lambda x: script(x.float()))

    yield "eager", lambda: on_host(in_place)
    yield "traced, optimized", traced
    yield "compiled", lambda: on_host(compiled(probabilities, freezing=True))


def _captured(work: Callable[[], Any]) -> Callable[[], None]:
    """What replays a CUDA graph of ``work``, which is run before to warm up."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()

    def replay(work: Callable[[], Any] = work) -> None:
        """Holds ``work`` and with it the arrays of the graph, whose memory would be given to others."""
        graph.replay()

    return replay


def _torch_staged(task: Task, logits: Any, probabilities: Any, compiled: Any) -> Forms:
    """From host to host by way of the card."""
    import torch

    def pageable(function: Any) -> Run:
        def run() -> np.ndarray:
            with torch.inference_mode():
                return function(torch.from_numpy(task.x).cuda()).cpu().numpy()

        return run

    def fill(locked: Any, locked_array: np.ndarray, x: np.ndarray) -> None:
        if x.nbytes <= COPIED_BY_NUMPY:
            np.copyto(locked_array, x)
        else:
            locked.copy_(torch.from_numpy(x))

    n_out = task.network.widths[-1]
    kind = getattr(torch, task.dtype)

    def staged(function: Any) -> Run:
        """One graph of the copy to the card, the network and the copy back; both copies are of page-locked memory."""
        given, taken = torch.empty(task.x.shape, dtype=kind).pin_memory(), torch.empty(task.rows, n_out).pin_memory()
        on_card = torch.empty(task.x.shape, dtype=kind, device="cuda")
        given_array, taken_array = given.numpy(), taken.numpy()

        def work() -> None:
            on_card.copy_(given, non_blocking=True)
            taken.copy_(function(on_card), non_blocking=True)

        replay, stream = _captured(work), torch.cuda.current_stream()

        def run() -> np.ndarray:
            fill(given, given_array, task.x)
            replay()
            stream.synchronize()
            return taken_array.copy()

        return run

    def pieces(function: Any) -> Run:
        """Piece after piece: while one is copied to page-locked memory, others go up, are computed and come back."""
        size = max(1, PIECE_BYTES // task.x[:1].nbytes)
        taken = torch.empty(task.rows, n_out).pin_memory()
        slots = []
        for _ in range(SLOTS):
            given = torch.empty((size, task.x.shape[1]), dtype=kind).pin_memory()
            on_card = torch.empty_like(given, device="cuda")
            made: dict[str, Any] = {}

            def work(given: Any = given, on_card: Any = on_card, made: dict[str, Any] = made) -> None:
                on_card.copy_(given, non_blocking=True)
                made["out"] = function(on_card)

            slots.append((given, torch.cuda.Stream(), _captured(work), made))

        def run() -> np.ndarray:
            for number, start in enumerate(range(0, task.rows, size)):
                given, stream, replay, made = slots[number % SLOTS]
                end = min(start + size, task.rows)
                stream.synchronize()
                piece = given[: end - start]
                fill(piece, piece.numpy(), task.x[start:end])
                with torch.cuda.stream(stream):
                    replay()
                    taken[start:end].copy_(made["out"][: end - start], non_blocking=True)
            for _, stream, _, _ in slots:
                stream.synchronize()
            return taken.clone().numpy()

        return run

    fast = compiled(probabilities)  # for each shape when it is called first
    yield "eager", lambda: pageable(probabilities)
    yield "compiled", lambda: pageable(fast)
    yield "graph", lambda: staged(probabilities)
    yield "compiled graph", lambda: staged(fast)
    if task.x.nbytes > 2 * PIECE_BYTES:
        yield "graphs of pieces", lambda: pieces(probabilities)
        yield "compiled graphs of pieces", lambda: pieces(fast)


def _torch_card(task: Task, logits: Any, probabilities: Any, compiled: Any) -> Forms:
    """Loss and accuracy of data on the card."""
    import torch

    x, labels = torch.from_numpy(task.x).cuda(), torch.from_numpy(task.labels).cuda()

    def evaluate(x: Any) -> Any:
        z = logits(x)
        loss = torch.nn.functional.cross_entropy(z, labels)
        return torch.stack([loss, (z.argmax(1) == labels).float().mean()])

    def plain(function: Any) -> Run:
        def run() -> np.ndarray:
            with torch.inference_mode():
                return function(x).cpu().numpy()

        return run

    def captured(function: Any) -> Run:
        taken = torch.empty(2).pin_memory()
        replay = _captured(lambda: taken.copy_(function(x), non_blocking=True))
        stream, taken_array = torch.cuda.current_stream(), taken.numpy()

        def run() -> np.ndarray:
            replay()
            stream.synchronize()
            return taken_array.copy()

        return run

    yield "eager", lambda: plain(evaluate)
    yield "graph", lambda: captured(evaluate)
    yield "compiled graph", lambda: captured(compiled(evaluate))


# --- ONNX Runtime ---


def onnx_runtime(task: Task) -> Forms:
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    if task.place == "card":
        return
    kinds = {"float32": TensorProto.FLOAT, "uint8": TensorProto.UINT8}
    operations, names = {"relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid"}, iter(map("v{}".format, range(1000)))
    nodes, constants, current = [], [], "x"

    def add(operation: str, *others: str, output: str = "", **attributes: Any) -> str:
        made = output or next(names)
        nodes.append(helper.make_node(operation, [current, *others], [made], **attributes))
        return made

    if task.dtype == "uint8":
        current = add("Cast", to=TensorProto.FLOAT)
    for place, (weight, bias) in enumerate(task.layers):
        constants += [numpy_helper.from_array(weight, f"w{place}"), numpy_helper.from_array(bias, f"b{place}")]
        current = add("Gemm", f"w{place}", f"b{place}")
        if place < len(task.layers) - 1:
            current = add(operations[task.network.activation])
    add("Softmax", output="p", axis=1)
    inputs = [helper.make_tensor_value_info("x", kinds[task.dtype], ["rows", task.network.widths[0]])]
    outputs = [helper.make_tensor_value_info("p", TensorProto.FLOAT, ["rows", task.network.widths[-1]])]
    graph = helper.make_graph(nodes, "network", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    provider = "CUDAExecutionProvider" if task.backend == "cuda" else "CPUExecutionProvider"
    if provider not in onnxruntime.get_available_providers():
        raise RuntimeError(f"this build of ONNX Runtime has no {provider}")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = task.threads if task.backend == "cpu" else 0
    session = onnxruntime.InferenceSession(model, options, providers=[provider])

    def bound() -> Run:
        """Inputs are bound in each call; what comes out goes to a new array, which ONNX Runtime writes to itself."""
        binding, shape = session.io_binding(), (task.rows, task.network.widths[-1])

        def run() -> np.ndarray:
            found = np.empty(shape, np.float32)
            binding.bind_cpu_input("x", task.x)
            binding.bind_output("p", "cpu", 0, np.float32, shape, found.ctypes.data)
            session.run_with_iobinding(binding)
            return found

        return run

    yield "run", lambda: lambda: session.run(["p"], {"x": task.x})[0]
    yield "bound", bound


# --- JAX ---


def jax(task: Task) -> Forms:
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_platforms", task.backend)
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # which makes a call on the CPU shorter
    layers = [(jnp.asarray(weight), jnp.asarray(bias)) for weight, bias in task.layers]
    activation = {"relu": jax.nn.relu, "tanh": jnp.tanh, "sigmoid": jax.nn.sigmoid}[task.network.activation]
    presets = jax.lax.DotAlgorithmPreset

    def logits(x: Any, precision: Any) -> Any:
        h = x.astype("float32")
        for place, (weight, bias) in enumerate(layers):
            h = jnp.dot(h, weight, precision=precision) + bias
            h = activation(h) if place < len(layers) - 1 else h
        return h

    def probabilities(x: Any, precision: Any) -> Any:
        return jax.nn.softmax(logits(x, precision))

    def called(function: Any, *arguments: Any) -> Run:
        return lambda: np.asarray(function(*arguments))

    # On a card float32 products are in tf32 unless a precision says otherwise.
    ways: dict[str, Any] = {"jit": "highest"}
    if task.backend == "cuda":
        ways |= {"bf16x6": presets.BF16_BF16_F32_X6, "tf32x3": presets.TF32_TF32_F32_X3}
    if task.place == "card":
        x, labels = jnp.asarray(task.x), jnp.asarray(task.labels, "int32")

        def evaluate(x: Any, labels: Any, precision: Any) -> Any:
            z = logits(x, precision)
            of_label = jnp.sum(z * jax.nn.one_hot(labels, z.shape[1]), axis=1)
            loss = jnp.mean(jax.nn.logsumexp(z, axis=1) - of_label)
            return jnp.stack([loss, jnp.mean((jnp.argmax(z, axis=1) == labels).astype("float32"))])

        for name, way in ways.items():
            yield name, partial(called, jax.jit(partial(evaluate, precision=way)), x, labels)
        return
    for name, way in ways.items():
        yield name, partial(called, jax.jit(partial(probabilities, precision=way)), task.x)
    if task.backend == "cuda":
        donated = jax.jit(partial(probabilities, precision="highest"), donate_argnums=0)
        on_card = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        locked = on_card.with_memory_kind("pinned_host")
        yield "donated", lambda: lambda: np.asarray(donated(jax.device_put(task.x)))

        def by_way_of_locked() -> np.ndarray:
            given = jax.device_put(jax.device_put(task.x, locked), on_card)
            return np.asarray(jax.device_put(donated(given), locked))

        yield "page-locked, donated", lambda: by_way_of_locked


# --- which there are ---


@dataclass(frozen=True)
class Library:
    """A library: its forms, the modules and backends that it needs."""

    forms: Callable[[Task], Forms]
    modules: Sequence[str]
    backends: Sequence[str] = ("cpu", "cuda")

    @property
    def missing(self) -> list[str]:
        return [name for name in self.modules if importlib.util.find_spec(name) is None]


OURS = "mlpgpu"
LIBRARIES = {
    OURS: Library(mlpgpu, ()),
    "scikit-learn": Library(scikit_learn, ("sklearn",), backends=("cpu",)),
    "PyTorch": Library(pytorch, ("torch",)),
    "ONNX Runtime": Library(onnx_runtime, ("onnx", "onnxruntime")),
    "JAX": Library(jax, ("jax",)),
}


def environment(backend: str, threads: int) -> dict[str, str]:
    """What the environment of a peer's process says of threads and memory, before anything is imported there."""
    found = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OMP_NUM_THREADS": str(threads)}
    found["TORCHINDUCTOR_COMPILE_THREADS"] = str(min(threads, MOST_COMPILING))  # of several processes at once
    if backend == "cpu":
        found |= {"OPENBLAS_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
        if threads == 1:
            flags = os.environ.get("XLA_FLAGS", "")
            found["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
    return found
