"""
Handwritten digits
==================

1,797 images of 8 by 8 pixels come with the package. A network with one hidden layer learns them in a second.
"""

import matplotlib.pyplot as plt
import numpy as np

import mlpgpu as mg

train, test = mg.datasets.load("digits")
train, validation = train.split(0.1, seed=7)
print(train)

# %%
# A network is a list of layers.  The last one gives logits: the softmax belongs to the loss, which computes both
# together without an overflow.

net = mg.Network([mg.Dense(64, 128, activation="relu"), mg.Dropout(0.2), mg.Dense(128, 10)], seed=7)
net.summary()

# %%
# Training stops where the validation loss has not improved for five epochs, and puts the best parameters back.

trainer = mg.Trainer(net, "softmax_cross_entropy", mg.Adam(0.003), batch_size=32, metrics=["accuracy"])
history = trainer.fit(train, epochs=60, validation=validation, callbacks=[mg.EarlyStopping(patience=5)])
best = history.best("validation_loss")
print(f"best of {len(history)} epochs: {best['epoch']:.0f}, validation loss {best['validation_loss']:.3f}")

# %%
# What the test set says: accuracy, and which digits are taken for which.

result = trainer.evaluate(test, metrics=["accuracy", "confusion_matrix"])
print(f"test accuracy: {result['accuracy']:.4f}")

figure, (curves, confusion) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
curves.plot(history["epoch"], history["loss"], label="training, with dropout")
curves.plot(history["epoch"], history["validation_loss"], label="validation")
curves.axvline(best["epoch"], color="0.6", linestyle=":", label="best epoch, which is kept")
curves.set(xlabel="epoch", ylabel="loss", yscale="log")
curves.legend()
counts = result["confusion_matrix"].astype(int)
confusion.imshow(np.log1p(counts), cmap="Blues")
confusion.set(xlabel="predicted digit", ylabel="true digit", xticks=range(10), yticks=range(10))
for (row, column), count in np.ndenumerate(counts):
    if count:
        confusion.text(column, row, count, ha="center", va="center", color="w" if row == column else "k", fontsize=8)
plt.show()

# %%
# The losses fall together until the validation loss levels out, which ends the training.  Nearly all test images lie
# on the diagonal; each number beside it is of images that look like another digit.
