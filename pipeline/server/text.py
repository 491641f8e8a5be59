"""Token ids → text, piece by piece: whole characters only, and nothing of a stop string.

ids      12   7    7    90        a character may take several tokens
text     "a"  "a�" "a€" "a€b"     what ends in � is held back: the next token may complete it
pieces   "a"  ""   "€"  "b"

The right text is what the tokenizer decodes from all ids of the reply at once. Special tokens and
ids without a token are left out *before* that decode, so that the space after one in the middle of
a reply stays, and only the space that begins the whole reply is taken by decoders that take one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: What a decoder writes for bytes that are no character, or not yet.
_BROKEN = "\ufffd"
#: Bytes of a character, of which the last is missing at least, that may each be written as one.
_MOST_BROKEN = 3


class TextPieces:
    """The text of one reply as it grows. The pieces together are the text of all ids."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        is_byte: Callable[[int], bool] = lambda token: False,
    ) -> None:
        """`decode` makes text of ids; the reply ends before the first of the strings in `stop`.

        `is_byte`: tokens of one byte each. Decoders read neighbouring ones together, and one wrong
        byte turns all of them into �: their text is certain when another token has ended them.
        """
        self._decode, self._stop, self._is_byte = decode, stop, is_byte
        self._ids: list[int] = []  # those with a text
        # Only a window is decoded again: from a place at which the text was whole, one such place
        # before the last, since decoders treat the beginning of a text in their own way. What lies
        # between the two places has a text, or it would not be the beginning.
        self._start = self._whole = self._sent = 0
        self._held = ""  # may be the beginning of a stop string
        self.matched: str | None = None

    def add(self, token: int) -> str:
        """The text that is certain now. `matched` is set once a stop string is complete."""
        if not self._has_text(token):
            return ""
        self._ids.append(token)
        return "" if self._is_byte(token) else self._without_stop(self._grown())

    def end(self) -> str:
        """All that was held back."""
        rest = "" if self.matched is not None else self._window()[self._sent :]
        text = self._without_stop(rest)
        held, self._held = self._held, ""
        return text if self.matched is not None else text + held

    def _has_text(self, token: int) -> bool:
        """A space that begins a text may vanish; in a row of three some would remain."""
        return bool(self._decode([token]) or self._decode([token] * 3))

    def _window(self) -> str:
        return self._decode(self._ids[self._start :])

    def _grown(self) -> str:
        text = self._window()
        whole = text.rstrip(_BROKEN)
        broken = len(text) - len(whole)
        until = len(text) - min(broken, _MOST_BROKEN)
        piece = text[self._sent : until]
        self._sent = max(self._sent, until)
        if not broken and self._decode(self._ids[self._whole :]):
            self._start, self._whole = self._whole, len(self._ids)
            self._sent = len(self._window())
        return piece

    def _without_stop(self, piece: str) -> str:
        """What can be sent of what was held back and a new piece."""
        text = self._held + piece
        first = min(
            ((text.index(each), each) for each in self._stop if each in text),
            key=lambda match: match[0],
            default=None,
        )
        if first is not None:
            at, self.matched = first
            self._held = ""
            return text[:at]
        begun = max((_begun(text, each) for each in self._stop), default=0)
        self._held = text[len(text) - begun :]
        return text[: len(text) - begun]


def _begun(text: str, stop: str) -> int:
    """Characters at the end of a text with which a stop string begins."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
