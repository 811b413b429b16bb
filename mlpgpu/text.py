"""Tables as text."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from html import escape


def tell(message: str) -> None:
    """Say something that is no error on standard error."""
    print(f"mlpgpu: {message}", file=sys.stderr)


def public_names(owner: object, internal: Collection[str] = ()) -> list[str]:
    """What Tab is to show of an object: no name with an underscore, and none of those that only the package uses."""
    return [name for name in object.__dir__(owner) if not name.startswith("_") and name not in internal]


def html(rows: Sequence[Sequence[str]], alignment: str, title: str) -> str:
    """The table of :func:`table` as HTML, with the heads that the first row has, under a title."""
    sides = ["left" if side == "<" else "right" for side in alignment]

    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f'<{tag} style="text-align: {side}">{escape(cell)}</{tag}>' for cell, side in zip(cells, sides, strict=True)
        )

    head, *body = rows
    lines = [f"<tr>{row(head, 'th')}</tr>", *(f"<tr>{row(cells, 'td')}</tr>" for cells in body)]
    return f"<table><caption>{escape(title)}</caption>{''.join(lines)}</table>"


def table(rows: Sequence[Sequence[str]], alignment: str) -> str:
    """Rows of cells as lines with columns two spaces apart; ``alignment`` has ``<`` or ``>`` for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"{{:{side}{width}}}" for side, width in zip(alignment, widths, strict=True)]
    return "\n".join("  ".join(map(str.format, formats, row)).rstrip() for row in rows)
