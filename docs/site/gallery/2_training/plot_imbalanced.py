"""
Rare classes
============

Where one row in fifty is of the class that matters, a network that never predicts it is right in 98 % of all rows.
Class weights and the focal loss shift the balance; what it costs shows in precision and recall, not in accuracy.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import make_classification
from sklearn.metrics import precision_recall_curve

import mlpgpu as mg

x, y = make_classification(
    12_000, n_features=20, n_informative=6, weights=[0.98], class_sep=0.8, flip_y=0.005, random_state=1
)
train, test = mg.Dataset(x, y).split(0.5, seed=1, stratify=True)
print(f"rows of class 1: {np.mean(train.y):.1%} in training, {np.mean(test.y):.1%} in the test")

# %%
# The same network three times.  ``class_weight="balanced"`` weights rows inversely to how frequent their class is;
# :class:`mlpgpu.BinaryFocal` gives rows that are predicted well already little weight.

ways = {
    "cross entropy": {"loss": "binary_cross_entropy"},
    "balanced weights": {"loss": "binary_cross_entropy", "class_weight": "balanced"},
    "focal loss": {"loss": mg.BinaryFocal()},
}
metrics = ["accuracy", "precision", "recall", "f1", "average_precision"]
probabilities = {}
for name, way in ways.items():
    layers = [mg.Standardize(20), mg.Dense(20, 64, "relu"), mg.Dropout(0.2), mg.Dense(64, 1)]
    trainer = mg.Trainer(mg.Network(layers, seed=4), optimizer=mg.Adam(0.002), batch_size=64, metrics=metrics, **way)
    trainer.fit(train, epochs=20)
    result = trainer.evaluate(test)
    print(f"{name:17}", *(f"{metric} {result[metric]:.3f}" for metric in metrics), sep="  ")
    probabilities[name] = trainer.network.predict(test)

# %%
# Each curve goes through all thresholds; the dot is the threshold of ½, which ``labels`` and the metrics above take.

figure, axes = plt.subplots(figsize=(6.5, 4.5), layout="constrained")
for name, probability in probabilities.items():
    precision, recall, _ = precision_recall_curve(test.y, probability)
    (curve,) = axes.plot(recall, precision, label=name)
    found = probability > 0.5
    hits = np.sum(found & (test.y == 1))
    axes.plot(hits / test.y.sum(), hits / found.sum(), "o", color=curve.get_color(), markersize=9)
axes.set(xlabel="recall: share of class 1 that is found", ylabel="precision: share of what is found that is class 1")
axes.legend()
plt.show()

# %%
# The curves are close to each other: all three networks rank the rows about equally well.  What differs is where on
# the curve the threshold of ½ lies.  Balanced weights find twice as many rows of the rare class, and many more false
# alarms with them.  The focal loss stays where the cross entropy is: it weights rows by how hard they are, not by
# their class.
