"""What of scikit-learn's checks and tests the estimators do not meet, each with its reason; as docs/sklearn.md says."""

from __future__ import annotations

import sklearn

VERSION = tuple(map(int, sklearn.__version__.split(".")[:2]))
LATEST = (1, 9)  # whose checks and tests these are; from 1.6 on they are the same but for what came later

# Checks of check_estimator.
_WEIGHTS = (
    "asks for equality to 1e-7 after 200 epochs, and a weight of 2 rounds otherwise in float32 than a row that is "
    "there twice; with precision='float64' it passes"
)
CHECKS = {
    "check_sample_weight_equivalence_on_dense_data": _WEIGHTS,
    "check_sample_weight_equivalence_on_sparse_data": _WEIGHTS,
}
# And where BLAS sums the products of a row otherwise beside other rows, as OpenBLAS's kernels for AVX2 do.
CHECKS_OF_SOME_PROCESSORS = {
    "check_methods_subset_invariance": (
        "on some processors: asks for equality to 1e-7 of a row's prediction alone and among others, and BLAS may "
        "round the sums otherwise there; with precision='float64' it passes"
    ),
}

# Tests of sklearn/neural_network/tests/test_mlp.py, by function.
LBFGS = "about the solver lbfgs, which there is not"
INTERNAL = "about names inside scikit-learn's class"
OTHERWISE = "asks for an error of partial_fit with early stopping, which works here"
USES_LBFGS = "fits by the solver lbfgs"
TESTS = {
    "test_gradient": INTERNAL,
    "test_lbfgs_classification": LBFGS,
    "test_lbfgs_regression": LBFGS,
    "test_lbfgs_classification_maxfun": LBFGS,
    "test_lbfgs_regression_maxfun": LBFGS,
    "test_mlp_warm_start_no_convergence[lbfgs-MLPClassifier]": LBFGS,
    "test_mlp_warm_start_no_convergence[lbfgs-MLPRegressor]": LBFGS,
    "test_learning_rate_warmstart": INTERNAL,
    "test_adaptive_learning_rate": INTERNAL,
    "test_multilabel_classification": USES_LBFGS,
    "test_multioutput_regression": USES_LBFGS,
    "test_predict_proba_multilabel": USES_LBFGS,
    "test_sparse_matrices": USES_LBFGS,
    "test_warm_start": USES_LBFGS,
    "test_mlp_vs_poisson_glm_equivalent": USES_LBFGS,
    "test_mlp_param_dtypes[MLPClassifier-float64]": "parameters are float32 unless precision='float64'",
    "test_mlp_param_dtypes[MLPRegressor-float64]": "parameters are float32 unless precision='float64'",
    "test_mlp_partial_fit_after_fit": OTHERWISE,
}
SINCE_1_7 = ("test_mlp_vs_poisson_glm_equivalent",)
NOT_OF_BEHAVIOUR = (LBFGS, INTERNAL, OTHERWISE)  # that there could be here


def table() -> str:
    """The rows of the table in docs/sklearn.md."""
    return "".join(
        f"| `{name}` | {reason} |\n" for name, reason in {**CHECKS, **CHECKS_OF_SOME_PROCESSORS, **TESTS}.items()
    )
