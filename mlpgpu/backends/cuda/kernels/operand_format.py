"""Operand formats: what tensor cores multiply in the place of float32 numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class OperandFormat:
    """How tensor cores are given float32 numbers.

    Attributes:
        struct: of gemm/operand_formats.cuh.
        components: 16-bit numbers that stand for one of float32: hi, hi and lo, or three.
        scaled: whether rows or columns have scales.
    """

    struct: str
    components: int
    scaled: bool

    @property
    def is_single(self) -> bool:
        """Whether one 16-bit number, which follows from the element alone, stands for an element."""
        return self.components == 1 and not self.scaled

    @property
    def products(self) -> int:
        """Products of components that stand for one product of float32 numbers."""
        return self.components * (self.components + 1) // 2

    @property
    def name(self) -> str:
        """The format as part of an entry's name."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", self.struct).lower()

    @property
    def contents(self) -> str:
        """What stands for a number of float32, in words."""
        number = "float16" if self.struct.startswith("Half") else "bfloat16"
        count = {1: f"one {number}", 2: f"two {number} (hi and lo)", 3: f"three {number}"}[self.components]
        return f"{count} with row and column scales" if self.scaled else count


HALF_PAIR, HALF = OperandFormat("HalfPair", 2, scaled=True), OperandFormat("Half", 1, scaled=True)
BFLOAT16, BFLOAT16_PAIR = OperandFormat("Bfloat16", 1, scaled=False), OperandFormat("Bfloat16Pair", 2, scaled=False)
BFLOAT16_TRIPLE = OperandFormat("Bfloat16Triple", 3, scaled=False)
OPERAND_FORMATS = BFLOAT16, BFLOAT16_PAIR, BFLOAT16_TRIPLE, HALF, HALF_PAIR
