"""Continue a text with a trained model, shown as it comes."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainshort.cli.errors import INTERRUPTED
from trainshort.cli.folders import check_one_model

if TYPE_CHECKING:
    from torch import Tensor

    from trainshort.data.tokenizer import Tokenizer

EXAMPLES = """
  trainshort generate runs/alibi-256 --prompt "def main("
  trainshort generate runs/alibi-256 --prompt "Once" --max-new-tokens 2000 --temperature 0.7 --top-p 0.9 --seed 1
  trainshort generate runs/alibi-256 --prompt "Once" --max-new-tokens none --bounded
  cat start.txt | trainshort generate runs/alibi-256 --prompt -
"""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
INCOMPLETE = 3  # the most replacement characters that stand for a character whose last bytes are missing
# In a terminal control characters, which could do more to it than write, are shown as pictures of them.
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
LONGEST = 32  # tokens that wait for a character: beyond, they are shown as they are, so that few are decoded again


@dataclass(frozen=True, kw_only=True)
class Flags:
    """How to continue what."""

    folder: str = field(
        metadata={"help": "a run, or any folder with a model and a tokenizer.json", "positional": True}
    )
    prompt: str = field(metadata={"help": "the text to continue; - reads it from the standard input"})
    max_new_tokens: int | None = field(
        default=400, metadata={"help": "how many tokens to add at most; none: one text after another until Ctrl-C"}
    )
    temperature: float = field(default=0.8, metadata={"help": "0 always takes the most probable token"})
    top_k: int | None = field(default=None, metadata={"help": "choose among this many most probable tokens"})
    top_p: float | None = field(default=None, metadata={"help": "choose among the most probable tokens of this mass"})
    seed: int | None = field(default=None, metadata={"help": "the same seed gives the same text"})
    bounded: bool = field(
        default=False, metadata={"help": "keep only the keys that can still matter: constant memory at any length"}
    )
    speed: bool | None = field(
        default=None, metadata={"help": "say at the end how fast it was (default: to a terminal)"}
    )
    device: str | None = field(
        default=None, metadata={"help": "such as cpu or cuda (default: cuda where there is one)"}
    )
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = field(
        default=None, metadata={"help": "of the model (default: as it was saved)"}
    )


class Stream:
    """Text from tokens that come one by one: a character is shown when all of its bytes are there.

    Only a short tail is ever decoded again: what is pending, after the tokens shown last, because some tokenizers
    write a token otherwise at the start of a text.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode, self.before, self.pending, self.shown = decode, list[int](), list[int](), 0

    def add(self, token: int) -> str:
        self.pending.append(token)
        text = self.decode(self.before + self.pending)
        waiting = len(self.pending) <= LONGEST
        whole = max(len(text.rstrip(REPLACEMENT)), len(text) - INCOMPLETE) if waiting else len(text)
        new = self._new(text[:whole])
        if self.shown == len(text) and (new or not waiting):
            self.before, self.pending = self.pending, []
            self.shown = len(self.decode(self.before))
        return new

    def rest(self) -> str:
        return self._new(self.decode(self.before + self.pending))

    def _new(self, text: str) -> str:
        new = text[self.shown :]
        self.shown = max(self.shown, len(text))
        return new


class Shown:
    """The prompt and what comes after it, written as it comes."""

    def __init__(self, prompt: str, tokenizer: Tokenizer) -> None:
        self.prompt, self.tokenizer = prompt, tokenizer
        self.stream = Stream(tokenizer.decode)
        self.times: list[float] = []  # of the first token and of the last
        self.count, self.gap = 0, ""
        self.pictures = PICTURES if sys.stdout.isatty() else {}

    def write(self, text: str, end: str = "") -> None:
        print(text.translate(self.pictures), end=end, flush=True)

    def start(self) -> None:
        self.write(self.prompt)

    def add(self, column: Tensor) -> None:
        if not self.count:
            self.start()
        token = int(column[0])
        self.times[1:] = [time.monotonic()]
        self.count += 1
        if token != self.tokenizer.end_id:
            self.write(self.gap + self.stream.add(token))
            self.gap = ""
        else:
            self.finish(end="")
            self.gap = "\n\n"  # before another text, where one comes

    def finish(self, end: str = "\n") -> None:
        self.write(self.stream.rest(), end)
        self.stream = Stream(self.tokenizer.decode)

    def speed(self, prompt: int) -> str:
        """Of all tokens but the first, for which the prompt was read."""
        seconds = self.times[-1] - self.times[0] if self.times else 0.0
        rate = f"{(self.count - 1) / seconds:,.1f} tokens/s, " if seconds else ""
        return f"{rate}{self.count:,} new token{'s' * (self.count != 1)}, {prompt + self.count:,} in context"


def _standard_input() -> str:
    """All of it, which is UTF-8 whatever the locale says."""
    data = sys.stdin.buffer.read()
    try:
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()  # any end of a line becomes a newline
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the standard input is not UTF-8: byte 0x{data[error.start]:02x} at {error.start:,} ({error.reason}); "
            "--prompt - reads a text: convert it first, for example with iconv"
        ) from None


def run(flags: Flags) -> int:
    import torch

    from trainshort.common.devices import device_for
    from trainshort.data import load_tokenizer
    from trainshort.models import LanguageModel, load
    from trainshort.models.prompts import stops_at

    dtype = None if flags.dtype is None else getattr(torch, flags.dtype)
    device = device_for(flags.device)
    check_one_model(flags.folder)
    if not Path(flags.folder, "config.json").exists():
        load(flags.folder)  # says what is wrong
    tokenizer = load_tokenizer(f"{flags.folder}/tokenizer.json")  # before the weights, which may be many
    text = _standard_input() if flags.prompt == "-" else flags.prompt
    model = load(flags.folder, dtype=dtype, device=device)
    if not isinstance(model, LanguageModel):
        raise ValueError(f"{flags.folder} holds an encoder: only language models continue a text")
    end = tokenizer.end_id
    prompt = tokenizer.encode(text) or ([] if end is None else [end])  # a text begins where another ended
    if not prompt:
        raise ValueError("prompt must not be empty: this tokenizer has no token that a text could begin with")
    shown = Shown(text, tokenizer)
    if flags.max_new_tokens == 0:  # there is nothing to wait for
        shown.start()
    endless = flags.max_new_tokens is None
    bounded: dict[str, Any] = {"bounded": True} if flags.bounded else {}
    status = 0
    try:
        model.generate(
            torch.tensor([prompt], dtype=torch.int64, device=device),
            max_new_tokens=flags.max_new_tokens,
            temperature=flags.temperature,
            top_k=flags.top_k,
            top_p=flags.top_p,
            seed=flags.seed,
            stop_tokens=() if endless else stops_at(end, model.config.vocab_size),
            on_token=shown.add,
            **bounded,
        )
    except KeyboardInterrupt as stop:
        if not shown.count:
            raise
        status = int(getattr(stop, "status", INTERRUPTED))
    shown.finish()
    if flags.speed or (flags.speed is None and sys.stderr.isatty()):
        print(shown.speed(len(prompt)), file=sys.stderr)
    return status
