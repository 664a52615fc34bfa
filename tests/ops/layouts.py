"""The same numbers in other memory layouts."""

from __future__ import annotations

import torch
from torch import Tensor


def transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def sliced(tensor: Tensor) -> Tensor:
    wide = torch.full((*tensor.shape[:3], tensor.shape[3] + 5), torch.nan, dtype=tensor.dtype, device=tensor.device)
    wide[..., 2:-3] = tensor
    return wide[..., 2:-3]


def columns_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(2, 3).contiguous().transpose(2, 3)


def every_second(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, dim=2)[:, :, ::2]


def expanded(tensor: Tensor) -> Tensor:
    return tensor[:1, :1].expand(tensor.shape)


LAYOUTS = [transposed, sliced, columns_first, every_second, expanded]
