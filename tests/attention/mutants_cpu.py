"""Mutants of the bounds on a CPU: windows.py, norms.py, near.py and decode.py, line by line.

Only changes that weaken a bound are here: what makes a window wider costs time, and no proof.
"""

from __future__ import annotations

from tests.attention.mutants import Mutant


def _in(file: str, *rows: tuple[str, ...]) -> list[Mutant]:
    """Rows of (name, text, replacement, check), or with "survives" and the reason for the check."""
    mutants = []
    for name, text, replacement, *rest in rows:
        check, reason = (rest[0], "") if len(rest) == 1 else ("", rest[1])
        mutants.append(Mutant(name, [(file, text, replacement)], check, reason))
    return mutants


WINDOWS = _in(
    "windows.py",
    ("x without slack", "(abs(problem.scale) * slack)", "abs(problem.scale)", "ingredients causal"),
    ("x with the sign of the scale", "(abs(problem.scale) * slack)", "(problem.scale * slack)", "mean_of_near_keys"),
    ("no slack at all", "slack = 1.0 + (dim + 4) * 2.0**-23", "slack = 1.0", "ingredients causal"),
    ("two sides, twice the tolerance", "problem.tolerance / sides.double()", "problem.tolerance / sides.double() ** 0", "both_sides"),
    ("rounding by the shortest key", "norms.amax(-1))  # [B, H, Tq]", "norms.amin(-1))  # [B, H, Tq]", "rounding"),
    ("norms of the wrong head", "norms.repeat_interleave(problem.q.shape[1] // norms.shape[1], dim=1)", "norms.repeat(1, problem.q.shape[1] // norms.shape[1], 1)", "ingredients grouped"),
    ("an infinite near score", "unknown = ~torch.isfinite(near)", "unknown = torch.isneginf(near)", "decoding_extremes"),
    ("nobody is stuck", "stuck = unknown & (run_end > run_first)", "stuck = unknown & (run_end < run_first)", "random causal"),
    ("one step too near, past", "budget + past[..., None] * position + near", "budget + past[..., None] * (position + 1) + near", "nearest_keys"),
    ("the future's slope for the past", "_Tail(norms, past, block, by_block is not None)", "_Tail(norms, future, block, by_block is not None)", "both_sides"),
    ("the threshold by the future's slope", "budget + past[..., None] * position + near", "budget + future[..., None] * position + near", "random left_right"),
    ("stuck: a block later", "needed = (run_first // block)", "needed = (run_first // block + 1)", "random causal"),
    ("stuck: not the first query", "stuck & (position >= run_first)", "stuck & (position > run_first)", "random packed"),
    ("stuck: the luckiest of a block", "_by_block(needed, block, fill=FAR).amin(-1)", "_by_block(needed, block, fill=-FAR).amax(-1)", "random packed_long"),
    ("the past of heads that look ahead", "first = first.masked_fill(~torch.tensor(looks_back, device=first.device)[:, None], 0)", "pass", "the_side_not_looked_to"),
    ("the future of heads that look back", "skipped = skipped.masked_fill(~torch.tensor(looks_ahead, device=last.device)[:, None], 0)", "pass", "the_side_not_looked_to"),
    ("no offset", "blocks * block - 1 - position - problem.bias.offset", "blocks * block - 1 - position", "nearest_keys_ahead"),
    ("one step too near, future", "blocks * block - 1 - position - problem.bias.offset", "blocks * block - position - problem.bias.offset", "nearest_keys_ahead"),
    ("the past's slope for the future", "_Tail(mirrored, future, block, False)", "_Tail(mirrored, past, block, False)", "both_sides"),
    ("the future's threshold by the past's slope", "budget + future[..., None] * place + near", "budget + past[..., None] * place + near", "random left_right"),
    ("not mirrored", "value=-math.inf).flip(-1)", "value=-math.inf)", "ingredients symmetric"),
    ("one block too few, future", "last = blocks - skipped", "last = blocks - skipped - 1", "nearest_keys_ahead"),
    ("stuck, future: a block less", "needed = (-(-run_end // block))", "needed = (run_end // block)", "random one_sided"),
    ("stuck, future: not the last query", "stuck & (position < run_end)", "stuck & (position < run_end - 1)", "random packed_symmetric"),
    ("stuck, future: the luckiest of a block", "_by_block(needed, block, fill=0).amax(-1)", "_by_block(needed, block, fill=FAR).amin(-1)", "random packed_ahead"),
    ("no edge above all", "edges = torch.cat((sample[:, :, picks], finite.amax(-1, keepdim=True)), dim=-1)", "edges = sample[:, :, picks]", "quantile_edges"),
    ("the shortest query as the only edge", "return finite.amax(-1, keepdim=True).double()", "return finite.amin(-1, keepdim=True).double()", "ingredients start"),
    ("quantiles of an unsorted sample", "finite[:, :, ::step].sort(-1).values", "finite[:, :, ::step]", "ingredients causal"),
    ("no series over given block norms", "self.series = series[..., None]", "self.series = 0.0 * series[..., None]", "norms_by_block"),
    ("the series of one block more", "torch.log(torch.expm1(-slopes * block) / torch.expm1(-slopes))", "torch.log(torch.expm1(-slopes * block / 2) / torch.expm1(-slopes))", "ingredients causal"),
    ("a block's end one step later", "torch.arange(1 - block, 1, device=norms.device)", "torch.arange(-block, 0, device=norms.device)", "nearest_keys"),
    ("one key for a block", "sums = torch.logsumexp(self.spread * x", "sums = torch.amax(self.spread * x", "ingredients causal"),
    ("no rounding of the sums", "1e-5 + 2.0**-22 * block * slopes[..., None]", "0.0 * slopes[..., None]", "ingredients_large"),
    ("no rounding of the slopes", "1e-5 + 2.0**-22 * block * slopes[..., None]", "1e-5 + 0.0 * slopes[..., None]", "ingredients_large"),
    ("blocks end at their first key", "+ 1) * block - 1", ") * block", "norms_by_block"),
    ("NaN weighs nothing", "nan_to_num(nan=HUGE, posinf=HUGE, neginf=-HUGE)", "nan_to_num(nan=-HUGE, posinf=HUGE, neginf=-HUGE)", "survives", "twice safe: a norm that is not finite is the longest of its head, so that no near score is known and every query visits all"),
    ("an infinite norm weighs nothing", "nan_to_num(nan=HUGE, posinf=HUGE, neginf=-HUGE)", "nan_to_num(nan=HUGE, posinf=-HUGE, neginf=-HUGE)", "survives", "as above"),
    ("the largest block for the sum of all", "torch.logcumsumexp(sums + self.places, dim=-1)", "torch.cummax(sums + self.places, dim=-1).values", "mean_of_near_keys"),
    ("places in float32", "self.places = slopes[..., None] * self.ends", "self.places = (slopes[..., None] * self.ends).float()", "long_sequences"),
    ("thresholds in float32", "threshold = budget + past[..., None] * position + near", "threshold = (budget + past[..., None] * position + near).float().double()", "long_sequences"),
    ("places of the wrong slope", "self.places = slopes[..., None] * self.ends", "self.places = 0.99 * slopes[..., None] * self.ends", "nearest_keys"),
    ("the longest query has no say", "(reach > below) & (reach <= x)", "(reach > below) & (reach < x)", "quantile_edges"),
    ("only the first edge", "if below is None else (reach > below) & (reach <= x)", "if below is None else reach != reach", "quantile_edges"),
    ("the luckiest edge", "torch.minimum(skip, count)", "torch.maximum(skip, count)", "quantile_edges"),
    ("the luckiest query of a block", "_by_block(least, block, fill=math.inf).amin(-1)", "_by_block(least, block, fill=-math.inf).amax(-1)", "random causal"),
    ("one block more", "count = torch.searchsorted(tail.table(x), least, right=True)", "count = torch.searchsorted(tail.table(x), least, right=True) + 1", "nearest_keys"),
    ("not monotone, low", "low.masked_fill(empty, FAR).flip(-1).cummin(-1).values.flip(-1)", "low.masked_fill(empty, FAR)", "random causal"),
    ("not monotone, high", "high.masked_fill(empty, 0).cummax(-1).values", "high.masked_fill(empty, 0)", "random symmetric"),
    ("queries do not see themselves", "torch.minimum(end, position + 1)", "torch.minimum(end, position)", "random causal"),
    ("visible blocks rounded down", "limits[sight] = (low // block, -(-high // block))", "limits[sight] = (low // block, high // block)", "random causal"),
    ("visible blocks rounded up", "limits[sight] = (low // block, -(-high // block))", "limits[sight] = (-(-low // block), -(-high // block))", "random packed"),
    ("the last sight of a block", "_by_block(low, block, fill=FAR).amin(-1)", "_by_block(low, block, fill=-FAR).amax(-1)", "random packed"),
    ("the first sight of a block", "_by_block(high, block, fill=0).amax(-1)", "_by_block(high, block, fill=FAR).amin(-1)", "random packed_symmetric"),
    ("slopes of the wrong heads", "bias.slopes[..., heads],", "bias.slopes[..., : heads.stop - heads.start],", "random one_gentle"),
    ("keys of the wrong heads", "k=problem.k[:, keys],", "k=problem.k[:, : keys.stop - keys.start],", "heads_apart"),
    ("norms of the wrong heads", "problem.key_norms[:, keys],", "problem.key_norms[:, : keys.stop - keys.start],", "heads_apart"),
)  # fmt: skip

