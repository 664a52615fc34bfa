"""What to prepare: the sources, the tokenizer, and how much of it is kept for validation."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainshort.common.settings import Settings


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(Settings):
    """From text to tokens. Fields that are None follow from the others."""

    sources: tuple[str, ...] = field(
        default=("stdlib",),
        metadata={
            "help": "text files, folders, .jsonl, .parquet, .gz or .xz of them, hf:ORG/NAME/CONFIG, or stdlib: the "
            "source of Python's standard library",
            "positional": True,
            "metavar": "SOURCE",
        },
    )
    out: str = field(default="data", metadata={"help": "the folder to write", "metavar": "FOLDER"})
    vocab: int | None = field(
        default=None,
        metadata={"help": "train a byte-level BPE tokenizer with this many tokens, instead of bytes", "least": 258},
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "a tokenizer.json to use, instead of bytes", "metavar": "PATH"}
    )
    end_token: str | None = field(
        default=None,
        metadata={"help": "the token that ends a document; found by its name in most tokenizer.json files"},
    )
    validation: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "files or other sources to validate on, instead of documents drawn from the others; files named "
            "here are not trained on, though they lie in a folder that is",
            "metavar": "SOURCE",
        },
    )
    validation_fraction: float = field(
        default=0.05,
        metadata={"help": "the part kept for validation: whole documents, drawn by the seed from all of the input"},
    )
    train_tokens: int | None = field(
        default=None,
        metadata={
            "help": "keep so many training tokens at most, the first ones, and read no further than needed (default: "
            "all); validation and the BPE's sample are of all of the input",
            "least": 1,
        },
    )
    text_field: str = field(
        default="text", metadata={"help": "the field or column that holds the text in jsonl, parquet and hf: sources"}
    )
    pattern: str | None = field(
        default=None,
        metadata={"help": "which files of a folder to read, such as '**/*.c'; by default those that look like text"},
    )
    document_start: str | None = field(
        default=None,
        metadata={"help": "a regular expression that matches the first line of each document inside a text file"},
    )
    errors: str = field(
        default="strict",
        metadata={"help": "what to do with bytes that are not UTF-8", "choices": ("strict", "replace")},
    )
    bpe_sample_mb: int = field(
        default=64, metadata={"help": "how much text, spread over the sources, the BPE is trained on", "least": 1}
    )
    workers: int | None = field(
        default=None, metadata={"help": "processes that tokenize; by default one a core", "least": 1}
    )
    seed: int = field(default=0, metadata={"help": "chooses the validation documents", "least": 0})
    overwrite: bool = field(default=False, metadata={"help": "replace what an earlier prepare left in the folder"})

    def __post_init__(self) -> None:
        self.check()
        if not self.sources:
            raise ValueError("prepare needs at least one source: a file, a folder, hf:NAME or stdlib")
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must lie in [0, 1), got {self.validation_fraction}")
        if self.vocab is not None and self.tokenizer is not None:
            raise ValueError(
                f"vocab (--vocab) {self.vocab} trains a tokenizer, and tokenizer (--tokenizer) {self.tokenizer!r} is "
                "one: give one of the two"
            )
        if self.end_token is not None and self.tokenizer is None:
            raise ValueError("end_token goes with a tokenizer.json: give tokenizer too, or leave it out")
