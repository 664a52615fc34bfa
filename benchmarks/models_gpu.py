"""Whole models on a GPU: training steps, one token, prompts, endless texts; beside what users would otherwise run.

    python benchmarks/models_gpu.py [--out results.json] [--commit HASH] [--parts training decoding ...]
    python benchmarks/models_gpu.py --parts mfu --data FOLDER     # as `trainshort prepare` wrote it, with a BPE

Training: a plain GPT with FlexAttention's ALiBi, compiled whole, and ours with compiled blocks; float32 weights,
bfloat16 arithmetic by autocast, forward + backward, the same tokens. Fox: the same step of our model with forget
gates, which begin at a bias of 0 as published, or of 5, beside ALiBi. Mfu: the command `trainshort train`, optimizer
and data included, against the rate of a large matrix product. Decoding: greedy tokens of a model in bfloat16, ours
with ALiBi and with rotary positions, and transformers' BLOOM with its default and its static cache. There are rows on
trained weights beside random ones, which flatter the windows. Limits measured in the same run: the rate of a large
matrix product, the bandwidth of reading memory. Times are medians of whole calls, the host's part included. The
results are written after every record, so that a run that is cut off leaves what it has.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from contenders_models import bloom, plain_gpt
from measured import sources_hash
from torch import Tensor

import trainshort as ts
from trainshort.models.kept import share_of_keys
from trainshort.models.language_model import initialize
from trainshort.training.metrics import read_metrics
from trainshort.training.speed import operations_per_token

TRAINED = {"num_layers": 12, "d_model": 768, "num_heads": 12, "vocab_size": 32768}
DECODED = {"num_layers": 24, "d_model": 1024, "num_heads": 16, "vocab_size": 32768}
SEVEN_B = {"num_layers": 32, "d_model": 4096, "num_heads": 32, "vocab_size": 32768}
TOKENS = 65536  # of a training step
GATED = 4096  # the length of the part fox
POSITIONS: list[tuple[str, dict[str, float]]] = [
    ("alibi", {}),
    ("fox", {"gate_bias": 0.0}),
    ("fox", {"gate_bias": 5.0}),
]
RUN = "--model small-124m --length 1024 --batch-tokens 65536 --steps 150"  # of the part mfu
OTHERS = "--warmup 10 --eval-tokens 0 --checkpoint-every 0"
WARM = 50  # of its steps, which are not counted
PARTS = ["training", "fox", "mfu", "first_step", "decoding", "seven_b", "prefill", "bounded"]
ROOT = Path(__file__).resolve().parent.parent
DEVICE = "cuda"  # a test runs some of it elsewhere
BEGIN = time.monotonic()


def say(*words: object) -> None:
    print(f"{time.monotonic() - BEGIN:6.1f}s", *words, flush=True)


def fresh() -> None:
    """Nothing of an earlier contender is left on the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def seconds_of(function: Callable[[], object], calls: int = 5) -> float:
    """The median of whole calls, each waited for."""
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def limits() -> dict[str, float]:
    """Operations a second of an 8192³ product in bfloat16; bytes a second that are read from memory."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    large = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        a @ b
        large.sum()
    found = {
        "matrix_rate": 2 * 8192**3 * 10 / seconds_of(lambda: [a @ b for _ in range(10)]),
        "bandwidth": large.numel() * 2 * 4 / seconds_of(lambda: [large.sum() for _ in range(4)]),
    }
    say(f"limits: {found['matrix_rate'] / 1e12:.0f} Tflop/s, {found['bandwidth'] / 1e12:.2f} TB/s")
    return found


def library_text() -> Tensor:
    """Python's own library as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(each.read_bytes() for each in files)), dtype=torch.uint8).long()


def language_model(shape: dict[str, int], position: str = "alibi", **options: float) -> ts.LanguageModel:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return ts.LanguageModel(ts.ModelConfig(position=position, position_options=options, **shape))


