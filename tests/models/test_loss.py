"""linear_cross_entropy: what F.cross_entropy gives on the logits, without the logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import trainshort as ts
from tests.models.largest import peak_bytes
from tests.models.small import encoder, language_model, random_tokens
from trainshort.models import loss as module

REDUCTIONS = ["mean", "sum", "none"]
CHUNKS = {"whole": 2**24, "chunks": 320, "one by one": 1}  # logits at once, of a vocabulary of 61
IGNORED = -100


class Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor

    def loss(self, **options: Any) -> Tensor:
        return ts.linear_cross_entropy(self.hidden, self.weight, self.targets, bias=self.bias, **options)

    def dense(self, **options: Any) -> Tensor:
        logits = F.linear(self.hidden, self.weight, self.bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits, self.targets, **options)

    def to(self, dtype: torch.dtype) -> Inputs:
        hidden, weight, bias = (each if each is None else copied(each, dtype) for each in self[:3])
        assert hidden is not None
        assert weight is not None
        return Inputs(hidden, weight, bias, self.targets)

    def gradients(self, loss: Tensor) -> list[Tensor]:
        """Of a loss whose rows count unequally, if it has rows."""
        factors = torch.linspace(-1.0, 2.0, loss.numel(), dtype=loss.dtype) if loss.dim() else torch.tensor(0.37)
        return list(torch.autograd.grad((loss * factors).sum(), [each for each in self[:3] if each is not None]))


def copied(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype, copy=True).requires_grad_()


def inputs(
    rows: int = 23, width: int = 16, vocabulary: int = 61, *, bias: bool = True, dtype: torch.dtype = torch.float64
) -> Inputs:
    hidden, weight = torch.randn(rows, width, dtype=dtype), torch.randn(vocabulary, width, dtype=dtype)
    offset = torch.randn(vocabulary, dtype=dtype).requires_grad_() if bias else None
    targets = torch.randint(vocabulary, (rows,))
    targets[3:9] = IGNORED
    return Inputs(hidden.requires_grad_(), weight.requires_grad_(), offset, targets)


def error(found: Tensor, right: Tensor | float = 0.0) -> float:
    return float((found - right).detach().double().norm())


@pytest.fixture(params=list(CHUNKS))
def in_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.LOGITS_AT_ONCE, "cpu", CHUNKS[request.param])


# Numbers


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.usefixtures("in_chunks")
def test_it_is_cross_entropy(reduction: str, bias: bool) -> None:
    case = inputs(bias=bias)
    expected, found = case.dense(reduction=reduction), case.loss(reduction=reduction)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for one, two in zip(case.gradients(found), case.gradients(expected), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_are_derivatives(monkeypatch: pytest.MonkeyPatch, reduction: str) -> None:
    monkeypatch.setitem(module.LOGITS_AT_ONCE, "cpu", 3 * 64)
    case = inputs(rows=8, width=3, vocabulary=7)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ts.linear_cross_entropy(hidden, weight, case.targets, bias=bias, reduction=reduction)

    assert torch.autograd.gradcheck(loss, case[:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_errors_are_those_of_dense_logits(
    monkeypatch: pytest.MonkeyPatch, reduction: str, dtype: torch.dtype
) -> None:
    """In chunks: with gradients summed over 75 of them."""
    monkeypatch.setitem(module.LOGITS_AT_ONCE, "cpu", 4 * 128)
    case = inputs(rows=300, width=32, vocabulary=100, dtype=torch.float32).to(dtype)
    exact = case.to(torch.float64)
    truth = exact.dense(reduction=reduction)
    dense, found = case.dense(reduction=reduction), case.loss(reduction=reduction)
    assert found.dtype == torch.float32
    results = [[loss, *case.gradients(loss)] for loss in (found, dense)]
    for one, two, right in zip(*results, [truth, *exact.gradients(truth)], strict=True):
        assert error(one, right) <= 2.0 * error(two, right) + 2.0**-22 * error(right)


def test_ignored_targets_can_be_any_number() -> None:
    case = inputs()
    for ignored in (7, -1, 2**40):
        targets = case.targets.where(case.targets != IGNORED, ignored)
        case = case._replace(targets=targets)
        expected = case.dense(ignore_index=ignored)
        torch.testing.assert_close(case.loss(ignore_index=ignored), expected, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_when_no_target_counts(reduction: str) -> None:
    case = inputs()
    case.targets.fill_(IGNORED)
    expected, found = case.dense(reduction=reduction), case.loss(reduction=reduction)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert bool(found.isnan().all()) is (reduction == "mean")
    assert all(not bool(gradient.any()) for gradient in case.gradients(found))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_rows(reduction: str) -> None:
    case = inputs(rows=0)
    found = case.loss(reduction=reduction)
    torch.testing.assert_close(found, case.dense(reduction=reduction), equal_nan=True)
    assert all(not bool(gradient.any()) for gradient in case.gradients(found))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_tokens_that_can_never_be(reduction: str) -> None:
    """A bias of -inf takes tokens out of the vocabulary, here whole blocks of it."""
    case = inputs()
    assert case.bias is not None
    with torch.no_grad():
        case.bias[:40] = -torch.inf
    case.targets.clamp_(min=40)
    expected, found = case.dense(reduction=reduction), case.loss(reduction=reduction)
    torch.testing.assert_close(found, expected)
    for one, two in zip(case.gradients(found), case.gradients(expected), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("logit", [-1e7, -torch.inf], ids=str)
def test_targets_of_no_probability(reduction: str, logit: float) -> None:
    """Their loss is huge or infinite; their gradients are those of the softmax, as ever."""
    case = inputs(dtype=torch.float32)
    assert case.bias is not None
    with torch.no_grad():
        case.bias[5] = logit
    case.targets[:2] = 5
    found = torch.autograd.grad(case.loss(reduction=reduction).sum(), case[:3])
    expected = torch.autograd.grad(case.dense(reduction=reduction).sum(), case[:3])
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two)


def test_strided_inputs_and_int32_targets() -> None:
    case = inputs()
    hidden = torch.stack((case.hidden, case.hidden), dim=-1).detach()[..., 0]
    weight, targets = case.weight.detach().t().contiguous().t(), torch.stack((case.targets,) * 2, 1).int()[:, 0]
    found = ts.linear_cross_entropy(hidden, weight, targets, bias=case.bias)
    torch.testing.assert_close(found, case.dense())


# What autograd does with it


def test_only_wanted_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the weight's gradient was computed")

    monkeypatch.setattr(module, "_add_product", refuse)
    case = inputs()
    with torch.no_grad():
        case.loss()
    with torch.inference_mode():
        case.loss(reduction="none")
    case.weight.requires_grad_(False)
    for reduction in REDUCTIONS:
        loss = case.loss(reduction=reduction).sum()
        assert case.bias is not None
        assert len(torch.autograd.grad(loss, [case.hidden, case.bias])) == 2
    case.weight.requires_grad_(True)
    with pytest.raises(AssertionError, match="was computed"):
        case.loss()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_backward_twice(reduction: str) -> None:
    case = inputs()
    loss = case.loss(reduction=reduction).sum()
    first = torch.autograd.grad(loss, case.weight, retain_graph=True)[0].clone()
    assert torch.equal(torch.autograd.grad(loss, case.weight)[0], first)


def test_a_weight_that_changes_before_the_backward_pass() -> None:
    """With a reduction, gradients are those of the forward pass; without, they can't be computed any more."""
    case = inputs()
    expected = case.gradients(case.dense())
    loss = case.loss()
    with torch.no_grad():
        case.weight.mul_(2.0)
    for one, two in zip(case.gradients(loss), expected, strict=True):
        torch.testing.assert_close(one, two)
    losses = case.loss(reduction="none")
    with torch.no_grad():
        case.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's, in make_dual
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_what_it_has_no_derivatives_for_is_refused(reduction: str) -> None:
    case = inputs()
    loss = case.loss(reduction=reduction).sum()
    with pytest.raises(RuntimeError, match=r"no double backward: use F\.cross_entropy"):
        torch.autograd.grad(loss, case.hidden, create_graph=True)
    with forward_ad.dual_level():
        dual = case._replace(hidden=forward_ad.make_dual(case.hidden.detach(), torch.ones_like(case.hidden)))
        with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            dual.loss(reduction=reduction)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda hidden: case._replace(hidden=hidden).loss(reduction=reduction).sum())(case.hidden)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_checkpointing(reduction: str, reentrant: bool) -> None:
    case = inputs()

    def loss(hidden: Tensor) -> Tensor:
        return case._replace(hidden=hidden).loss(reduction=reduction).sum()

    expected = torch.autograd.grad(loss(case.hidden), [case.hidden, case.weight])
    checkpoint(loss, case.hidden, use_reentrant=reentrant).backward()
    assert case.hidden.grad is not None
    assert case.weight.grad is not None
    torch.testing.assert_close((case.hidden.grad, case.weight.grad), expected)


