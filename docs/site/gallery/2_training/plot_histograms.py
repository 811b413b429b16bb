"""
Histograms of weights and gradients
===================================

Whether a deep network learns in all of its layers shows in its gradients before it shows in the loss. The callback
:class:`mlpgpu.Histograms` counts weights, activations and gradients where they lie, and changes no bit of the
training.
"""

import matplotlib.pyplot as plt
import numpy as np

import mlpgpu as mg

train, test = mg.datasets.load("digits")


def trained(activation):
    """Eight hidden layers of 32, with the initial weights that suit the activation."""
    init = {"relu": "he_uniform", "sigmoid": "glorot_uniform"}[activation]
    hidden = [mg.Dense(64 if layer == 0 else 32, 32, activation, init=init) for layer in range(8)]
    net = mg.Network([*hidden, mg.Dense(32, 10)], seed=2)
    counts = mg.Histograms(bins=60, every=2)
    trainer = mg.Trainer(net, "softmax_cross_entropy", mg.Momentum(0.01), batch_size=64, metrics=["accuracy"])
    trainer.fit(train, epochs=10, callbacks=[counts])
    print(f"{activation}: test accuracy {trainer.evaluate(test)['accuracy']:.3f}")
    return counts


counts = {activation: trained(activation) for activation in ("relu", "sigmoid")}

# %%
# ``counts.epochs[e][name]`` is a histogram after epoch e.  Here is how large a layer's gradient typically is, by
# layer: the square root of the mean square, computed from the counts and the middles of the bins.


def typical(histogram):
    counted, edges = histogram
    middles = (edges[1:] + edges[:-1]) / 2
    return np.sqrt(np.sum(counted * middles**2) / np.sum(counted))


figure, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
for place, epoch in enumerate(counts["relu"].epochs):
    counted, edges = counts["relu"].epochs[epoch]["0.weight"]
    axes[0].stairs(counted, edges, color=plt.cm.Blues(0.3 + 0.15 * place), label=f"epoch {epoch}")
axes[0].set(xlabel="weight of the first layer, with ReLU", ylabel="how many")
axes[0].legend()
for activation, colour in (("relu", "C0"), ("sigmoid", "C1")):
    for epoch, style in ((2, ":"), (10, "-")):
        found = counts[activation].epochs[epoch]
        sizes = [typical(found[f"{layer}.weight.gradient"]) for layer in range(9)]
        axes[1].plot(range(1, 10), sizes, style, color=colour, marker=".", label=f"{activation}, epoch {epoch}")
axes[1].set(xlabel="layer, 9 is the last", ylabel="typical gradient of a weight", yscale="log")
axes[1].legend()
for activation in ("relu", "sigmoid"):
    counted, edges = counts[activation].epochs[10]["7.activation"]
    axes[2].stairs(counted / counted.sum(), (edges - edges[0]) / (edges[-1] - edges[0]), label=activation)
axes[2].set(xlabel="activation of layer 8, from its least to its greatest", ylabel="share of the values", yscale="log")
axes[2].legend()
plt.show()

# %%
# With ReLU every layer's gradient is of about the same size.  With the sigmoid it shrinks by a constant factor from
# layer to layer towards the input, so the first layers hardly move and the network stays at the accuracy of a guess.
# The spikes on the right are its 32 units: each puts out one value, whatever the image is.
