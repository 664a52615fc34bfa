"""What is run for docs/reproducing.md: units of work, each a list of `trainshort` commands, in parts by name.

A unit is one run, or one speed: it is done wholly or not at all, and its commands share nothing with another unit's
but the choice of the learning rate. That is made by validation loss on text that no table shows.

    short        each method at the short length with three learning rates, then its best tested in every way
    long         each method at twice the length with its best rate; sinusoidal at four times, for the headline alone
    seeds        two more seeds of ALiBi and sinusoidal at the short length
    speed        some steps of training and a test at each length, with dense attention and with today's kernels
    checkpoint   a small ALiBi model to play with
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Float32 products of tests in TF32: finer than bfloat16, and residual sums are in float32, as in training.
ENVIRONMENT = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}

PARTS = ("short", "long", "seeds", "speed", "checkpoint")


@dataclass(frozen=True)
class Contender:
    """A position method with options. far: it is tested at the longest lengths too."""

    name: str
    position: str
    options: tuple[str, ...] = ()  # of trainshort train --set
    label: str | None = None  # what reports call it
    far: bool = False
    scaled: tuple[str, ...] = ()  # ways to stretch it for longer texts, without training


CONTENDERS = (
    Contender("alibi", "alibi", far=True, scaled=("linear", "ntk")),
    Contender("sinusoidal", "sinusoidal"),
    Contender("rotary", "rotary", far=True, scaled=("ntk", "yarn")),
    Contender("t5", "t5"),
    Contender("fox", "fox", far=True),
    Contender(
        "alibi-free", "alibi", ("position.biased_heads=6",), label="ALiBi, 2 of 8 heads without slope", far=True
    ),
    Contender("learned", "learned"),
    Contender("none", "none"),
)
BY_NAME = {each.name: each for each in CONTENDERS}
PAPERS = ("alibi", "sinusoidal", "rotary", "t5")
SPEED_METHODS = {"dense": PAPERS, "auto": (*PAPERS, "fox")}  # by how attention is computed


@dataclass(frozen=True)
class Size:
    """How large everything is. Lengths are multiples of the short one."""

    model: tuple[str, ...]
    length: int
    steps: int
    batch_tokens: int
    rates: tuple[str, ...]
    device: str
    dtype: str  # of tests; training is in bfloat16 on a GPU, with weights and residual sums in float32
    half: str  # of speeds and inspections: as models are run
    chunk: int
    test_batch: int
    small_stride: int
    small_tokens: int  # scored with the small stride
    trials: int
    inspected: int  # tokens
    speed_steps: int
    speed_tokens: int  # a step, and tested
    checkpoint: tuple[str, ...]
    checkpoint_steps: int
    checkpoint_length: int
    multiples: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 16, 32)
    far: tuple[int, ...] = (64, 128)  # of contenders that are tested so far
    book_multiples: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    small_multiples: tuple[int, ...] = (1, 2, 3, 4, 6)  # of the length that a model was trained at
    recall_multiples: tuple[int, ...] = (1, 2, 4, 8, 16)
    speed_multiples: tuple[int, ...] = (1, 2, 4, 6, 32, 128)
    dense_multiples: tuple[int, ...] = (1, 2, 4, 6)  # the last is the paper's longest, 3,072


SIZES = {
    # 8 layers x 512 with a 16k vocabulary: 34 million parameters, 39 million tokens, 1.6 times through the text.
    "full": Size(
        model=("--num-layers", "8", "--d-model", "512", "--num-heads", "8"),
        length=512,
        steps=1200,
        batch_tokens=32768,
        rates=("0.0007", "0.0014", "0.0028"),
        device="cuda",
        dtype="float32",
        half="bfloat16",
        chunk=16384,
        test_batch=65536,
        small_stride=16,
        small_tokens=12288,
        trials=100,
        inspected=16384,
        speed_steps=40,
        speed_tokens=65536,
        # 4 layers x 256: 7.3 million parameters, 14 MiB in 16 bits.
        checkpoint=("--num-layers", "4", "--d-model", "256", "--num-heads", "8"),
        checkpoint_steps=6000,
        checkpoint_length=256,
    ),
    # To see in minutes on a CPU that everything works.
    "rehearsal": Size(
        model=("--num-layers", "2", "--d-model", "32", "--num-heads", "8"),
        length=32,
        steps=12,
        batch_tokens=512,
        rates=("0.001", "0.004"),
        device="cpu",
        dtype="float32",
        half="float32",
        chunk=1024,
        test_batch=4096,
        small_stride=8,
        small_tokens=256,
        trials=4,
        inspected=256,
        speed_steps=12,
        speed_tokens=512,
        checkpoint=("--num-layers", "1", "--d-model", "32", "--num-heads", "4"),
        checkpoint_steps=12,
        checkpoint_length=32,
        multiples=(1, 2, 4, 8),
        far=(16,),
        book_multiples=(1, 4),
        small_multiples=(1, 2, 4),
        recall_multiples=(2, 4),
        speed_multiples=(1, 4),
        dense_multiples=(1, 4),
    ),
}


@dataclass(frozen=True)
class Places:
    """Where things lie, as commands name them: relative paths, so that results name no machine."""

    data: str
    texts: str
    scratch: str

    @property
    def books(self) -> list[str]:
        """In the order of their names; the first is what recall and inspection look at."""
        found = sorted(path for path in Path(self.texts).glob("*.txt") if path.name != WIKITEXT)
        return [path.as_posix() for path in found]


WIKITEXT = "wikitext-103-valid.txt"
Command = list[str]


@dataclass(frozen=True)
class Unit:
    """name: of its folder below results/. seconds: how long it may take, until one like it was timed.

    folders: the runs that come back, below the scratch folder. needs: units that must be done before.
    """

    name: str
    kind: str
    seconds: int
    commands: Callable[[Path], list[Command]]  # of the folder with the results so far
    folders: tuple[str, ...]
    contender: str = ""
    needs: tuple[str, ...] = ()
    diverges: bool = False  # its training may, which is a result like any other
    alone: bool = False  # nothing else may run beside it; and a command of it may run out of memory
    keeps: bool = False  # its weights, for the unit that needs it
    tries: Mapping[str, str] = field(default_factory=dict)  # runs by learning rate, of which the best is gone on with
    publishes: bool = False  # its model, in 16 bits


def units(part: str, size: Size, places: Places, only: Collection[str] = ()) -> list[Unit]:
    """In the order in which they are best done. only: contenders by name; all of them where none is named."""
    plan = _Plan(size, places)
    found = {
        "short": plan.short,
        "long": plan.long,
        "seeds": plan.seeds,
        "speed": plan.speed,
        "checkpoint": plan.checkpoint,
    }[part]()
    return [unit for unit in found if not only or unit.contender in only]


def name_of(contender: Contender, length: int, seed: int) -> str:
    return f"extrapolation/{contender.name}-{length}-seed{seed}"


def tried(contender: Contender, size: Size) -> dict[str, str]:
    """The name of each try by its learning rate."""
    return {rate: f"rates/{contender.name}-{size.length}-lr{rate}" for rate in size.rates}


def best_rate(tries: Mapping[str, str], results: Path) -> str:
    """Of those tried the one with the lowest validation loss at the end; a run that diverged has none."""
    losses = {rate: validation_loss(results / name) for rate, name in tries.items()}
    known = {rate: loss for rate, loss in losses.items() if loss is not None}
    if not known:
        raise RuntimeError(f"no learning rate of {', '.join(tries.values())} gave a finite validation loss")
    return min(known, key=lambda rate: known[rate])


def failure(run: Path, command: str) -> str | None:
    """What became of the first of its commands of this name that failed: "diverged", or "not enough memory"."""
    path = run / "made.json"
    failed = json.loads(path.read_text()).get("failed", []) if path.exists() else []
    return next((each["error"] for each in failed if each["command"][0] == command), None)


def validation_loss(run: Path) -> float | None:
    """The last in its metrics.jsonl; None of a run that did not reach its end, or came to nothing finite."""
    path = run / "metrics.jsonl"
    if failure(run, "train") is not None or not path.exists():
        return None
    rows = map(json.loads, path.read_text().splitlines())
    found = [row["validation_loss"] for row in rows if "validation_loss" in row]
    return found[-1] if found and math.isfinite(found[-1]) else None


class _Plan:
    def __init__(self, size: Size, places: Places) -> None:
        self.size, self.places = size, places

    def short(self) -> list[Unit]:
        found = []
        for contender in CONTENDERS:
            found += [self._try(contender, rate, name) for rate, name in tried(contender, self.size).items()]
            found.append(self._full(contender, self.size.length, 0))
        return found

    def long(self) -> list[Unit]:
        """The comparison at the test's own length first: the paper's headline."""
        length = self.size.length
        found = [self._full(contender, 2 * length, 0) for contender in CONTENDERS]
        return [*found[:2], self._full(BY_NAME["sinusoidal"], 4 * length, 0), *found[2:]]

    def seeds(self) -> list[Unit]:
        names = ("alibi", "sinusoidal")
        return [self._full(BY_NAME[name], self.size.length, seed) for seed in (1, 2) for name in names]

    def speed(self) -> list[Unit]:
        """Short lengths first, all methods of one length after another: what is there can be compared."""
        size = self.size
        multiples = {"dense": size.dense_multiples, "auto": size.speed_multiples}
        return [
            self._speed(BY_NAME[name], way, multiple * size.length)
            for way, names in SPEED_METHODS.items()
            for multiple in multiples[way]
            for name in names
        ]

    def checkpoint(self) -> list[Unit]:
        size, name = self.size, "checkpoint/alibi"
        run = f"{self.places.scratch}/{name}"
        length = size.checkpoint_length
        lengths = [length * multiple for multiple in (1, 2, 4, 8, 16, 32, 64)]

        def commands(results: Path) -> list[Command]:
            train = ["train", "--data", self.places.data, "--out", run, "--position", "alibi", "--resume"]
            train += [*size.checkpoint, "--length", str(length), "--steps", str(size.checkpoint_steps)]
            train += ["--batch-tokens", str(size.batch_tokens), "--lr", size.rates[1], *self._training()]
            tests = [self._test(run, text, lengths) for text in self._texts()]
            return [train, *tests]

        return [Unit(name, "checkpoint", 150, commands, (name,), contender="alibi", publishes=True)]

    def _try(self, contender: Contender, rate: str, name: str) -> Unit:
        run = f"{self.places.scratch}/{name}"
        return Unit(
            name,
            "try",
            75,
            lambda results: [self._train(contender, self.size.length, 0, rate, run)],
            (name,),
            contender=contender.name,
            diverges=True,
            keeps=True,
        )

    def _full(self, contender: Contender, length: int, seed: int) -> Unit:
        """Trained with the best rate, unless its weights are there from when it was tried, and tested."""
        name = name_of(contender, length, seed)
        run = f"{self.places.scratch}/{name}"
        tries = tried(contender, self.size)
        ways = contender.scaled if seed == 0 else ()
        scaled = [f"scaled/{Path(name).name}-{way}" for way in ways]

        def commands(results: Path) -> list[Command]:
            rate = best_rate(tries, results)
            found = [self._train(contender, length, seed, rate, run), *self._tests(contender, length, seed, run)]
            for way, folder in zip(ways, scaled, strict=True):
                found += self._scaled(contender, length, run, way, f"{self.places.scratch}/{folder}")
            return found

        return Unit(
            name,
            f"full at {length}" + (" and scaled" if scaled else ""),
            150 + 30 * len(scaled) + (40 if length > self.size.length else 0),
            commands,
            (name, *scaled),
            contender=contender.name,
            needs=tuple(tries.values()),
            diverges=True,
            tries=tries if (length, seed) == (self.size.length, 0) else {},
        )

    def _training(self) -> list[str]:
        """Flags of all runs. Losses of every tenth step: a curve needs no more."""
        size = self.size
        flags = ["--checkpoint-every", "0", "--log-every", "10", "--eval-tokens", "262144", "--device", size.device]
        return [*flags, "--model", "tiny"]

    def _train(self, contender: Contender, length: int, seed: int, rate: str, run: str) -> Command:
        size = self.size
        command = ["train", "--data", self.places.data, "--out", run, "--position", contender.position, "--resume"]
        command += [*size.model, "--length", str(length), "--seed", str(seed), "--lr", rate]
        command += ["--steps", str(size.steps), "--batch-tokens", str(size.batch_tokens), *self._training()]
        command += ["--name", contender.label] if contender.label else []
        return command + (["--set", *contender.options] if contender.options else [])

    def _texts(self) -> list[str]:
        return [f"{self.places.texts}/{WIKITEXT}", *self.places.books]

    def _lengths(self, multiples: Sequence[int], least: int) -> list[int]:
        return [self.size.length * multiple for multiple in multiples if self.size.length * multiple >= least]

    def _common(self) -> list[str]:
        size = self.size
        flags = ["--dtype", size.dtype, "--device", size.device, "--chunk", str(size.chunk)]
        return [*flags, "--batch-tokens", str(size.test_batch), "--no-table"]

    def _test(self, run: str, text: str, lengths: Sequence[int], *more: str) -> Command:
        return ["evaluate", run, "--text", text, "--lengths", *map(str, lengths), *self._common(), *more]

    def _tests(self, contender: Contender, length: int, seed: int, run: str) -> list[Command]:
        """Everything that a run is asked: its weights do not outlast the command. Perplexities first."""
        size, (wikitext, *books) = self.size, self._texts()
        far = size.far if contender.far else ()
        multiples, of_books = (*size.multiples, *far), self._lengths((*size.book_multiples, *far), length)
        sliding = ["--mode", "sliding", "--no-kept"]
        found = [self._test(run, wikitext, self._lengths(multiples, length))]
        found += [self._test(run, book, of_books) for book in books]
        # With the stride of the paper's tables, whose cost grows with the length; on books, half of each length.
        stride = ["--stride", str(size.length)]
        found.append(self._test(run, wikitext, self._lengths(size.multiples, length), *sliding, *stride))
        found += [self._test(run, book, of_books, *sliding) for book in books]
        if length > 2 * size.length:  # is there to be compared with at its own length
            return found
        small, lead = self._small_lengths(length), max(self._small_lengths(2 * size.length))
        stride = ["--stride", str(size.small_stride), "--lead", str(lead), "--tokens", str(size.small_tokens)]
        found.append(self._test(run, wikitext, small, *sliding, *stride))
        found.append(self._recall(run, length))
        if seed == 0:
            inspect = ["inspect", run, "--text", books[0], "--no-page", "--out", f"{run}/inspection"]
            inspect += ["--dtype", size.half, "--device", size.device, "--tokens", str(size.inspected)]
            found.append(inspect)
        return found

    def _small_lengths(self, length: int) -> list[int]:
        """Of windows that move by the small stride: those that nonoverlapping ones have too, to be put beside."""
        size = self.size
        known = {size.length * multiple for multiple in size.multiples}
        return [length * multiple for multiple in size.small_multiples if length * multiple in known]

    def _recall(self, run: str, length: int) -> Command:
        lengths = [max(length * multiple, 64) for multiple in self.size.recall_multiples]
        flags = ["--task", "recall", "--trials", str(self.size.trials)]
        return self._test(run, self.places.books[0], lengths, *flags)

    def _scaled(self, contender: Contender, length: int, run: str, way: str, out: str) -> list[Command]:
        size, (wikitext, *books) = self.size, self._texts()
        flags = ["--set", f"position.scaling={way}", "--out", out]
        far = size.far if contender.far else ()
        return [
            [*self._test(run, wikitext, self._lengths((*size.multiples, *far), length)), *flags],
            [*self._test(run, books[0], self._lengths((*size.book_multiples, *far), length)), *flags],
            [*self._recall(run, length), *flags],
        ]

    def _speed(self, contender: Contender, attention: str, length: int) -> Unit:
        """Alone on the machine, in a process of its own, of a batch of the same number of tokens at every length."""
        name = f"speed/{contender.name}-{attention}-{length}"

        def commands(results: Path) -> list[Command]:
            return self._speed_at(contender, attention, name, length)

        return Unit(name, f"speed at {length}", 35, commands, (name,), contender=contender.name, alone=True)

    def _speed_at(self, contender: Contender, attention: str, name: str, length: int) -> list[Command]:
        size, run = self.size, f"{self.places.scratch}/{name}"
        tokens = str(length * max(1, size.speed_tokens // length))  # whole rows
        steps = str(size.speed_steps if length <= 4 * size.length else size.speed_steps // 3)
        train = ["train", "--data", self.places.data, "--out", run, "--position", contender.position, "--resume"]
        train += [*size.model, "--length", str(length), "--steps", steps, "--eval-tokens", "0"]
        train += ["--batch-tokens", tokens, "--checkpoint-every", "0", "--attention", attention]
        train += ["--device", size.device, "--model", "tiny"]
        test = ["evaluate", run, "--text", self.places.books[0], "--lengths", str(length), "--no-kept", "--no-table"]
        test += ["--dtype", size.half, "--device", size.device, "--batch-tokens", tokens, "--chunk", str(size.chunk)]
        test += ["--tokens", str(2 * int(tokens)), "--attention", attention]
        # Twice: kernels are compiled in the first, whose record the second replaces, as it is the same test.
        return [train, test, test]
