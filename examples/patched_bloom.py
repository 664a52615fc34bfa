"""A BLOOM of transformers, patched: the same logits and the same texts, in memory linear in the length.

It is a small BLOOM with random weights, made on the spot, so that nothing is downloaded; one that was loaded with
from_pretrained is patched by the same line. Needs transformers: pip install 'trainshort[hf]'

    python examples/patched_bloom.py       half a minute on two cores
"""

import argparse
import time

import torch
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM

import trainshort as ts


@torch.no_grad()
def read(model: BloomForCausalLM, tokens: Tensor) -> tuple[Tensor, float]:
    """The logits of a text, and how long they took."""
    start = time.perf_counter()
    logits = model(tokens, use_cache=False).logits
    return logits, time.perf_counter() - start


def main(lengths: list[int], new: int) -> None:
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=1024, hidden_size=256, n_layer=4, n_head=8, eos_token_id=None, pad_token_id=0)
    model = BloomForCausalLM(config).eval()
    texts = [torch.randint(1024, (1, length)) for length in lengths]
    prompt = texts[0][:, :64]
    stock = [read(model, text) for text in texts]
    written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False)

    ts.patch(model)  # in place; ts.unpatch(model) undoes it

    print(f"{'length':>8}{'logits differ by':>18}{'seconds stock':>16}{'patched':>10}{'scores stock keeps':>22}")
    for text, (expected, before) in zip(texts, stock, strict=True):
        found, after = read(model, text)
        off = float((found - expected).abs().max() / expected.abs().max())
        scores = 4 * config.n_head * text.shape[1] ** 2 / 2**20  # float32, of one layer at a time
        print(f"{text.shape[1]:8,}{off:18.1e}{before:16.2f}{after:10.2f}{scores:18,.0f} MiB")
    again = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False)
    print(f"{new} tokens, written greedily: {'the same' if torch.equal(written, again) else 'others'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--new", type=int, default=50, help="tokens to write")
    given = parser.parse_args()
    main(given.lengths, given.new)
