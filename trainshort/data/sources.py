"""Where text comes from: files, folders, jsonl, parquet, gzip and xz, hf: names, and Python's own library.

Everything is streamed. A document comes in parts of about a megabyte, so that one of any size fits in memory; all but
very long documents are one part. Parts are cut in front of white space, where byte-level tokenizers cut as well.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from trainshort.common.extras import needed
from trainshort.common.messages import did_you_mean, shown
from trainshort.common.reading import parse_json
from trainshort.data.text import READ_BYTES, TextPart, parts_of_documents, parts_of_text, parts_of_texts

STDLIB = "stdlib"
HF = "hf:"
OPENERS: dict[str, Callable[..., IO[bytes]]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}  # type: ignore[dict-item]
TEXT = {
    *(".txt", ".text", ".md", ".rst", ".tex", ".html", ".htm", ".xml", ".tokens", ".raw"),
    *(".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".go", ".java", ".js", ".ts"),
}
ROWS = {".jsonl", ".ndjson", ".parquet"}
GROWTH = {".gz": 4, ".xz": 5, ".bz2": 5, ".parquet": 3}  # a guess at how much larger the text is than the file
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
LONGEST_LINE = 64 * 2**20  # bytes of a row of JSON: it is in memory as bytes, as text and as what it holds
WIKITEXT_START = r"^ = [^=\n][^\n]* = $"


class Item(NamedTuple):
    """One file, or one split of a data set."""

    name: str
    path: Path | None = None

    @property
    def kind(self) -> str:
        """The suffix that says what is inside, without the compression around it."""
        assert self.path is not None
        return Path(self.path.stem).suffix.lower() if self.packing else self.path.suffix.lower()

    @property
    def packing(self) -> str:
        assert self.path is not None
        return self.path.suffix.lower() if self.path.suffix.lower() in OPENERS else ""


@dataclass
class Sources:
    """Named sources, looked up at once (a name that is not there is an error now) and read as often as wanted."""

    names: tuple[str, ...]
    text_field: str = "text"
    pattern: str | None = None
    document_start: str | None = None
    errors: str = "strict"

    def __post_init__(self) -> None:
        self.start = _pattern(self.document_start)
        self.links_left_out = 0  # that lead out of the folder they are in
        self.items = [item for name in self.names for item in self._find(name)]
        self.done = 0  # bytes on the disk, for the progress bar
        self.reading = ""  # the name of the item that the last part is from

    @property
    def sizes(self) -> list[int]:
        """Bytes on the disk by item."""
        return [item.path.stat().st_size if item.path else 0 for item in self.items]

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def leave_out(self, others: Sources) -> None:
        """Drop the files that are also among the others, under whatever name."""
        theirs = {item.path.resolve() for item in others.items if item.path}
        self.items = [item for item in self.items if item.path is None or item.path.resolve() not in theirs]
        if not self.items:
            raise ValueError(
                f"{' '.join(self.names)}: nothing is left to train on, since all of it is named for validation"
            )

    @property
    def text_size(self) -> int:
        """About how many bytes of text there are; 0 where it cannot be told."""
        if any(item.path is None for item in self.items):
            return 0
        pairs = zip(self.items, self.sizes, strict=True)
        return sum(size * GROWTH.get(item.packing or item.kind, 1) for item, size in pairs)

    def parts(self) -> Iterator[TextPart]:
        self.done = 0
        for item, size in zip(self.items, self.sizes, strict=True):
            before, self.reading = self.done, item.name
            yield from self._rows_of_hub(item.name) if item.path is None else self._read(item, before, size)
            self.done = before + size

    def documents(self) -> Iterator[str]:
        """Whole documents: for those who know that theirs fit in memory."""
        pieces: list[str] = []
        for part in self.parts():
            pieces.append(part.text)
            if part.last:
                yield "".join(pieces)
                pieces = []

    def _find(self, name: str) -> Iterator[Item]:
        if name.startswith(HF):
            yield Item(name)
        elif name == STDLIB and not Path(name).exists():
            yield from standard_library()
        elif (path := Path(name)).is_dir():
            found = self._files_in(path)
            if not found:
                what = (
                    f"matches {self.pattern!r}"
                    if self.pattern
                    else "looks like text (.txt, .md, .jsonl, .parquet ...)"
                )
                if self.links_left_out:
                    what += f" (links that lead out of it are not followed: {self.links_left_out})"
                raise ValueError(f"{path}: no file in this folder {what}; name the files, or say which with pattern")
            yield from (Item(str(each), each) for each in found)
        elif path.exists():
            yield Item(name, path)
        else:
            near = did_you_mean(path.name, _names(path.parent))
            raise FileNotFoundError(f"{name}: no such file or folder{near}")

    def _files_in(self, folder: Path) -> list[Path]:
        """The text files of a folder, each once, in their order. Links that lead out of it are not followed."""
        root, seen, found = folder.resolve(), set(), []
        for each in sorted(folder.glob(self.pattern or "**/*")):
            if not each.is_file() or (self.pattern is None and not _is_text(each, folder)):
                continue
            target = each.resolve()
            if not target.is_relative_to(root):
                self.links_left_out += 1
            elif target not in seen:
                seen.add(target)
                found.append(each)
        return found

    def _read(self, item: Item, before: int, size: int) -> Iterator[TextPart]:
        assert item.path is not None
        if item.kind == ".parquet":
            yield from self._rows_of_parquet(item.path, before, size)
            return
        with item.path.open("rb", buffering=0) as raw:
            packed: IO[bytes] = io.BufferedReader(raw, READ_BYTES)
            stream = OPENERS[item.packing](packed) if item.packing else packed
            tell = raw.tell

            def watched(read: Iterator[TextPart]) -> Iterator[TextPart]:
                for part in read:
                    self.done = before + min(size, tell())
                    yield part

            try:
                if item.kind in (".jsonl", ".ndjson"):
                    yield from watched(parts_of_documents(self._rows_of_jsonl(stream, item.name)))
                else:
                    yield from watched(parts_of_text(stream, item.name, self.errors, self.start))
            except (EOFError, gzip.BadGzipFile, lzma.LZMAError, OSError) as error:
                if not item.packing or (isinstance(error, OSError) and error.errno is not None):
                    raise
                raise ValueError(f"{item.name}: not a whole {item.packing} file ({error}); get it again") from error

    def _rows_of_jsonl(self, stream: IO[bytes], name: str) -> Iterator[str]:
        number = 0
        while line := stream.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise ValueError(
                    f"{name}, line {number}: longer than {LONGEST_LINE:,} bytes, the most that one line may have; "
                    "divide it, or give long texts as text files, which have no limit"
                )
            if line.isspace():
                continue
            try:
                row = parse_json(line)
            except ValueError as error:  # also of bytes that are not UTF-8
                raise ValueError(f"{name}, line {number}: not valid JSON ({error})") from None
            del line  # the text of a long one need not be held twice
            yield self._text(row, f"{name}, line {number}")

    def _rows_of_parquet(self, path: Path, before: int, size: int) -> Iterator[TextPart]:
        with needed("pyarrow", by=str(path)):
            import pyarrow.parquet as parquet
        try:
            file = parquet.ParquetFile(path)
        except Exception as error:  # the package has many of its own
            raise ValueError(f"{path}: not a parquet file ({error})") from error
        with file:
            columns = file.schema_arrow.names
            if self.text_field not in columns:
                raise ValueError(
                    f"{path} has no column {self.text_field!r}; it has {', '.join(columns)}: choose with text_field"
                )
            rows = 0
            for batch in file.iter_batches(batch_size=256, columns=[self.text_field]):
                texts = batch.column(0).to_pylist()
                yield from parts_of_documents(
                    self._text({self.text_field: text}, f"{path}, row {rows + index}")
                    for index, text in enumerate(texts)
                    if text is not None
                )
                rows += len(texts)
                self.done = before + size * rows // max(1, file.metadata.num_rows)

    def _rows_of_hub(self, name: str) -> Iterator[TextPart]:
        where, split = hub_name(name)
        rows = load_hub(name)
        if split not in rows:
            raise ValueError(f"{name}: this data set has no split {split!r}; it has {', '.join(rows)}")
        texts = (self._text(row, name) for row in rows[split])
        # Each row of wikitext is a line, not a document.
        start = self.start or (_pattern(WIKITEXT_START) if "wikitext" in where else None)
        yield from parts_of_texts(texts, start) if start else parts_of_documents(texts)

    def _text(self, row: Any, where: str) -> str:
        text = row.get(self.text_field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            fields = f"fields {shown(', '.join(row))[1:-1]}" if isinstance(row, dict) else f"{type(row).__name__}"
            raise ValueError(f"{where}: no text in field {self.text_field!r} (got {fields}): choose with text_field")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                if self.errors == "strict":
                    raise ValueError(f"{where}: not valid Unicode ({error}); errors='replace' goes over it") from None
                text = text.encode("utf-8", "replace").decode()
        return text


def hub_name(name: str) -> tuple[str, str]:
    """`hf:ORG/NAME/CONFIG:SPLIT` -> what to load, and the split (train where none is given)."""
    where, _, split = name.removeprefix(HF).partition(":")
    return where, split or "train"


def load_hub(name: str) -> Any:
    """The splits of a data set, streamed, by name."""
    with needed("datasets", by=name):
        import datasets
    words = hub_name(name)[0].split("/")
    if not 1 <= len(words) <= 3 or not all(words):
        raise ValueError(
            f"{name}: a data set is named hf:ORG/NAME or hf:ORG/NAME/CONFIG, with :SPLIT after it at will"
        )
    path, config = "/".join(words[:2]), words[2] if len(words) == 3 else None
    try:
        return datasets.load_dataset(path, config, streaming=True)
    except Exception as error:  # network, names, formats: the package's own words are the best there are
        raise RuntimeError(f"{name}: the package datasets cannot load it ({error})") from error


def standard_library() -> Iterator[Item]:
    """The running Python's own library: there on every machine. Without its tests, and what is not UTF-8."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = ((path.relative_to(root), path) for path in root.rglob("*.py"))
    for relative, path in sorted((relative.as_posix(), path) for relative, path in files):
        if LEFT_OUT.isdisjoint(relative.split("/")) and path.stat().st_size:
            try:
                path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            yield Item(str(path), path)


def _is_text(path: Path, root: Path) -> bool:
    item = Item(str(path), path)
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return not hidden and item.kind in TEXT | ROWS


def _names(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir()] if folder.is_dir() else []


def _pattern(text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        return re.compile(text, re.MULTILINE)
    except re.error as error:
        raise ValueError(f"document_start must be a regular expression, got {text!r} ({error})") from error
