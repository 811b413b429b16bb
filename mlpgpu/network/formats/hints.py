"""What a caller says of a network whose file does not say it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...activations import ACTIVATIONS
from ...errors import ConfigurationError, DtypeError, lookup
from ...losses import OUTPUTS, OutputName
from .steps import Activation, Output


@dataclass(frozen=True)
class Hints:
    """Functions that are in no file of weights alone.

    Attributes:
        activation: that of all layers but the last, or one for each layer; None if nobody said.
        output: what makes predictions of logits; None if nobody said, which is ``"identity"``.
    """

    activation: str | Sequence[str] | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        if self.output is not None:
            object.__setattr__(self, "output", lookup("output", self.output, OUTPUTS))
        if self.activation is None:
            return
        if isinstance(self.activation, str):
            known: str | tuple[str, ...] = lookup("activation", self.activation, ACTIVATIONS)
        elif isinstance(self.activation, Sequence):
            known = tuple(lookup("activation", name, ACTIVATIONS) for name in self.activation)
        else:
            expected = "a name, or a list of one for each layer"
            raise DtypeError("activation", expected=expected, got=type(self.activation).__name__)
        object.__setattr__(self, "activation", known)

    def refuse(self, what: str) -> None:
        """Raise ConfigurationError if something is said of a file that says it itself."""
        if self.activation is not None or self.output is not None:
            got = f"activation={self.activation!r}, output={self.output!r}"
            expected = "no activation= and no output=, which the file has"
            raise ConfigurationError(f"load of {what}", expected=expected, got=got)

    def functions(self, what: str, count: int) -> list[list[Activation]]:
        """What follows each of ``count`` weighted layers.

        Raises:
            ConfigurationError: nobody said it, or it is said of another number of layers.
        """
        if self.activation is None:
            if count > 1:
                hint = 'mlpgpu.load(path, activation="relu"), or a list of one for each layer'
                expected = f"activation= for {count} layers, which the file does not have"
                raise ConfigurationError(f"load of {what}", expected=expected, got="none", hint=hint)
            names = ["identity"] * count
        elif isinstance(self.activation, str):
            names = [self.activation] * (count - 1) + ["identity"]
        else:
            names = list(self.activation)
        if len(names) != count:
            expected = f"{count} of them, one for each layer"
            raise ConfigurationError("activation", expected=expected, got=f"{len(names)}: {names}")
        return [[] if name == "identity" else [Activation(name)] for name in names]

    def outputs(self) -> list[Output]:
        """The last function, if there is one."""
        output: OutputName = lookup("output", self.output or "identity", OUTPUTS)
        return [] if output == "identity" else [Output(output)]
