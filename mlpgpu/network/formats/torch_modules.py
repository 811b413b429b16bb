"""PyTorch modules of what ``torch.nn`` lacks.  Only :mod:`.torch_model` imports this, where PyTorch is asked for."""

from __future__ import annotations

import torch


class Rescale(torch.nn.Module):  # type: ignore[misc]
    """Bytes times ``factor``, in the precision of the modules that follow."""

    factor: torch.Tensor

    def __init__(self, factor: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor, dtype=dtype), persistent=False)  # follows .double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (rows, n) of bytes, or of numbers that bytes have become."""
        return x.to(self.factor.dtype) * self.factor


class Standardize(torch.nn.Module):  # type: ignore[misc]
    """``(x - mean) / scale``, or where it ``is_inverse`` ``x · scale + mean``; buffers (n,)."""

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, n: int, is_inverse: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.is_inverse = is_inverse
        self.register_buffer("mean", torch.zeros(n, dtype=dtype))
        self.register_buffer("scale", torch.ones(n, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (rows, n)."""
        return x * self.scale + self.mean if self.is_inverse else (x - self.mean) / self.scale

    def extra_repr(self) -> str:
        return f"{len(self.mean)}, is_inverse={self.is_inverse}"


class LocallyConnected(torch.nn.Module):  # type: ignore[misc]
    """``y_i = b_i + Σ_r w[r, i] · x_{i + r}``, by as many columns of the values as x has: w (window, most)."""

    def __init__(self, window: int, most: int, biases: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(window, most, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(biases, dtype=dtype)) if biases else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (rows, n_out + window - 1) → (rows, n_out)."""
        window = self.weight.shape[0]
        n_out = x.shape[1] - window + 1
        y = (x.unfold(1, window, 1) * self.weight[:, :n_out].T).sum(dim=2)
        return y if self.bias is None else y + self.bias[:n_out]

    def extra_repr(self) -> str:
        return f"window={self.weight.shape[0]}, most={self.weight.shape[1]}"


class Exp(torch.nn.Module):  # type: ignore[misc]
    """exp(x)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x of any shape."""
        return torch.exp(x)
