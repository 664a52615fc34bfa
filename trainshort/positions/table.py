"""The table of position methods by name; those of files and installed packages are added to it."""

from __future__ import annotations

from trainshort.positions.alibi import Alibi
from trainshort.positions.fox import Fox
from trainshort.positions.kerple import Kerple
from trainshort.positions.learned import Learned
from trainshort.positions.none import NoPosition
from trainshort.positions.position import Position
from trainshort.positions.rotary import Rotary
from trainshort.positions.sinusoidal import Sinusoidal
from trainshort.positions.t5 import T5

POSITIONS: dict[str, type[Position]] = {
    "alibi": Alibi,
    "fox": Fox,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rotary": Rotary,
    "t5": T5,
    "kerple": Kerple,
    "none": NoPosition,
}
BUILT_IN = dict(POSITIONS)

# What else people call them.
OTHER_NAMES = {
    "rope": "rotary",
    "roformer": "rotary",
    "rotaryembedding": "rotary",
    "sin": "sinusoidal",
    "sine": "sinusoidal",
    "sincos": "sinusoidal",
    "fourier": "sinusoidal",
    "absolute": "learned",
    "learnable": "learned",
    "embedding": "learned",
    "gpt2": "learned",
    "bert": "learned",
    "relative": "t5",
    "t5bias": "t5",
    "buckets": "t5",
    "forgetting": "fox",
    "forgettingtransformer": "fox",
    "forget": "fox",
    "cable": "fox",
    "nope": "none",
    "no": "none",
    "off": "none",
    "kernel": "kerple",
    "yarn": "rotary",
    "ntk": "rotary",
    "linear": "alibi",
    "linearbias": "alibi",
    "bloom": "alibi",
    "mpt": "alibi",
}
