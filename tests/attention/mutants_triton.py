"""Mutants of the kernels' bounds: what the forward pass skips, what the backward pass leaves out, decoding's window.

Only changes that weaken a bound are here: what makes a window wider costs time, and no proof.
"""

from __future__ import annotations

from tests.attention.mutants import Mutant, in_file

BOUNDS = in_file(
    "triton/windows.py",
    ("no slack in lengths", "(1.0 + (D + 8) * 1.1920929e-7) + D * UNDERFLOW\n\n\n", "1.0 + D * UNDERFLOW\n\n\n", "ingredients"),
    ("squares that are lost", "UNDERFLOW = tl.constexpr(2.0**-63)", "UNDERFLOW = tl.constexpr(0.0)", "ingredients_tiny"),
    ("K by unweighted keys", "weight = tl.maximum(tl.exp(-m * away.to(tl.float32)), 1e-30)[None, :]", "weight = tl.maximum(tl.exp(0.0 * away.to(tl.float32)), 1e-30)[None, :]", "ingredients"),
    ("K by mirrored weights", "_effective(n, norm, inside, x, mp, -step + (UNIT - 1))", "_effective(n, norm, inside, x, mp, step)", "ingredients"),
    ("an outlier vanishes with its weight", "tl.maximum(tl.exp(-m * away.to(tl.float32)), 1e-30)[None, :]", "tl.exp(-m * away.to(tl.float32))[None, :]", "survives", "a weight below 1e-30 is lost only where m * away > 69; the bound with it is the sum of the other keys, and the lost key adds e^(x norm - 69) at most, which the distance to the unit pays for"),
    ("K by the mean of a part", "/ tl.sum(weight, 1)\n", "/ (2.0 * tl.sum(weight, 1))\n", "ingredients"),
    ("NaN is a short key", 'tl.where(n < 1e30, n, float("inf"))', "tl.where(n < 1e30, n, 0.0)", "not_finite"),
    ("no center taken off", "lengths(k.to(tl.float32) - center[None, :], D)", "lengths(k.to(tl.float32), D)", "ingredients"),
    ("norms so far: each unit for itself", "value = tl.maximum(tl.associative_scan(value, 0, _larger, reverse=BACK), carry)", "value = tl.maximum(value, carry)", "ingredients"),
    ("no sum over distances", "near + budget + _tail(m) + 0.01) / m\n    first = tl.where", "near + budget + 0.01) / m\n    first = tl.where", "past"),
    ("no tolerance", "norm) * 1.000001 - near + budget + _tail(m) + 0.01) / m\n    first", "norm) * 1.000001 - near + _tail(m) + 0.01) / m\n    first", "past"),
    ("the past one unit nearer", "tl.maximum(origin + first, 0), FAR), 0) // UNIT\n", "tl.maximum(origin + first, 0), FAR), 0) // UNIT + 1\n", "past"),
    ("rounded up to a unit", "best = tl.min(tl.where(some, tl.maximum(origin + first, 0), FAR), 0) // UNIT", "best = (tl.min(tl.where(some, tl.maximum(origin + first, 0), FAR), 0) + UNIT - 1) // UNIT", "past"),
    ("the luckiest query", "best = tl.min(tl.where(some, tl.maximum(origin + first, 0), FAR), 0) // UNIT", "best = tl.max(tl.where(some, tl.maximum(origin + first, 0), 0), 0) // UNIT", "past"),
    ("norms beyond X", "tl.where(x <= X, x * K, X * K + (x - X) * norm)", "x * K", "beyond_the_sample"),
    ("a unit's decay for the sum over units", "step = m * UNIT * 0.5  # of", "step = m * UNIT * 1.0  # of", "survives", "any step is sound: a unit that lies n units before the window may hold e^(-n step) of what the nearest may, and the sum over n is what `_tail(step)` leaves room for"),
    ("no sum over units", "spare = least - budget - _tail(step) - within - 0.01", "spare = least - budget - within - 0.01", "outliers"),
    ("no sum within a unit", "spare = least - budget - _tail(step) - within - 0.01", "spare = least - budget - _tail(step) - 0.01", "outliers"),
    ("no tolerance beside an outlier", "spare = least - budget - _tail(step) - within - 0.01", "spare = least - _tail(step) - within - 0.01", "outliers"),
    ("the unit itself is skipped", "index + 1 + tl.floor(room * 0.9999).to(tl.int32), index)", "index + 1 + tl.floor(room * 0.9999).to(tl.int32), index + 1)", "outliers"),
    ("a unit more for free", "index + 1 + tl.floor(room * 0.9999)", "index + 2 + tl.floor(room * 0.9999)", "outliers"),
    ("the luckiest unit", "allowed = tl.minimum(allowed, tl.min(tl.where(inside, unit_end, FAR), 0))", "allowed = tl.max(tl.where(inside, unit_end, 0), 0)", "outliers"),
    ("the quietest query beside an outlier", "most = tl.max(tl.where(some, x, 0.0), 0)", "most = tl.min(tl.where(some, x, 0.0), 0)", "outliers"),
    ("no offset", "+ 0.01) / m + offset\n", "+ 0.01) / m\n", "survives", "the window's end is rounded up by a step more than the proof needs, and the offset is at most a step"),
    ("no sum over distances ahead", "- near + budget + _tail(m) + 0.01) / m + offset", "- near + budget + 0.01) / m + offset", "future"),
    ("no tolerance ahead", "- near + budget + _tail(m) + 0.01) / m + offset", "- near + _tail(m) + 0.01) / m + offset", "future"),
    ("the future one unit nearer", "return (tl.maximum(tl.minimum(most, nk), 0) + UNIT - 1) // UNIT", "return (tl.maximum(tl.minimum(most, nk), 0)) // UNIT", "future"),
    ("no hundredth of a nat", "+ budget + _tail(m) + 0.01) / m\n    first", "+ budget + _tail(m)) / m\n    first", "survives", "slack for the rounding of the formula itself, some 1e-6 of terms that are a few hundred at most where it matters"),
)  # fmt: skip

