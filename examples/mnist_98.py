"""Train 784-128-10 on MNIST to 98 % test accuracy, and tell the training's time from that of compiling and upload.

--choose prints what epochs and peak rate were chosen by: the fewest epochs within 0.001 of the best accuracy on a sixth
of the training set, held out.  The test set is used once for each seed, when its training on all rows is over.
"""

from __future__ import annotations

import argparse
import time
from statistics import mean, median

from matplotlib.figure import Figure

import mlpgpu as mg
from mlpgpu.bench import Epochs

BATCH_SIZE, CHOSEN, SEEDS = 192, (6, 0.3), range(5)
GRID = [(epochs, peak) for epochs in (5, 6, 7, 8) for peak in (0.2, 0.25, 0.3, 0.35, 0.4)]


def train(data: mg.Dataset, judge: mg.Dataset, seed: int, epochs: int, peak: float, every: int) -> list[list[float]]:
    """Milliseconds of compiling, of an epoch that uploads the data, and of each later one; accuracies on the way."""
    network = mg.Network([mg.Dense(data.n_in, 128, activation="relu"), mg.Dense(128, 10)], seed=seed)
    optimizer = mg.Momentum(mg.OneCycle(peak, epochs=epochs), momentum=0.9)
    started = time.perf_counter()
    run = Epochs(mg.Trainer(network, "softmax_cross_entropy", optimizer, batch_size=BATCH_SIZE), data)
    milliseconds, accuracies = [1000 * (time.perf_counter() - started)], []
    for epoch in range(epochs + 1):
        started = time.perf_counter()
        run()
        milliseconds.append(1000 * (time.perf_counter() - started))
        if epoch == 0:
            run.reset()
        elif epoch % every == 0:
            accuracies.append(run.accuracy(judge))
    return [milliseconds, accuracies]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="mnist", help="of the data set (default: mnist)")
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--picture", default="mnist_98.png", help="where to draw accuracy over training time")
    arguments = parser.parse_args()
    whole, test = mg.datasets.load(arguments.name)
    part, held_out = whole.split(1 / 6, seed=0)
    for epochs, peak in [*(GRID if arguments.choose else []), CHOSEN]:
        curves = [train(part, held_out, seed, epochs, peak, 1) for seed in SEEDS]
        print(f"{epochs:2} epochs, peak {peak:4}: validation accuracy {mean(found[-1] for _, found in curves):.4f}")

    axes = (figure := Figure()).subplots()
    for (_, _, *epochs_ms), found in curves:
        axes.plot([sum(epochs_ms[: k + 1]) for k in range(len(found))], found, color="C0")
    print(f"compiling the kernels, or finding them compiled: {curves[0][0][0]:.0f} ms")
    print("upload ms  training ms  test accuracy")
    rows = []
    for seed in SEEDS:
        (_, first, *epochs_ms), (accuracy,) = train(whole, test, seed, *CHOSEN, CHOSEN[0])
        rows.append((first - median(epochs_ms), sum(epochs_ms), accuracy))
    columns = list(zip(*rows, strict=True))
    for row in [*rows, map(median, columns)]:  # the last line is the medians'
        print("{:9.2f}  {:11.2f}  {:13.4f}".format(*row))
    axes.plot(*columns[1:], "o", color="C1")
    axes.set(xlabel="training, ms", ylabel="accuracy: validation (lines), test (points)")
    figure.savefig(arguments.picture, dpi=150)


if __name__ == "__main__":
    main()
