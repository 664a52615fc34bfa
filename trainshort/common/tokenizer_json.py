"""A tokenizer.json, read by the package tokenizers within limits: what it may not do is end the program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainshort.common.extras import is_installed, needed, require
from trainshort.common.messages import shown
from trainshort.common.reading import read_text

END = "<|endoftext|>"  # the token that ends a document, in tokenizers that are made here; others call theirs
END_NAMES = (END, "</s>", "<eos>", "<|end_of_text|>", "<|eos|>", "<|endofdoc|>", "[EOS]", "[SEP]", "<EOS>")
LARGEST = 256 * 2**20  # bytes of the file
LARGEST_PADDING = 2**20  # tokens
SPARE_IDS = 2**16  # that no token has, beside four for each token


class UnreadTokenizer:
    """Takes the place of a tokenizer where the package tokenizers is not installed, so that its model can be loaded.

    It can be saved again. Whatever else is asked of it is answered with what to install.
    """

    def __init__(self, text: str, where: str) -> None:
        self._text, self._where = text, where

    def to_str(self) -> str:
        return self._text

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copying and pickling look for
            raise AttributeError(name)
        require(["tokenizers"], by=self._where)
        raise AttributeError(
            f"{self._where} was read while the package tokenizers was not installed: load the model again"
        )


def read_tokenizer(path: Path) -> Any:
    """The tokenizer in a file, as the package has it; without the package, an UnreadTokenizer."""
    text = read_tokenizer_text(path)
    return parse_tokenizer(text, str(path)) if is_installed("tokenizers") else UnreadTokenizer(text, str(path))


def read_tokenizer_text(path: Path) -> str:
    if not path.exists() and path.with_name("tokenizer.model").exists():
        raise FileNotFoundError(
            f"{path}: no such file; the folder has a SentencePiece tokenizer.model only, which is not read: make a "
            "tokenizer.json of it, with save_pretrained of a fast tokenizer of transformers"
        )
    return read_text(path, "a tokenizer is a tokenizer.json or a folder with one", largest=LARGEST)


def parse_tokenizer(text: str, where: str) -> Any:
    """The tokenizer in a text, as the package has it; `where` names the text in errors.

    Lengths that it was saved with to cut texts to, or to pad them, are those of some training run: they are left out.
    """
    with needed("tokenizers", by=where):
        from tokenizers import Tokenizer
    with package_errors(where, "not a tokenizer of the package tokenizers"):
        backend = Tokenizer.from_str(text)
        ids = backend.get_vocab(with_added_tokens=True)
        padding = backend.padding or {}
    highest = max(ids.values(), default=0)
    if highest >= 4 * len(ids) + SPARE_IDS:
        raise ValueError(
            f"{where}: has {len(ids):,} tokens, and gives one of them the number {highest:,}: a model would need as "
            "many rows; number the tokens from 0 on"
        )
    for name in ("length", "pad_to_multiple_of"):
        if (padding.get(name) or 0) > LARGEST_PADDING:
            raise ValueError(
                f"{where}: pads texts to {padding[name]:,} tokens; at most {LARGEST_PADDING:,} are allowed"
            )
    backend.no_truncation()
    backend.no_padding()
    return backend


@contextmanager
def package_errors(where: str, problem: str) -> Iterator[None]:
    """What goes wrong in the package as a ValueError: bare Exceptions, and panics, which are not even those."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{where}: {problem} ({shown(' '.join(str(error).split()))})") from error
        raise
