"""prepare: all of the text, in both splits together, whoever tokenizes it; and files that are whole or not there."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from tests.data.test_sources import fake_datasets, write_rows
from tests.data.test_tokenizer import BPE, LOWERCASE
from trainshort.cli.prepare import run
from trainshort.data import prepare as prepare_module
from trainshort.data import text as text_module
from trainshort.data import workers as workers_module
from trainshort.data.config import PrepareConfig
from trainshort.data.dataset import TokenData
from trainshort.data.prepare import prepare
from trainshort.data.writer import SplitWriter

TEXTS = [f"Document {number}: the dog said {'wörd ' * (number % 13)}\n and slept. " for number in range(300)]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", TEXTS)


def prepared(source: object, out: Path, **options: Any) -> TokenData:
    return TokenData(prepare(PrepareConfig(sources=(str(source),), out=str(out), **options), progress=False))


def texts_of(data: TokenData, split: str) -> list[str]:
    tokens, borders = data.split(split), data.borders_of(split)
    pairs = pairwise(borders)
    return [data.tokenizer.decode(tokens[start:end].tolist()) for start, end in pairs]


def assert_counts(data: TokenData) -> None:
    """Those in meta.json are those of the text, and those of the tokens."""
    for split in ("train", "validation"):
        meta, texts = data.meta["splits"][split], texts_of(data, split)
        assert meta["documents"] == len(texts)
        assert meta["bytes"] == sum(len(text.encode()) for text in texts) == data.bytes_of(split)
        assert meta["words"] == sum(len(text.encode().split()) for text in texts) == data.words_of(split)
        assert meta["tokens"] == len(data.split(split))


@pytest.mark.parametrize("options", [{}, {"vocab": 280}, {"vocab": 280, "workers": 1}], ids=str)
def test_all_of_the_text_is_there(rows: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    data = prepared(rows, tmp_path / "data", **options)
    train, validation = texts_of(data, "train"), texts_of(data, "validation")
    assert sorted(train + validation) == sorted(TEXTS)
    assert train == [text for text in TEXTS if text in set(train)], "in their order"
    assert 0.025 <= len(validation) / len(TEXTS) <= 0.075
    assert data.tokens.dtype == np.uint16
    assert data.tokens[data.borders[1:] - 1].tolist() == [data.end_id] * 300
    assert_counts(data)
    data.verify()


def test_the_split_is_the_same_for_every_tokenizer(rows: Path, tmp_path: Path) -> None:
    one = texts_of(prepared(rows, tmp_path / "a"), "validation")
    assert texts_of(prepared(rows, tmp_path / "b", vocab=270), "validation") == one
    assert texts_of(prepared(rows, tmp_path / "c", seed=1), "validation") != one


def test_workers_change_nothing(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches, more than are in flight at once, by one process and by three."""
    monkeypatch.setattr(prepare_module, "BATCH_PARTS", 7)
    BPE.save(tmp_path / "bpe.json")
    one = prepared(rows, tmp_path / "a", tokenizer=str(tmp_path / "bpe.json"), workers=1)
    other = prepared(rows, tmp_path / "b", tokenizer=str(tmp_path / "bpe.json"), workers=3)
    assert one.meta["hashes"] == other.meta["hashes"]
    assert one.identity == other.identity


@pytest.mark.parametrize("options", [{}, {"vocab": 270}], ids=str)
def test_of_one_long_document_a_passage_is_kept(tmp_path: Path, options: dict[str, Any]) -> None:
    text = "".join(TEXTS)
    (tmp_path / "book.txt").write_text(text)
    passages = set()
    for seed in range(4):
        out = tmp_path / f"data{seed}"
        data = prepared(tmp_path / "book.txt", out, validation_fraction=0.1, seed=seed, **options)
        before, after = texts_of(data, "train")
        (passage,) = texts_of(data, "validation")
        assert before + passage + after == text
        assert passage.startswith(" and slept"), "whole lines"
        split = data.meta["splits"]
        assert split["validation"]["bytes"] == pytest.approx(0.1 * len(text.encode()), rel=0.1)
        assert_counts(data)
        passages.add(passage)
    assert len(passages) == 4, "at a place that the seed decides"


