"""`patch` and `unpatch`: a BLOOM, MPT or Falcon of transformers that is already in memory, with attention from here.

Patching changes three things of one model and nothing else: the class of its attention modules
(transformers_attention.py); its config, by a copy that asks for padding in place of masks (transformers_padding.py);
and a check of the arguments in front of its forward.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from trainshort.common.extras import MissingExtraError, needed, pip_command
from trainshort.integrations.transformers_padding import NAME

CAN_BE_PATCHED = (
    "models of transformers can be patched that contain a BloomModel, an MptModel or a FalconModel with alibi=True, "
    "alone, under any head or in a wrapper like PEFT's"
)
OLDEST = (5, 17)  # of transformers
STOCK_CONFIG = "_trainshort_stock_config"  # of a patched base model and of what is around it: a StockConfig


class StockConfig(NamedTuple):
    config: Any  # as other models may use it too
    contents: dict[str, Any]  # of it, when the model was patched


def patch(model: nn.Module) -> nn.Module:
    """Let a transformers BLOOM, MPT or Falcon (alibi=True) compute its attention here: linear memory, any length.

    Logits, gradients, `generate`, caches and padding stay what they are, up to rounding; parameters, state_dict and
    what save_pretrained writes are untouched. Attention weights (`output_attentions`) are not to be had from a
    patched model. Patching twice changes nothing more.

    Args:
        model: A base model, a model with a head, or a wrapper around one. It is changed in place.

    Returns:
        The same model.

    Example:
        >>> import transformers
        >>> config = transformers.BloomConfig(vocab_size=256, hidden_size=64, n_layer=2, n_head=4)
        >>> bloom = transformers.BloomForCausalLM(config)  # or from_pretrained("path/to/bloom-560m")
        >>> logits = ts.patch(bloom)(tokens).logits
    """
    bases = _checked_bases(model)
    for part in _with_stock_config(model.modules()):
        if part.config._attn_implementation_internal != NAME:  # its base was unpatched without it
            _restore_config(part, model)
    for base in bases:
        _patch_base(base)
    for base in bases:
        _share_config(base, model)
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """Undo `patch`: the model is as transformers made it. A model that is not patched stays as it is.

    Args:
        model: What was given to `patch`.

    Returns:
        The same model.

    Example:
        >>> import transformers
        >>> config = transformers.BloomConfig(vocab_size=256, hidden_size=64, n_layer=2, n_head=4)
        >>> bloom = ts.patch(transformers.BloomForCausalLM(config))
        >>> bloom = ts.unpatch(bloom)
    """
    parts = _with_stock_config(_modules(model, "unpatch"))
    for attention in (each for part in parts for each in _patched_attention(part)):
        _refuse_replaced_forward(attention)
    for part in parts:
        _unpatch_part(part, model)
    return model


def _modules(model: Any, verb: str) -> Iterator[nn.Module]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"cannot {verb} an object of class {type(model).__name__}: {CAN_BE_PATCHED}")
    return model.modules()


def _checked_bases(model: nn.Module) -> list[Any]:
    """The base models inside, all of which can be patched."""
    modules = _modules(model, "patch")
    _require_transformers()
    from transformers import BloomModel, FalconModel, MptModel

    bases = [each for each in modules if isinstance(each, (BloomModel, MptModel, FalconModel))]
    if not bases:
        raise TypeError(f"cannot patch a model of class {type(model).__name__}: {CAN_BE_PATCHED}")
    for base in bases:
        _check_config(base.config)
        for attention in _stock_attention(base):
            _check_attention(attention)
    return bases


def _require_transformers() -> None:
    with needed("transformers", by="patching"):
        import transformers
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < OLDEST:
        raise MissingExtraError(
            f"patching needs transformers {'.'.join(map(str, OLDEST))} or newer, and {transformers.__version__} is "
            f"installed: {pip_command('transformers')}"
        )


def _check_config(config: Any) -> None:
    if config.model_type == "falcon" and not config.alibi:
        raise ValueError(
            "cannot patch a Falcon with alibi=False in its config, which has rotary positions and no linear biases: "
            f"{CAN_BE_PATCHED}"
        )
    if not getattr(config, "is_causal", True):
        raise ValueError(
            "cannot patch a model with is_causal=False in its config: attention is causal in patched models"
        )


def _check_attention(attention: Any) -> None:
    from trainshort.integrations.transformers_attention import PATCHED

    if type(attention) not in PATCHED:
        known = ", ".join(sorted(stock.__name__ for stock in PATCHED))
        raise TypeError(f"cannot patch attention of class {type(attention).__name__}: it must be one of {known}")
    if getattr(attention, "slow_but_exact", False) and attention.pretraining_tp > 1:
        raise ValueError(
            "cannot patch a BLOOM with slow_but_exact and pretraining_tp > 1, which computes in slices and leaves "
            "out a bias: make the model with slow_but_exact=False in its config"
        )
    _refuse_replaced_forward(attention)


def _refuse_replaced_forward(attention: nn.Module) -> None:
    if "forward" in vars(attention):
        raise ValueError(
            f"the forward of a {type(attention).__name__} was replaced on the module itself, as hooks of accelerate "
            "do: remove them (accelerate.hooks.remove_hook_from_module(model, recurse=True)), call this again, and "
            "put them back"
        )


def _stock_attention(base: nn.Module) -> list[nn.Module]:
    from trainshort.integrations.transformers_attention import PATCHED

    every = [each for each in base.modules() if isinstance(each, tuple(PATCHED))]
    return [each for each in every if type(each) not in PATCHED.values()]


def _patched_attention(base: nn.Module) -> list[Any]:
    from trainshort.integrations.transformers_attention import PATCHED

    return [each for each in base.modules() if type(each) in PATCHED.values()]


def _with_stock_config(modules: Iterator[nn.Module]) -> list[Any]:
    return [each for each in modules if STOCK_CONFIG in vars(each)]


def _patch_base(base: Any) -> None:
    from trainshort.integrations.transformers_attention import PATCHED

    for attention in _stock_attention(base):
        attention.__class__ = PATCHED[type(attention)]
    if STOCK_CONFIG not in vars(base):
        setattr(base, STOCK_CONFIG, StockConfig(base.config, dict(vars(base.config))))
        base.config = copy.copy(base.config)  # models that were made from one config share it
        base.config._attn_implementation_internal = NAME
    if check_arguments not in base._forward_pre_hooks.values():
        base.register_forward_pre_hook(check_arguments, with_kwargs=True)


def _share_config(base: Any, model: nn.Module) -> None:
    """With what is in the base and around it; what is around it can be unpatched later than the base."""
    kept, inside = vars(base)[STOCK_CONFIG], set(base.modules())
    for module in model.modules():
        if vars(module).get("config") is not kept.config:
            continue
        around = any(each is base for each in module.modules())
        if around:
            setattr(module, STOCK_CONFIG, kept)
        if around or module in inside:
            module.config = base.config


def _unpatch_part(part: Any, model: nn.Module) -> None:
    for attention in _patched_attention(part):
        attention.__class__ = attention.stock
    for number in [number for number, hook in part._forward_pre_hooks.items() if hook is check_arguments]:
        del part._forward_pre_hooks[number]
        part._forward_pre_hooks_with_kwargs.pop(number, None)
    _restore_config(part, model)


def _restore_config(part: Any, model: nn.Module) -> None:
    patched, (stock, contents) = part.config, vars(part).pop(STOCK_CONFIG)
    missing = object()
    changed = {name: value for name, value in vars(patched).items() if contents.get(name, missing) != value}
    changed.pop("_attn_implementation_internal", None)
    vars(stock).update(changed)
    for module in model.modules():
        if vars(module).get("config") is patched:
            module.config = stock
    patched._attn_implementation_internal = stock._attn_implementation_internal  # a head around the model may have it


def check_arguments(base: Any, arguments: Any, keywords: dict[str, Any]) -> None:
    """Refuse what a patched model cannot do, in front of its forward, where it can be said clearly."""
    from trainshort.integrations.transformers_attention import check_mask, refuse_attentions

    if len(arguments) > 1:
        names = list(inspect.signature(type(base).forward).parameters)[1:]
        keywords = keywords | dict(zip(names, arguments, strict=False))
    wanted = keywords.get("output_attentions")
    refuse_attentions(base.config.output_attentions if wanted is None else wanted)
    mask = keywords.get("attention_mask")
    if isinstance(mask, Tensor):
        check_mask(mask)
