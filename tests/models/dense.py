"""A whole transformer written out as formulas, dense and in float64: what every model here is compared with.

It reads the names of the weights and the fields of the config, and shares no code with the package.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import trainshort as ts

Weights = dict[str, Tensor]


def weights_of(model: nn.Module, dtype: torch.dtype = torch.float64) -> Weights:
    """Copies of all weights, ready to receive gradients; tied ones are one tensor."""
    copies: dict[int, Tensor] = {}
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().to(dtype, copy=True).requires_grad_()
        found[name] = copies[id(tensor)]
    return found


def paper_slopes(heads: int) -> list[float]:
    closest = 2 ** int(math.log2(heads))
    first = [2.0 ** (-8.0 * (head + 1) / closest) for head in range(closest)]
    return first + [2.0 ** (-8.0 * (2 * head + 1) / (2 * closest)) for head in range(heads - closest)]


def t5_bucket(distance: int, buckets: int, furthest: int, bidirectional: bool) -> int:
    offset, steps = 0, max(-distance, 0)
    if bidirectional:
        buckets //= 2
        offset, steps = buckets if distance > 0 else 0, abs(distance)
    exact = buckets // 2
    if steps < exact:
        return offset + steps
    place = math.log(steps / exact) / math.log(furthest / exact) * (buckets - exact)
    return offset + min(buckets - 1, exact + int(place + 1e-9))


def stretched_by(config: ts.ModelConfig, length: int) -> float:
    """The factor of options for texts longer than those of the training."""
    options = config.position_options
    return options.get("factor") or max(1.0, length / options["trained_length"])


def position_bias(config: ts.ModelConfig, weights: Weights, queries: int, keys: int, start: int = 0) -> Tensor:
    """What is added to the scores: [H, Tq, Tk]. Distances are key - query; -inf where a head does not look."""
    distance = torch.arange(keys)[None, :] - (start + torch.arange(queries))[:, None]
    dtype = weights["trunk.embedding.weight"].dtype if "trunk.embedding.weight" in weights else torch.float64
    bias = torch.zeros(config.num_heads, queries, keys, dtype=dtype)
    options = config.position_options
    if config.position == "alibi":
        if options.get("trainable"):
            slopes = weights["position.log_slopes"].exp()
        else:
            biased = options.get("biased_heads", config.num_heads)
            given = options.get("slopes") or paper_slopes(biased) + [0.0] * (config.num_heads - biased)
            slopes = torch.tensor(given, dtype=dtype) * options.get("scale", 1.0)
        if options.get("scaling") == "linear":
            slopes = slopes / stretched_by(config, max(start + queries, keys))
        elif options.get("scaling") == "ntk":  # for a number of heads whose slopes fall from head to head
            factor, last = stretched_by(config, max(start + queries, keys)), max(int((slopes > 0).sum()) - 1, 1)
            slopes = slopes / factor ** (torch.arange(config.num_heads) / last)
        bias = bias - slopes[:, None, None] * distance.abs()
        if options.get("one_sided"):
            past = (config.num_heads + 1) // 2
            bias[:past] = bias[:past].masked_fill(distance > 0, -math.inf)
            bias[past:] = bias[past:].masked_fill(distance < 0, -math.inf)
    elif config.position == "kerple":
        a, p = (weights[f"position.{name}"].to(dtype)[:, None, None] for name in ("a", "p"))
        steps = distance.abs().to(dtype)
        if options.get("kind") == "power":
            bias = bias - a * torch.exp(p * steps.clamp_min(1.0).log()) * (steps > 0)
        else:
            bias = bias - p * torch.log(1.0 + a * steps)
    elif config.position == "t5":
        buckets, furthest = options.get("buckets", 32), options.get("max_distance", 128)
        every = {int(d): t5_bucket(int(d), buckets, furthest, not config.causal) for d in distance.unique()}
        rows = torch.tensor([[every[int(d)] for d in line] for line in distance])
        bias = weights["position.table"][rows].permute(2, 0, 1)
    if config.causal:
        bias = bias.masked_fill(distance > 0, -math.inf)
    return bias


def embedded(config: ts.ModelConfig, weights: Weights, x: Tensor, positions: Tensor) -> Tensor:
    if config.position == "sinusoidal":
        half = config.d_model // 2
        angles = positions[..., None] * 10000.0 ** (-torch.arange(half, dtype=x.dtype) / (half - 1))
        return x * math.sqrt(config.d_model) + torch.cat((angles.sin(), angles.cos()), dim=-1)
    if config.position == "learned":
        return x + weights["position.embedding.weight"][positions]
    return x


def turned(config: ts.ModelConfig, x: Tensor, positions: Tensor) -> Tensor:
    """Rotary: as complex numbers. x: [B, heads, T, D]."""
    options = config.position_options
    if config.position != "rotary" and not options.get("rotary"):
        return x
    base = options.get("base", 10000.0) if config.position == "rotary" else options.get("rotary_base", 500000.0)
    half, size = x.shape[-1] // 2, 1.0
    scaling = options.get("scaling") if config.position == "rotary" else None
    factor = stretched_by(config, x.shape[2]) if scaling else 1.0
    if scaling == "ntk":
        base = base * factor ** (2 * half / (2 * half - 2))
    frequencies = base ** (-torch.arange(half, dtype=x.dtype) / half)
    if scaling == "yarn":
        size = 0.1 * math.log(factor) + 1.0
        turns = options["trained_length"] / (2 * math.pi / frequencies)  # wavelengths in the trained length
        for i in range(half):
            kept = min(max((float(turns[i]) - 1.0) / (32.0 - 1.0), 0.0), 1.0)
            frequencies[i] = kept * frequencies[i] + (1.0 - kept) * frequencies[i] / factor
    angles = positions[:, None, :, None] * frequencies
    x = x * size
    numbers = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((numbers.real, numbers.imag), dim=-1)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """q: [B, H, Tq, D]; k, v: [B, Hkv, Tk, D]; bias: [B or 1, H, Tq, Tk]. Zeros where nothing is in sight."""
    group = q.shape[1] // k.shape[1]
    owner = [head // group for head in range(q.shape[1])]
    scores = scale * q @ k[:, owner].transpose(2, 3) + bias
    blind = torch.isneginf(scores).all(-1, keepdim=True)
    probabilities = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return probabilities @ v[:, owner]


def normed(config: ts.ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    if config.norm != "rmsnorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[f"{name}.weight"]
    return x + weights[f"{name}.bias"] if config.norm == "layernorm" else x


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def activated(config: ts.ModelConfig, x: Tensor) -> Tensor:
    if config.activation == "relu":
        return x.clamp_min(0.0)
    if config.activation == "silu":
        return x / (1.0 + (-x).exp())
    if config.activation == "gelu_tanh":
        return 0.5 * x * (1.0 + ((2.0 / math.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh())
    return 0.5 * x * (1.0 + (x / 2.0**0.5).erf())


def feed_forward(config: ts.ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    x = linear(weights, f"{name}.up", x)
    inner = activated(config, x[..., : config.hidden])
    if config.gated:
        inner = inner * x[..., config.hidden :]
    return linear(weights, f"{name}.down", inner)


def forgotten(config: ts.ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    """The bias of forget gates, pair by pair: the sum of log f over the tokens between. [B, H, T, T]."""
    log_f = -torch.log1p(torch.exp(-linear(weights, f"{name}.gates.logits", x))).transpose(1, 2)
    length = x.shape[1]
    index = torch.arange(length)
    query, key, between = index[:, None, None], index[None, :, None], index[None, None, :]
    past = ((between > key) & (between <= query)).to(x.dtype)
    bias = torch.einsum("bht,qkt->bhqk", log_f[:, : config.num_heads], past)
    if not config.causal:
        future = ((between > query) & (between <= key)).to(x.dtype)
        bias = bias + torch.einsum("bht,qkt->bhqk", log_f[:, config.num_heads :], future)
    return bias


def shifted(shares: Tensor, x: Tensor, positions: Tensor) -> Tensor:
    """Mixed with the token before. shares: [B, T, heads]; x: [B, heads, T, D]."""
    out = []
    for t in range(x.shape[2]):
        share = shares[:, t, :, None]
        before = x[:, :, t - 1] if t else torch.zeros_like(x[:, :, 0])
        before = before * (positions[:, t] > 0).to(x.dtype)[:, None, None]
        out.append(share * before + (1 - share) * x[:, :, t])
    return torch.stack(out, dim=2)


def head_normed(config: ts.ModelConfig, weight: Tensor, x: Tensor) -> Tensor:
    """x: [B, heads, T, D]; weight: [heads, D]."""
    return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight[:, None]


def wide_normed(config: ts.ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    """x: [B, heads, T, D]; a LayerNorm over heads and channels."""
    x = x - x.mean((1, 3), keepdim=True)
    x = x / (x.square().mean((1, 3), keepdim=True) + config.norm_eps).sqrt()
    weight, bias = (weights[f"{name}.{each}"].view(x.shape[1], 1, x.shape[3]) for each in ("weight", "bias"))
    return x * weight + bias


def self_attention(
    config: ts.ModelConfig, weights: Weights, name: str, x: Tensor, positions: Tensor, bias: Tensor
) -> Tensor:
    batch, length, _ = x.shape
    normed_input = x
    x = linear(weights, f"{name}.qkv", x)
    if config.clip_qkv is not None:
        x = x.clamp(-config.clip_qkv, config.clip_qkv)
    x = x.view(batch, length, -1, config.width).transpose(1, 2)
    queries, keys = config.num_heads, config.num_heads + config.kv_heads
    q, k, v = x[:, :queries], x[:, queries:keys], x[:, keys:]
    if config.kv_shift:
        shares = 1 / (1 + torch.exp(-linear(weights, f"{name}.shift.shares", normed_input)))
        k = shifted(shares[..., : config.kv_heads], k, positions)
        v = shifted(shares[..., config.kv_heads :], v, positions)
    if config.qk_norm:
        q = head_normed(config, weights[f"{name}.query_norm.weight"], q)
        k = head_normed(config, weights[f"{name}.key_norm.weight"], k)
    if config.wide_qk_norm:
        q, k = (wide_normed(config, weights, f"{name}.{each}_norm", x) for each, x in (("query", q), ("key", k)))
    q, k = (turned(config, part, positions) for part in (q, k))
    if f"{name}.gates.logits.weight" in weights:
        bias = bias + forgotten(config, weights, name, normed_input)
    scale = config.width**-0.5 if config.attention_scale is None else config.attention_scale
    out = softmax_attention(q, k, v, bias, scale)
    if config.output_norm:
        out = head_normed(config, weights[f"{name}.output_norm.weight"], out)
    out = out.transpose(1, 2).reshape(batch, length, -1)
    if config.output_gate:
        out = out / (1 + torch.exp(-linear(weights, f"{name}.output_gate", normed_input)))
    return linear(weights, f"{name}.out", out)


def hidden_states(
    config: ts.ModelConfig,
    weights: Weights,
    tokens: Tensor,
    *,
    real: Tensor | None = None,
    token_types: Tensor | None = None,
) -> Tensor:
    """tokens: [B, T]; real: bool [B, T], False for padding -> [B, T, d_model]."""
    length = tokens.shape[1]
    positions = torch.arange(length).expand(tokens.shape)
    bias = position_bias(config, weights, length, length)[None]
    if real is not None:
        positions = (positions - real.int().argmax(-1, keepdim=True)).clamp_min(0)
        bias = bias.expand(len(tokens), -1, -1, -1).masked_fill(~real[:, None, None, :], -math.inf)
    x = weights["trunk.embedding.weight"][tokens]
    if config.token_types:
        x = x + weights["trunk.token_types.weight"][0 * tokens if token_types is None else token_types]
    x = embedded(config, weights, x, positions)
    if config.embedding_norm:
        x = normed(config, weights, "trunk.embedding_norm", x)
    for layer in range(config.num_layers):
        at = f"trunk.blocks.{layer}"
        if config.norm_place == "post":
            attended = self_attention(config, weights, f"{at}.attention", x, positions, bias)
            inner = normed(config, weights, f"{at}.attention_norm", x + attended)
            x = normed(config, weights, f"{at}.second_norm", inner + x) if config.second_residual else inner
            x = normed(config, weights, f"{at}.ffn_norm", x + feed_forward(config, weights, f"{at}.ffn", x))
            continue
        first = normed(config, weights, f"{at}.attention_norm", x)
        attended = self_attention(config, weights, f"{at}.attention", first, positions, bias)
        if config.parallel_residual:
            second = normed(config, weights, f"{at}.ffn_norm", x) if config.parallel_norms else first
            x = x + attended + feed_forward(config, weights, f"{at}.ffn", second)
        else:
            x = x + attended
            x = x + feed_forward(config, weights, f"{at}.ffn", normed(config, weights, f"{at}.ffn_norm", x))
    if config.final_norm and config.norm_place == "pre":
        x = normed(config, weights, "trunk.final_norm", x)
    return x


def logits(config: ts.ModelConfig, weights: Weights, tokens: Tensor, **about: Tensor | None) -> Tensor:
    """Of a language model: [B, T, V]."""
    return linear(weights, "head", hidden_states(config, weights, tokens, **about))


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean over all targets that are not -100, in nats."""
    chosen = targets != -100
    rows = scores[chosen]
    right = rows.gather(-1, targets[chosen][:, None])[:, 0]
    return (torch.logsumexp(rows, dim=-1) - right).mean()