def batch_of(text: Tensor, length: int, generator: torch.Generator | None = None) -> Tensor:
    """[B, length + 1]: rows of the text from random places, TOKENS targets in all."""
    starts = torch.randint(0, len(text) - length - 1, (TOKENS // length,), device=DEVICE, generator=generator)
    return text[starts[:, None] + torch.arange(length + 1, device=DEVICE)]


def ours(model: ts.LanguageModel, length: int) -> tuple[ts.LanguageModel, Any]:
    model.compile_blocks()
    return model, model.loss


CONTENDERS: dict[str, Any] = {"ours": ours, "FlexAttention GPT": plain_gpt}


def step_of(model: torch.nn.Module, loss: Any, tokens: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            value = loss(tokens[:, :-1], tokens[:, 1:])
        value.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return value.detach()

    return step


def training(lengths: list[int], trained_steps: int) -> Iterator[list[dict[str, Any]]]:
    records = []
    text = library_text().cuda()
    source = language_model(TRAINED)
    for weights in ("random", "trained"):
        if weights == "trained":
            train_a_little(source, text, trained_steps)
        for length in lengths if weights == "random" else [each for each in lengths if each in (1024, 16384)]:
            tokens = batch_of(text, length)
            record: dict[str, Any] = {"length": length, "weights": weights}
            for name, make in CONTENDERS.items():
                torch._dynamo.reset()  # or the second length would be compiled for lengths in general
                record[name] = one_training(*make(source, length), tokens)
            mine, plain = record["ours"], record["FlexAttention GPT"]
            say(
                f"training at {length}, {weights}: {mine['tokens_per_second']:,.0f} tokens/s, "
                f"{mine['tokens_per_second'] / plain['tokens_per_second']:.2f}x, "
                f"{mine['peak_bytes'] / 2**30:.1f} GiB of {plain['peak_bytes'] / 2**30:.1f}, "
                f"losses {mine['loss']:.4f} {plain['loss']:.4f}"
            )
            records.append(record)
            yield records


def fox() -> Iterator[list[dict[str, Any]]]:
    """A training step with ALiBi and with forget gates, and the share of the key blocks of a row that is visited."""
    records: list[dict[str, Any]] = []
    tokens = batch_of(library_text().to(DEVICE), GATED)
    for position, options in POSITIONS:
        torch._dynamo.reset()
        model = language_model(TRAINED, position, **options)
        record: dict[str, Any] = {"position": position, **options, "length": GATED}
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            record["share_of_keys"] = share_of_keys(model, tokens[:1, :-1])
        record |= one_training(*ours(model, GATED), tokens)
        records.append(record)
        say(
            f"{position} {options}: {record['tokens_per_second']:,.0f} tokens/s, "
            f"{record['tokens_per_second'] / records[0]['tokens_per_second']:.2f}x alibi, "
            f"{record['share_of_keys']:.1%} of the keys, {record['peak_bytes'] / 2**30:.1f} GiB"
        )
        yield records


class LeftOutError(Exception):
    """A part that cannot be measured with what is here."""


def mfu(data: Path, rate: float, flags: str = RUN, warm: int = WARM) -> Iterator[list[dict[str, Any]]]:
    """The command `trainshort train`: tokens a second, and the share of the matrix rate, by the run and by `rate`."""
    if not (data / "meta.json").exists():
        raise LeftOutError(f"there is no prepared data in {data}: write it with trainshort prepare, or give --data")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = ["train", *flags.split(), *OTHERS.split(), "--device", DEVICE, "--data", str(data), "--out", str(run)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-m", "trainshort", *words], env=environment, check=True)
        rows = [row for row in read_metrics(run) if "loss" in row and row["step"] >= warm]
        model, length = ts.LanguageModel.from_pretrained(run), json.loads((run / "train.json").read_text())["length"]
    operations = operations_per_token(model, length)
    first, last = rows[0], rows[-1]
    speed = (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"])
    record = {
        "flags": f"{flags} {OTHERS}",
        "vocab_size": model.config.vocab_size,
        "steps": last["step"] - first["step"],
        "tokens_per_second": speed,
        "operations_per_token": operations,
        "matrix_rate": rate,
        "mfu": speed * operations / rate,
        "mfu_of_the_run": last.get("mfu"),  # of its last seconds, by a rate that it has timed itself
    }
    say(f"trainshort train: {speed:,.0f} tokens/s, MFU {record['mfu']:.1%}, the run says {record['mfu_of_the_run']}")
    yield [record]


def one_training(model: torch.nn.Module, loss: Any, tokens: Tensor) -> dict[str, float]:
    fresh()
    step = step_of(model, loss, tokens)
    step()
    torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of(step, 7 if tokens.shape[1] <= 4097 else 4)
    peak = torch.cuda.max_memory_allocated()
    return {"tokens_per_second": TOKENS / seconds, "peak_bytes": peak, "loss": float(step())}


def train_a_little(model: ts.LanguageModel, text: Tensor, steps: int, length: int = 1024) -> None:
    """Some steps of AdamW on Python's library, so that queries and keys are those of a model that has learned."""
    model.compile_blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * min(1.0, (step + 1) / 30)
        tokens = batch_of(text, length, generator)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            value = model.loss(tokens[:, :-1], tokens[:, 1:])
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    say(f"  trained {steps} steps at {length} to a loss of {float(value.detach()):.3f}")


@functools.cache
def trained_weights(steps: int) -> dict[str, Tensor]:
    """Of the model that generates, after so many steps: for all parts of this process, on the CPU meanwhile."""
    model = language_model(DECODED)
    train_a_little(model, library_text().to(DEVICE), steps)
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def first_steps() -> Iterator[dict[str, float]]:
    """Seconds of the first training step at 1,024 in a new process with empty caches, all compiling included."""
    found = {}
    for name in CONTENDERS:
        with tempfile.TemporaryDirectory() as folder:
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
            command = [sys.executable, __file__, "--first-step", name]
            # Its errors go where this process's own go: nobody could say afterwards why it failed.
            done = subprocess.run(
                command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True, check=True
            )
        found[name] = float(done.stdout.split()[-1])
        say(f"first step, {name}: {found[name]:.1f} s")
        yield found


def first_step(name: str) -> float:
    model, loss = CONTENDERS[name](language_model(TRAINED), 1024)
    tokens = torch.randint(0, 32768, (TOKENS // 1024, 1025), device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    step_of(model, loss, tokens)()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def token_time(generate: Callable[[int], object], few: int = 32, many: int = 160) -> float:
    """Seconds for a token: what more of them cost, so that prompt and capturing are left out.

    The shortest of each is taken before they are subtracted: a hiccup of the host in the shorter one would otherwise
    count as speed.
    """
    generate(few)
    shorter, longer = [], []
    for _ in range(5):
        shorter.append(seconds_of(lambda: generate(few), 1))
        longer.append(seconds_of(lambda: generate(many), 1))
    return (min(longer) - min(shorter)) / (many - few)


def greedy(model: ts.LanguageModel, prompt: Tensor) -> Callable[[int], object]:
    return lambda new: model.generate(prompt, max_new_tokens=new, temperature=0.0)


def decoding(trained_steps: int) -> Iterator[list[dict[str, Any]]]:
    records: list[dict[str, Any]] = []

    def add(model: str, weights: str, rows: int, context: int, seconds: float) -> None:
        records.append({"model": model, "weights": weights, "rows": rows, "context": context, "ms": seconds * 1e3})
        say(f"one token, {model}, {weights}, {rows} rows after {context}: {seconds * 1e3:.3f} ms")

    def failed(model: str, error: Exception) -> None:
        """What a user would meet, and part of the result."""
        say(f"{model}: {type(error).__name__}: {error}")
        records.append({"model": model, "error": type(error).__name__})

    text = library_text().cuda()
    for position in ("alibi", "rotary"):
        model = language_model(DECODED, position)
        for weights in ("random", "trained") if position == "alibi" else ("random",):
            if weights == "trained":
                model.float().load_state_dict(trained_weights(trained_steps))
            model.to(torch.bfloat16)
            for rows, context in ((1, 2048), (1, 65536), (8, 2048)):
                prompt = text[: rows * context].view(rows, context)
                add(f"ours, {position}", weights, rows, context, token_time(greedy(model, prompt)))
                yield records
        del model
        fresh()
    try:
        theirs = bloom(DECODED)
    except Exception as error:
        failed("transformers' BLOOM", error)
        yield records
        return
    prompt = text[:2048].view(1, -1)
    for cache in ("dynamic", "static"):
        kwargs = {} if cache == "dynamic" else {"cache_implementation": "static"}

        def run(new: int, kwargs: dict[str, Any] = kwargs) -> object:
            mask = torch.ones_like(prompt)
            return theirs.generate(prompt, attention_mask=mask, max_new_tokens=new, do_sample=False, **kwargs)

        try:
            add(f"transformers' BLOOM, {cache} cache", "random", 1, 2048, token_time(run))
        except Exception as error:
            failed(f"transformers' BLOOM, {cache} cache", error)
        yield records


def seven_b(bandwidth: float) -> Iterator[list[dict[str, Any]]]:
    """A model of seven billion weights: tokens a second against reading its weights once."""
    records = []
    with torch.device("meta"):
        model = ts.LanguageModel(ts.ModelConfig(**SEVEN_B)).to(torch.bfloat16)
    model.to_empty(device="cuda")
    initialize(model, model.config)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.reset_parameters()
    weights = sum(p.numel() * p.element_size() for p in model.trunk.blocks.parameters())
    weights += model.head.weight.numel() * 2
    for context in (2048, 65536):
        prompt = torch.randint(0, 32768, (1, context), device="cuda")
        seconds = token_time(greedy(model, prompt))
        share = weights / seconds / bandwidth
        records.append({"context": context, "ms": seconds * 1e3, "weight_bytes": weights, "of_bandwidth": share})
        say(f"7B, one token after {context}: {seconds * 1e3:.3f} ms, {share:.1%} of the bandwidth")
        yield records


@torch.no_grad()
def prefill() -> Iterator[list[dict[str, Any]]]:
    records = []
    model = language_model(DECODED).to(torch.bfloat16).eval()
    for length in (2048, 65536):
        prompt = torch.randint(0, 32768, (1, length), device="cuda")

        def run(prompt: Tensor = prompt) -> object:
            return model.generate(prompt, max_new_tokens=1, temperature=0.0, cuda_graph=False)

        run()
        fresh()
        seconds = seconds_of(run)
        records.append({"length": length, "seconds": seconds, "peak_bytes": torch.cuda.max_memory_allocated()})
        say(f"prompt of {length}: {seconds * 1e3:.1f} ms, peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
        yield records


@torch.no_grad()
def feed(model: ts.LanguageModel, text: Tensor, lengths: list[int]) -> list[dict[str, Any]]:
    """A text through a bounded cache in pieces: what the cache holds after so many tokens."""
    records = []
    cache = model.make_cache(1, bounded=True)
    began = time.monotonic()
    for end in lengths:
        for piece in text[cache.length : end].view(1, -1).split(16384, dim=1):
            model(piece, cache=cache, last_only=True)
        torch.cuda.synchronize()
        held = cache.report()
        records.append(
            {
                "tokens": held.tokens,
                "bytes": held.nbytes + held.text_bytes,
                "full_bytes": held.full_bytes,
                "share_of_keys": held.share_of_keys,
                "reruns": held.reruns,
                "seconds": time.monotonic() - began,
            }
        )
        say(f"  bounded: {held}")
    return records


def bounded(trained_steps: int) -> Iterator[list[dict[str, Any]]]:
    """A million tokens in memory that does not grow, and one token after 65,536."""
    records = []
    text = library_text().cuda()
    model = language_model(DECODED)
    for weights in ("random", "trained"):
        if weights == "trained":
            model.float().load_state_dict(trained_weights(trained_steps))
        model.to(torch.bfloat16)
        held = feed(model.eval(), text, [65536, 262144, 2**20])
        prompt = text[:65536].view(1, -1)
        seconds = token_time(
            lambda new, p=prompt: model.generate(p, max_new_tokens=new, temperature=0.0, bounded=True)
        )
        say(f"bounded, {weights}: one token after 65,536 in {seconds * 1e3:.3f} ms")
        records.append({"weights": weights, "held": held, "ms": seconds * 1e3})
        yield records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--trained-steps", type=int, default=200)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--data", type=Path, default=ROOT / "build" / "paper-data", help="of the part mfu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--first-step", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device: for the CPU there is benchmarks/models_cpu.py")
    if options.first_step:
        print(first_step(options.first_step))
        return
    if options.out and not options.out.parent.is_dir():  # said before anything is measured
        sys.exit(f"--out {options.out}: there is no folder {options.out.parent}")
    about = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": options.commit,
        "sources": sources_hash("models_gpu"),
    }
    results: dict[str, Any] = {"about": about, "limits": limits()}
    parts: dict[str, Callable[[], Iterator[Any]]] = {  # each gives all that it has found so far, after every record
        "training": lambda: training(options.lengths, options.trained_steps),
        "fox": fox,
        "mfu": lambda: mfu(options.data, results["limits"]["matrix_rate"]),
        "first_step": first_steps,
        "decoding": lambda: decoding(options.trained_steps),
        "seven_b": lambda: seven_b(results["limits"]["bandwidth"]),
        "prefill": prefill,
        "bounded": lambda: bounded(options.trained_steps),
    }
    wrong = []
    for name in options.parts:
        fresh()
        try:
            for found in parts[name]():
                results[name] = found
                if options.out:
                    options.out.write_text(json.dumps(results, indent=1) + "\n")
        except LeftOutError as error:
            wrong.append(f"left out: {name}, as {error}")
        except Exception:  # the next parts need not suffer from it
            traceback.print_exc()
            wrong.append(f"failed: {name}")
    if wrong:
        sys.exit("; ".join(wrong))


if __name__ == "__main__":
    main()
