"""Optimizers, their learning rate, and their state as named tensors: what a checkpoint can hold without pickling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainshort.models.head_parts import HeadNorm
from trainshort.training.config import TrainConfig

NORMS = (nn.LayerNorm, nn.RMSNorm, HeadNorm)  # whose weights never decay, whatever their shape
# What each optimizer remembers of a parameter.
KEPT = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "muon": {"momentum_buffer"}}


def learning_rate(config: TrainConfig, step: int) -> float:
    """Of step 1, 2, ...: rises in a line through the warm-up, then falls with a cosine to final_lr of its peak."""
    warmup = config.warmup_steps
    if step <= warmup:
        return config.lr * step / warmup
    done = (step - warmup) / max(1, config.steps - warmup)
    return config.lr * (config.final_lr + (1 - config.final_lr) * (1 + math.cos(math.pi * done)) / 2)


class Optimizer:
    """AdamW for all parameters, or Muon for the hidden matrices and AdamW for the rest."""

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        named = dict(model.named_parameters())  # tied tensors once
        self.names = {id(parameter): name for name, parameter in named.items()}
        matrices = _matrices(model)
        hidden = {name for name in matrices if name.startswith("trunk.blocks.") and named[name].dim() == 2}
        use_muon = config.optimizer == "muon"
        rest = {name: value for name, value in named.items() if not (use_muon and name in hidden)}
        groups = [
            {"params": [rest[name] for name in rest if name in matrices], "weight_decay": config.weight_decay},
            {"params": [rest[name] for name in rest if name not in matrices], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        fused = {parameter.device.type for parameter in named.values()} in ({"cuda"}, {"cpu"})
        self.parts: dict[str, torch.optim.Optimizer] = {
            "adamw": torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=fused or None)
        }
        if use_muon:
            self.parts["muon"] = _muon([named[name] for name in sorted(hidden)], config)

    def step(self, lr: float) -> None:
        for part in self.parts.values():
            for group in part.param_groups:
                group["lr"] = lr
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """`adamw.trunk.embedding.weight.exp_avg` and so on, on the CPU."""
        return {name: value.detach().cpu().contiguous() for name, value in self._entries()}

    def shards(self) -> dict[str, Tensor]:
        """The same as they are: of a model whose parameters are shards, what this process holds."""
        return {name: value.detach() for name, value in self._entries()}

    def empty_state(self) -> dict[str, Tensor]:
        """Room for what `shards` gives once every parameter had a gradient, to be filled and given to `load`."""
        found = {}
        for part, optimizer in self.parts.items():
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                for key in KEPT[part]:
                    like = torch.zeros(()) if key == "step" else torch.zeros_like(parameter)
                    found[f"{part}.{self.names[id(parameter)]}.{key}"] = like.detach()
        return found

    def load(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Put back what `state` gave: all of it, for exactly these parameters."""
        taken: set[str] = set()
        for part, optimizer in self.parts.items():
            state: dict[int, dict[str, Any]] = {}
            order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for index, parameter in enumerate(order):
                prefix = f"{part}.{self.names[id(parameter)]}."
                found = {name: value for name, value in tensors.items() if name.startswith(prefix)}
                for name, value in found.items():
                    if value.dim() and value.shape != parameter.shape:
                        raise ValueError(f"{where}: {name!r} is {list(value.shape)}, not {list(parameter.shape)}")
                taken |= found.keys()
                keys = {name.removeprefix(prefix) for name in found}
                if found and keys != KEPT[part]:
                    wanted = ", ".join(sorted(KEPT[part]))
                    raise ValueError(f"{where}: {prefix[:-1]!r} has {', '.join(sorted(keys))}, not {wanted}")
                if found:
                    state[index] = {name.removeprefix(prefix): value for name, value in found.items()}
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        if strange := sorted(tensors.keys() - taken):
            raise ValueError(f"{where}: tensor {strange[0]!r} belongs to no parameter ({len(strange)} in all)")

    def _entries(self) -> Iterator[tuple[str, Tensor]]:
        for part, optimizer in self.parts.items():
            for parameter, values in optimizer.state.items():
                for key, value in values.items():
                    if not isinstance(value, Tensor):
                        raise TypeError(f"{part} keeps {key} as {type(value).__name__}: only tensors can be saved")
                    yield f"{part}.{self.names[id(parameter)]}.{key}", value


def _matrices(model: nn.Module) -> set[str]:
    """The names of parameters that weight decay shrinks. Norms may have a row of weights for each head."""
    of_norms = {id(each) for module in model.modules() if isinstance(module, NORMS) for each in module.parameters()}
    return {name for name, each in model.named_parameters() if each.dim() >= 2 and id(each) not in of_norms}


def _muon(matrices: list[Tensor], config: TrainConfig) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise RuntimeError(f"torch {torch.__version__} has no Muon: use torch 2.9 or newer, or the optimizer adamw")
    # Scaled so that its steps are as large as AdamW's: one learning rate serves both.
    return torch.optim.Muon(matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
