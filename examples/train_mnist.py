"""Train on MNIST or Fashion-MNIST: 60,000 images of 28 by 28 pixels, ten classes.

The files are looked for in --folder, else in the folder that $MLPGPU_DATA names, else downloaded once.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from pathlib import Path

import mlpgpu as mg

# Hidden widths, the optimizer and its largest rate, chosen by accuracy on a sixth of the training set held out.
MNIST: tuple[list[int], type[mg.Momentum | mg.Adam], float] = ([128], mg.Momentum, 0.2)
RECIPES = {"mnist": MNIST, "fashion-mnist": ([256, 128], mg.Adam, 0.003)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="mnist", help="mnist, fashion-mnist or digits (default: mnist)")
    parser.add_argument("--folder", type=Path, help="where the data set's files are")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    train, test = mg.datasets.load(arguments.name, arguments.folder)
    train, validation = train.split(0.1, seed=arguments.seed)

    hidden, optimizer, rate = RECIPES.get(arguments.name, MNIST)
    layers = [mg.Dense(n_in, n_out, activation="relu") for n_in, n_out in pairwise([train.n_in, *hidden])]
    network = mg.Network([*layers, mg.Dense(hidden[-1], 10)], seed=arguments.seed)

    schedule = mg.OneCycle(rate, epochs=arguments.epochs)
    trainer = mg.Trainer(network, "softmax_cross_entropy", optimizer(schedule), batch_size=128, metrics=["accuracy"])
    network.summary()
    started = time.perf_counter()
    history = trainer.fit(train, arguments.epochs, validation=validation)
    seconds = time.perf_counter() - started
    print(history)
    print(f"test accuracy: {trainer.evaluate(test)['accuracy']:.4f}, trained in {seconds:.1f} s")


if __name__ == "__main__":
    main()