FORWARD = in_file(
    "triton/forward.py",
    ("what the centre adds is forgotten", "* 0.6931471805599453 - centered", "* 0.6931471805599453", "past_of_shifted_keys"),
    ("what the centre adds, twice", "* 0.6931471805599453 - centered", "* 0.6931471805599453 - 2.0 * centered", "past_of_shifted_keys"),
    ("base 2 for base e", "(m + tl.log2(l)) * 0.6931471805599453", "(m + tl.log2(l))", "past"),
    ("far keys counted as near", "- centered\n", "- centered + tl.log(2.0)\n", "past"),
    ("no slack for the scores", "near -= x * (", "near -= 0.0 * x * (", "survives", "the worst rounding of a sum of D products; inputs reach it by chance only, at a hundredth of its size"),
    ("tiles that matter only by themselves", "rest = rest * fade + weight", "rest = weight", "thinly_spread"),
    ("what is left is never added up", "matters = ~((rest <= share * l) & (weight * grow <= share * l))", "matters = ~(weight * grow <= share * l)", "thinly_spread"),
    ("no early mark", "matters = ~((rest <= share * l) & (weight * grow <= share * l))", "matters = ~(rest <= share * l)", "survives", "it marks a tile before its share is full, to end the walk at a better place: the sum of the rest alone is the bound"),
    ("the tile that mattered is left out", "found = tl.where(matters, key if DOWN else key + BN, found)", "found = tl.where(matters, key + BN if DOWN else key, found)", "thinly_spread"),
    ("the luckiest query's tiles", "least = tl.min(tl.where(some, found, FAR).reshape(BM // G, G), 1)", "least = tl.max(tl.where(some, found, 0).reshape(BM // G, G), 1)", "thinly_spread"),
    ("the luckiest query's tiles ahead", "most = tl.max(tl.where(some, found, 0).reshape(BM // G, G), 1)", "most = tl.min(tl.where(some, found, FAR).reshape(BM // G, G), 1)", "thinly_spread"),
)  # fmt: skip

HOST = in_file(
    "triton/launch.py",
    ("all of the tolerance for each pass", "share = problem.tolerance / (2 if problem.causal else 4)", "share = problem.tolerance / (1 if problem.causal else 2)", "past"),
    ("all of a pass for each side", "share = problem.tolerance / (2 if problem.causal else 4)", "share = problem.tolerance / 2", "future"),
    ("no slack in the shares", "SLACK = 0.999", "SLACK = 1.0", "survives", "for the rounding of float32 sums of up to 2^24 weights, each relative to the largest"),
)  # fmt: skip

DECODING = in_file(
    "triton/decode.py",
    ("no sum over distances", "- near + budget + geometric + 0.01) / m", "- near + budget + 0.01) / m", "decoding"),
    ("no tolerance", "- near + budget + geometric + 0.01) / m", "- near + geometric + 0.01) / m", "decoding"),
    ("the nearest key at no distance", "* scale - m * (p - nearest).to(tl.float32)", "* scale + m * (p - nearest).to(tl.float32)", "survives", "a query stands at most one step behind its nearest key (`position`), and that step is the rounding of the window"),
    ("tiny queries have no length", "x = lengths(wide, D) * tl.abs(scale)", "x = tl.sqrt(tl.sum(wide * wide, 1)) * tl.abs(scale)", "decoding_tiny_queries"),
    ("NaN among the norms", "first = tl.where(odd > 0, 0, tl.minimum(tl.maximum(lowest, 0), end) // UNIT * UNIT)", "first = tl.minimum(tl.maximum(lowest, 0), end) // UNIT * UNIT", "decoding_not_finite"),
    ("rounded up to a unit", "tl.minimum(tl.maximum(lowest, 0), end) // UNIT * UNIT)", "(tl.minimum(tl.maximum(lowest, 0), end) + UNIT - 1) // UNIT * UNIT)", "decoding"),
    ("norms a little too short", "norm = tl.maximum(norm, tl.max(norms, 0))", "norm = tl.maximum(norm, 0.97 * tl.max(norms, 0))", "decoding"),
)  # fmt: skip

MUTANTS = [*BOUNDS, *FORWARD, *HOST, *DECODING]
