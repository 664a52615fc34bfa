"""A position method of your own, in a file: ALiBi in which all heads have one slope, instead of one each.

The class says what to add to the scores; the last line of it gives it a name. That is all: the command line trains it
beside others, tests it at lengths beyond those of the training, and draws it into the report.

    trainshort compare --import examples/own_position.py --positions one_slope alibi --length 64

Run as a script, this file does just that with small models. More flags are handed on, such as --steps 1000.

    python examples/own_position.py        a minute on two cores
"""

import sys

import torch

import trainshort as ts
from trainshort.cli.main import main
from trainshort.positions import POSITIONS, Position, Shape


class OneSlope(Position):
    """slope: of every head. It is an option of the method, checked and saved with the model by itself."""

    def __init__(self, shape: Shape, *, slope: float = 0.125) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.full((shape.num_heads,), slope))

    def bias(self) -> ts.LinearBias:
        return ts.LinearBias(self.slopes)  # keys that can't matter are skipped, as under any slopes


POSITIONS["one_slope"] = OneSlope

COMPARE = ["compare", "--import", __file__, "--positions", "one_slope", "alibi", "none", "--length", "64"]
SMALL = ["--num-layers", "2", "--d-model", "64", "--num-heads", "4", "--steps", "200", "--batch-tokens", "2048"]

if __name__ == "__main__":
    words = [*COMPARE, *SMALL, "--test-tokens", "32768", "--out", "runs/own-position", *sys.argv[1:]]
    print("trainshort", *words)
    sys.exit(main(words))
