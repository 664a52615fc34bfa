"""Whole models on the GPU: a training step and generation give what they give on the CPU, as far as float32 goes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import trainshort as ts

FACTOR = 4.0  # times what float32 on the CPU is away from float64, and the last three bits of a number
WHERE = ["alibi", "rotary", "t5", "fox", "fox pro", "kerple"]
PRO = {"qk_norm": True, "kv_shift": True, "output_norm": True, "output_gate": True}


def model_of(name: str) -> ts.LanguageModel:
    torch.manual_seed(1)
    position, _, pro = name.partition(" ")
    options = {"gate_bias": 3.0} if position == "fox" else {}
    fields = {"position": position, "position_options": options} | (PRO if pro else {})
    config = ts.ModelConfig(vocab_size=101, d_model=128, num_layers=2, num_heads=4, **fields)  # type: ignore[arg-type]
    return ts.LanguageModel(config)


def training_step(model: ts.LanguageModel, tokens: Tensor) -> dict[str, Tensor]:
    """Loss, gradients and the parameters after one step, as float64 on the CPU."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    found = {"loss": loss.detach()}
    found |= {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    found |= {n: p.detach() for n, p in model.named_parameters()}
    return {name: tensor.double().cpu() for name, tensor in found.items()}


@pytest.mark.parametrize("position", WHERE)
def test_training_step(position: str) -> None:
    model = model_of(position)
    tokens = torch.randint(101, (2, 601), generator=torch.Generator().manual_seed(0))
    truth = training_step(copy.deepcopy(model).double(), tokens)
    on_cpu = training_step(copy.deepcopy(model), tokens)
    on_gpu = training_step(copy.deepcopy(model).cuda(), tokens.cuda())
    assert on_gpu.keys() == truth.keys()
    for name, expected in truth.items():
        loss = (on_cpu[name] - expected).norm() + 2.0**-20 * expected.norm()
        error = (on_gpu[name] - expected).norm()
        assert float(error) <= FACTOR * float(loss), f"{name}: {float(error / loss)} times what the CPU loses"


@pytest.mark.parametrize("position", WHERE)
def test_training_step_in_bfloat16(position: str) -> None:
    """Under autocast: gradients point the same way as in float64, as well as the CPU's do."""
    model = model_of(position)
    tokens = torch.randint(101, (2, 601), generator=torch.Generator().manual_seed(0))
    truth = training_step(copy.deepcopy(model).double(), tokens)
    results = {}
    for device in ("cpu", "cuda"):
        with torch.autocast(device, torch.bfloat16):
            results[device] = training_step(copy.deepcopy(model).to(device), tokens.to(device))
    for name, expected in truth.items():
        loss = (results["cpu"][name] - expected).norm() + 2.0**-8 * expected.norm()
        error = (results["cuda"][name] - expected).norm()
        assert float(error) <= FACTOR * float(loss), f"{name}: {float(error / loss)} times what the CPU loses"


@pytest.mark.filterwarnings("ignore:generate runs without CUDA graphs:UserWarning")  # for kerple
@pytest.mark.parametrize("position", WHERE)
def test_generation(position: str) -> None:
    """Greedy, from rows of unlike lengths padded on the left: token by token what the CPU gives."""
    model = model_of(position).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # so that the most likely token is never a matter of rounding
    tokens = torch.randint(101, (2, 300), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(300) >= torch.tensor([[0], [170]])
    expected = model.generate(tokens, key_padding_mask=mask, max_new_tokens=40, temperature=0.0)
    model = model.cuda()
    for use_cache in (True, False):
        out = model.generate(
            tokens.cuda(), key_padding_mask=mask.cuda(), max_new_tokens=40, temperature=0.0, use_cache=use_cache
        )
        assert torch.equal(out.cpu(), expected), use_cache


def test_packed_documents() -> None:
    model = model_of("alibi")
    tokens = torch.randint(101, (1, 500), generator=torch.Generator().manual_seed(0))
    borders = torch.tensor([0, 120, 121, 400, 500])
    with torch.no_grad():
        truth = copy.deepcopy(model).double()(tokens, cu_seqlens=borders)
        on_cpu = model(tokens, cu_seqlens=borders).double()
        on_gpu = copy.deepcopy(model).cuda()(tokens.cuda(), cu_seqlens=borders.cuda()).double().cpu()
    loss = (on_cpu - truth).norm() + 2.0**-20 * truth.norm()
    assert float((on_gpu - truth).norm()) <= FACTOR * float(loss)


def test_generation_says_why_it_has_no_graph() -> None:
    tokens = torch.zeros(1, 5, dtype=torch.int64).cuda()
    with pytest.raises(RuntimeError, match=r"cannot use CUDA graphs: .*KerpleBias"):
        model_of("kerple").cuda().generate(tokens, max_new_tokens=3, cuda_graph=True)


def test_heads_without_a_slope_are_those_of_the_cpu() -> None:
    """With windows of the kernels for the others, whole and a token at a time."""
    options = {"slopes": [0.0, 0.9, 0.0, 0.3]}
    torch.manual_seed(1)
    model = ts.LanguageModel(
        ts.ModelConfig(vocab_size=101, d_model=128, num_heads=4, position_options=options)
    ).eval()
    tokens = torch.randint(101, (1, 1500), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(tokens)
        model = model.cuda()
        cache = model.make_cache(1)
        parts = [model(part, cache=cache) for part in tokens.cuda().split([1400, 98, 1, 1], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1).cpu(), expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(model(tokens.cuda()).cpu(), expected, rtol=1e-3, atol=1e-3)
