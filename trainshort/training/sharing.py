"""How processes share the work of a model: each computes its rows of a batch (ddp), and may also hold no more than
its shard of the weights, gradients and optimizer state (fsdp)."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from trainshort.models import LanguageModel
from trainshort.training.batches import Batch
from trainshort.training.processes import Processes


class _SumOfLosses(nn.Module):
    """`model.loss` as the forward of a module, which is what DistributedDataParallel calls."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, part: Batch) -> Tensor:
        return self.model.loss(part.inputs, part.targets, cu_seqlens=part.cu_seqlens, reduction="sum")


class SharedModel:
    """The losses of a model, whose gradients are the mean over all processes after each backward pass.

    half: the dtype of autocast, if that is on.
    """

    def __init__(self, model: LanguageModel, processes: Processes, half: torch.dtype | None) -> None:
        self.model, self.kind = model, processes.kind
        self.losses: nn.Module = _SumOfLosses(model)
        if processes.kind == "ddp":
            # Gradients lie where they are exchanged: a copy of them would take as much memory again.
            self.losses = DistributedDataParallel(self.losses, gradient_as_bucket_view=True, **_buffers_stay())
            processes.before_leaving.callback(_free_reducer, self.losses)
        elif processes.kind == "fsdp":
            shard(model, processes, half)

    def loss(self, part: Batch) -> Tensor:
        """The sum of the losses of this process's rows."""
        total: Tensor = self.losses(part)
        return total

    @contextlib.contextmanager
    def part_of_step(self, *, last: bool) -> Iterator[None]:
        """Around one part of an accumulated step: gradients under ddp are exchanged once, with the last.

        Shards are summed with each part: whole gradients are what nobody has the memory for.
        """
        wait = isinstance(self.losses, DistributedDataParallel) and not last
        with self.losses.no_sync() if wait else contextlib.nullcontext():  # type: ignore[operator]
            yield

    @contextlib.contextmanager
    def whole(self) -> Iterator[LanguageModel]:
        """The model, as one that its parts can be called of: all but the blocks, which gather themselves."""
        if self.kind != "fsdp":
            yield self.model
            return
        root: Any = self.model
        root.unshard()
        try:
            yield self.model
        finally:
            root.reshard()

    def clip(self, largest: float) -> Tensor:
        """Clip the gradients by the norm of all of them together, which is returned."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), largest)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _free_reducer(losses: DistributedDataParallel) -> None:
    """Free what exchanges gradients while the process group still has other users.

    The last user frees the group, and waits for gloo's threads. The reducer would do so with Python's lock held,
    which one of them may be waiting for, to free a tensor: the process would never end. Others release the lock.
    """
    losses.reducer = losses.logger = None  # type: ignore[assignment]


def _buffers_stay() -> dict[str, Any]:
    """The option that says so: tables of positions never change. torch 2.13 has renamed it."""
    known = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def shard(model: LanguageModel, processes: Processes, half: torch.dtype | None) -> None:
    """Spread every parameter over all processes. A block's matrices are gathered when the block is computed.

    They are gathered in the dtype of autocast, which would round them to it anyway. Everything else (embedding,
    norms, slopes) autocast leaves in float32: it is gathered so, once a step, with the model. Gradients are summed in
    float32. So the numbers are those of one process, to rounding.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(processes.device.type, (processes.world,))
    blocks = list(model.trunk.blocks)
    linear = [each for block in blocks for each in block.modules() if isinstance(each, nn.Linear)]
    matrices = {parameter for layer in linear for parameter in layer.parameters()}
    kept = MixedPrecisionPolicy(cast_forward_inputs=False)
    rounded = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # The model before its blocks, so that it takes what they don't.
    fully_shard(model, mesh=mesh, mp_policy=kept, ignored_params=matrices)
    others = set(model.parameters()) - matrices
    for block in blocks:
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=rounded if half else kept,
            ignored_params=others,
            reshard_after_forward=processes.world > 1,  # one process keeps its copies, as autocast does
        )
    register_fsdp_forward_method(model, "loss")
