"""Tokenizer of models that read one letter a token: proteins, text by characters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LetterTokenizer:
    """Letters to tokens and back, "_" for the mask token. What `HuggingFaceModel` asks of a tokenizer, and no more.

    Args:
        letters: whose tokens follow each other.
        first: token of the first letter; those below it are special.
        mask: token of an unknown letter.
        pad: token of padding.
        start: token before a text, if the model wants one.
        end: token after it.

    Example:
        >>> letters = LetterTokenizer("ACD", first=4, mask=7, pad=1, start=0, end=2)
        >>> letters.encode(["AC_"])
        tensor([[0, 4, 5, 7, 2]])
        >>> letters.decode(letters.encode(["AC_", "D"]))
        ['AC_', 'D']
    """

    def __init__(
        self, letters: str, *, first: int, mask: int, pad: int, start: int | None = None, end: int | None = None
    ) -> None:
        self.letters, self.first = letters, first
        self.before = [] if start is None else [start]
        self.after = [] if end is None else [end]
        self.mask_token_id, self.pad_token_id = mask, pad
        self.all_special_ids = sorted({*range(first), mask})
        self._token = {letter: first + number for number, letter in enumerate(letters)} | {"_": mask}
        self._letter = {token: letter for letter, token in self._token.items()}

    def __len__(self) -> int:
        return max(self._letter) + 1

    def get_vocab(self) -> dict[str, int]:
        """Letter to token, without the special tokens that no letter stands for."""
        return dict(self._token)

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Tokens [B, N] int64 of texts, shorter ones padded on the right.

        Raises:
            ValueError: for a text that is empty or holds anything else than the letters and "_".
        """
        rows = []
        for number, text in enumerate(texts):
            foreign = next((letter for letter in text if letter not in self._token), None)
            if foreign is not None or not text:
                got = "nothing" if foreign is None else repr(foreign)
                raise ValueError(f"encode: text {number} must consist of {self.letters!r} and '_', got {got}")
            rows.append([*self.before, *(self._token[letter] for letter in text), *self.after])
        width = max(map(len, rows), default=0)
        return torch.tensor([row + [self.pad_token_id] * (width - len(row)) for row in rows], dtype=torch.int64)

    def decode(self, tokens: Tensor) -> list[str]:
        """The texts of tokens [B, N]: "_" for the mask token, nothing for what is no letter."""
        return ["".join(self._letter.get(token, "") for token in row) for row in tokens.tolist()]
