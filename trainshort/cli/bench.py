"""Attention on this machine, beside what torch offers.

All of them compute on the same random inputs, in turns. `dense bias` hands torch the whole table of penalties, made
beforehand and not counted; `row bias` a row of them: linear memory, but it adds absolute positions, which costs
digits; `no bias` is plain causal attention: no ALiBi at all, shown as the limit of what skips nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainshort.cli.stopping import on_stop

EXAMPLES = """
  trainshort bench
  trainshort bench --lengths 1024 4096 16384 --backward
  trainshort bench --device cuda --dtype bfloat16 --heads 16 --head-dim 128 --out bench.json
"""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The shapes to measure."""

    lengths: tuple[int, ...] = field(default=(512, 2048, 4096, 16384), metadata={"help": "tokens in a sequence"})
    heads: int = field(default=8, metadata={"help": "attention heads"})
    head_dim: int = field(default=64, metadata={"help": "channels of one head"})
    tokens: int = field(default=4096, metadata={"help": "tokens in a batch; longer lengths are one row"})
    backward: bool = field(default=False, metadata={"help": "measure forward and backward together"})
    seconds: float = field(default=2.0, metadata={"help": "for each length"})
    dense_up_to: int = field(default=4096, metadata={"help": "longest length at which to try the dense bias"})
    dtype: Literal["float32", "bfloat16", "float16"] | None = field(
        default=None, metadata={"help": "of the inputs (default: bfloat16 on a GPU, else float32)"}
    )
    device: str | None = field(
        default=None, metadata={"help": "such as cpu or cuda (default: cuda where there is one)"}
    )
    threads: int | None = field(default=None, metadata={"help": "CPU threads (default: as torch chooses)"})
    out: Path | None = field(default=None, metadata={"help": "also write the figures to this JSON file"})

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "tokens", "threads", *(["lengths"] if not self.lengths else [])):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be at least 1, got {value}")
        for length in self.lengths:
            if length < 1:
                raise ValueError(f"lengths must be at least 1, got {length}")
        if not self.seconds > 0:
            raise ValueError(f"seconds must be positive, got {self.seconds}")


def run(flags: Flags) -> None:
    import torch

    from trainshort.cli.bench_shown import bench_heading, bench_notes, bench_row
    from trainshort.common.devices import device_for
    from trainshort.common.files import write_json
    from trainshort.common.progress import waiting
    from trainshort.experiments.bench import WAYS, Case, about, measure

    if flags.threads is not None:
        torch.set_num_threads(flags.threads)
    device = device_for(flags.device)
    dtype = getattr(torch, flags.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    records: list[dict[str, Any]] = []
    shapes = f"{flags.heads} heads, head_dim {flags.head_dim}, {str(dtype).removeprefix('torch.')}"
    what = "forward + backward" if flags.backward else "forward"
    print(f"{what} in milliseconds, {shapes}, {about(device)}; beside trainshort torch with", flush=True)
    print(bench_heading(WAYS[1:]), flush=True)

    def left() -> str:
        kept = f", and are in {flags.out}" if flags.out is not None and records else ""
        return f"stopped; {len(records)} of {len(flags.lengths)} lengths were measured{kept}"

    with on_stop(left):
        for length in flags.lengths:
            case = Case(
                length=length,
                batch=max(1, flags.tokens // length),
                heads=flags.heads,
                head_dim=flags.head_dim,
                dtype=dtype,
                device=device,
                backward=flags.backward,
            )
            with waiting(f"{length:,} tokens"):
                record = measure(case, seconds=flags.seconds, dense=length <= flags.dense_up_to)
            records.append(record)
            print(bench_row(record), flush=True)
            if flags.out is not None:
                chosen = json.loads(json.dumps(asdict(flags), default=str))
                write_json(flags.out, {"machine": about(device), "flags": chosen, "records": records})
    print("\n".join(bench_notes(records)))
