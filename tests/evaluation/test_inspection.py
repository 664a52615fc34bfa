"""What `inspect` says of heads, against the softmax written down plainly; and that its bound holds when keys outside
of windows are turned, and values there are changed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import trainshort as ts
from trainshort.evaluation import inspection, mass
from trainshort.evaluation.inspect_config import InspectConfig
from trainshort.evaluation.inspection import NEARLY_ALL, inspect
from trainshort.models.kept import Attended, watched
from trainshort.ops.norms import center_of
from trainshort.ops.problem import make_problem

LENGTH = 200
QUICK = ("alibi", "one-sided encoder")  # the others are for make test-all
TOLERANCE = 2.0**-10
CASES: dict[str, dict[str, Any]] = {
    "alibi": {},
    "grouped": {"num_kv_heads": 2},
    "slope 0": {"position_options": {"biased_heads": 3}},
    "encoder": {"causal": False},
    "one-sided encoder": {"causal": False, "position_options": {"one_sided": True}},
    "fox": {"position": "fox"},
    "kerple": {"position": "kerple", "position_options": {"kind": "power"}},
    "rotary": {"position": "rotary"},
}


def made(name: str) -> ts.LanguageModel | ts.Encoder:
    """Weights large enough that queries and keys matter, and slopes as they are."""
    torch.manual_seed(3)
    fields: dict[str, Any] = {"vocab_size": 31, "d_model": 32, "num_layers": 2, "num_heads": 4} | CASES[name]
    config = ts.ModelConfig(**fields)
    model = ts.LanguageModel(config) if config.causal else ts.Encoder(config)
    with torch.no_grad():
        for block in model.trunk.blocks:
            block.attention.qkv.weight.mul_(8.0)
    return model.eval()


def tokens(count: int = LENGTH) -> list[int]:
    return torch.randint(0, 31, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def layers_of(model: ts.LanguageModel | ts.Encoder) -> list[Attended]:
    found: list[Attended] = []
    with torch.no_grad(), watched(model, found.append):
        model.trunk(torch.tensor([tokens()]))
    return found


def dense(model: ts.LanguageModel | ts.Encoder, seen: Attended, k: Tensor | None = None) -> Tensor:
    """The softmax, float64 [H, T, T]."""
    heads, length = seen.q.shape[1:3]
    keys = (seen.k[0] if k is None else k).double().repeat_interleave(heads // seen.k.shape[1], dim=0)
    place = torch.arange(length)
    scores = seen.q[0].double() @ keys.transpose(1, 2) * model.config.score_scale
    if seen.bias is not None:
        scores = scores + seen.bias.between(place[None, None, :, None], place[None, None, None], torch.float64)[0]
    sights = ["past"] * heads if model.config.causal else seen.bias.sights(heads) if seen.bias else ["both"] * heads
    for head, sight in enumerate(sights):
        if sight != "both":
            ahead = place[None] - place[:, None]
            scores[head].masked_fill_(ahead > 0 if sight == "past" else ahead < 0, -math.inf)
    return scores.softmax(-1)


def cases(*left_out: str) -> list[Any]:
    marks = {name: () if name in QUICK else pytest.mark.slow for name in CASES if name not in left_out}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


@pytest.mark.parametrize("name", cases())
@torch.no_grad()
def test_figures_are_those_of_the_softmax(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mass, "AT_ONCE_ELSEWHERE", 7 * 4 * LENGTH)  # so that rows come in many parts
    model = made(name)
    found = inspect(model, tokens(), InspectConfig(tolerance=TOLERANCE, lengths=(64, LENGTH)))
    watch = inspection._Watch(model, TOLERANCE)
    place = torch.arange(LENGTH)
    distance = (place[None] - place[:, None]).abs()
    for number, seen in enumerate(layers_of(model)):
        weights, windows = dense(model, seen), watch.windows(seen)
        inside = (place >= windows.first[..., None]) & (place < windows.end[..., None])
        for head in range(4):
            figure = {each: found["heads"][each][number][head] for each in found["heads"]}
            skipped = weights[head].masked_fill(inside[head], 0.0).sum(-1)
            assert skipped.max() <= TOLERANCE
            assert figure["skipped"] == pytest.approx(skipped.max().item(), rel=1e-3, abs=1e-12)
            beyond = torch.stack([weights[head].masked_fill(distance <= d, 0.0).sum(-1) for d in range(LENGTH)])
            needed = (beyond > 1 - NEARLY_ALL).sum(0)  # it falls with the distance
            assert figure["needed"] == pytest.approx(needed.double().mean().item(), rel=1e-4)
            assert (figure["most_needed"], figure["query"]) == (needed.max(), needed.argmax())
            assert abs(figure["query"] - figure["key"]) == figure["most_needed"]
            enough = (beyond > TOLERANCE).sum(0)
            mattering = (inside[head] & (distance <= enough[:, None])).sum() / inside[head].sum()
            assert figure["mattered"] == pytest.approx(mattering.item(), rel=1e-3)
            reach = distance.masked_fill(~inside[head], 0).amax(-1).double()
            assert (figure["reach"], figure["farthest"]) == (pytest.approx(reach.mean().item()), reach.max())
            assert found["by_position"][number][head][0] == pytest.approx(needed[:4].double().mean().item())
            for edge, share in zip(found["distances"], found["beyond"][number][head], strict=True):
                could = torch.maximum(place, LENGTH - 1 - place) if not model.config.causal else place
                assert share == pytest.approx(beyond[edge][could > edge].mean().item(), rel=1e-3, abs=1e-9)
    assert found["penalty"] == (name != "rotary")
    if name not in ("rotary", "slope 0"):
        assert min(min(row) for row in found["heads"]["seen"]) < 0.9, "nothing was proved"


@pytest.mark.parametrize("name", cases("rotary"))
@torch.no_grad()
def test_nothing_outside_of_windows_moves_the_output_beyond_the_bound(name: str) -> None:
    model = made(name)
    found = inspect(model, tokens(), InspectConfig(tolerance=TOLERANCE))
    watch = inspection._Watch(model, TOLERANCE)
    worst = inner = 0.0
    for number, seen in enumerate(layers_of(model)):
        windows, before = watch.windows(seen), dense(model, seen)
        problem = make_problem(seen.q, seen.k, seen.v, seen.bias, causal=model.config.causal)
        center = center_of(problem)
        groups = 4 // seen.k.shape[1]
        for head in range(4):
            mine = head // groups
            key, value = seen.k[0, mine].double(), seen.v[0, mine].double()
            middle = torch.zeros_like(key[0]) if center is None else center[0, mine].double()
            length = (key - middle).norm(dim=-1, keepdim=True)
            bound = found["bound"][number][head]
            for query in range(0, LENGTH, 23):
                place = torch.arange(LENGTH)
                outside = (place < windows.first[head, query]) | (place >= windows.end[head, query])
                direction = seen.q[0, head, query].double() * model.config.score_scale
                turned = torch.where(outside[:, None], middle + length * direction / direction.norm(), key)
                keys = seen.k[0].double().clone()
                keys[mine] = turned  # as near to the query as they can be, and as long as they were
                after = dense(model, seen, keys)[head, query]
                out = before[head, query] @ value
                moved = (after @ value - out).norm().item()
                others = torch.where(outside[:, None], value[torch.argmax((value - out).norm(dim=-1))], value)
                changed = (before[head, query] @ others - out).norm().item()
                assert max(moved, changed) <= bound * (1 + 1e-6)
                worst = max(worst, moved / bound, changed / bound)
                inner = max(inner, (before[head, query] @ value.roll(1, 0) - out).norm().item() / bound)
    assert worst > 0, "nothing lies outside"
    assert inner > 1, "what lies inside does matter"


def test_shares_by_length_are_those_of_shorter_texts() -> None:
    model = made("alibi")
    found = inspect(model, tokens(700), InspectConfig(lengths=(130, 600)))
    assert [each["length"] for each in found["by_length"]] == [130, 600, 700]
    for each in found["by_length"]:
        alone = inspect(model, tokens(700)[: each["length"]], InspectConfig())
        assert each["visited"] == alone["heads"]["visited"]
        assert each["seen"] == alone["heads"]["seen"]


@torch.no_grad()
def test_visited_keys_are_those_that_attention_compares() -> None:
    model = made("alibi")
    found = inspect(model, tokens(1500), InspectConfig(tokens=1500))
    seen: list[Attended] = []
    with watched(model, seen.append):
        model.trunk(torch.tensor([tokens(1500)]))
    for layer, (q, k, v, bias) in enumerate(seen):
        scale = model.config.score_scale
        windows = ts.attention(q, k, v, bias=bias, scale=scale, return_windows=True).windows
        assert windows is not None
        share = (windows.end - windows.first).double().sum(-1)[0] / (1500 * 1501 / 2)
        assert found["heads"]["visited"][layer] == pytest.approx(share.tolist(), rel=1e-5)
    assert min(found["heads"]["visited"][0]) < 0.5


@pytest.mark.parametrize("length", [1, 2, 31, 33])
@pytest.mark.parametrize("name", ["alibi", "encoder"])
def test_a_few_tokens_are_enough(name: str, length: int) -> None:
    found = inspect(made(name), tokens()[:length], InspectConfig())
    assert found["length"] == length
    assert all(0 <= value <= 1 for row in found["heads"]["seen"] for value in row)


def test_bad_input_is_refused() -> None:
    model = made("alibi")
    with pytest.raises(ValueError, match="has no tokens"):
        inspect(model, [], InspectConfig())
    with pytest.raises(ValueError, match="at most the 200 tokens of the text, got 201"):
        inspect(model, tokens(), InspectConfig(lengths=(201,)))
    with torch.no_grad():
        model.trunk.blocks[1].attention.qkv.weight[3] = math.nan
    with pytest.raises(ValueError, match="queries of layer 2 are not finite"):
        inspect(model, tokens(), InspectConfig())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"lengths": (0,)}, "lengths must be at least 1"),
        ({"tokens": 10, "lengths": (20,)}, "at most tokens, the 10"),
        ({"tolerance": 1.0}, r"tolerance must lie in \[0, 1\)"),
        ({"tolerance": math.nan}, r"tolerance must lie in \[0, 1\)"),
    ],
)
def test_a_bad_config_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        InspectConfig(**fields)
