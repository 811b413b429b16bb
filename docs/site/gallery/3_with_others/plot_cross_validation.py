"""
Cross-validation with scikit-learn
==================================

``mlpgpu.sklearn`` has estimators that scikit-learn's tools take as their own: pipelines, searches, calibration.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from mlpgpu.sklearn import MLPClassifier

x, y = load_breast_cancer(return_X_y=True)
model = make_pipeline(
    StandardScaler(), MLPClassifier((32,), learning_rate_init=0.01, tol=1e-3, n_iter_no_change=5, random_state=0)
)
scores = cross_val_score(model, x, y, cv=5)
print(f"accuracy in five folds: {scores.mean():.3f} ± {scores.std():.3f}")

# %%
# A search over ``alpha``, scikit-learn's weight penalty, and over ``dropout``, which it does not have.

grid = {"mlpclassifier__alpha": np.logspace(-2, 2, 5), "mlpclassifier__dropout": [0.0, 0.3]}
search = GridSearchCV(model, grid, cv=3, return_train_score=True).fit(x, y)
print("best:", search.best_params_, f"accuracy {search.best_score_:.3f}")

# %%
# The best estimator holds an :class:`mlpgpu.Network`, which is saved, exported and used without scikit-learn.

print(search.best_estimator_[-1].network_)
found = search.cv_results_
alphas = np.array(found["param_mlpclassifier__alpha"], float)
dropouts = np.array(found["param_mlpclassifier__dropout"], float)

figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
for place, dropout in enumerate(np.unique(dropouts)):
    rows = dropouts == dropout
    mean, deviation = found["mean_test_score"][rows], found["std_test_score"][rows]
    axes.plot(alphas[rows], mean, color=f"C{place}", marker="o", label=f"held out, dropout {dropout:g}")
    axes.fill_between(alphas[rows], mean - deviation, mean + deviation, color=f"C{place}", alpha=0.15)
    axes.plot(alphas[rows], found["mean_train_score"][rows], color=f"C{place}", linestyle=":", label="training")
axes.set(xlabel="alpha", ylabel="accuracy, mean of three folds", xscale="log")
axes.legend()
plt.show()

# %%
# With little penalty the network is better on the rows that it was trained on (dotted) than on others.  A larger
# ``alpha`` brings the curves together, and beyond 10 it costs accuracy on both.  The bands are one standard deviation
# over the folds, wider than what the choice of ``dropout`` makes.
