"""The slopes of the paper, for every number of heads."""

from __future__ import annotations

import math

import pytest
import torch

import trainshort as ts


def paper_slopes(heads: int) -> list[float]:
    """The rule as the authors published it: `get_slopes` of fairseq's transformer with ALiBi."""

    def power_of_two(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(heads).is_integer():
        return power_of_two(heads)
    closest = 2 ** math.floor(math.log2(heads))
    return power_of_two(closest) + paper_slopes(2 * closest)[0::2][: heads - closest]


@pytest.mark.parametrize("heads", range(1, 129))
def test_every_head_count_follows_the_paper(heads: int) -> None:
    slopes = ts.alibi_slopes(heads)
    assert slopes.shape == (heads,)
    assert slopes.dtype == torch.float32
    torch.testing.assert_close(slopes.double(), torch.tensor(paper_slopes(heads)).double(), rtol=2.0**-22, atol=0.0)


@pytest.mark.parametrize(
    ("heads", "known"),
    [
        (1, [2.0**-8]),
        (2, [0.0625, 0.00390625]),
        (3, [0.0625, 0.00390625, 0.25]),
        (4, [0.25, 0.0625, 0.015625, 0.00390625]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (8, [2.0**-h for h in range(1, 9)]),
        (12, [2.0**-h for h in range(1, 9)] + [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]),
        (16, [2.0 ** (-h / 2) for h in range(1, 17)]),
    ],
)
def test_known_values(heads: int, known: list[float]) -> None:
    assert torch.equal(ts.alibi_slopes(heads), torch.tensor(known))


def test_twelve_heads_as_printed() -> None:
    tail = [round(float(slope), 4) for slope in ts.alibi_slopes(12)[8:]]
    assert tail == [0.7071, 0.3536, 0.1768, 0.0884]


@pytest.mark.parametrize(("heads", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError), (True, TypeError)])
def test_anything_but_a_positive_int_is_refused(heads: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="num_heads"):
        ts.alibi_slopes(heads)  # pyright: ignore[reportArgumentType]
