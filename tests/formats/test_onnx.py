"""ONNX files give onnxruntime the predictions that we make."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from exported import OUTPUT_LOSS, bound, inputs, stack, trained

import mlpgpu as mg
from mlpgpu import errors
from mlpgpu.activations import ACTIVATIONS
from mlpgpu.network.formats import onnx_file

PRECISIONS = ("float32", "float64")
RUNTIME = tuple(map(int, onnxruntime.__version__.split(".")[:2]))


def session(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def assert_same(
    net: mg.Network, x: np.ndarray, path: Path, precision: str | None = None, *, logits: bool = False
) -> None:
    """onnxruntime computes our predictions, of all rows and of one."""
    net.export(path, logits=logits)
    onnx.checker.check_model(onnx.load(path), full_check=True)
    expected = net.forward(x) if logits else net.predict(x)
    for rows in (slice(None), slice(1)):
        (found,) = session(path).run(None, {"input": x[rows]})
        assert found.dtype == net.dtype
        np.testing.assert_allclose(
            found, expected[rows].reshape(len(found), -1), rtol=0.0, atol=bound(net, expected, precision)
        )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_between_standardized_columns(activation: str, precision: str, tmp_path: Path) -> None:
    if (activation, precision) == ("silu", "float64") and RUNTIME < (1, 31):
        pytest.skip("before 1.31 onnxruntime makes one operation of silu, which it has in float32 alone")
    net = trained(stack(activation), precision=precision)
    # Runtimes have the error function in float32 alone.
    of = "float32" if activation == "gelu" else precision
    assert_same(net, inputs(5, precision), tmp_path / "net.onnx", of)


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("output", OUTPUT_LOSS)
def test_every_output(output: str, precision: str, logits: bool, tmp_path: Path) -> None:
    net = trained(stack("relu", standardized=False), output, precision)
    assert net.output == output
    assert_same(net, inputs(5, precision), tmp_path / "net.onnx", logits=logits)


def test_logits_of_standardized_targets(tmp_path: Path) -> None:
    assert_same(trained(stack("relu")), inputs(5), tmp_path / "net.onnx", logits=True)


def test_dropout_is_gone(tmp_path: Path) -> None:
    trained(stack("relu")).export(tmp_path / "net.onnx")
    model = onnx.load(tmp_path / "net.onnx")
    assert {node.op_type for node in model.graph.node} == {"Sub", "Div", "Gemm", "MatMul", "Relu", "Mul", "Add"}
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 17)]


@pytest.mark.parametrize("bias", ["output", "layer", None])
def test_locally_connected_layers(bias: str | None, tmp_path: Path) -> None:
    shared = mg.LocallyConnected(9, 3, "tanh", bias=bias)
    net = trained([shared, shared, mg.LocallyConnected(5, 2, bias=bias), mg.Dense(4, 2)])
    assert_same(net, inputs(9), tmp_path / "net.onnx")


def test_layers_that_share_their_values_stand_there_once(tmp_path: Path) -> None:
    shared = mg.Dense(5, 5, "tanh")
    net = trained([shared, shared, mg.Dense(5, 2)])
    assert_same(net, inputs(5), tmp_path / "net.onnx")
    assert len(onnx.load(tmp_path / "net.onnx").graph.initializer) == 4


def test_bytes_are_taken_as_bytes(tmp_path: Path) -> None:
    train, test = mg.datasets.load("digits")
    net = mg.Network([mg.Standardize(64), mg.Dense(64, 16, "relu"), mg.Dense(16, 10)], seed=1)
    mg.Trainer(net, "softmax_cross_entropy", backend="cpu").fit(train, epochs=1, progress=False)
    x = np.asarray(test.x)
    assert x.dtype == np.uint8
    assert_same(net, x, tmp_path / "net.onnx")


def test_names_are_in_the_metadata(tmp_path: Path) -> None:
    net = mg.Network([mg.Dense(3, 2)], seed=1)
    net.output, net.classes = "softmax", ("cat", "dog")
    net.export(tmp_path / "net.onnx")
    props = {entry.key: json.loads(entry.value) for entry in onnx.load(tmp_path / "net.onnx").metadata_props}
    assert props == {"classes": ["cat", "dog"]}


def test_the_same_network_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.onnx", "b.ONNX"):
        trained(stack("gelu")).export(tmp_path / name)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.ONNX").read_bytes()


def test_what_is_refused_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(b"before")
    net = mg.Network([mg.Standardize(3), mg.Dense(3, 2)], seed=1)
    with pytest.raises(errors.ConfigurationError, match="fitted Standardize"):
        net.export(path)
    net.adapt(inputs(3))
    with monkeypatch.context() as patched, pytest.raises(errors.BackendError, match=r"mlpgpu\[onnx\]"):
        patched.setitem(sys.modules, "onnx", None)
        net.export(path)
    monkeypatch.setattr(onnx_file, "MOST_BYTES", 16)
    with pytest.raises(errors.ConfigurationError, match="at most 16 bytes"):
        net.export(path)
    with pytest.raises(errors.ConfigurationError, match=r"\.onnx or \.safetensors"):
        net.export(tmp_path / "net.tflite")
    with pytest.raises(errors.DtypeError, match="a path"):
        net.export(3)  # type: ignore[arg-type]
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
