"""A curve drawn with braille dots: two by four to a character, so a loss curve fits into a few lines of a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_BLANK = 0x2800
# Bit of the dot in column c (0, 1) and row r (0 at the top) of one braille character, as Unicode defines them.
_DOT = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def curve(
    points: Sequence[tuple[float, float]], marks: Sequence[float] = (), *, width: int = 64, height: int = 10
) -> list[str]:
    """Draw points, x ascending, with an axis at the left and below.

    Args:
        points: (x, y) pairs, at least one.
        marks: x positions to mark with a vertical line and a cross.
        width: characters of the plot without its axis.
        height: lines of the plot without its axis.

    Returns:
        Lines of text without trailing blanks.
    """
    low_x, high_x = points[0][0], max(points[-1][0], *marks, points[0][0] + 1) if marks else points[-1][0]
    low_y, high_y = min(y for _, y in points), max(y for _, y in points)
    cells = _dots(points, (low_x, high_x), (low_y, high_y), width, height)
    columns = {round(_scaled(mark, low_x, high_x) * (2 * width - 1)) // 2 for mark in marks}
    lines = []
    for row in range(height):
        label = high_y if row == 0 else low_y if row == height - 1 else None
        text = "".join(
            chr(_BLANK + cells[row][column]) if cells[row][column] else ("╎" if column in columns else " ")
            for column in range(width)
        )
        lines.append(f"{'' if label is None else f'{label:.3g}':>7} │{text}".rstrip())
    lines.append(f"{'':>7} └{''.join('✗' if column in columns else '─' for column in range(width))}")
    ends = f"{low_x:,.0f}", f"{high_x:,.0f}"
    lines.append(f"{'':>9}{ends[0]}{ends[1]:>{max(1, width - len(ends[0]))}}")
    return lines


def _dots(
    points: Sequence[tuple[float, float]],
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    width: int,
    height: int,
) -> list[list[int]]:
    """Bits of each character: the points, joined by straight lines."""
    cells = [[0] * width for _ in range(height)]
    at = [(_scaled(x, *x_range) * (2 * width - 1), (1 - _scaled(y, *y_range)) * (4 * height - 1)) for x, y in points]
    for (from_x, from_y), (to_x, to_y) in zip(at, [*at[1:], at[-1]], strict=True):
        pieces = max(1, round(max(abs(to_x - from_x), abs(to_y - from_y))))
        for piece in range(pieces + 1):
            share = piece / pieces
            column, row = round(from_x + share * (to_x - from_x)), round(from_y + share * (to_y - from_y))
            cells[row // 4][column // 2] |= _DOT[column % 2][row % 4]
    return cells


def _scaled(value: float, low: float, high: float) -> float:
    return 0.0 if high <= low else min(1.0, max(0.0, (value - low) / (high - low)))