# Autocast


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(monkeypatch: pytest.MonkeyPatch, reduction: str, dtype: torch.dtype) -> None:
    """Products in 16 bits, sums in float32: the weight's gradient is as good as with all logits at once."""
    monkeypatch.setitem(module.LOGITS_AT_ONCE, "cpu", 4 * 128)
    case = inputs(rows=300, width=32, vocabulary=100, dtype=torch.float32)
    exact = case.to(torch.float64)
    truth = exact.dense(reduction=reduction)
    with torch.autocast("cpu", dtype):
        dense, found = case.dense(reduction=reduction), case.loss(reduction=reduction)
    results = [[loss, *case.gradients(loss)] for loss in (found, dense)]
    for one, two, right in zip(*results, [truth, *exact.gradients(truth)], strict=True):
        assert one.dtype == torch.float32
        assert error(one, right) <= 1.5 * error(two, right) + 2.0**-22 * error(right)
    d_weight = results[0][2]
    assert not torch.equal(d_weight, d_weight.to(dtype).float()), "rounded to 16 bits"


def test_autocast_leaves_float64_alone() -> None:
    case = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(case.loss(), case.loss().double())
        torch.testing.assert_close(case.loss(), case.dense(), rtol=1e-12, atol=0.0)


# Compilers


class Graphs:
    """A backend for torch.compile that counts nodes: of each forward graph, then of its backward graph."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.names: list[list[str]] = []

    def backend(self) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=self._count, bw_compiler=self._count)

    def _count(self, graph: Any, example_inputs: Any) -> Any:
        from functorch.compile import make_boxed_func

        self.sizes.append(len(graph.graph.nodes))
        self.names.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_compiled_graph_does_not_grow_with_the_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, reduction: str
) -> None:
    monkeypatch.setitem(module.LOGITS_AT_ONCE, "cpu", 64)
    found = []
    for rows in (2, 300):
        torch.compiler.reset()
        graphs, case = Graphs(), inputs(rows=rows)
        loss = torch.compile(case.loss, fullgraph=True, backend=graphs.backend())
        expected, value = case.loss(reduction=reduction), loss(reduction=reduction)
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(case.gradients(value), case.gradients(expected))
        forward, backward = graphs.names
        ours = [name for name in forward + backward if name.startswith("trainshort.")]
        assert len(ours) == (2 if reduction == "none" else 1)
        assert sum(graphs.sizes) < 50
        found.append(graphs.sizes)
    assert found[0] == found[1]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_one_graph_for_any_number_of_rows(reduction: str) -> None:
    torch.compiler.reset()
    graphs = Graphs()
    loss = torch.compile(ts.linear_cross_entropy, fullgraph=True, dynamic=True, backend=graphs.backend())
    for rows in (40, 300, 77):
        case = inputs(rows=rows)
        found = loss(case.hidden, case.weight, case.targets, bias=case.bias, reduction=reduction)
        torch.testing.assert_close(found, case.dense(reduction=reduction))
        torch.testing.assert_close(case.gradients(found), case.gradients(case.dense(reduction=reduction)))
    assert len(graphs.sizes) == 2


def test_compiled_under_autocast_and_without_gradients() -> None:
    torch.compiler.reset()
    case = inputs(dtype=torch.float32)
    loss = torch.compile(case.loss, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = case.loss(), loss()
    assert torch.equal(found, expected)
    for one, two in zip(case.gradients(found), case.gradients(expected), strict=True):
        assert torch.equal(one, two)
    with torch.no_grad():
        assert not loss().requires_grad


def test_the_operators_are_well_formed() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        case = inputs(dtype=dtype)
        _, lse = module.rows_op(*case, IGNORED)
        torch.library.opcheck(module.sum_op, (*case, IGNORED, [True, True, True]))
        part = case._replace(weight=case.weight.detach(), bias=None)
        torch.library.opcheck(module.sum_op, (*part, IGNORED, [True, False, False]))
        torch.library.opcheck(module.rows_op, (*case, IGNORED))
        given = [None if each is None else each.detach() for each in case]
        torch.library.opcheck(
            module.rows_backward_op, (torch.randn_like(lse), lse, *given, IGNORED, [False, True, True])
        )


# Memory


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_is_what_the_module_states(
    monkeypatch: pytest.MonkeyPatch, reduction: str, dtype: torch.dtype
) -> None:
    monkeypatch.setitem(module.LOGITS_AT_ONCE, "cpu", 2**18)
    rows, width, vocabulary = 4096, 8, 2048
    case = inputs(rows, width, vocabulary, bias=False, dtype=torch.float32).to(dtype)
    peak = peak_bytes(lambda: case.loss(reduction=reduction).sum().backward())
    logits = 2**18 * (4 + 4 if dtype == torch.float32 else 2 + 4 + 4)
    others = 2 * (rows * width + vocabulary * width) * 4 + 16 * rows * 4
    assert peak <= logits + others
    assert peak < rows * vocabulary * dtype.itemsize / 4, "a quarter of all logits"


# Models


def adapted(head: nn.Linear) -> nn.Module:
    return nn.Sequential(nn.Identity(), head)


def hooked(head: nn.Linear) -> nn.Module:
    head.register_forward_hook(lambda _module, _inputs, logits: logits + 0.0)
    return head


@pytest.mark.parametrize("change", [None, adapted, hooked])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.usefixtures("in_chunks")
def test_heads(reduction: str, tied: bool, change: Callable[[nn.Linear], nn.Module] | None) -> None:
    model, tokens = language_model(tie_embeddings=tied, head_bias=True), random_tokens(2, 25)
    if change is not None:
        model.head = change(model.head)  # type: ignore[assignment]
    assert module.is_plain_linear(model.head) is (change is None)
    targets = random_tokens(2, 25, seed=1)
    targets[0, 3:9] = IGNORED
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction=reduction)
    found = model.loss(tokens, targets, reduction=reduction)
    torch.testing.assert_close(found.flatten(), expected.flatten(), rtol=1e-5, atol=1e-5)
    parameters = list(model.parameters())
    gradients = [torch.autograd.grad(loss.sum(), parameters) for loss in (found, expected)]
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5 * float(two.abs().max()))


def test_the_loss_of_an_encoder_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = encoder(vocab_size=4096, d_model=8, num_heads=1, num_layers=1), random_tokens(8, 64)
    monkeypatch.setitem(module.LOGITS_AT_ONCE, "cpu", 2**16)
    assert peak_bytes(lambda: model.loss(tokens, tokens).backward()) < tokens.numel() * 4096 * 4 / 2


class LossModule(nn.Module):
    """The loss as a forward pass, which is what wrappers like DDP call."""

    def __init__(self, model: ts.LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(tokens, targets)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_distributed_data_parallel(tmp_path: Path) -> None:
    """One process, a tied head: gradients go through DDP's buckets and come out the same, twice added up."""
    model, tokens = language_model(), random_tokens(2, 25)
    alone = copy.deepcopy(model)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(LossModule(model))
        for _ in range(2):
            wrapped(tokens, tokens).backward()
            alone.loss(tokens, tokens).backward()
    finally:
        torch.distributed.destroy_process_group()
    for one, two in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


