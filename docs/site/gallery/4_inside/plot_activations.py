"""
The activations, and what they do to a signal
=============================================

Nine functions, from the table that both backends are held to. How weights begin decides whether a signal keeps its
size through many layers; each function has initial weights that suit it.
"""

import matplotlib.pyplot as plt
import numpy as np

import mlpgpu as mg
from mlpgpu.activations import ACTIVATIONS

# %%
# A function is a network without weights of interest: one unit with weight 1 and bias 0.

z = np.linspace(-4, 4, 401, dtype=np.float32)[:, None]
curves = {}
for name in ACTIVATIONS:
    net = mg.Network([mg.Dense(1, 1, name)], seed=0)
    net.parameters = {"0.weight": [[1.0]], "0.bias": [0.0]}
    curves[name] = net.forward(z)[:, 0]
    print(f"{name:10} f(z) = {ACTIVATIONS[name].formula}")

# %%
# Thirty layers of 128, and the size of the signal behind every one of them: with initial weights that suit the
# function, and with those that a layer has if nothing is said, which suit networks of few layers.

x = np.random.default_rng(0).normal(size=(500, 128)).astype(np.float32)


def sizes(activation, init):
    """The root mean square of a layer's outputs, layer by layer."""
    found, signal = [], x
    for layer in range(30):
        net = mg.Network([mg.Dense(128, 128, activation, init=init)], seed=layer)
        signal = net.forward(signal)
        found.append(np.sqrt(np.mean(signal**2)))
    return found


figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
for name, curve in curves.items():
    left.plot(z, curve, label=name)
left.set(xlabel="z", ylabel="f(z)", ylim=(-1.5, 4))
left.legend(fontsize=8)
for place, name in enumerate(("relu", "tanh", "sigmoid")):
    suited = ACTIVATIONS[name].initializer
    right.plot(range(1, 31), sizes(name, suited), color=f"C{place}", label=f"{name}, {suited}")
    right.plot(range(1, 31), sizes(name, None), color=f"C{place}", ls=":", label=f"{name}, default")
right.set(xlabel="layer", ylabel="root mean square of its outputs", yscale="log", ylim=(0.02, 20))
right.legend(fontsize=8, ncols=2)
plt.show()

# %%
# With initial weights that suit it (solid) ReLU's signal keeps its size through thirty layers; by default (dotted) it
# shrinks in the first layers, until only the biases are left of it.  The sigmoid's outputs cannot fade, but that is
# no help: they are all about ½, whatever the input was.
