"""Continue a text with a trained model, shown as it comes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

EXAMPLES = """
  trainshort generate runs/alibi-256 --prompt "def main("
  trainshort generate runs/alibi-256 --prompt "Once" --max-new-tokens 2000 --temperature 0.7 --top-p 0.9 --seed 1
  cat start.txt | trainshort generate runs/alibi-256 --prompt -
"""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """How to continue what."""

    folder: str = field(
        metadata={"help": "a run, or any folder with a model and a tokenizer.json", "positional": True}
    )
    prompt: str = field(metadata={"help": "the text to continue; - reads it from the standard input"})
    max_new_tokens: int = field(default=400, metadata={"help": "how many tokens to add at most"})
    temperature: float = field(default=0.8, metadata={"help": "0 always takes the most probable token"})
    top_k: int | None = field(default=None, metadata={"help": "choose among this many most probable tokens"})
    top_p: float | None = field(default=None, metadata={"help": "choose among the most probable tokens of this mass"})
    seed: int | None = field(default=None, metadata={"help": "the same seed gives the same text"})
    device: str | None = field(
        default=None, metadata={"help": "such as cpu or cuda (default: cuda where there is one)"}
    )
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = field(
        default=None, metadata={"help": "of the model (default: as it was saved)"}
    )


class Stream:
    """Text from tokens that come one by one: a character is shown when all of its bytes are there."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode, self.tokens, self.shown = decode, list[int](), 0

    def add(self, token: int) -> str:
        self.tokens.append(token)
        return self._new(self.decode(self.tokens).rstrip("\N{REPLACEMENT CHARACTER}"))

    def rest(self) -> str:
        return self._new(self.decode(self.tokens))

    def _new(self, text: str) -> str:
        new = text[self.shown :]
        self.shown = max(self.shown, len(text))
        return new


def run(flags: Flags) -> None:
    import torch

    from trainshort.common.devices import device_for
    from trainshort.data import load_tokenizer
    from trainshort.models import LanguageModel, load

    dtype = None if flags.dtype is None else getattr(torch, flags.dtype)
    device = device_for(flags.device)
    model = load(flags.folder, dtype=dtype, device=device)
    if not isinstance(model, LanguageModel):
        raise ValueError(f"{flags.folder} holds an encoder: only language models continue a text")
    tokenizer = load_tokenizer(f"{flags.folder}/tokenizer.json")
    text = sys.stdin.read() if flags.prompt == "-" else flags.prompt
    end = tokenizer.end_id
    prompt = tokenizer.encode(text) or ([] if end is None else [end])  # a text begins where another ended
    if not prompt:
        raise ValueError("prompt must not be empty: this tokenizer has no token that a text could begin with")
    stream = Stream(tokenizer.decode)
    if flags.max_new_tokens == 0:  # there is nothing to wait for
        print(text, end="", flush=True)

    def show(column: torch.Tensor) -> None:
        if not stream.tokens:
            print(text, end="", flush=True)
        token = int(column[0])
        if token != end:
            print(stream.add(token), end="", flush=True)

    model.generate(
        torch.tensor([prompt], dtype=torch.int64, device=device),
        max_new_tokens=flags.max_new_tokens,
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
        seed=flags.seed,
        stop_tokens=() if end is None else (end,),
        on_token=show,
    )
    print(stream.rest(), flush=True)
