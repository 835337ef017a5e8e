"""The text of an answer while it is written, of which only the newest tokens are decoded."""

import os
from collections.abc import Sequence

from peagle_jax.decode.requests import Request
from peagle_jax.decode.stop_strings import Detokenizer, StopString, find_stop, first_line

HALF_CHARACTER = "\ufffd"  # what a tokenizer decodes bytes to that are no character yet


class UndecodableError(Exception):
    """A tokenizer cannot decode its own tokens."""


class TextStream:
    """Text that grows with its tokens. Of these only the newest are decoded.

    What a token spells may depend on the tokens just before it, as a leading space or the bytes of
    one character do. So the tokens of one addition are decoded behind those of the one before, and
    the end of a text within a character is left out until the rest has come. (With SentencePiece's
    bytes a byte that fits no character also changes those before it, which are in `text` already.)

    Attributes:
      text: of the tokens so far, as far as later ones do not change it.
      num_tokens: of which `text` has all.
    """

    def __init__(self, tokenizer: Detokenizer) -> None:
        self.text, self.num_tokens = "", 0
        self._tokenizer = tokenizer
        self._recent: list[int] = []  # tokens that are decoded at the next addition
        self._num_old = 0  # of these, which are there for those behind them
        self._seen = ""  # what of their text `text` has
        self._num_added = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Takes the next tokens."""
        self._recent += token_ids
        self._num_added += len(token_ids)
        whole = self._decode(self._recent)
        stable = whole.rstrip(HALF_CHARACTER)
        new = stable[len(os.path.commonprefix([self._seen, stable])) :]
        if new:
            self.text, self._seen = self.text + new, stable
        if stable != whole:
            return
        self.num_tokens = self._num_added
        if new:
            self._recent = self._recent[self._num_old :]
            self._num_old = len(self._recent)
            self._seen = self._decode(self._recent)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


class AnswerText:
    """The text of one answer, with the strings that end it.

    Attributes:
      text: the whole text of an answer that is done; None before.
    """

    def __init__(self, tokenizer: Detokenizer, request: Request) -> None:
        self.text: str | None = None
        self._tokenizer, self._stop = tokenizer, request.stop_strings
        self._min_tokens = request.min_tokens
        self._longest = max(map(len, self._stop), default=1)
        self._stream = TextStream(tokenizer)
        self._num_seen = 0  # tokens of the answer
        self._num_searched = 0  # characters
        self._num_checked = 0  # tokens whose text was searched
        self._num_shown = 0  # characters that `news` gave

    def read(self, token_ids: Sequence[int], is_done: bool) -> StopString | None:
        """Decodes the answer so far, which begins with what earlier calls had.

        Args:
          is_done: whether the answer ends here in any case.

        Returns:
          The string that ends it, if its text has one.

        Raises:
          UndecodableError: the tokenizer raises, or panics.
        """
        try:
            return self._read(list(token_ids), is_done)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library tokenizers is no Exception
            raise UndecodableError(f"the tokenizer cannot decode: {first_line(error)}") from error

    def _read(self, token_ids: list[int], is_done: bool) -> StopString | None:
        num_seen, self._num_seen = self._num_seen, len(token_ids)
        self._stream.add(token_ids[num_seen:])
        begin = max(self._num_searched - self._longest + 1, 0)
        is_likely = any(self._stream.text.find(string, begin) >= 0 for string in self._stop)
        self._num_searched = len(self._stream.text)
        found = None
        if self._stop and (is_likely or is_done):  # the text so far may lack the last tokens
            limits = self._num_checked, self._min_tokens
            found = find_stop(self._tokenizer, token_ids, self._stop, *limits)
        self._num_checked = self._stream.num_tokens
        if found is not None:
            self.text = found.text
        elif is_done:
            self.text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return found

    def news(self) -> str:
        """Text that no earlier call gave, as far as later tokens cannot change it.

        The beginning of a stop string is not part of the answer if the rest follows, so that the
        last characters are held back until the answer is done.
        """
        text = self.text
        if text is None:
            text = self._stream.text[: max(len(self._stream.text) - self._longest + 1, 0)]
        new, self._num_shown = text[self._num_shown :], max(self._num_shown, len(text))
        return new
