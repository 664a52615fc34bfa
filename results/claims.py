"""The paper's claims, each with a rule that says from the numbers here whether it holds.

A rule is a list of checks. All of them met: holds; some: holds in part; none: does not hold here. A check whose
numbers are not there makes no verdict, and a claim without any is not tested. Where seeds differ by more than what
a check turns on, it is undecided.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from found import LABELS, WIKITEXT, Found

HOLDS, IN_PART, NOT_HERE, NOT_TESTED = "holds", "holds in part", "does not hold here", "not tested"
UNDECIDED = "undecided"
SMALLEST_GAP = 0.002  # of a perplexity, by which a best length must be better than others


@dataclass(frozen=True)
class Check:
    """met: None where there are no numbers, or they do not decide. found: what was measured, in words."""

    met: bool | None
    found: str
    undecided: bool = False


@dataclass(frozen=True)
class Claim:
    says: str
    paper: str  # its numbers, and where they stand
    rule: str
    checks: Callable[[Found], Sequence[Check]]


def verdict(checks: Sequence[Check]) -> str:
    known = [check.met for check in checks if check.met is not None]
    undecided = any(check.undecided for check in checks)
    if not known:
        return UNDECIDED if undecided else NOT_TESTED
    said = HOLDS if all(known) else IN_PART if any(known) else NOT_HERE
    what = "decided" if undecided else "tested"
    return said if len(known) == len(checks) else f"{said} ({len(known)} of {len(checks)} {what})"


def ratios(found: Found, contender: str, trained: int, length: int, text: str = WIKITEXT) -> list[float]:
    """Perplexity at a length over that at the training length, of each seed."""
    long, short = (found.perplexities(contender, trained, each, text) for each in (length, trained))
    return [long[seed] / short[seed] for seed in long if seed in short]


def ratio(found: Found, contender: str, trained: int, length: int) -> float | None:
    known = ratios(found, contender, trained, length)
    return statistics.fmean(known) if known else None


def spread_of(values: Sequence[float]) -> float | None:
    """The standard deviation over seeds."""
    return statistics.stdev(values) if len(values) > 1 else None


def _at_most(values: Sequence[float], limit: float, what: str, spread: float | None = None) -> Check:
    """spread: that of the mean, where it is not that of these values."""
    if not values:
        return Check(None, f"{what}: –")
    mean, spread = statistics.fmean(values), spread_of(values) if spread is None else spread
    said = f"{what}: {mean:.3f}" + ("" if spread is None else f" ± {spread:.3f}")
    if spread is not None and abs(mean - limit) < spread:
        return Check(None, f"{said}, too close to {limit:g} to say", undecided=True)
    return Check(mean <= limit, said)


def _above(values: Sequence[float], limit: float, what: str) -> Check:
    check = _at_most(values, limit, what)
    return Check(None if check.met is None else not check.met, check.found, check.undecided)


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
                ratios(found, "alibi", trained, trained * multiple, text), 1.0, f"{_named(trained, multiple)}, {text}"
            )
            for text in found.texts
        ]

    return _each_trained(found, check)


def fails_beyond(contender: str, multiple: int, limit: float) -> Callable[[Found], list[Check]]:
    def checks(found: Found) -> list[Check]:
        def check(trained: int) -> list[Check]:
            return [_above(ratios(found, contender, trained, trained * multiple), limit, _named(trained, multiple))]

        return _each_trained(found, check)

    return checks


def rotary_goes_further(found: Found) -> list[Check]:
    """Than sinusoidal embeddings, before it fails too."""

    def check(trained: int) -> list[Check]:
        rotary, sinusoidal = (ratio(found, name, trained, 2 * trained) for name in ("rotary", "sinusoidal"))
        said = f"{_named(trained, 2)}: {_number(rotary)}, sinusoidal {_number(sinusoidal)}"
        return [Check(rotary < sinusoidal if rotary is not None and sinusoidal is not None else None, said)]

    return [*_each_trained(found, check), *fails_beyond("rotary", 4, 1.3)(found)]


def t5_between(found: Found) -> list[Check]:
    def check(trained: int) -> list[Check]:
        alibi, t5, rotary = (ratio(found, name, trained, 8 * trained) for name in ("alibi", "t5", "rotary"))
        if alibi is None or t5 is None or rotary is None:
            return [Check(None, f"{_named(trained, 8)}: –")]
        return [Check(alibi < t5 < rotary, f"{_named(trained, 8)}: {alibi:.3f}, {t5:.3f}, {rotary:.3f}")]

    return _each_trained(found, check)


def short_against_long(found: Found) -> list[Check]:
    """Seeds are known at the short length: what a run there varies by is taken for what others do."""
    if found.short is None:
        return []
    checks = []
    for trained in (found.short, 2 * found.short):
        alibi = found.perplexities("alibi", trained, 2 * trained)
        other = found.perplexities("sinusoidal", 2 * trained, 2 * trained)
        what = f"ALiBi L = {trained:,} at {2 * trained:,} over sinusoidal L = {2 * trained:,}"
        if not alibi or not other:
            checks.append(Check(None, f"{what}: –"))
            continue
        value = statistics.fmean(alibi.values()) / statistics.fmean(other.values())
        varies = [_varies(found, "alibi", 2), _varies(found, "sinusoidal", 1)]
        spread = None
        if varies[0] is not None and varies[1] is not None:
            spread = value * math.hypot(varies[0] / math.sqrt(len(alibi)), varies[1] / math.sqrt(len(other)))
        checks.append(_at_most([value], 1.01, what, spread))
    return checks


def _varies(found: Found, contender: str, multiple: int) -> float | None:
    """By how much of its perplexity a run at the short length varies with the seed."""
    values = list(found.perplexities(contender, found.short or 0, multiple * (found.short or 0)).values())
    spread = spread_of(values)
    return None if spread is None else spread / statistics.fmean(values)


Named = tuple[str, int]  # a contender and a length
Rule = Callable[[float], bool]


def at_least(limit: float) -> Rule:
    return lambda value: value >= limit


def at_most(limit: float) -> Rule:
    return lambda value: value <= limit


def _compared(found: Found, attention: str, pair: tuple[Named, Named], figure: str, rule: Rule, what: str) -> Check:
    """training_speed or training_memory of the first run over that of the second."""
    runs = [found.speed(name, attention, length) for name, length in pair]
    out = [
        f"{LABELS[name]} at {length:,}"
        for run, (name, length) in zip(runs, pair, strict=True)
        if run is not None and run.ran_out_of_memory("train")
    ]
    if out:
        return Check(None, f"{what}: {' and '.join(out)} ran out of memory")
    first, second = (None if run is None else getattr(run, figure) for run in runs)
    if not first or not second:
        return Check(None, f"{what}: –")
    value = first / second
    return Check(rule(value), f"{what}: {value:.3f}")


def faster_than_long(attention: str) -> Callable[[Found], list[Check]]:
    def checks(found: Found) -> list[Check]:
        if found.short is None:
            return []
        made = []
        for length in (found.short, 2 * found.short):
            pair = ("alibi", length), ("sinusoidal", 2 * length)
            name = f"L = {length:,} over sinusoidal L = {2 * length:,}"
            made.append(_compared(found, attention, pair, "training_speed", at_least(1.11), f"tokens/s, {name}"))
            made.append(_compared(found, attention, pair, "training_memory", at_most(0.90), f"memory, {name}"))
        return made

    return checks


def at_each_length(first: str, second: str, figure: str, rule: Rule, what: str) -> Callable[[Found], list[Check]]:
    """With dense attention, as in the paper."""

    def checks(found: Found) -> list[Check]:
        return [
            _compared(found, "dense", ((first, length), (second, length)), figure, rule, f"{what} at {length:,}")
            for length in found.speed_lengths("dense")
        ]

    return checks


def early_token_curse(found: Found) -> list[Check]:
    """By how much the loss falls from L to the longest length that was tested with the small stride."""

    def check(trained: int) -> list[Check]:
        small = _with_small_stride(found, trained)
        longest = max(small, default=trained)
        beside = ratio(found, "alibi", trained, longest)
        if longest == trained or trained not in small or beside is None:
            return [Check(None, f"L = {trained:,}: –")]
        slid = small[longest] / small[trained]
        text = f"{trained:,} to {longest:,}: ×{beside:.3f} nonoverlapping, ×{slid:.3f} with a small stride"
        return [Check(beside < 1 and 1 - slid < (1 - beside) / 3, text)]

    return _each_trained(found, check)


def _with_small_stride(found: Found, trained: int) -> dict[int, float]:
    return {} if found.small_stride is None else found.sliding("alibi", trained, found.small_stride)


def peak_near_twice(found: Found) -> list[Check]:
    def check(trained: int) -> list[Check]:
        small = _with_small_stride(found, trained)
        if len(small) < 3 or trained not in small:
            return [Check(None, f"L = {trained:,}: –")]
        best = min(small, key=lambda length: small[length])
        gap = min(small[trained], small[max(small)]) / small[best] - 1
        values = ", ".join(f"{value:.2f} at {length:,}" for length, value in small.items())
        met = trained < best <= 3 * trained and gap >= SMALLEST_GAP
        return [Check(met, f"L = {trained:,}: {values}; best at {best:,}, {gap:.1%} below the ends")]

    return _each_trained(found, check)


def never(found: Found) -> list[Check]:
    return []


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


CLAIMS = (
    Claim(
        "ALiBi trained at L works at lengths far beyond, no worse than at L",
        "19.73 at 512, 18.31 at 15,512 (Table 2); 18.66 at 1,024, 17.98 at 16,024 (Table 3)",
        "perplexity at 16,384 at most that at L, nonoverlapping, on each text; undecided within a standard deviation "
        "over seeds",
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
        "ratio to the perplexity at L: at 2 L below that of sinusoidal embeddings, at 4 L above 1.3",
        rotary_goes_further,
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
        "perplexity at most 1% above; undecided within one standard deviation, as seeds at the short length have it",
        short_against_long,
    ),
    Claim(
        "and trains faster with less memory, with dense attention",
        "11% faster and 11% less memory at 1.3 billion parameters",
        "at least 1.11 times the tokens/s, at most 0.90 of the memory (the paper's 26.2 of 29.3 GB are 0.894), with "
        "equal tokens a step",
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
        at_each_length("alibi", "sinusoidal", "training_speed", at_least(0.95), "tokens/s"),
    ),
    Claim(
        "ALiBi adds next to no memory",
        "0 to 0.7% (Table 1)",
        "at most 0.7% more than sinusoidal in training with dense attention, at each length",
        at_each_length("alibi", "sinusoidal", "training_memory", at_most(1.007), "memory"),
    ),
    Claim(
        "T5's bias takes about twice as long to train",
        "14.4 against 28.3 thousand words a second at 512 (Table 1)",
        "at most 0.55 of ALiBi's tokens/s with dense attention, at each length",
        at_each_length("t5", "alibi", "training_speed", at_most(0.55), "T5's tokens/s over ALiBi's"),
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
        "with a small stride the best length lies above L and at most at 3 L, and perplexity there is at least 0.2% "
        "below that at L and at the longest",
        peak_near_twice,
    ),
    Claim(
        "At 1.3 billion parameters ALiBi L = 1,024 beats sinusoidal L = 2,048 at 2,048",
        "8.92 against 9.01",
        "needs models of that size",
        never,
    ),
)
