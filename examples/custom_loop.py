"""A training loop of one's own: Trainer.step on batches made on the fly, here mixtures of two digits.

The method is mixup (Zhang et al., ICLR 2018): x = λ x₁ + (1-λ) x₂, and the targets likewise.
"""

from __future__ import annotations

import argparse

import numpy as np

import mlpgpu as mg

ALPHA = 0.2  # λ is drawn from the distribution Beta(ALPHA, ALPHA): mostly near 0 or 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    arguments = parser.parse_args()
    steps, batch = arguments.steps, arguments.batch

    train, test = mg.datasets.load("digits")
    images = train.x * np.float32(train.scale or 1.0)  # (rows, 64)
    targets = np.eye(10, dtype=np.float32)[train.labels(10)]  # (rows, 10), a distribution over the classes each

    network = mg.Network([mg.Dense(64, 256, activation="relu"), mg.Dense(256, 10)], seed=5)
    optimizer = mg.Momentum(mg.CosineDecay(0.1, steps=steps))
    trainer = mg.Trainer(network, "softmax_cross_entropy", optimizer, batch_size=batch)

    random = np.random.default_rng(5)
    losses = []
    for step in range(1, steps + 1):
        first, second = random.integers(0, len(images), (2, batch))
        share = random.beta(ALPHA, ALPHA, (batch, 1)).astype(np.float32)
        x = share * images[first] + (1 - share) * images[second]  # (batch, 64)
        y = share * targets[first] + (1 - share) * targets[second]  # (batch, 10)
        losses.append(trainer.step(x, y))
        if step % max(1, steps // 10) == 0:
            print(f"step {step:4}: mean loss {np.mean(losses):.4f}")
            losses.clear()

    print(f"test accuracy: {trainer.evaluate(test, metrics=['accuracy'])['accuracy']:.4f}")


if __name__ == "__main__":
    main()
