"""Text of a growing token sequence, for streaming and stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase


class TokenText:
    """Text of a growing token sequence: what is final so far, cut before the first stop string.

    Held back are incomplete characters and endings that may yet become a stop string, so that a stop string is found
    across token borders and no part of it is ever sent. Special tokens leave no text, but those in `shown` do.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), shown: Collection[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._hidden: set[int] | None = None  # None: the tokenizer leaves out special tokens itself
        if shown:
            added = tokenizer.added_tokens_decoder
            self._hidden = {token for token in added if added[token].special and token not in shown}
        self._ids: list[int] = []
        self._sent = 0

    def push(self, token: int) -> tuple[str, bool]:
        """Text that became final with `token`, and whether a stop string was reached."""
        if self._hidden is None or token not in self._hidden:
            self._ids.append(token)
        text = self._decode()
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            return self._take(text, min(found)), True
        end = len(text.rstrip("\ufffd"))
        held = (size for stop in self._stop for size in range(1, len(stop)) if text.endswith(stop[:size], 0, end))
        end -= max(held, default=0)
        return self._take(text, end), False

    def flush(self) -> str:
        """The held-back rest."""
        text = self._decode()
        return self._take(text, len(text))

    def _take(self, text: str, end: int) -> str:
        part = text[self._sent : end]
        self._sent = max(self._sent, end)
        return part

    def _decode(self) -> str:
        skip = self._hidden is None
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))
