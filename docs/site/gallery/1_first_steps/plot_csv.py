"""
From a CSV to predictions, in the shell
=======================================

A file of rows is trained on without a script: which columns are numbers, categories or dates is found out, and the
model's file remembers it.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

folder = Path(tempfile.mkdtemp())


def houses(rows, seed):
    """Made-up sales, with cells that are missing."""
    random = np.random.default_rng(seed)
    size = random.uniform(30, 200, rows)  # square metres
    city = random.choice(["Oslo", "Bergen", "Narvik"], rows, p=[0.6, 0.3, 0.1])
    sold = pd.Timestamp("2020-01-01") + pd.to_timedelta(random.integers(0, 1800, rows), unit="D")
    level = pd.Series(city).map({"Oslo": 80.0, "Bergen": 60.0, "Narvik": 30.0}).to_numpy()
    price = size * level * (1 + 0.0002 * (sold - sold.min()).days) * random.lognormal(0, 0.08, rows)  # in hundreds
    frame = pd.DataFrame({"size": size.round(), "city": city, "sold": sold, "price": price.round()})
    frame.loc[random.random(rows) < 0.05, "size"] = np.nan
    return frame


houses(3000, seed=1).to_csv(folder / "houses.csv", index=False)
houses(500, seed=2).to_csv(folder / "new.csv", index=False)
print((folder / "houses.csv").read_text()[:160])


# %%
# The commands, as one would type them.


def shell(*arguments):
    done = subprocess.run([sys.executable, "-m", "mlpgpu", *arguments], cwd=folder, capture_output=True, text=True)
    print(f"$ python -m mlpgpu {' '.join(arguments)}\n{done.stdout}{done.stderr}")
    done.check_returncode()


shell("train", "houses.csv", "--target", "price", "--layers", "64", "32", "--epochs", "8", "--out", "model.h5")
shell("predict", "model.h5", "new.csv", "--out", "predictions.csv")
shell("evaluate", "model.h5", "new.csv")

# %%
# The predictions beside what the houses were sold for.

new = pd.read_csv(folder / "new.csv")
predicted = pd.read_csv(folder / "predictions.csv")["price"]

figure, axes = plt.subplots(figsize=(6, 5), layout="constrained")
for city, rows in new.groupby("city"):
    axes.scatter(rows["price"], predicted[rows.index], s=8, label=city)
unknown = new["size"].isna()
axes.scatter(
    new["price"][unknown], predicted[unknown], s=40, facecolors="none", edgecolors="k", label="size is missing"
)
most = new["price"].max()
axes.plot([0, most], [0, most], color="0.6", zorder=0)
axes.set(xlabel="price", ylabel="predicted price")
axes.legend()
plt.show()

# %%
# Points lie along the diagonal, within the 8 % of noise that the prices were made with.  Where the size is missing
# the median stands for it, so those houses are predicted by city and date alone, and scatter.
