"""Names from data as text that a terminal or a picture can show."""

from __future__ import annotations

import unicodedata

HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # control, formatting (also from right to left), bytes that are no text, breaks


def printable(text: str, *, lines: bool = False) -> str:
    """Return the text with every character escaped that a terminal would not show but obey.

    lines: keep line breaks, as in a message of several lines; a name never has any.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if unicodedata.category(character) not in HIDDEN or (lines and character == "\n")
        else character.encode("unicode_escape", "backslashreplace").decode()
        for character in text
    )
