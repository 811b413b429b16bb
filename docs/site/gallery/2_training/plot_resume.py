"""
Interrupt and resume, to the bit
================================

A run that is killed and resumed from its file ends where an unbroken one ends: not nearly, but in every bit. Sums
have a fixed order, and random numbers are addressed by seed and step, so there is no hidden state that a file could
miss.
"""

import os
import signal
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import mlpgpu as mg

train, test = mg.datasets.load("digits")
path = Path(tempfile.mkdtemp()) / "run.h5"


def new_trainer():
    net = mg.Network([mg.Dense(64, 64, activation="relu"), mg.Dropout(0.2), mg.Dense(64, 10)], seed=3)
    return mg.Trainer(net, "softmax_cross_entropy", mg.Adam(mg.OneCycle(0.01, epochs=12)), batch_size=50)


unbroken = new_trainer()
unbroken.fit(train, epochs=12, validation=test)

# %%
# A second run of the same kind is interrupted in the middle of its sixth epoch, as by a key.


class PressCtrlC(mg.Callback):
    every_steps = 150

    def step_end(self, trainer):
        os.kill(os.getpid(), signal.SIGINT)


broken = new_trainer()
history = broken.fit(train, epochs=12, validation=test, callbacks=[PressCtrlC(), mg.Checkpoint(path)])
print(f"interrupted: {history.interrupted}, after {broken.steps} steps and {len(history)} whole epochs")
before = list(history["loss"])
del broken

# %%
# The file is all that is left.  A resumed trainer is given the same data, and goes on in the middle of the epoch.

resumed = mg.Trainer.resume(path)
resumed.fit(train, epochs=12, validation=test)
for name, value in unbroken.network.parameters.items():
    print(f"{name:9} of shape {value.shape!s:9} same bits: {np.array_equal(value, resumed.network.parameters[name])}")

# %%
# For comparison, a run that is started anew from the interrupted weights, as one does without a run file: other
# shuffles, Adam's averages from zero, a rate from its beginning.

restarted = new_trainer()
restarted.network.parameters = mg.load(path).parameters
restarted.fit(train, epochs=12 - len(before), validation=test)

figure, (curves, gaps) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
epochs = np.arange(1, 13)
curves.plot(epochs, unbroken.history["validation_loss"], linewidth=5, color="0.8", label="unbroken")
curves.plot(epochs, resumed.history["validation_loss"], label="resumed from the run's file")
later = epochs[len(before) :]
curves.plot(later, restarted.history["validation_loss"], "--", label="restarted from its weights alone")
curves.axvline(len(before) + 0.5, color="k", linestyle=":", label="Ctrl-C")
curves.set(xlabel="epoch", ylabel="validation loss")
curves.legend()
reference = np.array(unbroken.history["validation_loss"])
gaps.plot(epochs, abs(np.array(resumed.history["validation_loss"]) - reference), label="resumed")
gaps.plot(
    later, abs(np.array(restarted.history["validation_loss"]) - reference[len(before) :]), "--", label="restarted"
)
gaps.set(xlabel="epoch", ylabel="|validation loss − that of the unbroken run|")
gaps.legend()
plt.show()

# %%
# The resumed curve lies on the unbroken one, and their difference is exactly 0 in every epoch.  The restarted run
# takes a path of its own: no worse in the end, but another network, and nobody could tell what it would have come to
# unbroken.
