"""Events at irregular times: train on short spans, test on long ones.

A slow process is measured with noise at irregular times, now often and now rarely. What was its true value at each
measurement, given those so far? A small transformer answers with attention that fades with real time,
`ts.DecayBias.at(times, slopes)`, or with the number of measurements between, `ts.LinearBias(slopes)`, or not at all.
Both learn their slopes, and all are told how long the last pause was. They are trained on spans of 64 measurements
and tested on spans up to 64 times as long. It is an Ornstein-Uhlenbeck process, so the best possible error is
known: that of a Kalman filter.

    python examples/irregular_times.py            a minute on two cores
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainshort as ts

NOISE = 1.0  # standard deviation of a measurement; that of the process is 1 too
MEMORY = 1.0  # the time in which the process forgets all but 1/e of what it was
TRAINED = 64  # measurements of a training span


class Spans(NamedTuple):
    times: Tensor  # float64 [B, T]
    truth: Tensor  # [B, T]
    measured: Tensor  # [B, T]


def draw(batch: int, length: int, generator: torch.Generator) -> Spans:
    """Spans of a process with unit variance and a correlation of exp(-gap / MEMORY), at random times."""
    # From busy to quiet and back, about every 20 measurements: on average 100 or 2 in the time of MEMORY.
    switches = (torch.rand(batch, length, generator=generator) < 0.05).cumsum(1)
    quiet = (switches + torch.randint(2, (batch, 1), generator=generator)) % 2 == 1
    gaps = torch.empty(batch, length).exponential_(generator=generator) * torch.where(quiet, 0.5, 0.01)
    kept = torch.exp(-gaps / MEMORY)
    steps = torch.randn(batch, length, generator=generator) * torch.sqrt(1 - kept**2)
    state, states = torch.randn(batch, generator=generator), []
    for index in range(length):
        state = state * kept[:, index] + steps[:, index]
        states.append(state)
    truth = torch.stack(states, dim=1)
    noise = NOISE * torch.randn(batch, length, generator=generator)
    return Spans(gaps.double().cumsum(1), truth, truth + noise)


class Filter(nn.Module):
    """A causal transformer from measurements to true values. fades: by "time", by "order" or not ("none")."""

    def __init__(self, fades: str, width: int = 32, heads: int = 4, layers: int = 1) -> None:
        super().__init__()
        self.fades, self.heads = fades, heads
        self.embed = nn.Linear(2, width)
        slopes = ts.alibi_slopes(heads) * (64.0 if fades == "time" else 1.0)  # about 64 measurements go into MEMORY
        self.log_slopes = nn.ParameterList(slopes.log() for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.ffn = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )
        self.head = nn.Linear(width, 1)
        self.visited = 1.0  # share of keys that the last call compared queries with

    def bias(self, times: Tensor, log_slopes: Tensor) -> ts.DecayBias | ts.LinearBias | None:
        if self.fades == "time":
            return ts.DecayBias.at(times, log_slopes.exp())
        return ts.LinearBias(log_slopes.exp()) if self.fades == "order" else None

    def forward(self, spans: Spans) -> Tensor:
        gaps = torch.diff(spans.times, dim=1, prepend=spans.times[:, :1]).float()
        x = self.embed(torch.stack((spans.measured, gaps), dim=-1))
        length = x.shape[1]
        visited = []
        for layer, log_slopes in enumerate(self.log_slopes):
            qkv = self.qkv[layer](self.norms[2 * layer](x)).unflatten(-1, (3, self.heads, -1))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, H, T, D] each
            found = ts.attention(q, k, v, bias=self.bias(spans.times, log_slopes), return_windows=True)
            assert found.windows is not None
            visited.append((found.windows.end - found.windows.first).float().mean() / ((length + 1) / 2))
            x = x + self.out[layer](found.out.transpose(1, 2).flatten(2))
            x = x + self.ffn[layer](self.norms[2 * layer + 1](x))
        self.visited = float(torch.stack(visited).mean())
        return self.head(self.norms[-1](x))[..., 0]


def train(fades: str, steps: int) -> Filter:
    torch.manual_seed(0)
    model = Filter(fades)
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        spans = draw(32, TRAINED, generator)
        loss = F.mse_loss(model(spans), spans.truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def kalman(spans: Spans) -> Tensor:
    """The best estimate there is, [B, T]."""
    gaps = torch.diff(spans.times, dim=1, prepend=spans.times[:, :1]).float()
    mean, variance, means = torch.zeros(len(gaps)), torch.ones(len(gaps)), []
    for gap, measured in zip(gaps.unbind(1), spans.measured.unbind(1), strict=True):
        kept = torch.exp(-gap / MEMORY)
        mean, variance = kept * mean, kept**2 * variance + 1 - kept**2
        gain = variance / (variance + NOISE**2)
        mean, variance = mean + gain * (measured - mean), (1 - gain) * variance
        means.append(mean)
    return torch.stack(means, dim=1)


def error(estimate: Tensor, truth: Tensor) -> float:
    """Root of the mean square, over the measurements that have some before them."""
    return float((estimate - truth)[:, TRAINED // 2 :].square().mean().sqrt())


def main(steps: int, lengths: tuple[int, ...]) -> dict[str, list[float]]:
    """Trains and tests; prints and returns the errors of each kind of attention, by length."""
    models = {f"fades by {fades}": train(fades, steps) for fades in ("time", "order", "none")}
    generator = torch.Generator().manual_seed(2)
    tests = {f"{length:,}": draw(max(1, 2**15 // length), length, generator) for length in lengths}
    errors = {"Kalman filter": [error(kalman(spans), spans.truth) for spans in tests.values()]}
    visited = []
    with torch.no_grad():
        for name, model in models.items():
            errors[name] = []
            for spans in tests.values():
                errors[name].append(error(model(spans), spans.truth))
                visited.append(model.visited)
    print(f"Root mean square errors after training on spans of {TRAINED} measurements, by length of the test spans.")
    print(f"A single measurement is off by {NOISE}.")
    print(f"{'':16}", *(f"{test:>8}" for test in tests))
    for name, found in errors.items():
        print(f"{name:16}", *(f"{value:8.3f}" for value in found))
    print(f"{'keys visited':16}", *(f"{share:8.1%}" for share in visited[: len(tests)]), " fading by time")
    return errors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024, 4096], help="of test spans")
    given = parser.parse_args()
    torch.set_num_threads(1)  # so small a model is no work for two
    main(given.steps, tuple(given.lengths))
