"""Names that a user may write: those of the tables, for type checkers, and what other libraries call the same.

Tests hold these types to the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

ActivationName: TypeAlias = Literal[
    "identity", "sigmoid", "tanh", "relu", "leaky_relu", "elu", "softplus", "gelu", "silu",
    "linear", "logistic", "swish",
]  # fmt: skip
InitializerName: TypeAlias = Literal[
    "glorot_uniform", "glorot_normal", "he_uniform", "he_normal", "small_uniform", "fan_in_uniform", "zeros",
]  # fmt: skip
LossName: TypeAlias = Literal[
    "squared_error", "mean_squared_error", "absolute_error", "huber", "binary_cross_entropy", "softmax_cross_entropy",
    "quantile", "poisson", "binary_focal", "focal",
    "pinball", "poisson_nll_loss", "binary_focal_crossentropy",
    "mse", "mae", "bce", "cross_entropy",
    "binary_crossentropy", "categorical_crossentropy", "sparse_categorical_crossentropy",
]  # fmt: skip
OptimizerName: TypeAlias = Literal[
    "sgd", "momentum", "nesterov", "rmsprop", "adam", "adamw",
    "SGD", "Momentum", "Nesterov", "RMSprop", "Adam", "AdamW",
    "nag", "adam_w", "rms_prop", "sgd_momentum",
]  # fmt: skip
PrecisionName: TypeAlias = Literal[
    "float32", "float32-ieee", "float64", "tf32", "bfloat16", "fp32", "fp64", "bf16"
]  # fmt: skip
ReductionName: TypeAlias = Literal["ordered", "atomic", "fast"]
ParallelName: TypeAlias = Literal["auto", "data", "tensor", "none"]

# What is understood: the name of the same thing in a table.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "linear": ("identity",),
    "logistic": ("sigmoid",),
    "swish": ("silu",),
    "mse": ("mean_squared_error",),
    "mae": ("absolute_error", "mean_absolute_error"),
    "pinball": ("quantile",),
    "poisson_nll_loss": ("poisson",),
    "binary_focal_crossentropy": ("binary_focal",),
    "bce": ("binary_cross_entropy",),
    "binary_crossentropy": ("binary_cross_entropy",),
    "cross_entropy": ("softmax_cross_entropy",),
    "categorical_crossentropy": ("softmax_cross_entropy",),
    "sparse_categorical_crossentropy": ("softmax_cross_entropy",),
    "acc": ("accuracy",),
    "accuracy_score": ("accuracy",),
    "categorical_accuracy": ("accuracy",),
    "sparse_categorical_accuracy": ("accuracy",),
    "balanced_accuracy_score": ("balanced_accuracy",),
    "precision_score": ("precision",),
    "recall_score": ("recall",),
    "f1_score": ("f1",),
    "matthews_correlation": ("matthews_corrcoef",),
    "mcc": ("matthews_corrcoef",),
    "roc_auc_score": ("roc_auc",),
    "r2_score": ("r2",),
    "nag": ("nesterov",),
    "adam_w": ("adamw",),
    "rms_prop": ("rmsprop",),
    "sgd_momentum": ("momentum",),
    "fp32": ("float32",),
    "fp64": ("float64",),
    "bf16": ("bfloat16",),
}

# What is only told, because it is not quite the same.
NEAR: Mapping[str, str] = {
    "gpu": "cuda",
    "half": "bfloat16",
    "fp16": "bfloat16",
    "float16": "bfloat16",
    "double": "float64",
    "kaiming_uniform": "he_uniform",
    "kaiming_normal": "he_normal",
    "xavier_uniform": "glorot_uniform",
    "xavier_normal": "glorot_normal",
    "auc": "roc_auc",
    "l1": "absolute_error",
    "l2": "mean_squared_error",
    "smooth_l1": "huber",
    "log_loss": "softmax_cross_entropy",
    "neg_log_loss": "log_loss",
    "top_k_accuracy": "top_5_accuracy",
    "top_k_categorical_accuracy": "top_5_accuracy",
    "mean_pinball_loss": "pinball_0.5",
    "pinball": "pinball_0.5",
    "categorical_focal_crossentropy": "focal",
    "nll": "softmax_cross_entropy",
    "crossentropy": "softmax_cross_entropy",
    "sigmoid_cross_entropy": "binary_cross_entropy",
    "rmse": "mean_squared_error",
    "train_loss": "loss",
    "training_loss": "loss",
    "lr": "rate",
    "learning_rate": "rate",
    "weights": "parameters",
    "softmax": "identity",
    "lbfgs": "adam",
    "adamax": "adam",
    "amsgrad": "adam",
    "nadam": "adam",
    "adagrad": "rmsprop",
    "adadelta": "rmsprop",
    "heavy_ball": "momentum",
    "lion": "adamw",
}
