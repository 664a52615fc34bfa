"""Draw the pictures of the docs from the library itself: python docs/pictures/draw.py

Their colours are of middling lightness and stand on nothing, so that they can be read on a light and on a dark page.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

import trainshort as ts

HERE = Path(__file__).resolve().parent
INK, BLUE, ROSE, AMBER = "#757d88", "#2f81c7", "#d9536a", "#c98500"
SLATE = "#5b6470"  # a ground for white words, to be seen on a dark page too
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
LENGTH, BLOCK, HEADS = 4096, 128, 8


def text(x: float, y: float, words: str, *, size: float = 13, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def between(first: str, second: str, share: float) -> str:
    """A colour that has this share of the first, and the rest of the second."""
    pairs = zip(*(bytes.fromhex(colour[1:]) for colour in (first, second)), strict=True)
    return "#" + bytes(round(share * one + (1 - share) * other) for one, other in pairs).hex()


def box(x: float, y: float, width: float, height: float, colour: str, opacity: float = 1.0, corner: float = 0) -> str:
    where = f'x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}"'
    return f'<rect {where} rx="{corner:g}" fill="{colour}" fill-opacity="{opacity:.3f}"/>'


def line(points: list[tuple[float, float]], colour: str, *, width: float = 1, dashes: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashed}/>'


def picture(width: int, height: int, title: str, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'{head} role="img" font-family="{FONT}">\n<title>{title}</title>\n' + "\n".join(parts) + "\n</svg>\n"


def scores() -> str:
    """Scores of five tokens: products of queries and keys, and what ALiBi adds for a slope of 1.

    White words on solid grounds, and large ones: on a phone the picture has half of its width.
    """
    tokens, cell, left, right, top = 5, 52, 4, 366, 46
    place = torch.arange(tokens)
    bias = ts.LinearBias(torch.ones(1)).between(place[:, None], place[None, :], torch.float32).reshape(tokens, tokens)
    parts = [
        text(left + 2, 28, "how well query and key match", size=19, anchor="start"),
        text(right + 2, 28, "how far apart they stand", size=19, anchor="start"),
        text((left + tokens * cell + right) / 2 - 30, top + tokens * cell / 2 + 10, "+", size=34),
        text((left + tokens * cell + right) / 2 + 16, top + tokens * cell / 2 + 8, "m ×", size=25, colour=BLUE),
    ]
    for i in range(tokens):
        for j in range(i + 1):
            x, y, penalty = j * cell, top + i * cell, float(bias[i, j])
            shown, ground = f"{penalty:g}".replace("-", "−"), between(BLUE, SLATE, math.exp(penalty / 1.6))
            small = 'font-size="13" dy="4"'
            product = f'q<tspan {small}>{i + 1}</tspan><tspan dy="-4">·k</tspan><tspan {small}>{j + 1}</tspan>'
            parts += [
                box(left + x + 2, y + 2, cell - 4, cell - 4, SLATE, corner=5),
                text(left + x + cell / 2, y + cell / 2 + 6, product, size=18, colour="#fff"),
                box(right + x + 2, y + 2, cell - 4, cell - 4, ground, corner=5),
                text(right + x + cell / 2, y + cell / 2 + 7, shown, size=21, colour="#fff"),
            ]
    legend = "one row a query, one column a key; m is the head's slope"
    parts.append(text((left + right + tokens * cell) / 2, top + tokens * cell + 32, legend, size=18))
    return picture(right + tokens * cell + 4, top + tokens * cell + 46, "Attention scores with ALiBi", parts)


def slopes() -> str:
    """By head, the factor e^(-slope * distance) that the penalty puts on a key's weight, by distance."""
    left, top, row, step, octaves = 150, 34, 34, 48, 11
    values = ts.alibi_slopes(HEADS)
    parts = [
        text(left + octaves * step / 2, 20, "weight that is left after the penalty, by distance in tokens", size=14)
    ]
    for head, slope in enumerate(values.tolist()):
        y = top + head * row
        parts.append(text(left - 12, y + row / 2 + 5, f"head {head + 1}, m = 1/{1 / slope:g}", anchor="end"))
        octave_parts = [place / 4 for place in range(octaves * 4 + 1)]
        stops = "".join(_stop(octave / octaves, _left_over(slope, octave)) for octave in octave_parts)
        parts.append(f'<linearGradient id="head{head}">{stops}</linearGradient>')
        parts.append(box(left, y + 3, octaves * step, row - 6, f"url(#head{head})", corner=4))
    for octave in range(0, octaves + 1, 2):
        parts.append(text(left + octave * step, top + HEADS * row + 18, f"{2**octave:,}"))
    return picture(left + octaves * step + 36, top + HEADS * row + 30, "How far each of eight heads sees", parts)


