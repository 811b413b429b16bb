"""
MNIST, and what the network gets wrong
======================================

Images of 28 by 28 pixels. They stay bytes in memory, and each batch is scaled as it is read. Of the 60,000 to train
on this page takes a sixth, to be done in seconds; on all of them the same settings reach 98 %. The files are looked
for in the folder that ``$MLPGPU_DATA`` names; without it the page takes the bundled digits.
"""

import os
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import mlpgpu as mg

folder = os.environ.get("MLPGPU_DATA")
name = "mnist" if folder and (Path(folder) / "mnist").is_dir() else "digits"
train, test = mg.datasets.load(name)
if name == "mnist":
    _, train = train.split(1 / 6, seed=0)
side = int(train.n_in**0.5)  # pixels
print(f"{name}: {len(train):,} images of {side} by {side}, {len(test):,} to test on")

# %%
# The rate rises and falls once over the whole training (one cycle), which gives a small network most of its accuracy
# within a few epochs.

epochs = 6 if name == "mnist" else 30
net = mg.Network([mg.Dense(train.n_in, 128, activation="relu"), mg.Dense(128, 10)], seed=0)
optimizer = mg.Momentum(mg.OneCycle(0.3, epochs=epochs), momentum=0.9)
trainer = mg.Trainer(net, "softmax_cross_entropy", optimizer, batch_size=192, metrics=["accuracy"])
judge, _ = test.split(0.8, seed=0)  # a fifth of the test set, for the error after each epoch
started = time.perf_counter()
history = trainer.fit(train, epochs, validation=judge)
print(f"{epochs} epochs in {time.perf_counter() - started:.1f} s")
print(f"test accuracy {trainer.evaluate(test)['accuracy']:.4f}")

# %%
# The errors that the network is surest of are the most instructive ones.

probabilities = net.predict(test)  # (rows, 10)
predicted = probabilities.argmax(axis=1)
wrong = np.flatnonzero(predicted != test.y)
surest = wrong[np.argsort(-probabilities[wrong, predicted[wrong]])][:8]

figure = plt.figure(figsize=(10, 4), layout="constrained")
left, right = figure.subfigures(1, 2)
axes = left.subplots()
axes.plot(history["epoch"], 100 * (1 - np.array(history["validation_accuracy"])), marker="o", label="test error")
axes.set(xlabel="epoch", ylabel="wrong images of a fifth of the test set, %", ylim=(0, None))
rate = axes.twinx()
rate.plot(history["epoch"], history["rate"], color="C1", linestyle="--", label="rate")
rate.set_ylabel("learning rate at the epoch's end")
for row, image in zip(surest, right.subplots(2, 4).flat, strict=False):
    image.imshow(test.x[row].reshape(side, side), cmap="gray_r")
    image.set_title(f"{test.y[row]}, taken for {predicted[row]}", fontsize=8)
    image.set_axis_off()
plt.show()

# %%
# The error falls fast while the rate (dashed) is high, and settles as it goes to 0.  Several of the images on the
# right would be hard for a reader, too.
