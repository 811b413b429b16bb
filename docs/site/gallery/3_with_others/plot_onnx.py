"""
Export to ONNX
==============

``net.export("model.onnx")`` writes a graph that other programs run without this package. What belongs to the
network goes along: scaling of inputs and targets, the output's function, classes.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnx
import onnxruntime

import mlpgpu as mg

train, test = mg.datasets.load("digits")
folder = Path(tempfile.mkdtemp())

# %%
# A network is trained, exported, and run by onnxruntime on the same bytes.

net = mg.Network([mg.Dense(64, 128, activation="gelu"), mg.Dense(128, 10)], seed=1)
trainer = mg.Trainer(net, "softmax_cross_entropy", mg.Adam(0.003))
trainer.fit(train, epochs=15)
net.export(folder / "digits.onnx")

graph = onnx.load(folder / "digits.onnx").graph
print("nodes:", ", ".join(node.op_type for node in graph.node))
session = onnxruntime.InferenceSession(folder / "digits.onnx", providers=["CPUExecutionProvider"])
(theirs,) = session.run(None, {"input": test.x})
ours = net.predict(test)
print(f"largest difference of a probability: {abs(ours - theirs).max():.1e}")
print(f"same class in {np.mean(ours.argmax(1) == theirs.argmax(1)):.0%} of the rows")

# %%
# The same for every activation: both programs add up in float32, each in its own order, and have their own functions.

activations = ["sigmoid", "tanh", "relu", "leaky_relu", "elu", "softplus", "gelu", "silu"]
x = np.random.default_rng(0).normal(size=(1000, 64)).astype(np.float32)
differences = {}
for activation in activations:
    net = mg.Network([mg.Dense(64, 128, activation), mg.Dense(128, 128, activation), mg.Dense(128, 10)], seed=1)
    net.export(folder / f"{activation}.onnx")
    session = onnxruntime.InferenceSession(folder / f"{activation}.onnx", providers=["CPUExecutionProvider"])
    (theirs,) = session.run(None, {"input": x})
    ours = net.predict(x)
    differences[activation] = abs(ours - theirs).max(axis=1) / abs(ours).max()

figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
axes.boxplot(list(differences.values()), tick_labels=activations, whis=(0, 100))
axes.axhline(2.0**-23, color="0.6", linestyle=":", label="2⁻²³, a float32's last digit")
axes.set(xlabel="activation of the hidden layers", ylabel="largest difference in a row / largest prediction")
axes.set_ylim(None, 4.5e-7)
axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
axes.legend(loc="upper right")
plt.show()

# %%
# Each box holds the middle half of 1,000 rows, the whiskers all of them.  The two programs differ by about a last
# digit of float32: nothing of the network is lost on the way.  ReLU and its leaky form need no function that one
# program could compute otherwise than the other, so where both add up in the same order, as here, they agree in every
# bit.
