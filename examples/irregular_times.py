"""Events at irregular times: train on short spans, test on long ones.

A slow process is measured with noise, now often and now rarely. What was its true value at each measurement, given
those so far? One layer of attention answers, whose weights fade with real time (`ts.DecayBias.at`), with the number
of measurements between (`ts.LinearBias`), or not at all. All are told how long the last pause was.

    python examples/irregular_times.py            half a minute on two cores
"""

import argparse

import torch
from torch import Tensor, nn

import trainshort as ts

NOISE, TRAINED, WIDTH, HEADS = 1.0, 64, 32, 4  # of a measurement; measurements of a training span; of the model


def draw(batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Times, and a process of variance 1 and correlation exp(-gap): true values and measured ones, all [B, T]."""
    quiet = (torch.rand(batch, length, generator=generator) < 0.05).cumsum(1) % 2 == 1
    gaps = torch.empty(batch, length).exponential_(generator=generator) * torch.where(quiet, 0.5, 0.01)
    steps, noise = torch.randn(2, batch, length, generator=generator)
    truth = steps.clone()
    for index in range(1, length):
        kept = torch.exp(-gaps[:, index])
        truth[:, index] = kept * truth[:, index - 1] + torch.sqrt(1 - kept**2) * steps[:, index]
    return gaps.double().cumsum(1), truth, truth + NOISE * noise


class Filter(nn.Module):
    """From times and measurements [B, T] to estimates. fades: by "time", by "order" or by "nothing"."""

    def __init__(self, fades: str) -> None:
        super().__init__()
        self.fades, self.visited = fades, 1.0
        unit = 64.0 if fades == "time" else 1.0  # about so many measurements in a unit of time
        self.log_slopes = nn.Parameter((unit * ts.alibi_slopes(HEADS)).log())
        self.embed, self.qkv = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, 1))

    def forward(self, times: Tensor, measured: Tensor) -> Tensor:
        gaps = torch.diff(times, dim=1, prepend=times[:, :1]).float()
        x, slopes = self.embed(torch.stack((measured, gaps), dim=-1)), self.log_slopes.exp()
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, D] each
        bias = {"time": ts.DecayBias.at(times, slopes), "order": ts.LinearBias(slopes), "nothing": None}[self.fades]
        out, _, windows = ts.attention(q, k, v, bias=bias, return_windows=True)
        self.visited = float((windows.end - windows.first).sum() / out[..., 0].numel() / ((x.shape[1] + 1) / 2))
        return self.out(x + out.transpose(1, 2).flatten(2))[..., 0]


def train(fades: str, steps: int) -> Filter:
    torch.manual_seed(0)
    model, generator = Filter(fades), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        times, truth, measured = draw(32, TRAINED, generator)
        optimizer.zero_grad()
        (model(times, measured) - truth).square().mean().backward()
        optimizer.step()
    return model.requires_grad_(False)


def main(steps: int, lengths: list[int]) -> None:
    print(f"Root mean square errors after training on spans of {TRAINED}; of a measurement alone it is {NOISE}.")
    for fades in ("time", "order", "nothing"):
        model = train(fades, steps)
        for length in lengths:
            times, truth, measured = draw(max(1, 2**15 // length), length, torch.Generator().manual_seed(2))
            error = (model(times, measured) - truth)[:, TRAINED // 2 :].square().mean().sqrt()
            print(f"fades by {fades:9} spans of {length:6,}: {error:.3f}, {model.visited:4.0%} of the keys visited")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512, 4096], help="of test spans")
    main(**vars(parser.parse_args()))
