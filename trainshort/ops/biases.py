"""The biases there are. A new one is a class that is listed here."""

from __future__ import annotations

from trainshort.ops.bias import Bias, BucketBias, LinearBias
from trainshort.ops.decay import DecayBias
from trainshort.ops.kerple import KerpleBias

BIASES: tuple[type[Bias], ...] = (LinearBias, BucketBias, DecayBias, KerpleBias)
NAMES = "a LinearBias, a BucketBias, a DecayBias, a KerpleBias"
