"""Train on the bundled handwritten digits: 1,797 images of 8 by 8 pixels, ten classes."""

from __future__ import annotations

import argparse
from pathlib import Path

import mlpgpu as mg


def make_trainer(seed: int, epochs: int) -> mg.Trainer:
    """A network 64-256-10 and how it is trained, chosen by accuracy on validation splits of the training set."""
    network = mg.Network(
        [
            mg.Dense(64, 256, activation="relu"),
            mg.Dropout(0.3),
            mg.Dense(256, 10),  # logits: the loss owns the softmax
        ],
        seed=seed,
    )
    optimizer = mg.Momentum(mg.CosineDecay(0.2, epochs=epochs), momentum=0.9)
    return mg.Trainer(network, "softmax_cross_entropy", optimizer, batch_size=64, metrics=["accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where to put the results")
    arguments = parser.parse_args()

    train, test = mg.datasets.load("digits")
    train, validation = train.split(0.1, seed=arguments.seed)

    trainer = make_trainer(arguments.seed, arguments.epochs)
    trainer.network.summary()
    history = trainer.fit(train, arguments.epochs, validation=validation)
    print(history)

    result = trainer.evaluate(test, metrics=["accuracy", "confusion_matrix"])
    print("confusion matrix, a row for each true digit:", result["confusion_matrix"].astype(int), sep="\n")
    print(f"test accuracy: {result['accuracy']:.4f}")

    arguments.folder.mkdir(parents=True, exist_ok=True)
    weights = arguments.folder / "digits.h5"
    trainer.network.save(weights)
    picture = history.plot(arguments.folder / "digits.png")
    print(f"weights: {weights}, training curve: {picture}")


if __name__ == "__main__":
    try:
        main()
    except mg.MlpgpuError as error:  # such as MLPGPU_BACKEND=cuda where there is no driver
        raise SystemExit(f"mlpgpu: {error}") from None
