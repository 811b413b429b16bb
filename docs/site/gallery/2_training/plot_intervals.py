"""
Regression with intervals
=========================

A network that predicts a mean says nothing of how far off it may be. Trained on the pinball loss it predicts a
quantile instead; the 5 % and the 95 % quantile bound an interval that should hold nine of ten targets, however wide
they spread.
"""

import matplotlib.pyplot as plt
import numpy as np

import mlpgpu as mg


def samples(rows, seed):
    """A wave whose noise grows with x."""
    random = np.random.default_rng(seed)
    x = random.uniform(0, 10, (rows, 1))
    return mg.Dataset(x, np.sin(x[:, 0]) + random.normal(scale=0.05 + 0.06 * x[:, 0]))


train, test = samples(4000, seed=1), samples(4000, seed=2)

# %%
# One network for each level.  ``Standardize`` brings inputs to mean 0 and deviation 1, and at the end scales
# predictions back to the targets' units.

levels = (0.05, 0.5, 0.95)
networks = {}
for level in levels:
    layers = [mg.Standardize(1), mg.Dense(1, 64, "silu"), mg.Dense(64, 64, "silu"), mg.Dense(64, 1), mg.Standardize(1)]
    trainer = mg.Trainer(mg.Network(layers, seed=3), mg.Quantile(level), mg.Adam(mg.OneCycle(0.01, epochs=30)))
    trainer.fit(train, epochs=30)
    networks[level] = trainer.network
    print(f"pinball loss of the {level:.0%} quantile: {trainer.evaluate(test)['loss']:.4f}")

# %%
# How many of the test targets lie inside, in all and by x.

low, high = (networks[level].predict(test) for level in (0.05, 0.95))
inside = (low <= test.y) & (test.y <= high)
print(f"inside the interval: {inside.mean():.1%}, of 90 %")
tenth = (test.x[:, 0]).astype(int)
by_x = [inside[tenth == part].mean() for part in range(10)]

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", width_ratios=(2, 1))
grid = np.linspace(0, 10, 400)[:, None]
left.scatter(test.x[:1000], test.y[:1000], s=3, color="0.6", label="test samples")
left.fill_between(grid[:, 0], networks[0.05].predict(grid), networks[0.95].predict(grid), alpha=0.3)
left.plot(grid, networks[0.5].predict(grid), label="median, and 5 % to 95 %")
left.plot(grid, np.sin(grid), color="k", linestyle=":", label="the wave without noise")
left.set(xlabel="x", ylabel="y")
left.legend(loc="lower left")
right.bar(np.arange(10) + 0.5, 100 * np.array(by_x), width=0.9)
right.axhline(90, color="k", linestyle=":")
right.set(xlabel="x", ylabel="test samples inside the interval, %", ylim=(70, 100))
plt.show()

# %%
# The interval widens as the noise does, and holds about 90 % of the samples at every x: it is right where the noise
# is small and where it is large, which one width for all x could not be.
