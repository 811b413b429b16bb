"""Learn exclusive or: the smallest problem that needs a hidden layer."""

from __future__ import annotations

import argparse

import numpy as np

import mlpgpu as mg


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    x = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)  # (4, 2)
    y = np.array([0, 1, 1, 0])  # (4,)
    network = mg.Network([mg.Dense(2, 4, activation="tanh"), mg.Dense(4, 1)], seed=arguments.seed)
    trainer = mg.Trainer(network, "binary_cross_entropy", mg.Adam(0.05), batch_size=4)
    history = trainer.fit(mg.Dataset(x, y), arguments.epochs)
    print(history)

    for (a, b), probability, label in zip(x, network.predict(x), network.labels(x), strict=True):
        print(f"{a:.0f} xor {b:.0f} = {label}   (probability of 1: {probability:.4f})")


if __name__ == "__main__":
    main()
