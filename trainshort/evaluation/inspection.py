"""What each head of a model can provably see of a text, and how much of that mattered.

Provably: certified windows. All keys outside of a query's window have together at most `tolerance` of its softmax,
proved from norms. Leaving them out moves the output of attention by at most tolerance * diameter of the values, and
so does anything else that is done to them as long as the proof holds: other values no farther apart, or keys that are
turned about the centre they are measured from. Attention itself visits whole blocks of 128 keys, and everything where
looking for windows would not pay: that is `visited`. What mattered is measured: the softmax, by distance (mass.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from trainshort.evaluation.inspect_config import FORMAT, VERSION, InspectConfig
from trainshort.evaluation.mass import Rows, rows_of
from trainshort.models.kept import Attended, may_skip, watched
from trainshort.models.model import Model
from trainshort.ops import LinearBias, Windows, attention
from trainshort.ops.problem import DEFAULT_TOLERANCE, make_problem
from trainshort.ops.windows import certified_blocks, visible_keys

NEARLY_ALL = 0.99  # of a query's softmax
BINS = 48  # of positions
BLOCK = 32  # of queries and keys that windows are proved for
Grid = list[list[float]]  # [layers][heads]


@dataclass(frozen=True)
class Layer:
    """Figures of one layer: a tensor [H] each."""

    visited: Tensor  # the share of the keys in sight that attention visits
    seen: Tensor  # the share inside of windows
    reach: Tensor  # tokens from a query to the farthest key in its window, on average over queries
    farthest: Tensor  # the same at most
    needed: Tensor  # tokens within which nearly all of the softmax lies, on average
    most_needed: Tensor  # the same at most, by the query that looks farthest
    query: Tensor  # the position of that query
    key: Tensor  # of the key that stands there
    mattered: (
        Tensor  # of the keys in windows, the share that cannot be left out without losing more than the tolerance
    )
    skipped: Tensor  # the largest part of a query's softmax outside of its window
    diameter: Tensor  # of the values, from above
    output: Tensor  # the mean norm of what attention gives
    beyond: Tensor  # [H, distances]: the mean softmax beyond each distance, of queries that could look so far
    by_position: Tensor  # [H, bins]: `needed` by the position of the query


@torch.inference_mode()
def inspect(
    model: Model,
    tokens: Sequence[int],
    config: InspectConfig,
    *,
    on_layer: Callable[[int, int, int], None] | None = None,
) -> dict[str, Any]:
    """The figures of a text, as JSON knows them: grids are [layers][heads].

    on_layer is told of each layer that is done: of which length, how many of it, and of how many.
    """
    if not tokens:
        raise ValueError("the text has no tokens: there is nothing to look at")
    weight = model.trunk.embedding.weight
    row = torch.tensor([list(tokens)], dtype=torch.int64, device=weight.device)
    length = row.shape[1]
    if config.lengths and config.lengths[-1] > length:
        raise ValueError(
            f"lengths must be at most the {length:,} tokens of the text, got {config.lengths[-1]:,}: name a longer "
            "text, or shorter lengths"
        )
    tolerance = DEFAULT_TOLERANCE[weight.dtype] if config.tolerance is None else config.tolerance
    layers: list[Layer] = []
    watch = _Watch(model, tolerance)

    def measure(seen: Attended) -> None:
        _check_finite(seen, len(layers))
        layers.append(watch.measured(seen))
        if on_layer is not None:
            on_layer(length, len(layers), model.config.num_layers)

    with watched(model, measure):
        model.trunk(row)
    by_length = [
        {"length": each} | watch.shares_at(row[:, :each], on_layer)
        for each in config.lengths or usual_lengths(length)
        if each < length
    ]
    figures: dict[str, Any] = {
        name: _grid([getattr(layer, name) for layer in layers])
        for name in Layer.__dataclass_fields__
        if name not in ("beyond", "by_position")
    }
    return {
        "format": FORMAT,
        "version": VERSION,
        "length": length,
        "causal": model.config.causal,
        "position": model.config.position,
        "penalty": may_skip(model),
        "slopes": _slopes(model),
        "tolerance": tolerance,
        "share": NEARLY_ALL,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": str(weight.device),
        "heads": figures,
        "bound": [[tolerance * value for value in row] for row in figures["diameter"]] if may_skip(model) else None,
        "by_length": [*by_length, {"length": length, "visited": figures["visited"], "seen": figures["seen"]}],
        "distances": distances(length),
        "beyond": [_rounded(layer.beyond) for layer in layers],
        "position_edges": position_edges(length),
        "by_position": [_rounded(layer.by_position) for layer in layers],
    }


def usual_lengths(length: int) -> list[int]:
    """Powers of two below the length of the text."""
    return [size for power in range(7, 30) if (size := 2**power) < length]


def distances(length: int) -> list[int]:
    """Two an octave, below the length: 0, 1, 2, 3, 4, 6, 8, 11 ..."""
    found = {0, *(round(2 ** (step / 2)) for step in range(64))}
    return sorted(each for each in found if each < max(length - 1, 1))


def position_edges(length: int) -> list[int]:
    """Borders of equal bins over the text."""
    bins = min(BINS, length)
    return [length * place // bins for place in range(bins + 1)]


class _Watch:
    """What is asked of each layer of a model."""

    def __init__(self, model: Model, tolerance: float) -> None:
        self.model, self.tolerance = model, tolerance
        self.causal, self.scale = model.config.causal, model.config.score_scale

    def shares_at(self, row: Tensor, on_layer: Callable[[int, int, int], None] | None) -> dict[str, Grid]:
        """The shares of keys that are visited, and that can be seen, in a text [1, T]."""
        visited: list[Tensor] = []
        inside: list[Tensor] = []

        def count(seen: Attended) -> None:
            visited.append(self._share(seen, self._visited(seen)[0]))
            inside.append(self._share(seen, self.windows(seen)))
            if on_layer is not None:
                on_layer(row.shape[1], len(visited), self.model.config.num_layers)

        with watched(self.model, count):
            self.model.trunk(row)
        return {"visited": _grid(visited), "seen": _grid(inside)}

    def windows(self, seen: Attended) -> Windows:
        """The keys that each query can see: int64 [H, T] each."""
        problem = make_problem(
            seen.q, seen.k, seen.k, seen.bias, causal=self.causal, scale=self.scale, tolerance=self.tolerance
        )
        blocks = certified_blocks(problem, BLOCK, every_head=True)[0].to(torch.int64)  # [H, blocks, 2]
        by_query = (blocks * BLOCK).repeat_interleave(BLOCK, dim=1)[:, : seen.q.shape[2]]
        first, end = visible_keys(problem)
        return Windows(torch.maximum(first[0], by_query[..., 0]), torch.minimum(end[0], by_query[..., 1]))

    def _visited(self, seen: Attended) -> tuple[Windows, Tensor]:
        """The keys that each query visits, and what attention gives."""
        out, _, windows = attention(
            seen.q,
            seen.k,
            seen.v,
            bias=seen.bias,
            causal=self.causal,
            scale=self.scale,
            tolerance=self.tolerance,
            return_windows=True,
        )
        assert windows is not None
        return Windows(*(side[0].to(torch.int64) for side in windows)), out[0]

    def _share(self, seen: Attended, windows: Windows) -> Tensor:
        """Of the keys in sight, those inside: [H]."""
        problem = make_problem(seen.q, seen.k, seen.v, seen.bias, causal=self.causal)
        first, end = (side[0] for side in visible_keys(problem))
        return (windows.end - windows.first).double().sum(-1) / (end - first).double().sum(-1)

    def measured(self, seen: Attended) -> Layer:
        visited, out = self._visited(seen)
        windows = self.windows(seen)
        heads, length = windows.first.shape
        place = torch.arange(length, device=out.device)
        reach = torch.maximum(place - windows.first, windows.end - 1 - place)
        sums = _Sums(heads, length, out.device)
        for rows in rows_of(seen, causal=self.causal, scale=self.scale):
            sums.add(rows, windows, self.tolerance)
        inside = (windows.end - windows.first).sum(-1)
        value = seen.v[0].double() if out.dtype == torch.float64 else seen.v[0].float()
        diameter = 2 * torch.linalg.vector_norm(value - value.mean(1, keepdim=True), dim=-1).amax(-1)  # [Hkv]
        query = sums.needed.argmax(-1, keepdim=True)
        return Layer(
            visited=self._share(seen, visited),
            seen=self._share(seen, windows),
            reach=reach.double().mean(-1),
            farthest=reach.amax(-1),
            needed=sums.needed.double().mean(-1),
            most_needed=sums.needed.gather(-1, query)[:, 0],
            query=query[:, 0],
            key=sums.keys.gather(-1, query)[:, 0],
            mattered=sums.exact.double() / inside.double(),
            skipped=sums.skipped,
            diameter=diameter.repeat_interleave(heads // len(diameter)),
            output=torch.linalg.vector_norm(out.float(), dim=-1).mean(-1),
            beyond=sums.beyond / sums.could.clamp_min(1.0),
            by_position=_binned(sums.needed, length),
        )


class _Sums:
    """What is collected over the rows of a layer."""

    def __init__(self, heads: int, length: int, device: torch.device) -> None:
        edges = distances(length)
        self.distances = torch.tensor(edges, device=device)
        self.needed, self.keys = (torch.zeros(heads, length, dtype=torch.int64, device=device) for _ in range(2))
        self.exact = torch.zeros(heads, dtype=torch.int64, device=device)
        self.skipped = torch.zeros(heads, dtype=torch.float32, device=device)
        self.beyond = torch.zeros(heads, len(edges), dtype=torch.float32, device=device)
        self.could = torch.zeros(heads, len(edges), dtype=torch.float32, device=device)

    def add(self, rows: Rows, windows: Windows, tolerance: float) -> None:
        here = slice(int(rows.positions[0]), int(rows.positions[-1]) + 1)
        first, end = windows.first[:, here], windows.end[:, here]
        needed = rows.within(1 - NEARLY_ALL)
        self.needed[:, here], self.keys[:, here] = needed, rows.keys_at(needed)
        self.skipped = torch.maximum(self.skipped, rows.outside(first, end).amax(-1).float())
        enough = rows.within(tolerance)
        low, high = rows.positions - enough, rows.positions + enough + 1
        self.exact += (torch.minimum(high, end) - torch.maximum(low, first)).clamp_min(0).sum(-1)
        seen = rows.before.shape[-1] - 1 if rows.after is not None else rows.positions + 1
        farthest = torch.maximum(rows.positions, torch.as_tensor(seen) - 1 - rows.positions)
        for place, distance in enumerate(self.distances):
            could = farthest > distance
            self.beyond[:, place] += (rows.beyond(distance[None, None]) * could).sum(-1).float()
            self.could[:, place] += could.sum()


def _check_finite(seen: Attended, layer: int) -> None:
    for name, tensor in (("queries", seen.q), ("keys", seen.k), ("values", seen.v)):
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"the {name} of layer {layer + 1} are not finite: the weights are damaged, or too large for this "
                "dtype (try dtype float32)"
            )


def _binned(values: Tensor, length: int) -> Tensor:
    """Means over bins of positions, [H, T] -> [H, bins]."""
    edges = position_edges(length)
    return torch.stack([values[:, a:b].double().mean(-1) for a, b in pairwise(edges)], dim=-1)


def _slopes(model: Model) -> list[float] | None:
    bias = model.position.bias()
    slopes = bias.slopes if isinstance(bias, LinearBias) and bias.slopes.dim() == 1 else None
    return None if slopes is None else [float(f"{slope:.6g}") for slope in slopes.tolist()]


def _grid(layers: Sequence[Tensor]) -> Grid:
    return [_rounded(layer) for layer in layers]


def _rounded(values: Tensor) -> Any:
    """Six figures of each number."""

    def shortened(value: Any) -> Any:
        return [shortened(each) for each in value] if isinstance(value, list) else float(f"{value:.6g}")

    return shortened(values.tolist())
