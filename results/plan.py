"""What is run for docs/reproducing.md: units of work, each a list of `trainshort` commands, in parts by name.

A unit is one run, or one speed: it is done wholly or not at all, and its commands share nothing with another unit's
but the choice of the learning rate. That is made by validation loss on text that no table shows.

    short        each method at the short length with three learning rates, then its best tested in every way
    long         each method at twice the length with its best rate; sinusoidal at four times
    seeds        two more seeds of ALiBi and sinusoidal at the short length
    speed        some steps of training and a test at each length, with dense attention and with today's kernels
    checkpoint   a small ALiBi model to play with
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
PAPERS = ("sinusoidal", "rotary", "t5", "alibi")
SPEED_METHODS = {"auto": (*PAPERS, "fox"), "dense": PAPERS}  # by how attention is computed


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
    far: tuple[int, ...] = (64, 128)
    book_multiples: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    small_multiples: tuple[int, ...] = (1, 2, 3, 4, 6)
    recall_multiples: tuple[int, ...] = (1, 2, 4, 8, 16)
    speed_multiples: tuple[int, ...] = (1, 2, 4, 32, 128)
    dense_multiples: tuple[int, ...] = (1, 2, 4, 8)


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
        trials=50,
        inspected=4096,
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
    needs: tuple[str, ...] = ()
    alone: bool = False  # nothing else may run beside it; and a command of it may run out of memory
    keeps: bool = False  # its weights, for the unit that needs it
    tries: Mapping[str, str] = field(default_factory=dict)  # runs by learning rate, of which the best is gone on with
    publishes: bool = False  # its model, in 16 bits


def units(part: str, size: Size, places: Places) -> list[Unit]:
    """In the order in which they are best done."""
    plan = _Plan(size, places)
    return {
        "short": plan.short,
        "long": plan.long,
        "seeds": plan.seeds,
        "speed": plan.speed,
        "checkpoint": plan.checkpoint,
    }[part]()


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


def validation_loss(run: Path) -> float | None:
    """The last in its metrics.jsonl."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = [row["validation_loss"] for row in rows if "validation_loss" in row]
    return found[-1] if found else None


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
        return [self._speed(BY_NAME[name], way) for way, names in SPEED_METHODS.items() for name in names]

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

        return [Unit(name, "checkpoint", 150, commands, (name,), publishes=True)]

    def _try(self, contender: Contender, rate: str, name: str) -> Unit:
        run = f"{self.places.scratch}/{name}"
        return Unit(
            name,
            "try",
            75,
            lambda results: [self._train(contender, self.size.length, 0, rate, run)],
            (name,),
            keeps=True,
        )

    def _full(self, contender: Contender, length: int, seed: int) -> Unit:
        """Trained with the best rate, unless its weights are there from when it was tried, and tested."""
        name = name_of(contender, length, seed)
        run = f"{self.places.scratch}/{name}"
        tries = tried(contender, self.size)
        scaled = [f"scaled/{Path(name).name}-{way}" for way in contender.scaled]

        def commands(results: Path) -> list[Command]:
            rate = best_rate(tries, results)
            found = [self._train(contender, length, seed, rate, run), *self._tests(contender, length, run)]
            for way, folder in zip(contender.scaled, scaled, strict=True):
                found += self._scaled(contender, length, run, way, f"{self.places.scratch}/{folder}")
            return found

        return Unit(
            name,
            "full",
            180,
            commands,
            (name, *scaled),
            needs=tuple(tries.values()),
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

    def _tests(self, contender: Contender, length: int, run: str) -> list[Command]:
        """Everything that a run is asked: its weights do not outlast the command."""
        size, (wikitext, *books) = self.size, self._texts()
        far = size.far if contender.far else ()
        found = [self._test(run, wikitext, self._lengths((*size.multiples, *far), length))]
        found += [self._test(run, book, self._lengths((*size.book_multiples, *far), length)) for book in books]
        stride = ["--mode", "sliding", "--no-kept", "--stride"]
        found.append(self._test(run, wikitext, self._lengths(size.multiples, length), *stride, str(size.length)))
        small = self._lengths(size.small_multiples, length)
        lead = ["--lead", str(max(size.small_multiples) * size.length), "--tokens", str(size.small_tokens)]
        found.append(self._test(run, wikitext, small, *stride, str(size.small_stride), *lead))
        found.append(self._recall(run, length))
        inspect = ["inspect", run, "--text", books[0], "--no-page", "--out", f"{run}/inspection"]
        inspect += ["--dtype", size.half, "--device", size.device, "--tokens", str(size.inspected)]
        return [*found, inspect]

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

    def _speed(self, contender: Contender, attention: str) -> Unit:
        """Alone on the machine, of a batch of the same number of tokens at every length."""
        size = self.size
        multiples = size.dense_multiples if attention == "dense" else size.speed_multiples
        lengths = [size.length * multiple for multiple in multiples]
        names = [f"speed/{contender.name}-{attention}-{length}" for length in lengths]

        def commands(results: Path) -> list[Command]:
            pairs = zip(names, lengths, strict=True)
            return [each for name, length in pairs for each in self._speed_at(contender, attention, name, length)]

        return Unit(names[0], "speed", 20 * len(lengths), commands, tuple(names), alone=True)

    def _speed_at(self, contender: Contender, attention: str, name: str, length: int) -> list[Command]:
        size, run = self.size, f"{self.places.scratch}/{name}"
        tokens = str(max(size.speed_tokens, length))
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