# Errors


@pytest.mark.parametrize("worst", [61, -1, 2**40])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_target_outside_the_vocabulary_is_named(reduction: str, worst: int) -> None:
    case = inputs()
    case.targets[17] = worst
    with pytest.raises(IndexError, match=rf"\[0, 61\) or be ignore_index \(-100\); got {worst}$"):
        case.loss(reduction=reduction)


def test_inputs_that_do_not_go_together() -> None:
    case = inputs()
    hidden, weight, bias, targets = case
    assert bias is not None
    with pytest.raises(ValueError, match="mean, sum or none; got 'max'"):
        case.loss(reduction="max")
    with pytest.raises(ValueError, match=r"hidden must be \[N, d\] and weight \[V, d\]"):
        ts.linear_cross_entropy(hidden[None], weight, targets)
    with pytest.raises(ValueError, match=r"hidden must be \[N, d\] and weight \[V, d\]"):
        ts.linear_cross_entropy(hidden[:, :-1], weight, targets)
    with pytest.raises(ValueError, match=r"targets must be \[23\] like hidden, got \[22\]"):
        ts.linear_cross_entropy(hidden, weight, targets[1:])
    with pytest.raises(TypeError, match=r"targets must be int32 or int64, got torch\.float32"):
        ts.linear_cross_entropy(hidden, weight, targets.float())
    with pytest.raises(ValueError, match=r"bias must be \[61\] like weight, got \[60\]"):
        ts.linear_cross_entropy(hidden, weight, targets, bias=bias[1:])
    with pytest.raises(TypeError, match="alike outside of autocast"):
        ts.linear_cross_entropy(hidden.float(), weight, targets)
