"""Endless generation: a cache that keeps only the keys that can still matter, so that memory stops growing.

A model writes on and on. With a full cache each token costs memory for good; a bounded one forgets keys as soon as it
has proved that no later query can give them weight, and writes the same text.

    python examples/endless_text.py        a minute on two cores
"""

import argparse

import torch

import trainshort as ts


@torch.no_grad()
def main(tokens: int, every: int) -> None:
    torch.manual_seed(0)
    slopes = [0.5, 0.25, 0.125, 0.0625]  # the gentlest slope says how far a head can see
    config = ts.ModelConfig(d_model=64, num_layers=2, num_heads=4, position_options={"slopes": slopes})
    model = ts.LanguageModel(config).eval()
    prompt = torch.tensor([list(b"Once upon a time")])

    cache = model.make_cache(batch_size=1, bounded=True)
    token = prompt
    print(f"{'tokens':>8}{'bounded cache':>16}{'full cache':>14}{'keys held':>12}")
    while cache.length < tokens:
        logits = model(token, cache=cache, last_only=True)
        token = logits[:, -1].argmax(-1, keepdim=True)
        if cache.length % every == 0:
            report = cache.report()
            sizes = f"{report.nbytes / 1024:12,.0f} KiB{report.full_bytes / 1024:10,.0f} KiB"
            print(f"{report.tokens:8,}{sizes}{report.share_of_keys:12.1%}")

    # The same in one call. With max_new_tokens=None it goes on for ever: on_token shows tokens as they come.
    bounded = model.generate(prompt, max_new_tokens=2 * every, temperature=0.8, seed=0, bounded=True)
    full = model.generate(prompt, max_new_tokens=2 * every, temperature=0.8, seed=0)
    print(f"{2 * every:,} tokens with either cache: {'the same' if torch.equal(bounded, full) else 'others'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--every", type=int, default=1000, help="tokens between two lines of the table")
    given = parser.parse_args()
    main(given.tokens, given.every)