NORMS = _in(
    "norms.py",
    ("squares that are lost", "UNDERFLOW = 2.0**-63", "UNDERFLOW = 0.0", "ingredients_tiny"),
    ("a smaller floor", "UNDERFLOW = 2.0**-63", "UNDERFLOW = 2.0**-75", "ingredients_tiny"),
    ("lost squares in norms of rows", "dtype=dtype) + rows.shape[-1] ** 0.5 * UNDERFLOW", "dtype=dtype)", "ingredients_tiny"),
    ("lost squares in given block norms", "(given.detach().float() + problem.k.shape[3] ** 0.5 * UNDERFLOW) * slack", "given.detach().float() * slack", "ingredients_tiny"),
    ("given block norms rounded down", "(given.detach().float() + problem.k.shape[3] ** 0.5 * UNDERFLOW) * slack", "given.detach().float()", "rounding"),
    ("a block norm of NaN", "norms = torch.where(torch.isnan(norms), math.inf, norms)\n    return norms if norms.dim() == 3", "norms = torch.where(torch.isnan(norms), 0.0, norms)\n    return norms if norms.dim() == 3", "not_finite"),
    ("block norms of the wrong keys", "norms.repeat_interleave(BLOCK, dim=2)[:, :, :keys]", "norms.repeat(1, 1, BLOCK)[:, :, :keys]", "ingredients causal"),
    ("lost squares in given norms", "norms = (norms + k.shape[3] ** 0.5 * UNDERFLOW) * slack", "norms = norms * slack", "ingredients_tiny"),
    ("given norms rounded down", "norms = (norms + k.shape[3] ** 0.5 * UNDERFLOW) * slack", "norms = norms + 0.0", "rounding"),
    ("norms without slack", "norms = row_norms(k) * slack", "norms = row_norms(k)", "ingredients_large"),
    ("centred norms without slack", "        norms = norms * slack\n", "", "rounding"),
    ("the centre on the wrong side", "row_norms(k[part] - center[part][:, :, None])", "row_norms(k[part] + center[part][:, :, None])", "ingredients_large"),
    ("a key norm of NaN", "norms = torch.where(torch.isnan(norms), math.inf, norms)\n    real", "norms = torch.where(torch.isnan(norms), 0.0, norms)\n    real", "not_finite"),
    ("the last key counts as unwritten", "written = index <= problem.positions()[:, -1:]", "written = index < problem.positions()[:, -1:]", "ingredients start"),
    ("keys of the first query only", "written = index <= problem.positions()[:, -1:]", "written = index <= problem.positions()[:, :1]", "ingredients start"),
)  # fmt: skip

