"""Operand formats: what tensor cores multiply in the place of float32 numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class OperandFormat:
    """How tensor cores are given float32 numbers.

    Attributes:
        struct: of gemm/operand_formats.cuh.
        components: 16-bit numbers that stand for one of float32: hi, or hi and lo.
        scaled: whether rows or columns have scales.
    """

    struct: str
    components: int
    scaled: bool

    @property
    def is_single(self) -> bool:
        """Whether an element's words follow from the element alone, and are one."""
        return self.components == 1 and not self.scaled

    @property
    def products(self) -> int:
        """Of components for each product of numbers."""
        return self.components * (self.components + 1) // 2

    @property
    def name(self) -> str:
        """As part of an entry's name."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", self.struct).lower()


HALF_PAIR, HALF = OperandFormat("HalfPair", 2, scaled=True), OperandFormat("Half", 1, scaled=True)
BFLOAT16, BFLOAT16_PAIR = OperandFormat("Bfloat16", 1, scaled=False), OperandFormat("Bfloat16Pair", 2, scaled=False)
OPERAND_FORMATS = BFLOAT16, BFLOAT16_PAIR, HALF, HALF_PAIR
