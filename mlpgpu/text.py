"""Tables as text."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def tell(message: str) -> None:
    """Say something that is no error on standard error."""
    print(f"mlpgpu: {message}", file=sys.stderr)


def table(rows: Sequence[Sequence[str]], alignment: str) -> str:
    """Rows of cells as lines with columns two spaces apart; ``alignment`` has ``<`` or ``>`` for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"{{:{side}{width}}}" for side, width in zip(alignment, widths, strict=True)]
    return "\n".join("  ".join(map(str.format, formats, row)).rstrip() for row in rows)
