"""Our models in the LM Evaluation Harness (the package lm_eval).

Importing this makes the model `trainshort` known to lm_eval, which scans no entry points: then
`simple_evaluate(model="trainshort", model_args="folder=...")` finds it. Its command line is
`python -m trainshort.integrations.lm_eval`. What counts as context, what is cut off and where texts end follow
lm_eval's own adapter for transformers, so that both give the same scores.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainshort.common.extras import needed

with needed("lm_eval", by="trainshort.integrations.lm_eval"):
    import lm_eval.models  # noqa: F401 - its own models first: its table is filled only while it is empty
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from trainshort.common.checks import is_size, is_whole
from trainshort.common.devices import device_for
from trainshort.common.messages import shown
from trainshort.common.reading import read_json
from trainshort.common.tokenizer_json import END_NAMES, package_errors, read_tokenizer_text
from trainshort.models import LanguageModel, load
from trainshort.models.generate import piece_of

NAME = "trainshort"
DEFAULT_LENGTH = 2048  # tokens: what lm_eval takes for models that name no limit
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
SAMPLING = ("temperature", "top_k", "top_p", "seed")
LOGITS = 2**26  # numbers that are computed at once
LOOK_BACK = 4  # tokens, beyond those that a stop text can have: the first ones may be parts of characters

Row = list[int]  # token ids
Answer = tuple[float, bool]  # the log-probability of a continuation, and whether greedy decoding would say it
Part = TypeVar("Part")
Result = TypeVar("Result")
log = logging.getLogger(__name__)


@register_model(NAME)
class TrainshortLM(TemplateLM):
    """A language model from a folder that `trainshort.load` reads.

    max_length: tokens that the model is given at most; longer contexts lose their beginning. ALiBi has no limit of
    its own: this is the knob of train short, test long. Without it 2048, or the number of learned positions.
    batch_size: rows at once, or "auto": as many tokens as are computed at once when a prompt is read, in at most
    max_batch_size rows, and half as many where the memory of the device does not hold them.
    dtype: "auto" is that of the file. device: None is the GPU where there is one.
    prefix_token_id: what stands before a text without context; by default the token that begins texts, or else the
    one that ends them. max_gen_toks: new tokens, where a task does not say how many.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        max_length: int | None = None,
        batch_size: int | str = 1,
        max_batch_size: int = 64,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        prefix_token_id: int | None = None,
        max_gen_toks: int = 256,
        **unknown: Any,
    ) -> None:
        super().__init__()
        dtype = str(dtype).removeprefix("torch.")
        sizes = {"max_length": max_length, "max_batch_size": max_batch_size, "max_gen_toks": max_gen_toks}
        _check(folder, unknown, dtype, sizes)
        self.folder = Path(str(folder))
        self.rows = _batch_size(batch_size)
        self.most_rows, self.max_gen_toks = max_batch_size, max_gen_toks
        if (self.folder / "config.json").exists():
            read_tokenizer_text(self.folder / "tokenizer.json")  # before the weights: says why there is none
        model = load(
            self.folder,
            dtype=None if dtype == "auto" else getattr(torch, dtype),
            device=device_for(None if device is None else str(device)),
        )
        if not isinstance(model, LanguageModel):
            raise ValueError(f"{self.folder}: holds an encoder; lm_eval scores language models")
        self.model, self.tokenizer = model, model.tokenizer
        self._device = model.trunk.embedding.weight.device
        self.max_length = _longest(model, max_length)
        self.special = _special_tokens(self.folder, self.tokenizer)
        if prefix_token_id is not None:
            self.special["prefix"] = prefix_token_id
        for name, token in self.special.items():
            if not is_whole(token, 0, model.config.vocab_size - 1):
                raise ValueError(f"{name}_token_id must lie in [0, {model.config.vocab_size}), got {token!r}")

    @property
    def eot_token_id(self) -> int | None:
        return self.special.get("eos")

    @property
    def prefix_token_id(self) -> int:
        for name in ("prefix", "bos", "eos"):
            if name in self.special:
                return self.special[name]
        raise ValueError(
            f"{self.folder}: its tokenizer names no token that begins or ends texts, which a text without context "
            "needs before it; pass prefix_token_id"
        )

    @property
    def batch_size(self) -> int | str:
        return self.rows or "auto"

    @property
    def tokenizer_name(self) -> str:
        return str(self.folder)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        raise ValueError("the model trainshort has no chat templates: leave --apply_chat_template out")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> Row:
        """Token ids. add_special_tokens None: as the tokenizer has it, unless the text begins with such a token."""
        if add_special_tokens is None:
            first = self.special.get("prefix", self.special.get("bos", self.special.get("eos")))
            begins = first is not None and string.startswith(self.tok_decode([first], skip_special_tokens=False))
            add_special_tokens = not begins
        with package_errors(str(self.folder / "tokenizer.json"), "this tokenizer fails on a text"):
            row: Row = self.tokenizer.encode(string, add_special_tokens=add_special_tokens).ids
        if max(row, default=0) >= self.model.config.vocab_size:
            raise ValueError(
                f"{self.folder}: the tokenizer makes token {max(row)} of {shown(string)}; the model has "
                f"{self.model.config.vocab_size} tokens"
            )
        return row

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Row, Row]], disable_tqdm: bool = False, **_: Any
    ) -> list[Answer]:
        """Requests that give the model the same tokens, such as choices of one token, are computed once."""
        lengths = (len(context) + len(continuation) - 1 for _, context, continuation in requests)
        self._warn_of_long(lengths, self.max_length)
        asked: dict[tuple[int, ...], list[int]] = {}
        for number, (text, context, continuation) in enumerate(requests):
            asked.setdefault(self._input(text, context, continuation), []).append(number)
        answers: dict[int, Answer] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="scoring") as bar:
            for batch in self._batches(list(asked), len):
                parts = [(row, [requests[number][2] for number in asked[row]]) for row in batch]
                for row, found in zip(batch, self._halving(self._score, parts), strict=True):
                    for number, answer in zip(asked[row], found, strict=True):
                        answers[number] = answer
                        if requests[number][0] is not None:  # None: a window of a longer text
                            self.cache_hook.add_partial("loglikelihood", requests[number][0], answer)
                    bar.update(len(found))
        return [answers[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows of max_length that share one token; the last reaches back to be as long."""
        windows: list[tuple[None, Row, Row]] = []
        counts = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            pairs = utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            found = [(None, *utils.make_disjoint_window(pair)) for pair in pairs]
            windows += found
            counts.append(len(found))
        answers = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        sums = [sum((next(answers)[0] for _ in range(count)), 0.0) for count in counts]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def _input(self, text: Any, context: Row, continuation: Row) -> tuple[int, ...]:
        """What the model reads to score a continuation: the last token is predicted only."""
        if not continuation:
            raise ValueError(f"nothing to score: the continuation in {shown(text)} has no token of its own")
        if len(continuation) > self.max_length:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens is longer than max_length {self.max_length}: pass a "
                f"larger max_length ({shown(text)})"
            )
        whole = [*(context or [self.prefix_token_id]), *continuation]
        return tuple(whole[-self.max_length - 1 : -1])

    def _warn_of_long(self, lengths: Iterable[int], most: int) -> None:
        """Say once how many contexts lose their beginning."""
        cut = [length for length in lengths if length > most]
        if cut:
            log.warning(
                "%d requests have more than %d tokens (max_length %d; the longest has %d) and lose their beginnings",
                len(cut),
                most,
                self.max_length,
                max(cut),
            )

    def _score(self, parts: list[tuple[tuple[int, ...], list[Row]]]) -> list[list[Answer]]:
        """The answers for rows, each with the continuations that end it. Padded on the right, where nobody looks."""
        longest = max(len(row) for row, _ in parts)
        tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row, _ in parts], device=self._device)
        hidden = self.model.trunk(tokens)  # [B, T, d_model]
        wanted = [
            (hidden[index, len(row) - len(continuation) : len(row)], continuation)
            for index, (row, continuations) in enumerate(parts)
            for continuation in continuations
        ]
        states = torch.cat([state for state, _ in wanted])
        targets = torch.tensor([token for _, each in wanted for token in each], device=self._device)
        logs, greedy = self._log_probabilities(states, targets)
        sizes = [len(each) for _, each in wanted]
        answers = iter(
            (float(one.sum()), bool(two.all()))
            for one, two in zip(logs.split(sizes), greedy.split(sizes), strict=True)
        )
        return [[next(answers) for _ in continuations] for _, continuations in parts]

    def _log_probabilities(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of targets [N], float64 on the CPU, and whether each is the most probable; never all logits at once."""
        logs, greedy = [], []
        rows = max(1, LOGITS // self.model.config.vocab_size)
        dtype = torch.promote_types(states.dtype, torch.float32)
        for part, wanted in zip(states.split(rows), targets.split(rows), strict=True):
            found = self.model.head(part).log_softmax(-1, dtype=dtype)  # [n, V]
            logs.append(found.gather(1, wanted[:, None])[:, 0])
            greedy.append(found.argmax(-1) == wanted)
        return torch.cat(logs).double().cpu(), torch.cat(greedy).cpu()

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        texts: dict[int, str] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="generating") as bar:
            for numbers in groups.values():
                plan = _Plan(self, requests[numbers[0]].args[1])
                prompts = plan.prompts([requests[number].args[0] for number in numbers])
                numbered = list(zip(numbers, prompts, strict=True))
                for batch in self._batches(numbered, lambda prompt: len(prompt[1])):
                    found = self._halving(plan.run, [row for _, row in batch])
                    for (number, _), text in zip(batch, found, strict=True):
                        texts[number] = text
                        self.cache_hook.add_partial("generate_until", requests[number].args, text)
                    bar.update(len(batch))
        return [texts[number] for number in range(len(requests))]

    def _batches(self, parts: list[Part], length: Callable[[Part], int]) -> Iterator[list[Part]]:
        """Longest first, so that what does not fit is known at once, and rows of a batch are about as long."""
        parts = sorted(parts, key=length, reverse=True)
        budget = piece_of(self.model, 1)
        start = 0
        while start < len(parts):
            rows = self.rows or min(self.most_rows, max(1, budget // max(1, length(parts[start]))))
            yield parts[start : start + rows]
            start += rows

    def _halving(self, compute: Callable[[list[Part]], list[Result]], parts: list[Part]) -> list[Result]:
        """compute(parts), with batch_size "auto" in halves where memory does not hold all of them."""
        try:
            return compute(parts)
        except torch.OutOfMemoryError:
            if self.rows or len(parts) == 1:
                raise
        torch.cuda.empty_cache()
        middle = len(parts) // 2
        return self._halving(compute, parts[:middle]) + self._halving(compute, parts[middle:])


class _Plan:
    """How texts are continued, from the generation_kwargs of a task."""

    def __init__(self, lm: TrainshortLM, given: dict[str, Any]) -> None:
        options = dict(normalize_gen_kwargs(given, lm.max_gen_toks))
        end = None if lm.eot_token_id is None else lm.tok_decode([lm.eot_token_id], skip_special_tokens=False)
        self.stops = [stop for stop in handle_stop_sequences(options.pop("until"), eos=end) if stop]
        self.most = options.pop("max_gen_toks")
        if not 0 < self.most < lm.max_length:
            raise ValueError(
                f"max_gen_toks must lie between 1 and max_length - 1 ({lm.max_length - 1}), got {self.most}: pass a "
                "larger max_length"
            )
        sampled = options.pop("do_sample")
        self.sampling = {name: options.pop(name) for name in SAMPLING if options.get(name) is not None}
        self.sampling["temperature"] = self.sampling.get("temperature", 1.0) if sampled else 0.0
        if self.sampling.get("top_k") == 0:  # none, as transformers has it
            del self.sampling["top_k"]
        if options:
            raise ValueError(
                f"generation_kwargs may hold until, max_gen_toks, do_sample, {', '.join(SAMPLING)}; got "
                f"{', '.join(f'{name}={shown(value)}' for name, value in options.items())} besides"
            )
        self.lm = lm
        self.tail = max((len(stop.encode()) for stop in self.stops), default=0) + LOOK_BACK

    def prompts(self, texts: list[str]) -> list[Row]:
        """The ends of texts that leave room for what is to come."""
        room = self.lm.max_length - self.most
        rows = [self.lm.tok_encode(text) for text in texts]
        self.lm._warn_of_long(map(len, rows), room)
        return [row[-room:] or [self.lm.prefix_token_id] for row in rows]

    def run(self, prompts: list[Row]) -> list[str]:
        longest = max(map(len, prompts))
        tokens = torch.tensor([[*[0] * (longest - len(row)), *row] for row in prompts], device=self.lm.device)
        real = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in prompts])
        said: list[Row] = [[] for _ in prompts]
        going = set(range(len(prompts)))
        end = self.lm.eot_token_id

        def listen(column: Tensor) -> None:
            for index, token in enumerate(column.tolist()):
                if index not in going:
                    continue
                if token == end:
                    going.remove(index)
                    continue
                said[index].append(token)
                if self._stopped(said[index]):
                    going.remove(index)
            if not going:
                raise _AllEnded

        with contextlib.suppress(_AllEnded):
            self.lm.model.generate(
                tokens,
                max_new_tokens=self.most,
                key_padding_mask=real.to(self.lm.device),
                stop_tokens=() if end is None else (end,),
                on_token=listen,
                **self.sampling,
            )
        return [postprocess_generated_text(self.lm.tok_decode(row), self.stops, None) for row in said]

    def _stopped(self, row: Row) -> bool:
        if not self.stops:
            return False
        text = self.lm.tok_decode(row[-self.tail :], skip_special_tokens=False)
        return any(stop in text for stop in self.stops)


class _AllEnded(Exception):  # noqa: N818 - not an error: leaves the loop of generate
    """Every row has said one of its stop texts."""


def _check(folder: object, unknown: dict[str, Any], dtype: object, sizes: dict[str, int | None]) -> None:
    allowed = "folder, max_length, batch_size, max_batch_size, device, dtype, prefix_token_id, max_gen_toks"
    if unknown:
        raise ValueError(f"the model trainshort takes {allowed}; got {', '.join(unknown)}")
    if folder is None:
        raise ValueError(f"folder is missing: --model_args folder=PATH; the model trainshort takes {allowed}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    for name, value in sizes.items():
        if not is_size(value) and not (name == "max_length" and value is None):
            raise ValueError(f"{name} must be a positive int, got {value!r}")


def _batch_size(value: int | str) -> int | None:
    """Rows at once; None: "auto". The command line gives numbers as texts."""
    if value == "auto":
        return None
    rows = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if not is_size(rows):
        raise ValueError(f'batch_size must be a positive int or "auto", got {value!r}')
    return int(rows)


def _longest(model: LanguageModel, asked: int | None) -> int:
    limit = model.position.max_length
    if asked is not None and limit is not None and asked > limit:
        raise ValueError(f"max_length must be at most {limit}, the number of learned positions; got {asked}")
    if asked is None and limit is None:
        log.warning("max_length is not given: %d tokens, whatever the model can do", DEFAULT_LENGTH)
    return asked or limit or DEFAULT_LENGTH


def _special_tokens(folder: Path, tokenizer: Any) -> dict[str, int]:
    """The tokens that begin (bos) and end (eos) texts, from the files beside the tokenizer or by a known name."""
    found: dict[str, int] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):  # the second wins
        if not (folder / file).exists():
            continue
        entries = read_json(folder / file, "it names the special tokens of a tokenizer")
        for name in ("bos", "eos"):
            entry = entries.get(f"{name}_token")
            token = entry.get("content") if isinstance(entry, dict) else entry
            number = tokenizer.token_to_id(token) if isinstance(token, str) else None
            if number is not None:
                found[name] = number
    if "eos" not in found:
        ids = (tokenizer.token_to_id(name) for name in END_NAMES)
        if (number := next((each for each in ids if each is not None), None)) is not None:
            found["eos"] = number
    return found