def test_of_few_documents_a_whole_one_is_kept(tmp_path: Path) -> None:
    names = []
    for number, size in enumerate((400, 400, 110)):
        (tmp_path / f"{number}.txt").write_text("x" * size)
        names.append(str(tmp_path / f"{number}.txt"))
    config = PrepareConfig(sources=tuple(names), out=str(tmp_path / "data"), validation_fraction=0.1)
    data = TokenData(prepare(config, progress=False))
    assert [len(text) for text in texts_of(data, "train")] == [400, 400]
    assert [len(text) for text in texts_of(data, "validation")] == [110]
    assert_counts(data)


def test_long_documents_come_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "READ_BYTES", 64)
    (tmp_path / "book.txt").write_text("".join(TEXTS))
    data = prepared(tmp_path / "book.txt", tmp_path / "data", validation_fraction=0.0)
    assert texts_of(data, "train") == ["".join(TEXTS)]
    assert len(data.validation) == 0
    assert_counts_of_train(data)


def assert_counts_of_train(data: TokenData) -> None:
    text = "".join(TEXTS).encode()
    assert data.count("train") == (len(text), len(text.split()))
    assert data.meta["splits"]["train"]["words"] == len(text.split())


def test_validation_text_of_its_own(rows: Path, tmp_path: Path) -> None:
    (tmp_path / "valid.txt").write_text("validation text")
    data = prepared(rows, tmp_path / "data", validation=(str(tmp_path / "valid.txt"),))
    assert texts_of(data, "train") == TEXTS
    assert texts_of(data, "validation") == ["validation text"]
    assert_counts(data)


def test_a_data_set_with_a_validation_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_datasets(monkeypatch, {"train": TEXTS[:5], "validation": TEXTS[5:7]})
    data = prepared("hf:some/texts", tmp_path / "data")
    assert texts_of(data, "train") == TEXTS[:5]
    assert texts_of(data, "validation") == TEXTS[5:7]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_tokenizer_whose_tokens_are_not_the_text(rows: Path, tmp_path: Path, workers: int) -> None:
    """Lower case, unknown words: bytes and words are still those of the original text, and add up."""
    (tmp_path / "tokenizer.json").write_text(LOWERCASE.to_str())
    data = prepared(rows, tmp_path / "data", tokenizer=str(tmp_path / "tokenizer.json"), workers=workers)
    plain = prepared(rows, tmp_path / "plain")
    for split in ("train", "validation"):
        assert data.count(split) == plain.count(split)
        assert data.meta["splits"][split]["words"] == plain.meta["splits"][split]["words"]
        half = len(data.split(split)) // 2
        first, second = data.count(split, 0, half), data.count(split, half)
        assert (first[0] + second[0], first[1] + second[1]) == data.count(split)
    assert data.meta["spans"]


def test_a_long_word_is_one_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is so long that it has to be cut."""
    monkeypatch.setattr(text_module, "READ_BYTES", 16)
    (tmp_path / "tokenizer.json").write_text(LOWERCASE.to_str())
    (tmp_path / "a.txt").write_text("the " + "x" * 200 + " dog")
    for name, options in (("a", {}), ("b", {"tokenizer": str(tmp_path / "tokenizer.json"), "workers": 1})):
        data = prepared(tmp_path / "a.txt", tmp_path / name, validation_fraction=0.0, **options)
        assert data.count("train") == (208, 3)


def test_many_tokens_need_more_bytes(tmp_path: Path) -> None:
    values = json.loads(LOWERCASE.to_str())
    values["model"]["vocab"] |= {f"word{number}": number for number in range(4, 70_000)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    assert Backend.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size() == 70_000
    (tmp_path / "a.txt").write_text("the word69999 dog")
    data = prepared(tmp_path / "a.txt", tmp_path / "data", tokenizer=str(tmp_path / "tokenizer.json"), workers=1)
    assert data.tokens.dtype == np.uint32
    assert data.tokens.tolist() == [2, 69_999, 3, 1]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_there_is_not_replaced_unasked(rows: Path, tmp_path: Path) -> None:
    prepared(rows, tmp_path / "data")
    before = contents(tmp_path / "data")
    with pytest.raises(FileExistsError, match=r"holds prepared data already: .*--overwrite"):
        prepared(rows, tmp_path / "data", vocab=270)
    assert contents(tmp_path / "data") == before
    prepared(rows, tmp_path / "data", vocab=270, overwrite=True)
    assert contents(tmp_path / "data") != before


def test_a_full_disk_changes_nothing(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(rows, tmp_path / "data")
    before = contents(tmp_path / "data")

    def full(self: SplitWriter, encoded: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SplitWriter, "append", full)
    with pytest.raises(RuntimeError, match=r"no space left on the disk \(.* MB free\).* Nothing there was changed"):
        prepared(rows, tmp_path / "data", overwrite=True)
    assert contents(tmp_path / "data") == before


def test_a_mistake_in_the_text_changes_nothing(rows: Path, tmp_path: Path) -> None:
    prepared(rows, tmp_path / "data")
    before = contents(tmp_path / "data")
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    for options in ({}, {"vocab": 270}):
        with pytest.raises(ValueError, match="not UTF-8"):
            prepared(tmp_path / "bad.txt", tmp_path / "data", overwrite=True, **options)
        assert contents(tmp_path / "data") == before


def test_a_mistake_that_workers_are_waiting_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the middle ends the workers and comes through; nobody waits for anybody."""
    monkeypatch.setattr(prepare_module, "BATCH_PARTS", 5)
    BPE.save(tmp_path / "bpe.json")
    rows = write_rows(tmp_path / "rows.jsonl", TEXTS)
    with rows.open("a") as file:
        file.write("{")
    with pytest.raises(ValueError, match="line 302: not valid JSON"):
        prepared(rows, tmp_path / "data", tokenizer=str(tmp_path / "bpe.json"), workers=2, validation_fraction=0.0)
    assert not (tmp_path / "data").exists()


