"""The paper's claims, each with a rule that says from the numbers here whether it holds.

A rule is a list of checks. All of them met: holds; some: holds in part; none: does not hold here. A check whose
numbers are not there makes no verdict, and a claim without any is not tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from found import WIKITEXT, Found

HOLDS, IN_PART, NOT_HERE, NOT_TESTED = "holds", "holds in part", "does not hold here", "not tested"


@dataclass(frozen=True)
class Check:
    """met: None where there are no numbers. found: what was measured, in words."""

    met: bool | None
    found: str


@dataclass(frozen=True)
class Claim:
    says: str
    paper: str  # its numbers, and where they stand
    rule: str
    checks: Callable[[Found], Sequence[Check]]


def verdict(checks: Sequence[Check]) -> str:
    known = [check.met for check in checks if check.met is not None]
    if not known:
        return NOT_TESTED
    return HOLDS if all(known) else IN_PART if any(known) else NOT_HERE


def ratio(found: Found, contender: str, trained: int, length: int, text: str = WIKITEXT) -> float | None:
    """Perplexity at a length over that at the training length."""
    long, short = (found.perplexity(contender, trained, each, text) for each in (length, trained))
    return long / short if long and short else None


def _at_most(value: float | None, limit: float, what: str) -> Check:
    return Check(None if value is None else value <= limit, f"{what}: {'–' if value is None else f'{value:.3f}'}")


def _above(value: float | None, limit: float, what: str) -> Check:
    return Check(None if value is None else value > limit, f"{what}: {'–' if value is None else f'{value:.3f}'}")


def _each_trained(found: Found, check: Callable[[int], list[Check]]) -> list[Check]:
    """For the two lengths at which all methods were trained."""
    return [each for trained in found.lengths[:2] for each in check(trained)]


def _named(trained: int, multiple: int) -> str:
    return f"L = {trained:,} at {trained * multiple:,}"


def extrapolates(found: Found) -> list[Check]:
    def check(trained: int) -> list[Check]:
        multiple = 32 if trained == found.short else 16
        return [
            _at_most(
                ratio(found, "alibi", trained, trained * multiple, text), 1.0, f"{_named(trained, multiple)}, {text}"
            )
            for text in found.texts
        ]

    return _each_trained(found, check)


def fails_beyond(contender: str, multiple: int, limit: float) -> Callable[[Found], list[Check]]:
    def checks(found: Found) -> list[Check]:
        def check(trained: int) -> list[Check]:
            return [_above(ratio(found, contender, trained, trained * multiple), limit, _named(trained, multiple))]

        return _each_trained(found, check)

    return checks


def t5_between(found: Found) -> list[Check]:
    def check(trained: int) -> list[Check]:
        alibi, t5, rotary = (ratio(found, name, trained, 8 * trained) for name in ("alibi", "t5", "rotary"))
        if alibi is None or t5 is None or rotary is None:
            return [Check(None, f"{_named(trained, 8)}: –")]
        return [Check(alibi < t5 < rotary, f"{_named(trained, 8)}: {alibi:.3f}, {t5:.3f}, {rotary:.3f}")]

    return _each_trained(found, check)


def short_against_long(found: Found) -> list[Check]:
    if found.short is None:
        return []
    checks = []
    for trained in (found.short, 2 * found.short):
        alibi = found.perplexity("alibi", trained, 2 * trained)
        other = found.perplexity("sinusoidal", 2 * trained, 2 * trained)
        what = f"ALiBi L = {trained:,} at {2 * trained:,} over sinusoidal L = {2 * trained:,}"
        checks.append(_at_most(alibi / other if alibi and other else None, 1.01, what))
    return checks


def speed_ratio(
    found: Found, attention: str, first: tuple[str, int], second: tuple[str, int], *, what: str = "training_speed"
) -> float | None:
    """Of the first run over the second: tokens a second in training, or peak memory."""
    runs = [found.speed(name, attention, length) for name, length in (first, second)]
    values = [None if run is None else getattr(run, what) for run in runs]
    return values[0] / values[1] if values[0] and values[1] else None


def faster_than_long(attention: str) -> Callable[[Found], list[Check]]:
    def checks(found: Found) -> list[Check]:
        if found.short is None:
            return []
        made = []
        for length in (found.short, 2 * found.short):
            pair = ("alibi", length), ("sinusoidal", 2 * length)
            name = f"L = {length:,} over sinusoidal L = {2 * length:,}"
            speed = speed_ratio(found, attention, *pair)
            made.append(Check(None if speed is None else speed >= 1.11, f"tokens/s, {name}: {_number(speed)}"))
            memory = speed_ratio(found, attention, *pair, what="training_memory")
            made.append(Check(None if memory is None else memory <= 0.89, f"memory, {name}: {_number(memory)}"))
        return made

    return checks


def as_fast_as_sinusoidal(found: Found) -> list[Check]:
    return [
        Check(None if value is None else value >= 0.95, f"tokens/s at {length:,}: {_number(value)}")
        for length in found.speed_lengths("dense")
        for value in [speed_ratio(found, "dense", ("alibi", length), ("sinusoidal", length))]
    ]


def little_memory(found: Found) -> list[Check]:
    return [
        _at_most(value, 1.007, f"at {length:,}")
        for length in found.speed_lengths("dense")
        for value in [speed_ratio(found, "dense", ("alibi", length), ("sinusoidal", length), what="training_memory")]
    ]


def t5_is_slow(found: Found) -> list[Check]:
    return [
        _at_most(value, 0.55, f"T5's tokens/s over ALiBi's at {length:,}")
        for length in found.speed_lengths("dense")
        for value in [speed_ratio(found, "dense", ("t5", length), ("alibi", length))]
    ]


def early_token_curse(found: Found) -> list[Check]:
    """By how much the loss falls from L to the longest length that was tested with the small stride."""

    def check(trained: int) -> list[Check]:
        small = found.sliding("alibi", trained, small=True)
        longest = max(small, default=trained)
        beside = ratio(found, "alibi", trained, longest)
        if longest == trained or trained not in small or beside is None:
            return [Check(None, f"L = {trained:,}: –")]
        slid = small[longest] / small[trained]
        text = f"{trained:,} to {longest:,}: ×{beside:.3f} nonoverlapping, ×{slid:.3f} with a small stride"
        return [Check(beside < 1 and 1 - slid < (1 - beside) / 3, text)]

    return _each_trained(found, check)


def peak_near_twice(found: Found) -> list[Check]:
    small = {} if found.short is None else found.sliding("alibi", found.short, small=True)
    if found.short is None or len(small) < 3:
        return []
    best = min(small, key=lambda length: small[length])
    return [
        Check(found.short < best <= 3 * found.short, f"L = {found.short:,}: best at {best:,} of up to {max(small):,}")
    ]


def never(found: Found) -> list[Check]:
    return []


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


CLAIMS = (
    Claim(
        "ALiBi trained at L works at lengths far beyond, no worse than at L",
        "19.73 at 512, 18.31 at 15,512 (Table 2); 18.66 at 1,024, 17.98 at 16,024 (Table 3)",
        "perplexity at 16,384 at most that at L, nonoverlapping, on each text",
        extrapolates,
    ),
    Claim(
        "Sinusoidal embeddings fail soon beyond L",
        "43.54 at 1,012 against 20.05 at 512 (Table 2)",
        "perplexity at 2 L above 1.5 times that at L",
        fails_beyond("sinusoidal", 2, 1.5),
    ),
    Claim(
        "Rotary embeddings go on a little further and fail then",
        "21.37 at 1,012, 35.54 at 3,512 against 20.07 at 512 (Table 2)",
        "perplexity at 4 L above 1.3 times that at L",
        fails_beyond("rotary", 4, 1.3),
    ),
    Claim(
        "T5's bias lies between rotary and ALiBi",
        "at 3,512: rotary 35.54, T5 22.91, ALiBi 18.40 (Table 2)",
        "ratio to the perplexity at L, at 8 L: ALiBi below T5 below rotary",
        t5_between,
    ),
    Claim(
        "ALiBi trained at L is as good at 2 L as sinusoidal trained at 2 L",
        "18.81 at 1,024 for L = 512 against 19.34; 18.05 at 2,048 for L = 1,024 against 18.87",
        "perplexity at most 1% above",
        short_against_long,
    ),
    Claim(
        "and trains faster with less memory, with dense attention",
        "11% faster and 11% less memory at 1.3 billion parameters",
        "at least 1.11 times the tokens/s, at most 0.89 of the memory, of equal tokens a step",
        faster_than_long("dense"),
    ),
    Claim(
        "the same with today's kernels, whose memory is linear in the length",
        "not in the paper",
        "as above",
        faster_than_long("auto"),
    ),
    Claim(
        "ALiBi costs no speed",
        "28.3 against 28.5 thousand words a second at 512 (Table 1)",
        "at least 0.95 of sinusoidal's tokens/s in training with dense attention, at each length",
        as_fast_as_sinusoidal,
    ),
    Claim(
        "ALiBi adds next to no memory",
        "0 to 0.7% (Table 1)",
        "at most 0.7% more than sinusoidal in training with dense attention, at each length",
        little_memory,
    ),
    Claim(
        "T5's bias takes about twice as long to train",
        "14.4 against 28.3 thousand words a second at 512 (Table 1)",
        "at most 0.55 of ALiBi's tokens/s with dense attention, at each length",
        t5_is_slow,
    ),
    Claim(
        "The gain at longer lengths is fewer early tokens with little context, not use of the longer context",
        "with stride 1: 17.98 at 512, 18.3 at 3,072",
        "with a small stride less than a third of the nonoverlapping gain is left",
        early_token_curse,
    ),
    Claim(
        "With full windows ALiBi is best near 2 L",
        "with stride 1: 17.92 at 1,024 for L = 512",
        "with a small stride the best length lies above L and at most at 3 L",
        peak_near_twice,
    ),
    Claim(
        "At 1.3 billion parameters ALiBi L = 1,024 beats sinusoidal L = 2,048 at 2,048",
        "8.92 against 9.01",
        "needs models of that size",
        never,
    ),
)
