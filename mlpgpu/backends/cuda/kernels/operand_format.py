"""Operand formats: what tensor cores multiply in the place of float32 numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """How tensor cores are given float32 numbers: a struct of gemm/operands.cuh, and how many planes it takes."""

    struct: str
    planes: int
    scaled: bool

    @property
    def is_single(self) -> bool:
        """Whether an element's words follow from the element alone, and are one."""
        return self.planes == 1 and not self.scaled

    @property
    def products(self) -> int:
        """Of planes for each product of numbers."""
        return self.planes * (self.planes + 1) // 2

    @property
    def name(self) -> str:
        """As part of an entry's name."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", self.struct).lower()


HALF_PAIR, HALF = Form("HalfPair", 2, scaled=True), Form("Half", 1, scaled=True)
BFLOAT16, BFLOAT16_PAIR = Form("Bfloat16", 1, scaled=False), Form("Bfloat16Pair", 2, scaled=False)
FORMS = BFLOAT16, BFLOAT16_PAIR, HALF, HALF_PAIR
