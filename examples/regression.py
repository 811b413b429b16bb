"""Fit a smooth function of eight variables from noisy samples; inputs and targets are far from unit scale."""

from __future__ import annotations

import argparse

import numpy as np

import mlpgpu as mg

NOISE = 5.0  # standard deviation, in the units of y


def samples(rows: int, seed: int) -> mg.Dataset:
    """x (rows, 8), the last three columns without influence; y (rows,) = a known function and noise.

    The function is Friedman's, "Multivariate adaptive regression splines", Annals of Statistics 19, 1991,
    on [0, 1], moved to other units.
    """
    random = np.random.default_rng(seed)
    u = random.uniform(size=(rows, 8))
    f = 10 * np.sin(np.pi * u[:, 0] * u[:, 1]) + 20 * (u[:, 2] - 0.5) ** 2 + 10 * u[:, 3] + 5 * u[:, 4]
    return mg.Dataset(300 + 40 * u, 1000 + 10 * f + random.normal(scale=NOISE, size=rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=100)
    arguments = parser.parse_args()

    train, validation = samples(arguments.rows, seed=1).split(0.1, seed=1)
    test = samples(arguments.rows, seed=2)

    network = mg.Network(
        [
            mg.Standardize(8),  # inputs to mean 0 and deviation 1
            mg.Dense(8, 64, activation="silu"),
            mg.Dense(64, 64, activation="silu"),
            mg.Dense(64, 1),
            mg.Standardize(1),  # targets likewise; predictions are scaled back
        ],
        seed=1,
    )
    optimizer = mg.Adam(mg.ReduceOnPlateau(3e-3, factor=0.3, patience=5))
    metrics = ["r2", "mean_absolute_error"]
    trainer = mg.Trainer(network, "mean_squared_error", optimizer, batch_size=64, metrics=metrics)
    print(trainer.fit(train, arguments.epochs, validation=validation, callbacks=[mg.EarlyStopping(patience=15)]))

    result = trainer.evaluate(test)
    best = 1.0 - NOISE**2 / test.targets(1, np.float64).var()
    print(f"test R²: {result['r2']:.4f}, of at most about {best:.4f}; mean error: {result['mean_absolute_error']:.2f}")


if __name__ == "__main__":
    main()
