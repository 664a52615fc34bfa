"""The kernels inside torch: operators, compilation, autocast, checkpoints, hooks; and what they refuse to do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import trainshort as ts
from tests.ops.cases import left_padding, random_case
from tests.ops.dense import LEAVES, Case, differentiate
from tests.ops.layouts import columns_first, transposed
from tests.ops.triton.features import STEEP, STEEP_BY_ROW, bucket, small, symmetric
from tests.ops.triton.interpreter import problem_of
from trainshort.ops import operators as op

CASES: dict[str, dict] = {
    "causal": small(queries=70, slopes=STEEP),
    "left_right": symmetric(queries=70, slopes=STEEP, future=STEEP.flip(0), offset=0.5),
    "one_sided": symmetric(queries=70, sees=("past", "future")),
    "slopes_by_row": small(batch=2, queries=70, slopes=STEEP_BY_ROW),
    "grouped": small(queries=70, heads=4, kv_heads=2),
    "padded": small(batch=2, queries=70, key_padding_mask=left_padding(70, 20, length=70)),
    "packed": small(queries=70, cu_seqlens=torch.tensor([0, 20, 70])),
    "query_start": small(batch=2, queries=20, keys=70, query_start=torch.tensor([50, 30])),
    "bucket": bucket(queries=70),
    "no_bias": small(queries=70, bias="none"),
    "half": small(queries=70, dtype=torch.float16),
    "transposed": small(queries=70),
    "columns": small(queries=70),
}


def make(name: str) -> Case:
    case = random_case(**CASES[name])
    layout = {"transposed": transposed, "columns": columns_first}.get(name)
    return case if layout is None else replace(case, **{n: layout(getattr(case, n)) for n in ("q", "k", "v")})


def operator_arguments(case: Case, requires_grad: bool) -> tuple:
    there = {name: getattr(case, name) for name in LEAVES if getattr(case, name) is not None}
    case = replace(case, **{name: t.detach().requires_grad_(requires_grad) for name, t in there.items()})
    return op.pack(problem_of(case))


@pytest.mark.parametrize("name", CASES)
def test_the_operator_is_well_formed(name: str) -> None:
    arguments = operator_arguments(make(name), requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.trainshort.triton.default, arguments, test_utils=checks)


def test_the_operator_is_compiled_by_aot_autograd() -> None:
    arguments = operator_arguments(make("causal"), requires_grad=True)
    torch.library.opcheck(torch.ops.trainshort.triton.default, arguments)


@pytest.mark.parametrize("want_bias", [True, False])
@pytest.mark.parametrize(
    "name", ["causal", "left_right", "slopes_by_row", "grouped", "packed", "bucket", "transposed", "columns"]
)
def test_the_backward_operator_is_well_formed(name: str, want_bias: bool) -> None:
    case = make(name)
    arguments = operator_arguments(case, requires_grad=False)
    out, lse, windows = torch.ops.trainshort.triton(*arguments)
    torch.library.opcheck(
        torch.ops.trainshort.triton_backward.default,
        (case.upstream(), out, lse, windows, want_bias, *arguments),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("name", ["causal", "padded", "bucket", "half", "columns"])
def test_the_decoding_operator_is_well_formed(name: str) -> None:
    case = make(name)
    arguments = operator_arguments(replace(case, q=case.q[:, :, -2:]), requires_grad=False)
    torch.library.opcheck(torch.ops.trainshort.triton_decode.default, arguments)


@pytest.mark.parametrize("name", CASES)
def test_compiled_as_one_graph(name: str) -> None:
    torch.compiler.reset()
    case = make(name)
    compiled = torch.compile(lambda given: given.attend("triton"), fullgraph=True, backend="aot_eager")
    eager = case.run("triton")
    for key, tensor in differentiate(case, compiled).items():
        assert torch.equal(tensor, eager[key]), key


def test_compiled_decoding() -> None:
    torch.compiler.reset()
    case = make("causal")
    case = replace(case, q=case.q[:, :, -1:], key_norms=case.k.norm(dim=-1).amax(-1))
    compiled = torch.compile(lambda given: given.attend("triton"), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(case), case.attend("triton"))


def test_autocast_converts_the_inputs_and_nothing_else() -> None:
    case = random_case(**small(queries=70, slopes=torch.tensor([0.1003, 0.0507])))
    halved = replace(case, q=case.q.half(), k=case.k.half(), v=case.v.half())
    expected = halved.run("triton")
    for around in (True, False):

        def attend(given: Case) -> Tensor:
            with torch.autocast("cpu", torch.float16):
                return given.attend("triton")

        if around:
            with torch.autocast("cpu", torch.float16):
                results = case.run("triton")
        else:
            results = differentiate(case, attend)
        assert results["out"].dtype == torch.float16
        for name, tensor in results.items():
            assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(use_reentrant: bool) -> None:
    case = make("causal")
    expected = case.run("triton")
    leaves = [t.clone().requires_grad_() for t in (case.q, case.k, case.v, STEEP)]

    def attend(*tensors: Tensor) -> Tensor:
        return ts.alibi_attention(*tensors, backend="triton")

    out = checkpoint(attend, *leaves, use_reentrant=use_reentrant)
    out.backward(case.upstream())
    assert torch.equal(out, expected["out"])
    for leaf, name in zip(leaves, ("q", "k", "v", "slopes"), strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, expected[name]), name


@pytest.mark.parametrize("name", ["causal", "left_right", "bucket", "packed", "transposed"])
def test_saved_tensor_hooks(name: str) -> None:
    """Everything that may be large goes through the hooks, and whatever they give back is used."""
    case = make(name)
    expected = case.run("triton")
    seen = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tuple(tensor.shape))
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = case.run("triton")
    assert seen.count(tuple(case.q.shape)) >= 2
    for key, tensor in results.items():
        assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("layout", ["columns", "room behind", "shifted"])
def test_hooks_that_change_the_layout(layout: str) -> None:
    """Of all that is saved, log-sum-exp and windows included."""
    case = random_case(**small(batch=2, queries=450, slopes=STEEP))
    expected = case.run("triton")

    def unpack(tensor: Tensor) -> Tensor:
        if tensor.dim() < 3:
            return tensor
        if layout == "columns":
            return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
        if layout == "room behind":
            room = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 8), 7, dtype=tensor.dtype)
            room[..., : tensor.shape[-1]] = tensor
            return room[..., : tensor.shape[-1]]
        flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:]  # four bytes on
        return flat.copy_(tensor.flatten()).view(tensor.shape)

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        results = case.run("triton")
    for key, tensor in results.items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-4, atol=1e-4, msg=key)


def test_inputs_changed_in_place_are_noticed() -> None:
    case = make("causal")
    q = case.q.clone().requires_grad_()
    k = case.k.clone()
    out = replace(case, q=q, k=k).attend("triton")
    k.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("slopes",), ("k", "slopes")], ids="+".join)
def test_only_some_inputs_ask_for_a_gradient(wanted: tuple[str, ...]) -> None:
    case = make("causal")
    everything = case.run("triton")
    leaves = {name: getattr(case, name).clone().requires_grad_() for name in wanted}
    replace(case, **leaves).attend("triton").backward(case.upstream())
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, everything[name]), name


def test_inference_mode() -> None:
    case = make("causal")
    expected = case.attend("triton")
    with torch.inference_mode():
        out = case.attend("triton")
        assert out.is_inference()
    assert torch.equal(out, expected)


def test_double_backward_is_refused() -> None:
    case = make("causal")
    q = case.q.clone().requires_grad_()
    out = replace(case, q=q).attend("triton")
    (gradient,) = torch.autograd.grad(out, q, case.upstream(), create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward.*reference"):
        gradient.sum().backward()


def test_double_backward_through_the_operator_is_refused() -> None:
    arguments = operator_arguments(make("causal"), requires_grad=True)
    out = torch.ops.trainshort.triton(*arguments)[0]
    (gradient,) = torch.autograd.grad(out, arguments[0], torch.ones_like(out), create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward.*reference"):
        gradient.sum().backward()


def test_vmap_is_refused() -> None:
    case = make("causal")
    batched = torch.stack((case.q, case.q))
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.vmap(lambda q: ts.alibi_attention(q, case.k, case.v, backend="triton"))(batched)
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.vmap(lambda q: ts.alibi_attention(q[:, :, -1:], case.k, case.v, backend="triton"))(batched)


def test_many_gradients_at_once_are_refused() -> None:
    case = make("causal")
    q = case.q.clone().requires_grad_()
    out = ts.alibi_attention(q, case.k, case.v, backend="triton")
    upstream = torch.stack((case.upstream(), case.upstream()))
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.autograd.grad(out, q, upstream, is_grads_batched=True)


@pytest.mark.parametrize("queries", [1, 70])
def test_torch_func_is_refused(queries: int) -> None:
    case = make("causal")
    with pytest.raises(NotImplementedError, match=r"torch\.func.*backend='reference'"):
        torch.func.grad(lambda q: ts.alibi_attention(q, case.k, case.v, backend="triton").sum())(
            case.q[:, :, -queries:]
        )


@pytest.mark.parametrize("queries", [1, 70])
def test_negative_norms_are_refused(queries: int) -> None:
    case = make("causal")
    q, norms = case.q[:, :, -queries:], torch.full((*case.k.shape[:2], 1), -1.0)
    with pytest.raises(ValueError, match=r"key_norms must not be negative, got -1\.0"):
        ts.alibi_attention(q, case.k, case.v, key_norms=norms, backend="triton")
    visited = ts.alibi_attention(q, case.k, case.v, key_norms=norms * math.nan, backend="triton")
    torch.testing.assert_close(visited, ts.alibi_attention(q, case.k, case.v, backend="reference"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own use of its scripts
@pytest.mark.parametrize("queries", [1, 70])
def test_forward_mode_is_refused(queries: int) -> None:
    case = make("causal")
    q = case.q[:, :, -queries:]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        for backend in ("triton", "blocked"):
            with pytest.raises(NotImplementedError, match=r"forward-mode derivatives: use backend='reference'"):
                ts.alibi_attention(dual, case.k, case.v, backend=backend)
        dual = forward_ad.make_dual(q.double(), torch.ones_like(q).double())
        out = ts.alibi_attention(dual, case.k.double(), case.v.double(), backend="reference")
        assert forward_ad.unpack_dual(out).tangent is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traced_by_torch_jit() -> None:
    case = make("causal")
    slopes = torch.tensor([0.5, 0.25])
    for q in (case.q, case.q[:, :, -1:]):
        traced = torch.jit.trace(
            lambda q, k, v: ts.alibi_attention(q, k, v, slopes, backend="triton"), (q, case.k, case.v)
        )
        expected = ts.alibi_attention(q, case.k, case.v, slopes, backend="triton")
        torch.testing.assert_close(traced(q, case.k, case.v), expected)


def test_too_many_rows_are_refused() -> None:
    many = torch.zeros(1, 1, 8).expand(65536, 1, 1, 8)
    with pytest.raises(ValueError, match=r"at most 65,535 rows and heads, got 65,536 and 1: split the batch"):
        ts.attention(many, many, many, backend="triton", causal=False)


def test_what_it_cannot_do_is_said() -> None:
    wide, double = torch.zeros(1, 1, 4, 257), torch.zeros(1, 1, 4, 8, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"head_dim of at most 256, got 257.*blocked"):
        ts.alibi_attention(wide, wide, wide, backend="triton")
    with pytest.raises(RuntimeError, match=r"float32, got torch.float64.*blocked"):
        ts.alibi_attention(double, double, double, backend="triton")


def test_finite_differences() -> None:
    """Directional derivatives, from outputs alone: no formula for a gradient is shared with what is tested."""
    case = random_case(**symmetric(queries=40, heads=1, slopes=torch.tensor([0.3]), future=torch.tensor([0.5])))
    results, upstream = case.run("triton"), case.upstream().double()
    generator = torch.Generator().manual_seed(5)
    step = 2.0**-7
    for name in ("q", "k", "v", "slopes", "future"):
        tensor = getattr(case, name)
        direction = torch.randn(tensor.shape, generator=generator)
        with torch.no_grad():
            there, back = (replace(case, **{name: tensor + s * direction}).attend("triton") for s in (step, -step))
        slope = float(((there.double() - back.double()) * upstream).sum()) / (2.0 * step)
        expected = float((results[name].double() * direction).sum())
        scale = float(results[name].double().norm() * direction.norm())
        assert math.isclose(slope, expected, abs_tol=2e-3 * scale), name


def test_inputs_are_left_alone() -> None:
    case = make("padded")
    copies = {n: getattr(case, n).clone() for n in ("q", "k", "v", "slopes")}
    case.run("triton")
    for name, tensor in copies.items():
        assert torch.equal(getattr(case, name), tensor), name


def test_what_a_configuration_holds_is_all_that_it_is_found_by() -> None:
    """A configuration holds strides of its first call: problems with others must not share it."""
    from trainshort.ops.triton.call import describe
    from trainshort.ops.triton.config import config_for

    case = random_case(**CASES["left_right"] | {"batch": 2})
    by_row = replace(case, future=STEEP_BY_ROW)
    one, other = (config_for(describe(problem_of(c)).features, c.q, c.k, c.v) for c in (case, by_row))
    assert one.values["stride_slope"] != other.values["stride_slope"]
    assert one is not other
