"""Write the tables of README and docs from the measured data beside this script.

python benchmarks/tables.py            # rewrite the tables in place
python benchmarks/tables.py --check    # fail if one is out of date
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
PAGES = ("README.md", "docs/attention.md")
MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def attention_cpu(kinds: tuple[str, ...] = ("normal",)) -> str:
    data = json.loads((RESULTS / "attention_cpu.json").read_text())
    names = {"normal": "random normal", "tolerance 0": "tolerance 0", "outlier": "a huge key at the start"}
    lines = [
        "| length | inputs | key blocks kept | forward | forward + backward | error, of the baseline's |",
        "| ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for record in data["records"]:
        if record["kind"] not in kinds:
            continue
        both = f"{record['both_speedup']:.2f}×" if "both_speedup" in record else "–"
        error = record["error"]["ours"] / record["error"]["baseline"]
        lines.append(
            f"| {record['length']:,} | {names[record['kind']]} | {record['kept']:.1%} | "
            f"**{record['forward_speedup']:.2f}×** | **{both}** | {error:.3f} |"
        )
    about = data["about"]
    lines += ["", f"{about['machine']}; {about['shapes']}; torch {about['torch']}, commit {about['commit']}."]
    return "\n".join(lines) + "\n"


def attention_cpu_all() -> str:
    return attention_cpu(("normal", "tolerance 0", "outlier"))


def attention_cpu_beside() -> str:
    data = json.loads((RESULTS / "attention_cpu.json").read_text())
    if "beside" not in data:
        return "Not measured yet for this version.\n"
    lines = ["| length | forward | forward + backward |", "| ---: | ---: | ---: |"]
    lines += [
        f"| {record['length']:,} | **{record['forward_speedup']:.2f}×** | **{record['both_speedup']:.2f}×** |"
        for record in data["beside"]
    ]
    return "\n".join(lines) + "\n"


def attention_gpu() -> str:
    data = json.loads((RESULTS / "attention_gpu.json").read_text())
    lines = [
        "| head_dim | length | tiles visited, forward, backward | forward + backward, ms | "
        "of FlexAttention's speed | of cuDNN's, no bias | by backward(), ms | kernels alone, ms | "
        "of FlexAttention's | of cuDNN's |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in data["records"]:
        ours, flex, cudnn = (record["ms"][name] for name in ("ours", "FlexAttention", "cuDNN, no bias"))
        lines.append(
            f"| {record['dim']} | {record['length']:,} | {record['kept']:.1%}, {record['kept_backward']:.1%} | "
            f"{ours['both']:.3f} | **{flex['both'] / ours['both']:.2f}×** | "
            f"**{cudnn['both'] / ours['both']:.2f}×** | {ours['both_by_backward']:.3f} | {ours['both_gpu']:.3f} | "
            f"{flex['both_gpu'] / ours['both_gpu']:.2f}× | {cudnn['both_gpu'] / ours['both_gpu']:.2f}× |"
        )
    about = data["about"]
    lines += [
        "",
        f"{about['machine']}; {about['shapes']}; torch {about['torch']}, Triton {about['triton']}, "
        f"commit {about['commit']}.",
    ]
    return "\n".join(lines) + "\n"


def buckets_gpu() -> str:
    data = json.loads((RESULTS / "attention_gpu.json").read_text())
    lines = [
        "| length | ours, ms | FlexAttention, by distance | FlexAttention, by formula | "
        "ours, with the table's gradient | FlexAttention, with it |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    names = ("FlexAttention, by distance", "FlexAttention", "ours, table", "FlexAttention, table")
    for record in data["buckets"]:
        ms = record["ms"]
        times = [f"{ms[name]['both']:,.2f}" if name in ms else "–" for name in names]
        lines.append(f"| {record['length']:,} | **{ms['ours']['both']:.2f}** | {' | '.join(times)} |")
    return "\n".join(lines) + "\n"


def decoding_gpu() -> str:
    data = json.loads((RESULTS / "attention_gpu.json").read_text())
    lines = [
        "| rows | ours, µs | ours, all keys | SDPA, no bias | FlexAttention |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    names = ("ours", "ours, without norms", "SDPA, no bias", "FlexAttention")
    for record in data["decoding"]:
        times = [f"{record['ms'][name] * 1e3:,.0f}" for name in names]
        lines.append(f"| {record['batch']} | **{times[0]}** | {times[1]} | {times[2]} | {times[3]} |")
    return "\n".join(lines) + "\n"


TABLES = {
    "attention_gpu": attention_gpu,
    "decoding_gpu": decoding_gpu,
    "buckets_gpu": buckets_gpu,
    "attention_cpu": attention_cpu,
    "attention_cpu_all": attention_cpu_all,
    "attention_cpu_beside": attention_cpu_beside,
}


def filled(text: str) -> str:
    return MARK.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], text)


def main() -> None:
    stale = []
    for page in PAGES:
        path = ROOT / page
        before = path.read_text()
        after = filled(before)
        if before != after:
            stale.append(page)
            if "--check" not in sys.argv:
                path.write_text(after)
    if stale and "--check" in sys.argv:
        sys.exit(f"out of date: {', '.join(stale)}; run python benchmarks/tables.py")


if __name__ == "__main__":
    main()
