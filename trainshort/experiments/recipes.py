"""Comparisons by name: functions that return a whole CompareConfig, for models of a named size."""

from __future__ import annotations

from collections.abc import Callable

from trainshort.experiments.config import CompareConfig

METHODS = ("alibi", "rotary", "t5", "sinusoidal")

# Size of the model -> steps, tokens a step, learning rate: enough for the picture, less than the best perplexity.
BUDGETS = {
    "tiny": (2000, 8192, 2e-3),
    "small": (5000, 16384, 1e-3),
    "small-124m": (20000, 131072, 6e-4),
    "medium-350m": (40000, 131072, 3e-4),
    "bloom-560m": (60000, 131072, 3e-4),
    "paper-wikitext103": (286000, 73728, 3e-4),
    "paper-1.3b": (50000, 262144, 2e-4),
}


def demo(model: str = "tiny") -> CompareConfig:
    """Four methods in minutes on two cores: trained at 64 tokens, tested at up to 16,384, where windows pay."""
    return CompareConfig(
        out="runs/demo",
        positions=METHODS,
        length=(64,),
        multiples=(1, 2, 4, 16, 256),
        model=model,
        steps=400,
        batch_tokens=2048,
        lr=3e-3,
        test_tokens=32768,
        checkpoint_every=0,
        jobs=2,
    )


def figure1(model: str = "small-124m") -> CompareConfig:
    """The paper's Figure 1: trained at 512 and at 1024 tokens, tested at up to 16,384."""
    steps, batch_tokens, lr = BUDGETS[model]
    return CompareConfig(
        out=f"runs/figure1-{model}",
        positions=METHODS,
        length=(512, 1024),
        test_lengths=(512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384),
        model=model,
        steps=steps,
        batch_tokens=batch_tokens,
        lr=lr,
        test_tokens=None,
        checkpoint_every=1000,
    )


def short_against_long(model: str = "small-124m") -> CompareConfig:
    """The paper's Table 2: ALiBi trained short beside sinusoidal trained at the length of the test."""
    steps, batch_tokens, lr = BUDGETS[model]
    lengths = (512, 1024, 1536, 2048, 3072)
    return CompareConfig(
        out=f"runs/short-against-long-{model}",
        positions=("alibi", "sinusoidal"),
        length=lengths,
        test_lengths=lengths,
        model=model,
        steps=steps,
        batch_tokens=-(-batch_tokens // 6144) * 6144,  # a multiple of every length
        lr=lr,
        test_tokens=None,
        checkpoint_every=1000,
    )


RECIPES: dict[str, Callable[..., CompareConfig]] = {
    "demo": demo,
    "figure1": figure1,
    "short-against-long": short_against_long,
}
