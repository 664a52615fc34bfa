"""Gradients of a model that processes share, beside those of the same model in one process on all rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from trainshort.models import LanguageModel, ModelConfig
from trainshort.training.batches import Batch
from trainshort.training.processes import _Joined
from trainshort.training.sharing import SharedModel

ROWS, LENGTH, VOCABULARY = 7, 16, 33  # rows that no number of processes divides


def largest_differences(
    kind: str,
    model: dict[str, Any],
    half: bool = False,
    compiled: bool = False,
    recomputed: bool = False,
    spans: int = 1,
) -> dict[str, Any]:
    """The largest difference of each parameter's gradient, in parts of its largest entry, after two backward passes.

    And of the clipped norm, and the number of graphs that were compiled for all blocks. spans: processes that share a
    row.
    """
    config = ModelConfig(**{"num_layers": 2, "d_model": 16, "num_heads": 2, "vocab_size": VOCABULARY, **model})
    graphs: list[Any] = []

    def count(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(LanguageModel(config))
    whole, shared = models
    if compiled:
        torch.compiler.reset()
        shared.compile_blocks(backend=count)
    shared.checkpoint_activations(recomputed)
    processes = _Joined("cpu", kind)
    processes.split(spans)
    sharing = SharedModel(shared, processes, torch.bfloat16 if half else None)
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (2, ROWS, LENGTH + 1), generator=random)
    for part, last in ((0, False), (1, True)):
        inputs, targets = tokens[part, :, :-1], tokens[part, :, 1:]
        rows = processes.rows(ROWS)
        own = Batch(inputs[rows], targets[rows], None, 0).of_tokens(processes.tokens(LENGTH))
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            whole.loss(inputs, targets, reduction="sum").backward()
            with sharing.part_of_step(last=last), processes.sharing_rows():
                sharing.loss(own).backward(processes.weight)
    found: dict[str, Any] = {}
    for name, parameter in shared.named_parameters():
        gradient: Any = parameter.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        wanted = whole.get_parameter(name).grad
        assert wanted is not None
        found[name] = float((gradient - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    found["norm of all"] = float((sharing.clip(0.5) - norm).abs() / norm)
    dist.barrier()
    return {"differences": found, "graphs": len(graphs)}
