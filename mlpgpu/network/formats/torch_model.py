"""A network as a PyTorch ``Sequential``, with one module for each step."""

from __future__ import annotations

from typing import Any

from ...activations import LEAKY_SLOPE
from ..saved import SavedNetwork
from .limits import missing_package
from .state_dict import state_dict
from .steps import Dropout, Linear, Local, Rescale, Standardize, steps_of

SOFTPLUS_LINEAR_FROM = 40.0  # where log(1 + exp(z)) is z in float64; PyTorch's own 20 is for float32


def sequential_of(network: SavedNetwork) -> Any:
    """A ``torch.nn.Sequential`` in eval mode that predicts what the network does; its values are copies.

    Raises:
        BackendError: PyTorch is missing.
    """
    try:
        import torch

        from . import torch_modules
    except ImportError as error:
        raise missing_package("to_torch", "torch", error) from error

    nn = torch.nn
    functions = {
        "sigmoid": nn.Sigmoid,
        "tanh": nn.Tanh,
        "relu": nn.ReLU,
        "leaky_relu": lambda: nn.LeakyReLU(LEAKY_SLOPE),
        "elu": nn.ELU,
        "softplus": lambda: nn.Softplus(threshold=SOFTPLUS_LINEAR_FROM),
        "gelu": nn.GELU,
        "silu": nn.SiLU,
        "softmax": lambda: nn.Softmax(dim=1),
        "exp": torch_modules.Exp,
    }
    dtype = getattr(torch, network.parameters.dtype.name)
    named = network.named()
    steps = list(steps_of(network))
    modules: list[Any] = []
    shared: dict[int, Any] = {}
    for step in steps:
        if isinstance(step, Rescale):
            modules.append(torch_modules.Rescale(step.factor, dtype))
        elif isinstance(step, Standardize):
            modules.append(torch_modules.Standardize(len(named[f"{step.place}.mean"]), step.is_inverse, dtype))
        elif isinstance(step, Linear):
            if step.place not in shared:
                weight, bias = named[f"{step.place}.weight"], named.get(f"{step.place}.bias")
                if isinstance(step, Local):
                    biases = 0 if bias is None else len(bias)
                    window, most = weight.shape
                    module: Any = torch_modules.LocallyConnected(window, most, biases, dtype)
                else:  # no initial values are drawn: PyTorch's generator stays where it is
                    module = nn.utils.skip_init(nn.Linear, step.n_in, step.n_out, step.has_bias, dtype=dtype)
                shared[step.place] = module.requires_grad_(step.trainable)
            modules.append(shared[step.place])
        elif isinstance(step, Dropout):
            modules.append(nn.Dropout(step.rate))
        else:
            modules.append(functions[step.name]())
    model = nn.Sequential(*modules)
    model.load_state_dict({name: torch.tensor(values.copy()) for name, values in state_dict(steps, named).items()})
    return model.eval()