def test_workers_that_die(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_START", "import os; os._exit(1)")
    BPE.save(tmp_path / "bpe.json")
    with pytest.raises(RuntimeError, match="a tokenizing process has died"):
        prepared(rows, tmp_path / "data", tokenizer=str(tmp_path / "bpe.json"), workers=2)


@pytest.mark.parametrize("failing", ["tokens.bin", "documents.bin", "tokenizer.json", "meta.json"])
def test_a_folder_that_was_left_half_replaced_does_not_pass_for_whole(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    prepared(rows, tmp_path / "data")
    move = os.replace

    def killed(source: Path, target: Path) -> None:
        if Path(target).name == failing:
            raise KeyboardInterrupt
        move(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            prepared(rows, tmp_path / "data", vocab=270, overwrite=True)
    with pytest.raises(FileNotFoundError, match=r"meta\.json: no such file"):
        TokenData(tmp_path / "data")
    assert_counts(prepared(rows, tmp_path / "data", vocab=270))


def test_nothing_to_prepare(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"empty\.txt: no text in it"):
        prepared(tmp_path / "empty.txt", tmp_path / "new" / "data")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_tokenizer_that_fails_on_a_text(rows: Path, tmp_path: Path, workers: int) -> None:
    """In this process or in another one: the same sentence, and nothing is left."""
    values = json.loads(LOWERCASE.to_str())
    values["model"]["unk_token"] = "missing"
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"tokenizer\.json: this tokenizer fails on a text \("):
        prepared(rows, tmp_path / "data", tokenizer=str(tmp_path / "tokenizer.json"), workers=workers)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("failing", ["tokens.bin", "documents.bin", "tokenizer.json", "meta.json"])
def test_a_prepare_that_fails_leaves_no_folder(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Wherever it fails, and if it made the folder; one that was there stays, with what others put into it."""
    move = os.replace

    def interrupted(source: Path, target: Path) -> None:
        if Path(target).name == failing:
            raise KeyboardInterrupt
        move(source, target)

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    monkeypatch.setattr(os, "replace", interrupted)
    for out in (tmp_path / "new" / "data", tmp_path / "mine" / "data"):
        with pytest.raises(KeyboardInterrupt):
            prepared(rows, out)
    assert not (tmp_path / "new").exists()
    assert contents(tmp_path / "mine") == {"notes.txt": b"mine"}


def test_a_tokenizer_without_an_end(rows: Path, tmp_path: Path) -> None:
    text = LOWERCASE.to_str().replace("</s>", "stop")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"no token of a known name .*--end-token"):
        prepared(rows, tmp_path / "data", tokenizer=str(tmp_path / "tokenizer.json"))
    data = prepared(rows, tmp_path / "data", tokenizer=str(tmp_path / "tokenizer.json"), end_token="stop", workers=2)
    assert data.end_id == 1
    assert data.tokens[-1] == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sources": ()}, "needs at least one source"),
        ({"sources": "book.txt"}, "sources must be a list of texts, got 'book.txt'"),
        ({"validation_fraction": 1.0}, r"validation_fraction must lie in \[0, 1\), got 1.0"),
        ({"vocab": 100}, "vocab must be at least 258, got 100"),
        ({"vocab": 300, "tokenizer": "a.json"}, "give one of the two"),
        ({"end_token": "x"}, "end_token goes with a tokenizer.json"),
        ({"errors": "ignore"}, "errors must be one of strict, replace; got 'ignore'"),
    ],
)
def test_refusals(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PrepareConfig(**fields)


def test_the_command(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(PrepareConfig(sources=(str(rows),), out=str(tmp_path / "data"))) == 0
    shown = capsys.readouterr().out
    assert "vocabulary of 257 (bytes), uint16" in shown
    assert "validation: whole documents, drawn from all of the input with seed 0: 4." in shown
    assert "% of the text (5.0% asked)" in shown


def test_the_bar(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    prepare(PrepareConfig(sources=(str(rows),), out=str(tmp_path / "data"), vocab=270))
    shown = capsys.readouterr().err
    assert "tokenizer" in shown
    assert "tokens" in shown


PEAK = """
import resource, sys
from trainshort.data.config import PrepareConfig
from trainshort.data.prepare import prepare
import numpy
from trainshort.data.tokenizer import train_bpe
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
options = {"tokenizer": sys.argv[3]} if len(sys.argv) > 3 else {}
prepare(PrepareConfig(sources=(sys.argv[1],), out=sys.argv[2], **options), progress=False)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_memory_does_not_grow_with_the_text(tmp_path: Path, tokenizer: str) -> None:
    """One document, in a small and in a ten times larger file: the peak differs by little, and is small."""
    BPE.save(tmp_path / "bpe.json")
    line, peaks = "the dog and the quick fox sleep over the lazy text\n", []
    for megabytes in (20, 200) if tokenizer == "bytes" else (4, 40):
        (tmp_path / "book.txt").write_text(line * (megabytes * 2**20 // len(line)))
        words = [sys.executable, "-c", PEAK, str(tmp_path / "book.txt"), str(tmp_path / f"data{megabytes}")]
        words += [str(tmp_path / "bpe.json")] if tokenizer == "bpe" else []
        peaks.append(int(subprocess.run(words, capture_output=True, text=True, check=True).stdout))
    assert peaks[1] < peaks[0] + 50
    assert peaks[1] < 150


def test_links_that_were_left_out_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("mine " * 100)
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "texts" / "b.txt").symlink_to(tmp_path / "secret.txt")
    run(PrepareConfig(sources=(str(tmp_path / "texts"),), out=str(tmp_path / "data")))
    assert "left out: links that lead out of their folder: 1" in capsys.readouterr().out
    assert b"secret" not in bytes(TokenData(tmp_path / "data").tokens.astype("u1"))


@pytest.mark.parametrize("options", [{}, {"vocab": 280, "workers": 1}, {"vocab": 280, "workers": 2}], ids=str)
@pytest.mark.parametrize("named", [True, False])
def test_training_tokens_are_as_many_as_asked_for(
    rows: Path, tmp_path: Path, options: dict[str, Any], named: bool
) -> None:
    """The first ones, and the last document ends where it is cut. Validation is as it would be without a limit."""
    if named:
        write_rows(tmp_path / "valid.jsonl", ["Another text altogether. " * 9])
        options = options | {"validation": (str(tmp_path / "valid.jsonl"),)}
    whole = prepared(rows, tmp_path / "whole", **options)
    data = prepared(rows, tmp_path / "data", train_tokens=1000, **options)
    assert len(data.train) == 1000
    assert data.train[:-1].tolist() == whole.train[:999].tolist()
    assert int(data.train[-1]) == data.end_id
    assert data.validation.tolist() == whole.validation.tolist()
    assert_counts(data)


def test_a_limit_that_is_never_reached_changes_nothing(rows: Path, tmp_path: Path) -> None:
    whole, data = prepared(rows, tmp_path / "whole"), prepared(rows, tmp_path / "data", train_tokens=10**9)
    assert data.tokens.tolist() == whole.tokens.tolist()


def test_no_more_is_read_than_a_limit_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second file is damaged, which nobody sees who has enough of the first."""
    write_rows(tmp_path / "a.jsonl", TEXTS)
    write_rows(tmp_path / "valid.jsonl", TEXTS[:3])
    (tmp_path / "b.jsonl").write_text("not json\n")
    monkeypatch.setattr(prepare_module, "BATCH_TEXT", 1000)
    sources = (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    config = PrepareConfig(
        sources=sources, validation=(str(tmp_path / "valid.jsonl"),), train_tokens=500, out=str(tmp_path / "data")
    )
    assert len(TokenData(prepare(config, progress=False)).train) == 500
