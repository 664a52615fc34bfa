"""Public checkpoints as tables of names: which tensors of a file make each tensor of our one model.

A family says in a `Layout` what its config means as a ModelConfig, and for each of our modules what its own are
called. Everything is compared by headers first. Then the model is filled one tensor at a time, in the dtype and on
the device that it ends up with: memory never holds more than the model and one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from trainshort.common.messages import shown
from trainshort.models.checkpoints.fields import Fields
from trainshort.models.checkpoints.shards import Stored, Weights
from trainshort.models.checkpoints.weights import DTYPES, stored_tensors
from trainshort.models.config import ModelConfig
from trainshort.models.encoder import Encoder
from trainshort.models.language_model import LanguageModel

Pieces = Callable[[Tensor], Iterable[Tensor]]


@dataclass(frozen=True)
class Source:
    """What makes a module's weight, and its bias: those of these modules in the file, their rows one after another.

    pieces: of the tensor in the file, in the order in which their rows are ours. Views of it need no memory.
    """

    names: tuple[str, ...]
    pieces: Pieces = lambda tensor: (tensor,)


Table = Mapping[str, str | Source]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A family's checkpoint.

    modules: for each module of ours (or one tensor of it) the one in the file; N stands for the number of a layer.
    copies: tensors that tied models store a second time, and what they have to equal.
    unused: a pattern of names that the file may have, and the model does without.
    """

    config: ModelConfig
    modules: Table
    copies: Mapping[str, str] = field(default_factory=dict)
    unused: str = r"(?!)"  # nothing


def grouped_qkv(kv_heads: int, group: int, width: int) -> Pieces:
    """Rows stored for each key head as its queries, its key and its value: [kv_heads, group + 2, width]."""

    def pieces(tensor: Tensor) -> Iterable[Tensor]:
        rows = tensor.unflatten(0, (kv_heads, group + 2, width))
        return rows[:, :group], rows[:, group], rows[:, group + 1]

    return pieces


def without_prefix(weights: Weights, prefix: str) -> Weights:
    """Names as the tables have them: some files put the name of the inner model before them, and some do not."""
    plain: dict[str, Stored] = {}
    for name, stored in weights.tensors.items():
        short = name.removeprefix(prefix)
        if short in plain:
            raise ValueError(f"{weights.path}: has the tensor {shown(short)} with and without the prefix {prefix!r}")
        plain[short] = stored
    return Weights(weights.path, plain, prefix if plain.keys() != weights.tensors.keys() else "")


def load_layout(
    layout: Layout,
    weights: Weights,
    fields: Fields,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    position_options: Mapping[str, Any],
) -> LanguageModel | Encoder:
    """The model of a layout with its weights. fields: of its config. dtype None: see `_stored_dtype`."""
    config, where = layout.config, fields.path
    if position_options:
        config = replace(config, position_options={**config.position_options, **position_options})
    if config.num_layers > len(weights.tensors):
        raise ValueError(
            f"{weights.path}: has {len(weights.tensors):,} tensors, too few for the {config.num_layers:,} layers of "
            f"{where.name}"
        )
    try:
        with torch.device("meta"):
            model = LanguageModel(config) if config.causal else Encoder(config)
    except (RuntimeError, TypeError, ValueError) as error:  # torch has a RuntimeError for sizes beyond 2^63
        raise ValueError(f"{where}: {str(error).splitlines()[0]}") from error
    targets = stored_tensors(model)
    sources = {name: source_of(layout.modules, name) for name in targets}
    _compare(layout, weights, sources, targets)
    _check_copies(layout, weights)
    dtype = dtype or _stored_dtype(sources.values(), weights, fields)
    with torch.no_grad():
        filled = {name: _filled(sources[name], targets[name], weights, dtype, device) for name in targets}
    model.load_state_dict(filled, strict=False, assign=True)  # tied tensors have one name here, and two there
    return model


def source_of(modules: Table, name: str) -> Source:
    """Where a tensor of ours comes from, with the names of tensors instead of modules."""
    layer = re.search(r"\.blocks\.(\d+)\.", name)
    number = "" if layer is None else layer[1]
    general = re.sub(r"\.blocks\.\d+\.", ".blocks.N.", name)
    module, _, kind = general.rpartition(".")
    found, ending = (modules[general], "") if general in modules else (modules[module], f".{kind}")
    source = Source((found,)) if isinstance(found, str) else found
    return replace(source, names=tuple(each.replace(".N.", f".{number}.") + ending for each in source.names))


