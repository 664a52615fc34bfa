"""What 16-bit results cost the gradient of a bias, beyond the luck of one measurement.

The gradient of a slope is a single number, so that what dense attention happens to lose there may be next to nothing.
Rounding the output to 16 bits moves each query's row sum dout . out by about unit * |dout * out|, in any direction,
and that moves the gradient by as much times the query's mean distance. Queries err independently of each other.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tests.ops.budget import FACTOR, Judge
from tests.ops.dense import Case, Results, bias_of, dense, distances, t5_bucket


def bias_rounding(case: Case) -> Results:
    """The size of that error for slopes, future and table."""
    unit = torch.finfo(case.q.dtype).eps / 2
    out, weights = dense(case)
    moved = unit * (case.upstream().double() * out).norm(dim=-1)  # [B, H, Tq]
    distance = distances(case)[:, None]
    steps = torch.where(distance > 0, distance - case.offset, -distance.double())
    if case.times is not None and case.slopes is not None:
        steps = torch.as_tensor(bias_of(replace(case, slopes=torch.ones_like(case.slopes)), torch.float64)).abs()

    def over_queries(lever: Tensor) -> Tensor:
        return (moved * (lever * weights).sum(-1)).norm()

    found: Results = {}
    if case.slopes is not None and case.future is None:
        found["slopes"] = over_queries(steps)
    elif case.slopes is not None:
        found["slopes"], found["future"] = over_queries(steps * (distance <= 0)), over_queries(steps * (distance > 0))
    if case.table is not None:
        bucket = t5_bucket(distance[:, 0], case.table.shape[0], case.max_distance, case.bidirectional)
        by_bucket = weights.new_zeros((*weights.shape[:3], case.table.shape[0]))
        by_bucket.scatter_add_(3, bucket[:, None].expand_as(weights), weights)
        found["table"] = (moved[..., None] * by_bucket).norm()
    return found


class KernelJudge(Judge):
    """A Judge for kernels that multiply in the inputs' own dtype: weights are rounded to it as the output is."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        if case.q.dtype in (torch.float16, torch.bfloat16) and case.k.shape[2]:
            for name, error in bias_rounding(case).items():
                self.allowed[name] = self.allowed[name] + FACTOR * 2.0**0.5 * error