def _stop(where: float, opacity: float) -> str:
    return f'<stop offset="{where:.3f}" stop-color="{BLUE}" stop-opacity="{opacity:.3f}"/>'


def _left_over(slope: float, octave: float) -> float:
    return 0.08 + 0.92 * math.exp(-slope * 2**octave)  # what is nothing is still to be seen


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, HEADS, LENGTH, 64, generator=generator) for _ in range(2))
    return q, k


def windows() -> str:
    """The key blocks that query blocks of four heads visit, for random inputs."""
    size, gap, left, top, blocks = 150, 24, 10, 50, LENGTH // BLOCK
    found = ts.certified_windows(*inputs(), block=BLOCK)[0]  # [heads, query blocks, (first, end)]
    parts, cell = [], size / blocks
    for number, head in enumerate((0, 3, 4, 5)):
        x = left + number * (size + gap)
        visited = 0
        stairs = "".join(f"h{cell:.4g}v{cell:.4g}" for _ in range(blocks))
        parts.append(f'<path d="M{x:g},{top}{stairs}H{x:g}Z" fill="{INK}" fill-opacity="0.22"/>')
        for block, (first, end) in enumerate(found[head].tolist()):
            y = top + block * cell
            parts.append(box(x + first * cell, y, (end - first) * cell, cell + 0.3, BLUE))
            visited += end - first
        slope = f"m = 1/{1 / float(ts.alibi_slopes(HEADS)[head]):g}"
        parts.append(text(x + size / 2, 20, f"head {head + 1}, {slope}"))
        parts.append(text(x + size / 2, 39, f"{visited / (blocks * (blocks + 1) / 2):.0%} visited", colour=BLUE))
    parts.append(
        text(x + size, top + size + 26, f"{LENGTH:,} tokens in blocks of {BLOCK}; a row a query block", anchor="end")
    )
    return picture(left * 2 + 4 * size + 3 * gap, top + size + 40, "Key blocks that four heads visit", parts)


def tail() -> str:
    """For the last query of one head: the weight of all keys beyond a distance, its bound, the tolerance."""
    head, left, top, width, height, lowest = 3, 74, 30, 560, 250, -60
    q, k = (tensor[0, head].double() for tensor in inputs())
    slope, query, scale = float(ts.alibi_slopes(HEADS)[head]), q[-1], q.shape[1] ** -0.5
    faded = -slope * torch.arange(LENGTH - 1, -1, -1).double()
    true = scale * (k @ query) + faded
    most = scale * query.norm() * k.norm(dim=1) + faded  # by Cauchy-Schwarz
    total = torch.logsumexp(true, 0)
    shown = 1024  # tokens of distance on the picture

    def place(distance: float, nats: float) -> tuple[float, float]:
        return left + width * distance / shown, top + height * min(max(nats / lowest, 0.0), 1.0)

    def curve(scores: Tensor) -> list[tuple[float, float]]:
        beyond = torch.logcumsumexp(scores, 0).flip(0) - total  # of all keys at a distance or more
        return [
            place(distance, float(beyond[distance])) for distance in range(0, shown, 8) if beyond[distance] > lowest
        ]

    first = int(ts.certified_windows(*inputs(), block=32)[0, head, -1, 0]) * 32
    edge, _ = place(LENGTH - first, 0)
    tolerance = place(0, -24 * math.log(2))[1]
    parts = [
        box(edge, top, left + width - edge, height, INK, 0.16),
        text((edge + left + width) / 2, top + height / 2, "never visited", size=15),
        line(curve(most), ROSE, width=2.5),
        line(curve(true), BLUE, width=2.5),
        line([(left, tolerance), (left + width, tolerance)], AMBER, width=1.5, dashes="6 4"),
        text(left + width - 8, tolerance - 8, "tolerance: one rounding of float32", colour=AMBER, anchor="end"),
        line([(left, top), (left, top + height), (left + width, top + height)], INK),
        text(*place(200, -3.6), "the most they can weigh", colour=ROSE, anchor="start"),
        text(*place(330, -36), "what they weigh", colour=BLUE, anchor="end"),
        text(left + width / 2, top + height + 42, "distance in tokens"),
        text(left - 8, 18, "weight of all keys at this distance or more", anchor="start"),
    ]
    for power, name in {0: "1", -8: "10⁻⁸", -16: "10⁻¹⁶", -24: "10⁻²⁴"}.items():
        parts.append(text(left - 10, place(0, power * math.log(10))[1] + 4, name, anchor="end"))
    parts += [text(place(far, 0)[0], top + height + 20, f"{far:,}") for far in range(0, shown + 1, 256)]
    return picture(left + width + 30, top + height + 54, "The weight of distant keys, and its bound", parts)


PICTURES = {"scores": scores, "slopes": slopes, "windows": windows, "tail": tail}


def main() -> None:
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
