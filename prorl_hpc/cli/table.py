"""Plain-text tables for terminals. Knows strings only."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns padded to their widest cell; numbers to the right."""
    cells = [[_text(cell) for cell in row] for row in rows]
    widths = [max([len(title), *(len(row[i]) for row in cells)]) for i, title in enumerate(header)]
    right = [
        bool(rows) and all(isinstance(row[i], int | float) or row[i] is None for row in rows)
        for i in range(len(header))
    ]

    def line(parts: Sequence[str]) -> str:
        padded = [
            part.rjust(width) if flush else part.ljust(width)
            for part, width, flush in zip(parts, widths, right, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(list(header)), line(["-" * w for w in widths]), *map(line, cells)])


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.4g}" if abs(cell) < 1e5 else f"{cell:.0f}"
    return str(cell)
