"""Write the tables of README and docs from the measured data beside this script.

python benchmarks/tables.py            # rewrite the tables in place
python benchmarks/tables.py --check    # fail if one is out of date
"""

from __future__ import annotations

import json
import re
import sys
from textwrap import wrap

from measured import RESULTS, ROOT, version

PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def headline(dim: int = 128) -> str:
    """What the README says of the chart of speed, in words."""
    data = json.loads((RESULTS / "attention_gpu.json").read_text())
    short, *_, long = (record for record in data["records"] if record["dim"] == dim)

    def speed(record: dict, other: str) -> float:
        return record["ms"][other]["both_gpu"] / record["ms"]["ours"]["both_gpu"]

    flex, cudnn = speed(long, "FlexAttention"), speed(long, "cuDNN, no bias")
    text = (
        f"At {long['length']:,} tokens the kernels visit {long['kept']:.1%} of the key tiles forward and "
        f"{long['kept_backward']:.1%} backward, and are {flex:.0f} times as fast as FlexAttention with the same "
        f"bias, {cudnn:.0f} times as fast as cuDNN without any. At {short['length']:,} tokens they visit "
        f"{short['kept']:.0%}, and are {speed(short, 'FlexAttention'):.1f} times as fast as FlexAttention. "
        f"{data['about']['machine']}, head_dim {dim}, random inputs; {version('attention_gpu')}."
    )
    return _wrapped(text)


def headline_models() -> str:
    """What the README says of whole models."""
    data = json.loads((RESULTS / "models_gpu.json").read_text())
    short, *_, long = (record for record in data["training"] if record["weights"] == "random")
    after = {record["context"]: record["ms"] for record in data["decoding"] if _is_headline(record)}
    near, far = min(after), max(after)
    text = (
        f"A whole model of 12 layers trains {_ratio(short):.2f} times as fast as a compiled plain GPT with "
        f"FlexAttention at {short['length']:,} tokens, and {_ratio(long):.1f} times at {long['length']:,}. One of 24 "
        f"layers writes a token in {after[near]:.2f} ms after {near:,} tokens, and in {after[far]:.2f} ms after "
        f"{far:,}. Random weights, which flatter at long texts; trained ones, and where others are close: "
        f"[Results](docs/results.md#whole-models-on-a-gpu). {data['about']['machine']}; {version('models_gpu')}."
    )
    return _wrapped(text)


def _is_headline(record: dict) -> bool:
    return record["model"] == "ours, alibi" and record["rows"] == 1 and record["weights"] == "random"


def _ratio(record: dict) -> float:
    """Our tokens a second, of the plain GPT's."""
    ratio: float = record["ours"]["tokens_per_second"] / record["FlexAttention GPT"]["tokens_per_second"]
    return ratio


