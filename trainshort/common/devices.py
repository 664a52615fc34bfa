"""Which device to compute on: the one that was named, or the GPU where there is one."""

from __future__ import annotations

import torch


def device_for(name: str | None, *, allowed: str = "cpu, cuda or cuda:N") -> torch.device:
    """The device of that name; None: the GPU where there is one. allowed: what errors say that a name may be."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be {allowed}; got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: torch finds no GPU here; leave device (--device) out, or use cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device must be {allowed}; got {name!r} ({error})") from error
    return device
