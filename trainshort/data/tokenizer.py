"""Tokenizers: bytes, a BPE on bytes, or any tokenizer.json of the package tokenizers, behind one small interface.

Ours are saved as tokenizer.json files that the package reads too, so a model folder needs no code of ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from trainshort.common.extras import needed
from trainshort.common.files import write_text
from trainshort.common.messages import did_you_mean
from trainshort.common.reading import parse_json
from trainshort.common.tokenizer_json import END, END_NAMES, package_errors, parse_tokenizer, read_tokenizer_text

LONGEST_WORD = 256  # characters, of a BPE that is trained here
_SOME = f"{{1,{LONGEST_WORD}}}"
# As GPT-2 has it: letters, digits or other signs with at most one space before them, or white space; but never long.
WORDS = (
    rf"'(?:[sdmt]|ll|ve|re)| ?\p{{L}}{_SOME}| ?\p{{N}}{_SOME}| ?[^\s\p{{L}}\p{{N}}]{_SOME}"
    rf"|\s{_SOME}(?!\S)|\s{_SOME}"
)
PROBES = ("Hello  world,\n\n\tit's 2024 \u00e9\u4e2d\U0001f642 x", "  a\r\n\x00\x1f\u00a0\u2028b ", "= 0.1 = \n")


class Tokenizer(Protocol):
    """What the rest of the package knows of a tokenizer."""

    vocab_size: int
    end_id: int | None  # ends a document; None where a tokenizer.json has no token of a known name

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def token_bytes(self) -> list[bytes] | None:
        """The bytes of each token, where texts are the bytes of their tokens; None where they are not."""

    def to_str(self) -> str: ...

    def save(self, path: str | Path) -> None: ...


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level tokenizers: printable ones for themselves."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


class ByteTokenizer:
    """Token b is byte b, and 256 ends a document. Needs no package."""

    vocab_size = 257
    end_id: int | None = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(each for each in map(int, ids) if each < 256).decode("utf-8", errors="replace")

    def token_bytes(self) -> list[bytes] | None:
        return [*(bytes([byte]) for byte in range(256)), b""]

    def to_dict(self) -> dict[str, Any]:
        """What the package tokenizers would have written: a byte-level BPE without merges."""
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        end = {"id": 256, "content": END, "special": True, "normalized": False}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{**end, "single_word": False, "lstrip": False, "rstrip": False}],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {character: byte for byte, character in enumerate(byte_alphabet())},
                "merges": [],
            },
        }

    def to_str(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    def save(self, path: str | Path) -> None:
        write_text(Path(path), self.to_str())


class FileTokenizer:
    """A tokenizer of the package tokenizers. Text that looks like a special token is text all the same."""

    def __init__(self, text: str, *, where: str = "tokenizer.json", end_token: str | None = None) -> None:
        self.backend = parse_tokenizer(text, where)
        self._text, self.where = text, where
        self.backend.encode_special_tokens = True
        self._ids = self.backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._ids.values(), default=0) + 1
        if end_token is not None and end_token not in self._ids:
            raise ValueError(
                f"{where} has no token {end_token!r} to end documents with{did_you_mean(end_token, self._ids)}"
            )
        names = END_NAMES if end_token is None else (end_token,)
        self.end_id: int | None = next((self._ids[name] for name in names if name in self._ids), None)

    def encode(self, text: str) -> list[int]:
        with package_errors(self.where, "this tokenizer fails on a text"):
            return list(self.backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        kept = [each for each in map(int, ids) if each != self.end_id]
        with package_errors(self.where, "this tokenizer fails on tokens"):
            return str(self.backend.decode(kept, skip_special_tokens=False))

    def token_bytes(self) -> list[bytes] | None:
        place = {character: byte for byte, character in enumerate(byte_alphabet())}
        table = [b""] * self.vocab_size
        added = {each.content for each in self.backend.get_added_tokens_decoder().values()}
        for token, index in self._ids.items():
            if index == self.end_id:
                continue
            if token not in added and all(character in place for character in token):
                table[index] = bytes(place[character] for character in token)
            else:
                table[index] = token.encode("utf-8")
        probes = (b"".join(table[index] for index in self.encode(probe)) == probe.encode() for probe in PROBES)
        return table if all(probes) else None

    def to_str(self) -> str:
        return self._text

    def save(self, path: str | Path) -> None:
        write_text(Path(path), self._text)


def load_tokenizer(path: str | Path, *, end_token: str | None = None) -> Tokenizer:
    """The tokenizer in a tokenizer.json, or in the folder that holds one."""
    path = Path(path)
    path = path / "tokenizer.json" if path.is_dir() else path
    return tokenizer_from_text(read_tokenizer_text(path), where=str(path), end_token=end_token)


def tokenizer_from_text(text: str, *, where: str = "tokenizer.json", end_token: str | None = None) -> Tokenizer:
    if len(text) < 2**16 and end_token in (None, END):  # larger ones are never that of bytes
        try:
            values = parse_json(text)
        except ValueError as error:
            raise ValueError(f"{where}: not valid JSON ({error}); a tokenizer is a tokenizer.json") from None
        if values == ByteTokenizer().to_dict():
            return ByteTokenizer()
    return FileTokenizer(text, where=where, end_token=end_token)


def train_bpe(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE: every text round-trips. Uses all cores.

    Words of more than LONGEST_WORD characters are cut, here and, since its file says so, wherever the tokenizer is
    used: the time of training grows with the square of the longest word.
    """
    with needed("tokenizers", by="training a BPE"):
        from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as Backend
    backend = Backend(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return FileTokenizer(backend.to_str(pretty=True))