NEAR = _in(
    "near.py",
    ("no rounding of near scores", "(problem.q.shape[3] + 36) * 2.0**-23 * reach.double()", "0.0 * reach.double()", "rounding"),
    ("no rounding of near sums", "* longest - 1e-5", "* longest", "survives", "the own key, which is not among those that vouch, adds more than float32 rounds off ln n, unless a score repels it, and the slack of that score is larger"),
    ("rounding without the centre", "longest = longest + 2.0 * row_norms(center)", "longest = longest + 0.0 * row_norms(center)", "rounding"),
    ("rounding with the centre once", "longest = longest + 2.0 * row_norms(center)", "longest = longest + row_norms(center)", "survives", "the slack of 2^-23 is twice the unit roundoff: once is for the worst order of additions, which no kernel takes"),
    ("padding in the sums", "near = near.masked_fill(~problem.key_padding_mask[:, None, low : low + whole * NEAR, None], 0.0)", "pass", "padding_and_packing"),
    ("sums of means in float32", "torch.nn.functional.pad(means.double(), (0, 0, 1, 0)).cumsum(2)", "torch.nn.functional.pad(means, (0, 0, 1, 0)).cumsum(2)", "long_sequences"),
    ("means of the other side of the centre", "means = means - center[:, :, None]", "means = means + center[:, :, None]", "ingredients causal"),
    ("more keys than there are", "gain = math.log(run) - past", "gain = math.log(run + 1) - past", "ingredients_large"),
    ("more keys than there are, ahead", "gain = math.log(run) - future", "gain = math.log(run + 1) - future", "ingredients_large"),
    ("near keys one step nearer", "past * (offset + (run + 1) / 2)", "past * (offset + (run - 1) / 2)", "ingredients_large"),
    ("near keys half a step nearer", "past * (offset + (run + 1) / 2)", "past * (offset + run / 2)", "ingredients_large"),
    ("near keys ahead one step nearer", "(NEAR - offset + (run - 1) / 2 - problem.bias.offset)", "(NEAR - offset + (run - 3) / 2 - problem.bias.offset)", "ingredients_large"),
    ("twice the offset", "(NEAR - offset + (run - 1) / 2 - problem.bias.offset)", "(NEAR - offset + (run - 1) / 2 - 2 * problem.bias.offset)", "ingredients_large"),
    ("every query first in its tile", "(torch.arange(queries, device=q.device) % NEAR).to(dtype)", "(0 * torch.arange(queries, device=q.device)).to(dtype)", "mean_of_near_keys"),
    ("the tile's own keys instead", "(tile + 1 if ahead else tile - steps).clamp(0, whole)\n            to_tile = (tile + 1 + steps if ahead else tile)", "(tile if ahead else tile + 1 - steps).clamp(0, whole)\n            to_tile = (tile + steps if ahead else tile + 1)", "unseen_keys"),
    ("keys that are not there", "(to_tile - from_tile == steps)", "(to_tile - from_tile >= 0)", "unseen_keys"),
    ("keys of the padding before", "inside & (place >= first) & (place + run <= end)", "inside & (place + run <= end)", "padding_and_packing"),
    ("keys of the padding behind", "inside & (place >= first) & (place + run <= end)", "inside & (place >= first)", "padding_and_packing"),
    ("heads that do not look there", 'blind = [sight == ("past" if ahead else "future") for sight in problem.sights]', "blind = [False for sight in problem.sights]", "unseen_keys"),
    ("the wrong scale", "_products(q, mean)[:, :, :queries] * scale", "_products(q, mean)[:, :, :queries] * abs(scale)", "mean_of_near_keys"),
    ("products with another tile", "mean[part][:, :, None, :, None]", "mean[part][:, :, None, :1, None]", "ingredients_large"),
    ("nearest: the other side of the centre", "keys = keys - center[:, None, None]", "keys = keys + center[:, None, None]", "ingredients left_padded"),
    ("nearest: keys before the first", "(index >= first[:, rows, None]) & (index < end[:, rows, None])", "index < end[:, rows, None]", "padding_and_packing"),
    ("nearest: keys behind the last", "(index >= first[:, rows, None]) & (index < end[:, rows, None])", "index >= first[:, rows, None]", "survives", "the nearest key in sight is clamped to the last one before it counts down; without any key `first` shuts all out"),
    ("nearest: not clamped", "torch.minimum(torch.maximum(position, first), end - 1)", "torch.maximum(position, first)", "survives", "then the run of keys is empty where a query stands behind it, or the bound counts fewer: nothing is claimed that is not there"),
    ("nearest: in the other row", "[batch, safe].double()", "[0 * batch, safe].double()", "ingredients left_padded"),
    ("nearest: heads that do not look there", "seen = seen & ~(blind[:, None, None] & (sign * distance > 0))", "seen = seen & ~(blind[:, None, None] & (sign * distance > 9999))", "unseen_keys"),
    ("nearest: no penalty", "score = score + problem.bias.at(distance.double(), past, future)", "score = score + 0.0 * problem.bias.at(distance.double(), past, future)", "nearest_keys"),
)  # fmt: skip

