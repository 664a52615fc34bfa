"""Turn text into tokens: files, folders, jsonl, parquet, gzip and xz, hf: names, or Python's own library.

The folder then holds tokens.bin, documents.bin, tokenizer.json and meta.json. Every byte of the text is kept: the
default tokenizer is bytes, and a trained BPE works on bytes too. The text is streamed, so its size does not matter.
"""

from __future__ import annotations

from pathlib import Path

from trainshort.cli.stopping import on_stop
from trainshort.data.config import PrepareConfig

Flags = PrepareConfig

EXAMPLES = """
  trainshort prepare                                        the source of Python's standard library, as bytes
  trainshort prepare book.txt --out data/book
  trainshort prepare texts/ more.jsonl.gz --vocab 16384 --out data/bpe
  trainshort prepare hf:Salesforce/wikitext/wikitext-103-raw-v1 --vocab 32768 --out data/wikitext
  trainshort prepare wiki.train.tokens --validation wiki.valid.tokens --document-start '^ = [^=].* = $'
"""


def run(config: PrepareConfig) -> int:
    from trainshort.data.dataset import TokenData
    from trainshort.data.prepare import prepare

    def left() -> str:
        if (Path(config.out) / "meta.json").exists():
            return f"stopped; the data in {config.out} is whole and as it was before"
        return f"stopped; {config.out} holds no data yet: the same command starts again from the beginning"

    with on_stop(left):
        folder = prepare(config)
    print(TokenData(folder).summary())
    return 0