def attention_cpu() -> str:
    data = json.loads((RESULTS / "attention_cpu.json").read_text())
    names = {"normal": "random normal", "tolerance 0": "tolerance 0", "outlier": "a huge key at the start"}
    lines = [
        "| length | inputs | key blocks kept | forward | forward + backward | error, of the baseline's |",
        "| ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for record in data["records"]:
        both = f"{record['both_speedup']:.2f}×" if "both_speedup" in record else "–"
        error = record["error"]["ours"] / record["error"]["baseline"]
        lines.append(
            f"| {record['length']:,} | {names[record['kind']]} | {record['kept']:.1%} | "
            f"**{record['forward_speedup']:.2f}×** | **{both}** | {error:.3f} |"
        )
    return "\n".join([*lines, "", _cpu_of("attention_cpu", data, shapes=True)]) + "\n"


def attention_cpu_beside() -> str:
    data = json.loads((RESULTS / "attention_cpu.json").read_text())
    if "beside" not in data:
        return "Not measured yet for this version.\n"
    lines = ["| length | forward | forward + backward |", "| ---: | ---: | ---: |"]
    lines += [
        f"| {record['length']:,} | **{record['forward_speedup']:.2f}×** | **{record['both_speedup']:.2f}×** |"
        for record in data["beside"]
    ]
    return "\n".join([*lines, "", _cpu_of("attention_cpu", data)]) + "\n"


def attention_gpu() -> str:
    data = json.loads((RESULTS / "attention_gpu.json").read_text())
    lines = [
        "| head_dim | length | tiles visited, forward, backward | forward + backward, ms | "
        "of FlexAttention's speed | of cuDNN's, no bias | kernels alone: of FlexAttention's | of cuDNN's |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in data["records"]:
        ours, flex, cudnn = (record["ms"][name] for name in ("ours", "FlexAttention", "cuDNN, no bias"))
        lines.append(
            f"| {record['dim']} | {record['length']:,} | {record['kept']:.1%}, {record['kept_backward']:.1%} | "
            f"{ours['both']:.3f} | **{flex['both'] / ours['both']:.2f}×** | "
            f"**{cudnn['both'] / ours['both']:.2f}×** | "
            f"{flex['both_gpu'] / ours['both_gpu']:.2f}× | {cudnn['both_gpu'] / ours['both_gpu']:.2f}× |"
        )
    about = data["about"]
    lines += [
        "",
        f"{about['machine']}; {about['shapes']}; torch {about['torch']}, Triton {about['triton']}, "
        f"{version('attention_gpu')}.",
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
    return "\n".join([*lines, "", _machine_of("attention_gpu", data)]) + "\n"


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
    return "\n".join([*lines, "", _machine_of("attention_gpu", data)]) + "\n"


def rivals_gpu() -> str:
    """Kernels for forget gates, which can compute ALiBi: theirs with the gates' gradient."""
    data = json.loads((RESULTS / "rivals.json").read_text())
    lines = [
        "| head_dim | length | ours, ms | FoX's kernel with ACP | it visits | flash-linear-attention's |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in data["records"]:
        ms = {name: times["both_gpu"] for name, times in record["ms"].items()}
        lines.append(
            f"| {record['dim']} | {record['length']:,} | **{ms['ours']:.2f}** | {ms['acp']:.2f} "
            f"({ms['acp'] / ms['ours']:.1f}×) | {record['acp_share']:.1%} | {ms['fla']:.2f} "
            f"({ms['fla'] / ms['ours']:.0f}×) |"
        )
    about = data["about"]
    lines += [
        "",
        f"{about['machine']}; {about['shapes']}; torch {about['torch']}, {version('rivals')}; kernels alone.",
    ]
    return "\n".join(lines) + "\n"


def models_training() -> str:
    data = json.loads((RESULTS / "models_gpu.json").read_text())
    lines = [
        "| length | weights | tokens/s | of the plain GPT's | peak memory, GiB | the plain GPT's |",
        "| ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for record in data["training"]:
        ours, plain = record["ours"], record["FlexAttention GPT"]
        lines.append(
            f"| {record['length']:,} | {record['weights']} | {ours['tokens_per_second']:,.0f} | "
            f"**{_ratio(record):.2f}×** | "
            f"{ours['peak_bytes'] / 2**30:.1f} | {plain['peak_bytes'] / 2**30:.1f} |"
        )
    first = data["first_step"]
    lines += [
        "",
        f"The first step at 1,024 with empty caches takes {first['ours']:.0f} s, the plain GPT's "
        f"{first['FlexAttention GPT']:.0f} s.",
        *(_mfu(record) for record in data.get("mfu", [])),
        _machine_of("models_gpu", data),
    ]
    return "\n".join(lines) + "\n"


def _mfu(record: dict) -> str:
    """What the command reaches, in a line."""
    operations, rate = f"{record['operations_per_token'] / 1e6:,.0f}", f"{record['matrix_rate'] / 1e12:.0f}"
    return (
        f"`trainshort train` with a vocabulary of {record['vocab_size']:,}, optimizer included: "
        f"{record['tokens_per_second']:,.0f} tokens/s, at {operations} million operations a token, dense causal "
        f"attention's, **{record['mfu']:.0%}** of the {rate} teraflop/s of an 8192³ product (`{record['flags']}`)."
    )


def models_fox() -> str:
    """A training step with forget gates beside one with ALiBi."""
    data = json.loads((RESULTS / "models_gpu.json").read_text())
    if "fox" not in data:
        return "Not measured yet for this version.\n"
    lines = [
        "| position | gates begin at a bias of | tokens/s | of alibi's | key blocks visited | peak memory, GiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in data["fox"]:
        speed, bias = record["tokens_per_second"], record.get("gate_bias")
        lines.append(
            f"| {record['position']} | {'–' if bias is None else f'{bias:.0f}'} | {speed:,.0f} | "
            f"**{speed / data['fox'][0]['tokens_per_second']:.2f}×** | {record['share_of_keys']:.1%} | "
            f"{record['peak_bytes'] / 2**30:.1f} |"
        )
    what = f"Random weights, rows of {data['fox'][0]['length']:,} tokens."
    return "\n".join([*lines, "", what, _machine_of("models_gpu", data)]) + "\n"


def models_decoding() -> str:
    data = json.loads((RESULTS / "models_gpu.json").read_text())
    lines = ["| model | weights | rows | context | ms a token |", "| --- | --- | ---: | ---: | ---: |"]
    for record in data["decoding"]:
        if "error" in record:
            lines.append(f"| {record['model']} | random | 1 | 2,048 | {record['error']} |")
        else:
            lines.append(
                f"| {record['model']} | {record['weights']} | {record['rows']} | {record['context']:,} | "
                f"**{record['ms']:.2f}** |"
            )
    for record in data["bounded"]:
        lines.append(f"| ours, alibi, bounded cache | {record['weights']} | 1 | 65,536 | **{record['ms']:.2f}** |")
    for record in data["seven_b"]:
        lines.append(
            f"| 7B, alibi ({record['of_bandwidth']:.0%} of the bandwidth) | random | 1 | {record['context']:,} | "
            f"**{record['ms']:.2f}** |"
        )
    long = max(data["prefill"], key=lambda record: record["length"])
    lines += [
        "",
        f"A prompt of {long['length']:,} tokens is read in {long['seconds'] * 1e3:.0f} ms.",
        _machine_of("models_gpu", data),
    ]
    return "\n".join(lines) + "\n"


def models_bounded() -> str:
    data = json.loads((RESULTS / "models_gpu.json").read_text())
    lines = [
        "| weights | tokens | held, MB | of a full cache | keys held | reruns |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in data["bounded"]:
        lines += [
            f"| {record['weights']} | {held['tokens']:,} | {held['bytes'] / 1e6:,.0f} | "
            f"{held['bytes'] / held['full_bytes']:.2%} | {held['share_of_keys']:.2%} | {held['reruns']} |"
            for held in record["held"]
        ]
    return "\n".join([*lines, "", _machine_of("models_gpu", data)]) + "\n"


def models_cpu() -> str:
    data = json.loads((RESULTS / "models_cpu.json").read_text())
    methods = list(data["records"][0]["ms"])
    lines = [f"| | {' | '.join(methods)} |", "| --- " + "| ---: " * len(methods) + "|"]
    for record in data["records"]:
        times = [f"{record['ms'][name]:,.1f}" if name in record["ms"] else "–" for name in methods]
        lines.append(f"| {record['question']} | {' | '.join(times)} |")
    return "\n".join([*lines, "", _cpu_of("models_cpu", data)]) + "\n"


def public_cpu() -> str:
    data = json.loads((RESULTS / "public_cpu.json").read_text())
    lines = [
        "| tokens | transformers, ms | patched | loaded | transformers, MB | patched | loaded | keys kept |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in data["records"]:
        times, peaks = record["ms"], record["peak_megabytes"]
        speedups = [f"**{times['transformers'] / times[name]:.1f}×**" for name in ("patched", "loaded")]
        shares = [f"**{peaks[name] / peaks['transformers']:.0%}**" for name in ("patched", "loaded")]
        lines.append(
            f"| {record['length']:,} | {times['transformers']:,.0f} | {' | '.join(speedups)} | "
            f"{peaks['transformers']:,.0f} | {' | '.join(shares)} | {record['kept']:.0%} |"
        )
    about = data["about"]
    lines += [
        "",
        f"{about['machine']}; {about['shapes']}; torch {about['torch']}, transformers {about['transformers']}, "
        f"{version('public_cpu')}.",
    ]
    return "\n".join(lines) + "\n"


def context_parallel() -> str:
    data = json.loads((RESULTS / "context_parallel.json").read_text())
    lines = [
        "| ranks | length | dtype | keys and gradients, MB | by formula | bounds, MB | by formula | of a ring's |",
        "| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in data["records"]:
        formula = record["formula"]
        lines.append(
            f"| {record['ranks']} | {record['length']:,} | {record['dtype']} | {record['keys'] / 1e6:.1f} | "
            f"{formula['keys'] / 1e6:.1f} | {record['bounds'] / 1e6:.2f} | {formula['bounds'] / 1e6:.2f} | "
            f"**{record['share']:.1%}** |"
        )
    paper, shares = data["paper"], ", ".join(f"{share:.0%}" for share in data["balance"])
    share = (paper["keys"] + paper["bounds"]) / paper["ring"]
    lines.append(
        f"| {paper['ranks']} | {paper['length']:,} | bfloat16 | – | {paper['keys'] / 1e6:.1f} | – | "
        f"{paper['bounds'] / 1e6:.1f} | {share:.2%} by formula |"
    )
    about = data["about"]
    lines += [
        "",
        f"All ranks together; {about['shapes']}; a ring: keys, values and their gradients make ranks − 1 hops. "
        f"torch {about['torch']}, {version('context_parallel')}. Key blocks visited by each of four ranks at "
        f"{data['records'][0]['length']:,}: {shares}.",
    ]
    return "\n".join(lines) + "\n"


def context_parallel_gpu() -> str:
    """What four ranks compute, one after another on one GPU, beside one call for the whole sequence."""
    data = json.loads((RESULTS / "context_parallel_gpu.json").read_text())
    lines = [
        "| length | one call: on the GPU, ms | by the clock | four ranks: attention kernels, ms | all kernels | "
        "by the clock |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in data["records"]:
        one, ranks = record["one"], record["ranks"]
        lines.append(
            f"| {record['length']:,} | {one['kernels']:.2f} | {one['clock']:.2f} | {ranks['attention']:.2f} "
            f"({ranks['attention'] / one['attention']:.1f}×) | {ranks['kernels']:.1f} | **{ranks['clock']:.0f}** |"
        )
    about = data["about"]
    lines += [
        "",
        f"All ranks together, bfloat16; {about['shapes']}; {about['machine']}; torch {about['torch']}, "
        f"{version('context_parallel_gpu')}.",
    ]
    return "\n".join(lines) + "\n"


def distributed(name: str = "distributed") -> str:
    if not (RESULTS / f"{name}.json").exists():
        return "Not measured yet for this version.\n"
    data = json.loads((RESULTS / f"{name}.json").read_text())
    lines = ["| processes | tokens a second | times one plain process |", "| --- | ---: | ---: |"]
    for record in data["records"]:
        kind, _, count = record["name"].partition(", ")
        shown = f"{count}, {kind}" if count else "1, without torchrun"
        lines.append(f"| {shown} | {record['tokens_per_second']:,} | **{record['times_plain']:.2f}×** |")
    about = data["about"]
    waited = max(record["waiting"] or 0.0 for record in data["records"])
    busy = f"; the machine was loaded, threads waited {waited:.0%} of the time for cores" if waited > 0.1 else ""
    lines += ["", f"{about['machine']} a process; torch {about['torch']}, {version(name)}{busy}. `{about['flags']}`"]
    return "\n".join(lines) + "\n"


def distributed_gpu() -> str:
    return distributed("distributed_gpu")


def decay_cpu() -> str:
    """Gates and times beside slopes, in the same passes."""
    if not (RESULTS / "decay_cpu.json").exists():
        return "Not measured yet for this version.\n"
    data = json.loads((RESULTS / "decay_cpu.json").read_text())
    names = ("gates", "times", "FoX")
    lines = [
        "| length | slopes, ms: forward, both | constant gates | whole seconds | gates as FoX has them | "
        "key blocks kept: slopes, FoX |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in data["records"]:
        forward, both, kept = record["forward_ms"], record["both_ms"], record["kept"]
        shown = [f"{forward[name] / forward['slopes']:.2f}×, {both[name] / both['slopes']:.2f}×" for name in names]
        lines.append(
            f"| {record['length']:,} | {forward['slopes']:,.0f}, {both['slopes']:,.0f} | {' | '.join(shown)} | "
            f"{kept['slopes']:.1%}, {kept['FoX']:.1%} |"
        )
    return "\n".join([*lines, "", _cpu_of("decay_cpu", data, shapes=True)]) + "\n"


def decay_gpu() -> str:
    """Gates beside slopes in the same kernels."""
    if not (RESULTS / "decay_gpu.json").exists():
        return "Not measured yet for this version.\n"
    data = json.loads((RESULTS / "decay_gpu.json").read_text())
    lines = [
        "| head_dim | length | slopes, ms | constant gates | their kernels alone | gates as FoX has them, ms | "
        "tiles visited, forward, backward |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in data["training"]:
        ms = {name: times["both_gpu"] for name, times in record["ms"].items()}
        kept, slopes = record["kept"]["FoX"], ms["slopes"]
        lines.append(
            f"| {record['dim']} | {record['length']:,} | {slopes:.2f} | **{ms['gates'] / slopes:.2f}×** | "
            f"{ms['gates, kernels'] / slopes:.2f}× | {ms['FoX']:.2f} | {kept['kept']:.1%}, "
            f"{kept['kept_backward']:.1%} |"
        )
    ratios = {
        name: [record["ms"][name]["both_gpu"] / record["ms"]["slopes"]["both_gpu"] for record in data["training"]]
        for name in ("gates", "gates, kernels")
    }
    clock = max(record["ms"]["gates"]["both"] / record["ms"]["slopes"]["both"] for record in data["training"])
    gates, kernels = (f"{min(each):.2f}× to {max(each):.2f}×" for each in ratios.values())
    lines += [
        "",
        f"So constant gates cost {gates} of slopes with their gradient, the kernels alone {kernels}; by the clock, "
        f"host included, up to {clock:.1f}× where calls are short.",
    ]
    lines += ["", "| one token after 65,536, rows | slopes, µs | constant gates, µs | gates as FoX has them, µs |"]
    lines += ["| ---: | ---: | ---: | ---: |"]
    for record in data["decoding"]:
        times = " | ".join(f"{record['ms'][name] * 1e3:,.0f}" for name in ("slopes", "gates", "FoX"))
        lines.append(f"| {record['batch']} | {times} |")
    return "\n".join([*lines, "", _machine_of("decay_gpu", data)]) + "\n"


def public_gpu() -> str:
    if not (RESULTS / "public_gpu.json").exists():
        return "Not measured yet for this version.\n"
    data = json.loads((RESULTS / "public_gpu.json").read_text())
    lines = [
        "| shape | tokens | model | seconds | GiB beyond the weights | keys kept |",
        "| --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for part, shape in (("bloom", "bloom-560m"), ("mpt", "MPT-7B")):
        for record in data.get(part, {"records": []})["records"]:
            what = f"| {shape} | {record['length']:,} | {record['model']} |"
            if "error" in record:
                lines.append(f"{what} {record['error']} | – | – |")
                continue
            ours = record["model"] != "transformers"
            kept = f"{data[part]['kept'][str(record['length'])]:.1%}" if ours else "100%"
            lines.append(f"{what} **{record['seconds']:.3f}** | {record['peak_bytes'] / 2**30:.2f} | {kept} |")
    lines += ["", "| one token of bloom-560m | context | ms | keys kept |", "| --- | ---: | ---: | ---: |"]
    steps = [*data.get("decoding", []), *data.get("compiled", [])]
    kept_after = {record["context"]: record["kept"] for record in steps if record["kept"] is not None}
    for record in steps:
        kept = kept_after.get(record["context"])
        share = "–" if kept is None else f"{kept:.1%}"
        lines.append(f"| {record['model']} | {record['context']:,} | **{record['ms']:.2f}** | {share} |")
    return "\n".join([*lines, "", _machine_of("public_gpu", data)]) + "\n"


def _wrapped(text: str) -> str:
    return "\n".join(wrap(text, 120, break_long_words=False, break_on_hyphens=False)) + "\n"


def _cpu_of(name: str, data: dict, shapes: bool = False) -> str:
    about = data["about"]
    what = f"{about['shapes']}; " if shapes else ""
    return f"{about['machine']}; {what}torch {about['torch']}, {version(name)}."


def _machine_of(name: str, data: dict) -> str:
    about = data["about"]
    return f"{about['machine']}; torch {about['torch']}, Triton {about['triton']}, {version(name)}."


TABLES = {
    "public_cpu": public_cpu,
    "public_gpu": public_gpu,
    "rivals_gpu": rivals_gpu,
    "models_cpu": models_cpu,
    "models_training": models_training,
    "models_fox": models_fox,
    "models_decoding": models_decoding,
    "models_bounded": models_bounded,
    "attention_gpu": attention_gpu,
    "context_parallel": context_parallel,
    "context_parallel_gpu": context_parallel_gpu,
    "decay_cpu": decay_cpu,
    "decay_gpu": decay_gpu,
    "distributed": distributed,
    "distributed_gpu": distributed_gpu,
    "decoding_gpu": decoding_gpu,
    "buckets_gpu": buckets_gpu,
    "headline": headline,
    "headline_models": headline_models,
    "attention_cpu": attention_cpu,
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