DECODE = _in(
    "decode.py",
    ("no geometric tail", "(nats + spare - math.log(-math.expm1(-slope))) / slope", "(nats + spare) / slope", "decoding"),
    ("the tail of steeper slopes", "math.log(-math.expm1(-slope))", "math.log(-math.expm1(-2 * slope))", "decoding"),
    ("no slack", "abs(problem.scale) * (1.0 + 4 * (dim + 4) * 2.0**-23)", "abs(problem.scale)", "decoding_rounding"),
    ("the sign of the scale", "slack = abs(problem.scale) *", "slack = problem.scale *", "decoding"),
    ("a tenth more than the tolerance", "spare = -math.log(problem.tolerance) + 1e-5", "spare = -math.log(1.1 * problem.tolerance)", "decoding"),
    ("no spare for the sums", "spare = -math.log(problem.tolerance) + 1e-5", "spare = -math.log(problem.tolerance)", "survives", "pays for the rounding of a few float64 sums, 1e-13, which is below the noise of any float64 measure"),
    ("tiny norms of keys", "norm = (longest[row][head] + tiny) * slack", "norm = longest[row][head] * slack", "decoding_rounding"),
    ("tiny norms of queries", "(lengths[row][head][member] + tiny) * norm", "lengths[row][head][member] * norm", "decoding_rounding"),
    ("the size of the own score", "scores[row][head][member] * problem.scale", "abs(scores[row][head][member] * problem.scale)", "decoding"),
    ("the shortest key", "(norms if norms.dim() == 2 else norms.amax(-1))", "(norms if norms.dim() == 2 else norms.amin(-1))", "decoding"),
    ("the norm of the last keys", "(norms if norms.dim() == 2 else norms.amax(-1))", "(norms if norms.dim() == 2 else norms[..., -1])", "decoding"),
    ("another key than the own", "own = problem.k.detach()[:, :, -1:]", "own = problem.k.detach()[:, :, :1]", "decoding"),
    ("slopes of the first row", "penalties = slopes[row if len(slopes) > 1 else 0]", "penalties = slopes[0]", "decoding_heads"),
    ("slopes of the wrong head", "slope = penalties[head * group + member]", "slope = penalties[head * group]", "decoding_heads"),
    ("one key less", "math.floor(keys - reach)", "math.ceil(keys - reach)", "decoding_at_every_length"),
    ("the luckiest of a group", "low = min(low, math.floor(keys - reach)", "low = max(0 if member == 0 else low, math.floor(keys - reach)", "decoding_heads"),
    ("a block rounded up", "lows.append(low // BLOCK * BLOCK)", "lows.append(-(-low // BLOCK) * BLOCK)", "decoding_at_every_length"),
    ("nothing left of a steep head", "low = keys - 1  #", "low = keys  #", "decoding_extremes"),
    ("an infinite score", "if 0.0 <= reach < keys else 0)", "if reach < keys else 0)", "decoding_extremes"),
    ("NaN skips", "if 0.0 <= reach < keys else 0)", "if not reach >= keys and reach == reach else (0 if reach == reach else keys - 1))", "not_finite"),
    ("the luckiest row", "[min(low) for low in zip(*rows, strict=True)]", "[max(low) for low in zip(*rows, strict=True)]", "decoding_heads"),
    ("padding rounded up", "hidden = [begin // BLOCK * BLOCK for begin in begins]", "hidden = [-(-begin // BLOCK) * BLOCK for begin in begins]", "decoding_heads"),
    ("heads share the shorter window", "start = min(low, shared[-1]) if shared else low", "start = max(low, shared[-1]) if shared else low", "decoding_heads"),
    ("windows of the wrong row", "lows if problem.key_padding_mask is not None else lows[:1]", "lows[-1:] * len(lows)", "decoding_heads"),
)  # fmt: skip

TOGETHER = [
    Mutant(
        "no slack anywhere",
        [
            ("windows.py", "slack = 1.0 + (dim + 4) * 2.0**-23", "slack = 1.0"),
            ("windows.py", "1e-5 + 2.0**-22 * block * slopes[..., None]", "0.0 * slopes[..., None]"),
            ("near.py", "(problem.q.shape[3] + 36) * 2.0**-23 * reach.double()", "0.0 * reach.double()"),
            ("near.py", "* longest - 1e-5", "* longest"),
        ],
        "rounding",
    ),
]

MUTANTS = [*WINDOWS, *NORMS, *NEAR, *DECODE, *TOGETHER]