def _compare(layout: Layout, weights: Weights, sources: Mapping[str, Source], targets: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are missing, that nothing reads, or that have another shape than the config says."""
    wanted = {name for source in sources.values() for name in source.names}
    there = weights.tensors.keys()
    if wanted - there:
        raise _missing(weights, sources)
    extra = sorted(
        name for name in there - wanted - layout.copies.keys() if re.fullmatch(layout.unused, name) is None
    )
    if extra:
        stored = weights.tensors[extra[0]]
        raise ValueError(f"{stored.file}: tensor {shown(stored.name)} is not in the model ({len(extra)} in all)")
    for name, source in sources.items():
        rows, *rest = targets[name].shape
        shape = (rows // len(source.names), *rest)
        for each in source.names:
            _check_shape(weights.tensors[each], shape)
    for copy, original in layout.copies.items():
        if copy in there and original in there:
            _check_shape(weights.tensors[copy], weights.tensors[original].shape)


def _missing(weights: Weights, sources: Mapping[str, Source]) -> ValueError:
    """By the names that the file would have them under; where most are missing, it has others."""
    wanted = {name: ours for ours, source in sources.items() for name in source.names}
    missing = sorted(
        (weights.prefix if ours.startswith("trunk.") else "") + name  # heads stand beside the inner model
        for name, ours in wanted.items()
        if name not in weights.tensors
    )
    others = sorted(stored.name for name, stored in weights.tensors.items() if name not in wanted)
    hint = f"; it has {shown(others[0])}" if others and 2 * len(missing) > len(wanted) else ""
    return ValueError(f"{weights.path}: tensor {missing[0]!r} is missing ({len(missing)} in all){hint}")


def _check_shape(stored: Stored, shape: tuple[int, ...]) -> None:
    if stored.shape != shape:
        came, wanted = shown(list(stored.shape)), list(shape)
        raise ValueError(f"{stored.file}: tensor {shown(stored.name)} is {came}, the config wants {wanted}")
    _ = stored.dtype  # refuses what is no weight


def _stored_dtype(sources: Iterable[Source], weights: Weights, fields: Fields) -> torch.dtype:
    """That of the file. Where tensors differ, norms say, the one that the config names, or one that holds all."""
    stored = {weights.tensors[name].dtype for source in sources for name in source.names}
    named = fields.values.get("dtype") or fields.values.get("torch_dtype")
    known = [each for each in DTYPES.values() if str(each).removeprefix("torch.") == named]
    return known[0] if known and len(stored) > 1 else reduce(torch.promote_types, stored)


def _filled(
    source: Source,
    target: Tensor,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> Tensor:
    """A tensor of ours, from those of the file, one by one."""
    stored = [weights.tensors[name] for name in source.names]
    filled = torch.empty(target.shape, dtype=dtype, device=device or "cpu")
    start = 0
    for each in stored:
        for piece in source.pieces(each.read()):
            rows = piece.numel() * len(filled) // filled.numel()
            filled[start : start + rows].view(piece.shape).copy_(piece)
            start += rows
    return filled


def _check_copies(layout: Layout, weights: Weights) -> None:
    """A tied model has one tensor for both: a file in which they differ is of another model than its config says."""
    for copy, original in layout.copies.items():
        if copy not in weights.tensors or original not in weights.tensors:
            continue
        first, second = weights.tensors[original], weights.tensors[copy]
        if not _same(first.read(), second.read()):
            advice = "; set tie_word_embeddings to false if they are two" if layout.config.causal else ""
            raise ValueError(
                f"{second.file}: tensor {shown(second.name)} is not the same as {shown(first.name)}, but the model "
                f"has one tensor for both{advice}"
            )


def _same(first: Tensor, second: Tensor) -> bool:
    """Equal numbers, or equal bits: NaN is no number."""
    if torch.equal(first, second):
        return True
    return first.dtype == second.dtype and torch.equal(first.view(torch.uint8), second.view(torch.uint8))
