"""The probability tables of quantised coefficients: constants of the format, so that no stream carries any.

A row of integers q is coded by one *row id*. Id 0 says that all are zero and codes nothing. Every other id names a
table and a shift s: ``high = (q + half) >> s`` with ``half = (1 << s) >> 1`` is coded as symbol ``high + 7`` where
-7 <= high <= 7, and the low s bits of ``q + half`` are kept as they are. Any other q is symbol 15, an escape, and is
kept as it is.

Tables: two shapes, p(high) ~ exp(-|high| / w) and exp(-(high / w)^2), times 24 widths w a quarter of an octave apart.
Row ids: 1 + 2 * width + shape without shift; then, for each shift from 1 to 8, the eight widths from number 12 on.
Decimal arithmetic is correctly rounded everywhere, so all machines make the same tables.
"""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

BITS = 10
SYMBOLS = 16
ESCAPE = 15
REACH = 7  # |high| of the widest symbol
WIDTHS, SHAPES = 24, 2
SHIFTS, FIRST_SHIFTED, SHIFTED_WIDTHS = 8, 12, 8
MIDDLE = 20  # a row id of middling width, for encoders that expect none
IDS = 1 + SHAPES * WIDTHS + SHIFTS * SHAPES * SHIFTED_WIDTHS

_OCTAVE = (1_000_000, 1_189_207, 1_414_214, 1_681_793)  # 2^(i / 4), in millionths
_NARROWEST = Decimal("0.12")
_LEAST = Decimal("0.35")  # of a slot: less probable symbols are escapes


def _table(shape: int, width: Decimal) -> list[int]:
    with localcontext() as exact:
        exact.prec = 40
        mass = [(-((Decimal(high) / width) ** (shape + 1))).exp() for high in range(64)]
        total = mass[0] + 2 * sum(mass[1:], Decimal(0))
        share = [each / total * (1 << BITS) for each in mass]
        side = [
            max(1, int(each.to_integral_value(ROUND_HALF_EVEN))) if each >= _LEAST else 0
            for each in share[1 : REACH + 1]
        ]
        escape = max(1, int((2 * sum(share[REACH + 1 :], Decimal(0))).to_integral_value(ROUND_HALF_EVEN)))
    return [*side[::-1], (1 << BITS) - 2 * sum(side) - escape, *side, escape]


def _tables() -> NDArray[np.uint16]:
    widths = [_NARROWEST * _OCTAVE[i % 4] * (1 << i // 4) / 1_000_000 for i in range(WIDTHS)]
    made = np.array([_table(shape, width) for width in widths for shape in range(SHAPES)], np.uint16)
    made.setflags(write=False)
    return made


def _row_ids() -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    plain = np.arange(SHAPES * WIDTHS)
    first = SHAPES * FIRST_SHIFTED
    shifted = np.tile(np.arange(first, first + SHAPES * SHIFTED_WIDTHS), SHIFTS)
    table = np.concatenate([[0], plain, shifted]).astype(np.uint16)
    shift = np.concatenate([np.zeros(1 + len(plain)), np.repeat(np.arange(1, SHIFTS + 1), SHAPES * SHIFTED_WIDTHS)])
    return table, shift.astype(np.uint8)


FREQS = _tables()  # uint16 [48, 16]; each row sums to 1024
TABLE, SHIFT = _row_ids()  # of each row id: the row of FREQS (0 for id 0, unused), and the shift


def _costs() -> NDArray[np.float32]:
    bits = BITS - np.log2(np.maximum(FREQS, 1).astype(np.float64))
    bits[:, ESCAPE] += 16
    out = np.where(FREQS > 0, bits, bits[:, ESCAPE:])[TABLE]
    out[:, :ESCAPE] += SHIFT[:, None]
    return out.astype(np.float32)


COSTS = _costs()  # bits of each symbol under each row id, with what is kept beside it; for encoders only
