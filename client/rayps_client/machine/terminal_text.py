r"""Text from elsewhere on a user's terminal: control characters are shown, such as ESC as \x1b, and not obeyed.

Without this, such a text could move the cursor of the terminal, set its title, write to its clipboard or change its
reading order.
"""

from __future__ import annotations

CONTROL_CODES = frozenset((*range(32), *range(127, 160)))  # the control characters of Unicode
_ORDER_CODES = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))  # change the reading order
_SHOWN = {code: f"\\x{code:02x}" for code in CONTROL_CODES if chr(code) not in "\t\n"} | {
    code: f"\\u{code:04x}" for code in _ORDER_CODES
}


def plain(text: str) -> str:
    r"""Replace control characters by visible text, such as ESC by \x1b; tabs and line ends stay."""
    return text.translate(_SHOWN)


def has_controls(text: str) -> bool:
    """Return whether a text has a control character; tabs and line ends are such characters too."""
    return any(ord(each) in CONTROL_CODES for each in text)
