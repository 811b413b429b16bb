"""ONNX, written: a graph of opset 17 that computes what ``Network.predict`` does.

The graph has an input ``input`` (rows, n_in) and an output ``output`` (rows, n_out), of any number of rows.  Inputs are
uint8 where the network was trained on bytes, else of the network's precision, in which it also computes.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from ...activations import LEAKY_SLOPE
from ...errors import ConfigurationError
from ...layers import input_width
from ...version import __version__
from ..saved import SavedNetwork
from .limits import missing_package
from .steps import Activation, Dropout, Linear, Local, Output, Rescale, Standardize, Step, steps_of

OPSET = 17
IR_VERSION = 8  # that of onnx 1.12, which brought the opset
MOST_BYTES = (1 << 31) - (1 << 20)  # of a protocol buffer, less room for what is beside the numbers

# Where ONNX has one operator for it, with its attributes.
OPERATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "sigmoid": ("Sigmoid", {}),
    "tanh": ("Tanh", {}),
    "relu": ("Relu", {}),
    "leaky_relu": ("LeakyRelu", {"alpha": LEAKY_SLOPE}),
    "elu": ("Elu", {"alpha": 1.0}),
    "softplus": ("Softplus", {}),
    "softmax": ("Softmax", {"axis": 1}),
    "exp": ("Exp", {}),
}


def write_onnx(network: SavedNetwork) -> bytes:
    """The bytes of an ONNX file.

    Raises:
        BackendError: the package onnx is missing.
        ConfigurationError: the network has more than the 2 GiB that a protocol buffer holds.
    """
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError as error:
        raise missing_package("export to ONNX", "onnx", error) from error

    if network.parameters.nbytes > MOST_BYTES:
        got, hint = f"{network.parameters.nbytes} bytes", "safetensors files hold any size"
        raise ConfigurationError("parameters for ONNX", expected=f"at most {MOST_BYTES} bytes", got=got, hint=hint)
    graph = _Graph(network.named(), network.parameters.dtype)
    for step in steps_of(network):
        graph.add(step)
    nodes = [onnx.helper.make_node(op, inputs, [out], **attributes) for op, inputs, out, attributes in graph.nodes]
    nodes[-1].output[0] = "output"
    scalar = onnx.helper.np_dtype_to_tensor_dtype(network.parameters.dtype)
    taken = onnx.TensorProto.UINT8 if network.remembered.scale is not None else scalar
    n_in, width = input_width(network.layers), input_width(network.layers)
    for layer in network.layers:
        width = layer.output_width(width)
    made = onnx.helper.make_graph(
        nodes,
        "mlpgpu",
        [onnx.helper.make_tensor_value_info("input", taken, ["rows", n_in])],
        [onnx.helper.make_tensor_value_info("output", scalar, ["rows", width])],
        [numpy_helper.from_array(values, name) for name, values in graph.values.items()],
    )
    opset = onnx.helper.make_opsetid("", OPSET)
    about = {"producer_name": "mlpgpu", "producer_version": __version__, "ir_version": IR_VERSION}
    model = onnx.helper.make_model(made, opset_imports=[opset], **about)
    names = {"classes": network.remembered.classes, "columns": network.remembered.columns}
    onnx.helper.set_model_props(model, {name: json.dumps(found) for name, found in names.items() if found is not None})
    return model.SerializeToString(deterministic=True)


class _Graph:
    """Nodes and values, made step by step.

    Attributes:
        nodes: (operator, inputs, output, attributes).
        values: by name; those that several nodes share stand there once.
        last: the name of what the last node gave.
    """

    def __init__(self, named: dict[str, np.ndarray], dtype: np.dtype) -> None:
        self.nodes: list[tuple[str, list[str], str, dict[str, Any]]] = []
        self.values: dict[str, np.ndarray] = {}
        self.last = "input"
        self._named, self._dtype = named, dtype

    def add(self, step: Step) -> None:
        x = self.last
        if isinstance(step, Rescale):
            of_dtype = {"float32": 1, "float64": 11}[self._dtype.name]  # TensorProto.FLOAT, DOUBLE
            self._node("Mul", self._node("Cast", x, to=of_dtype), self._value("input_scale", step.factor))
        elif isinstance(step, Standardize):
            kind = "target" if step.is_inverse else "input"
            mean = self._value(f"{kind}_mean", self._named[f"{step.place}.mean"])
            scale = self._value(f"{kind}_deviation", self._named[f"{step.place}.scale"])
            if step.is_inverse:
                self._node("Add", self._node("Mul", x, scale), mean)
            else:
                self._node("Div", self._node("Sub", x, mean), scale)
        elif isinstance(step, Local):
            self._local(step)
        elif isinstance(step, Linear):
            names = [f"{step.place}.{name}" for name in step.values]
            values = [self._value(name, self._named[name]) for name in names]
            self._node("Gemm" if step.has_bias else "MatMul", x, *values)
        elif isinstance(step, (Activation, Output)):
            self._function(step.name)
        else:
            assert isinstance(step, Dropout)  # in use it changes nothing

    def _local(self, step: Local) -> None:
        """Each output's window of inputs, (rows, n, window), times its weights (n, window), summed over the window."""
        weights = self._named[f"{step.place}.weight"]
        window, n = len(weights), step.n_out  # one layer at several places has other columns at each
        windows = self._value(f"{step.place}.windows_{n}", np.add.outer(np.arange(n), np.arange(window)))
        weight = self._value(f"{step.place}.weight_{n}", weights[:, :n].T)
        seen = self._node("Gather", self.last, windows, axis=1)
        product = self._node("Mul", seen, weight)
        self._node("ReduceSum", product, self._value("window_axis", np.array([2])), keepdims=0)
        if step.has_bias:
            self._node("Add", self.last, self._value(f"{step.place}.bias_{n}", self._named[f"{step.place}.bias"][:n]))

    def _function(self, name: str) -> None:
        z = self.last
        if name == "gelu":
            if self._dtype == np.float64:  # runtimes have erf in float32 alone
                halves = self._node("Cast", self._node("Mul", z, self._value("sqrt_half", math.sqrt(0.5))), to=1)
                erf = self._node("Cast", self._node("Erf", halves), to=11)
            else:
                erf = self._node("Erf", self._node("Mul", z, self._value("sqrt_half", math.sqrt(0.5))))
            share = self._node("Mul", self._node("Add", erf, self._value("one", 1.0)), self._value("half", 0.5))
            self._node("Mul", z, share)
        elif name == "silu":
            self._node("Mul", z, self._node("Sigmoid", z))
        elif name == "leaky_relu" and self._dtype == np.float64:  # attributes are float32
            self._node("Max", z, self._node("Mul", z, self._value("slope", LEAKY_SLOPE)))
        elif name == "elu" and self._dtype == np.float64:  # which runtimes have in float32 alone
            zero, one = self._value("zero", 0.0), self._value("one", 1.0)
            below = self._node("Sub", self._node("Exp", self._node("Min", z, zero)), one)
            self._node("Add", self._node("Max", z, zero), below)
        elif name == "softplus" and self._dtype == np.float64:  # likewise
            zero, one = self._value("zero", 0.0), self._value("one", 1.0)
            power = self._node("Exp", self._node("Neg", self._node("Abs", z)))
            self._node("Add", self._node("Max", z, zero), self._node("Log", self._node("Add", power, one)))
        else:
            operator, attributes = OPERATORS[name]
            self._node(operator, z, **attributes)

    def _node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Add a node; returns the name of what it gives."""
        self.last = f"t{len(self.nodes)}"
        self.nodes.append((operator, list(inputs), self.last, attributes))
        return self.last

    def _value(self, name: str, values: np.ndarray | float) -> str:
        """Add a value, numbers in the network's precision and places as int64; returns its name."""
        array = np.asarray(values)
        self.values[name] = np.asarray(array, np.int64 if array.dtype.kind == "i" else self._dtype, order="C")
        return name
