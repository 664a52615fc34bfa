"""What language models and encoders have in common when their tensors are replaced: ties and fixed tables survive.

A model built on the meta device has no memory. It gets some from `to_empty`, or from `load_state_dict` with
`assign=True`, a tensor at a time: torch then forgets that two names were one tensor, and tables that no checkpoint
holds would stay without values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from trainshort.models.config import ModelConfig
from trainshort.models.layers import Trunk
from trainshort.models.loss import head_loss
from trainshort.models.spans import over_ranks
from trainshort.models.transformers_arguments import LOAD, instead_of
from trainshort.ops.context import state
from trainshort.positions import Position


class Model(nn.Module):
    """A trunk and a head, which share the embedding if the config says so."""

    tokenizer: Any = None  # set by `load` where the checkpoint has one
    config: ModelConfig
    position: Position
    trunk: Trunk
    head: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_after_loading)

    def tie(self) -> None:
        """Make the head and the embedding one tensor."""
        self.head.weight = self.trunk.embedding.weight

    def compile_blocks(self, **options: Any) -> None:
        """Compile the blocks for training, once for all layers; options are those of torch.compile.

        Compiled blocks are used where gradients are recorded and there is no cache: evaluation and generation call
        them as before and compile nothing. That a model was compiled is not saved with it.
        """
        self.trunk.compile_blocks(options)

    def checkpoint_activations(self, on: bool = True) -> None:
        """In training, keep the input of each block alone, and compute the rest again in the backward pass.

        Memory grows with the number of layers by one hidden state each; a step takes about a third longer.
        """
        self.trunk.checkpoint_activations = on

    def attend_densely(self, on: bool = True) -> None:
        """Compute attention as before fused kernels: a table of all scores, whose memory grows with length squared.

        The same function to rounding, for measurements beside the kernels: whole rows alone, without padding, packed
        documents or a cache.
        """
        self.trunk.dense = on

    def hidden_states(
        self,
        tokens: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        token_types: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Hidden states by layer: of the embeddings, and after each block; the last ones are normed for the head.

        They are those that transformers gives with output_hidden_states=True, and gradients flow through all.

        Args:
            tokens: int [B, T].
            key_padding_mask: bool [B, T], True for real tokens.
            cu_seqlens: Borders of documents packed into one row.
            token_types: int [B, T], the segment of each token, for encoders that have them.

        Returns:
            num_layers + 1 tensors [B, T, d_model].

        Example:
            >>> embedded, *_, last = model.hidden_states(tokens)
        """
        states: list[Tensor] = []
        last = self.trunk(
            tokens,
            key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens,
            token_types=token_types,
            states=states,
        )
        return *states, last

    @classmethod
    @instead_of(LOAD)
    def from_pretrained(
        cls,
        folder: str | Path,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        position_options: Mapping[str, Any] | None = None,
    ) -> Self:
        """`ts.load`, which must find a model of this class in the folder. Nothing is ever downloaded.

        Args:
            folder: One that `ts.save` wrote, or that of a public ALiBi model.
            dtype: None: that of the file.
            device: None: the CPU.
            position_options: Some that are to be other than saved.

        Returns:
            The model, in evaluation mode, with `.tokenizer` if the folder has a tokenizer.json.

        Example:
            >>> model = ts.LanguageModel.from_pretrained("path/to/bloom-560m", dtype=torch.bfloat16)
        """
        from trainshort.models.checkpoints import load_class

        return load_class(cls, folder, dtype, device, position_options)

    def save_pretrained(self, folder: str | Path, *, format: str = "trainshort") -> None:
        """`ts.save(model, folder)`.

        Args:
            folder: Made if it is not there.
            format: "trainshort", or "bloom" for a folder that transformers loads.

        Example:
            >>> model.save_pretrained("my-model")
        """
        from trainshort.models.checkpoints import save

        save(self, folder, format=format)

    def head_loss(
        self, hidden: Tensor, targets: Tensor, *, ignore_index: int = -100, reduction: str = "mean"
    ) -> Tensor:
        """Cross entropy in nats of the head on hidden states [..., d_model], of targets [...]: see loss.head_loss.

        Inside `ts.context_parallel` "mean" and "sum" are over the targets of all ranks, with the gradient of this
        rank's own: gradients are then to be summed over ranks.
        """
        if state.current is not None and reduction != "none":
            own = self._losses(hidden, targets, ignore_index, "sum")
            return over_ranks(own, (targets != ignore_index).sum(), reduction == "mean")
        return self._losses(hidden, targets, ignore_index, reduction)

    def _losses(self, hidden: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
        losses = head_loss(
            self.head,
            hidden.flatten(0, -2),
            targets.flatten(),
            vocab_size=self.config.vocab_size,
            ignore_index=ignore_index,
            reduction=reduction,
        )
        return losses.view(targets.shape) if reduction == "none" else losses

    def _head_weight(self) -> object:
        """None where a quantized layer stands for the head, or there is no head."""
        return getattr(getattr(self, "head", None), "weight", None)

    def _apply(self, function: Callable[..., Any], recurse: bool = True) -> Self:
        # Asked of the tensors, not of the config: who has quantized the head has taken it off the embedding.
        tied = self._head_weight() is self.trunk.embedding.weight
        super()._apply(function, recurse)
        if tied:
            self.tie()
        return self


def materialize_tables(model: nn.Module, _: object = None) -> None:
    """Give position methods the tables that are not stored, where the parameters are. A hook after loading."""
    first = next(model.parameters(), None)
    if first is None or first.is_meta:
        return
    for module in model.modules():
        if isinstance(module, Position):
            module.materialize(first.device)


def _after_loading(model: nn.Module, _: object) -> None:
    assert isinstance(model, Model)
    materialize_tables(model)
    head = model._head_weight()
    if model.config.tie_embeddings and _came_from_one(head, model.trunk.embedding.weight):
        model.tie()


def _came_from_one(head: object, embedding: Tensor) -> bool:
    """Whether a tied pair that was loaded apart is still one: a checkpoint may name it once, or twice."""
    if not isinstance(head, Tensor) or head is embedding or embedding.is_meta:
        return False
    if head.is_meta:
        return True
    alike = type(head) is type(embedding) and (head.dtype, head.device) == (embedding.dtype, embedding.device)
    return alike and torch.equal(head, embedding)
