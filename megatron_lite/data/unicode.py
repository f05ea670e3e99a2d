"""Text that is in Unicode's normal form C by every version of its tables.

A later version gives characters to code points that had none, combining marks among them, and puts those in another
order; what has its characters stays as it is. So text is safe when Python's table knows every character of it and finds
it normalised.
"""

from __future__ import annotations

import unicodedata
from functools import cache

import numpy as np

MARKS = 0x300  # the first combining mark; below it every character stands for itself
HANGUL = range(0x1100, 0x1200)  # letters that compose to syllables by rule and not by table
END = 0x32000  # of the planes with text; what lies beyond is taken for unknown


def is_settled(text: str, raw: bytes) -> bool:
    """Whether no version would change `text`, whose UTF-8 is `raw`."""
    if text.isascii():
        return True
    known, alone = tables()
    octets = np.frombuffer(raw, dtype=np.uint8)
    others = octets[octets >= 0x80].tobytes()  # the characters beyond ASCII, still whole
    points = np.minimum(np.frombuffer(others.decode().encode("utf-32-le"), dtype="<u4"), END)
    if alone[points].all():
        return True
    return bool(known[points].all()) and unicodedata.is_normalized("NFC", text)


@cache
def tables() -> tuple[np.ndarray, np.ndarray]:
    """By code point: is it in Python's table; does it never change, whatever stands before it."""
    known = np.array([unicodedata.category(chr(c)) != "Cn" for c in range(END)] + [False])
    alone = known.copy()
    for c in range(MARKS, END):
        character = chr(c)
        if unicodedata.combining(character) or not unicodedata.is_normalized("NFC", character):
            alone[c] = False
        decomposed = unicodedata.decomposition(character)
        if decomposed and not decomposed.startswith("<"):
            alone[int(decomposed.split()[-1], 16)] = False  # the second half of a pair that may compose
    alone[HANGUL.start : HANGUL.stop] = False
    return known, alone
