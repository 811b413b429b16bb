"""
Optimizers and their rates
==========================

Which optimizer is best depends on the rate it is given, so a comparison takes each at many rates. The default rate
is the one that ``optimizer="adam"`` and the like take.
"""

import matplotlib.pyplot as plt
import numpy as np

import mlpgpu as mg

train, test = mg.datasets.load("digits")
rates = np.logspace(-4, 0.5, 10)
kinds = [mg.SGD, mg.Momentum, mg.Nesterov, mg.RMSprop, mg.Adam, mg.AdamW]


def loss_after(optimizer):
    """The training loss of 64-32-10 after four epochs; infinite where the training diverged."""
    net = mg.Network([mg.Dense(64, 32, activation="relu"), mg.Dense(32, 10)], seed=5)
    trainer = mg.Trainer(net, "softmax_cross_entropy", optimizer, batch_size=32)
    try:
        trainer.fit(train, epochs=4)
    except mg.errors.DivergenceError as error:
        print(error)
        return np.inf
    return trainer.evaluate(train)["loss"]


losses = {kind.__name__: [loss_after(kind(rate)) for rate in rates] for kind in kinds}
for name, found in losses.items():
    print(f"{name:9} best at a rate of {rates[np.argmin(found)]:.4f}: loss {min(found):.4f}")

# %%
# On the right, schedules of ten epochs; a schedule stands where a rate stands.

schedules = {
    "StepDecay": mg.StepDecay(1.0, 0.5, epochs=2),
    "ExponentialDecay": mg.ExponentialDecay(1.0, 0.7, epochs=1),
    "CosineDecay": mg.CosineDecay(1.0, epochs=10),
    "WarmUp of CosineDecay": mg.WarmUp(mg.CosineDecay(1.0, epochs=10), epochs=2),
    "OneCycle": mg.OneCycle(1.0, epochs=10),
}

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
for name, found in losses.items():
    left.plot(rates, found, marker=".", label=name)
left.set(xlabel="rate", ylabel="training loss after four epochs", xscale="log", yscale="log", ylim=(None, 4))
left.legend()
for name, schedule in schedules.items():
    net = mg.Network([mg.Dense(64, 10)], seed=0)
    trainer = mg.Trainer(net, "softmax_cross_entropy", mg.SGD(schedule), batch_size=300)
    history = trainer.fit(train, epochs=10)
    right.plot(history["epoch"], history["rate"], marker=".", label=name)
right.set(xlabel="epoch", ylabel="rate at the epoch's end, of 1")
right.legend()
plt.show()

# %%
# Each curve has a valley about a decade wide.  RMSprop, Adam and AdamW have theirs at far smaller rates than SGD,
# because they divide by the gradient's size; beyond its valley every optimizer fails.
