"""Attention inside torch: compiled, under autocast, checkpointed, in inference mode; and what it refuses to do."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import trainshort as ts
from tests.ops.cases import left_padding
from tests.ops.contract.operators import operator_arguments
from tests.ops.contract.places import WITH_WINDOWS, Place, at, slow_in_interpreter
from tests.ops.dense import Case, differentiate
from tests.ops.layouts import columns_first, transposed

OPERATORS = ("blocked", "interpreted")  # what an operator says of itself does not depend on the device


def length_of(place: Place) -> int:
    return {"interpreted": 70, "triton_gpu": 640}.get(place.name, 300)


CASES: dict[str, Callable[[Place, int], dict[str, Any]]] = {
    "short": lambda p, n: {"queries": 40},
    "one_query": lambda p, n: {"queries": 1, "keys": 200},
    "causal": lambda p, n: {"slopes": p.steep},
    "paper": lambda p, n: {},
    "long": lambda p, n: {"queries": 2 * n, "slopes": p.steep},
    "symmetric": lambda p, n: {"causal": False},
    "left_right": lambda p, n: {"causal": False, "slopes": p.steep, "future": p.steep.flip(0), "offset": 0.5},
    "one_sided": lambda p, n: {"heads": 3, "causal": False, "sees": ("past", "future", "both")},
    "slopes_by_row": lambda p, n: {"batch": 2, "slopes": p.steep_by_row},
    "grouped": lambda p, n: {"heads": 4, "kv_heads": 2},
    "padded": lambda p, n: {"batch": 2, "key_padding_mask": left_padding(n, n // 3, length=n)},
    "packed": lambda p, n: {"batch": 1, "cu_seqlens": torch.tensor([0, n // 3, n])},
    "query_start": lambda p, n: {"batch": 2, "queries": 20, "keys": n, "query_start": torch.tensor([n - 20, n // 3])},
    "bucket": lambda p, n: p.bucket,
    "no_bias": lambda p, n: {"bias": "none"},
    "low": lambda p, n: {"dtype": p.low},
    "transposed": lambda p, n: {},
    "columns": lambda p, n: {},
}


def make(place: Place, name: str, **more: Any) -> Case:
    length = length_of(place)
    case = place.case(**{"queries": length} | CASES[name](place, length) | more)
    layout = {"transposed": transposed, "columns": columns_first}.get(name)
    return case if layout is None else replace(case, **{n: layout(getattr(case, n)) for n in ("q", "k", "v")})


def of_queries(case: Case, place: Place) -> Callable[[Tensor], Tensor]:
    return lambda q: ts.alibi_attention(q, case.k, case.v, case.slopes, backend=place.backend)


# Operators


@at(*OPERATORS)
@pytest.mark.parametrize("name", CASES)
def test_the_operator_is_well_formed(name: str, place: Place) -> None:
    """Schema, fake tensors (shapes, dtypes and strides), autograd registration, and compilation by AOT autograd."""
    operator = getattr(torch.ops.trainshort, place.backend).default
    arguments = operator_arguments(make(place, name), requires_grad=True)
    if place.interpreted and name != "causal":  # AOT autograd runs it many times
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(operator, arguments, test_utils=checks)
    else:
        torch.library.opcheck(operator, arguments)


@at("blocked")  # the kernels leave windows unwritten where no backward pass will read them
def test_the_operator_is_well_formed_without_gradients(place: Place) -> None:
    arguments = operator_arguments(make(place, "long"), requires_grad=False)
    torch.library.opcheck(getattr(torch.ops.trainshort, place.backend).default, arguments)


@at(*OPERATORS)
@pytest.mark.parametrize("want_bias", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_backward_operator_is_well_formed(name: str, want_bias: bool, place: Place) -> None:
    case = make(place, name)
    arguments = operator_arguments(case, requires_grad=False)
    out, lse, windows = getattr(torch.ops.trainshort, place.backend)(*arguments)
    for grad_lse in (None, torch.ones_like(lse)):
        torch.library.opcheck(
            getattr(torch.ops.trainshort, f"{place.backend}_backward").default,
            (case.upstream(), grad_lse, out, lse, windows, want_bias, *arguments),
            test_utils=("test_schema", "test_faketensor"),
        )


# Compilation


def compiled(function: Callable[..., Tensor], compiler: str = "aot_eager") -> Callable[..., Tensor]:
    """In one graph. AOT autograd traces forward and backward; "aot_eager" runs the graphs as they stand."""
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=compiler)


@at(*WITH_WINDOWS)
@pytest.mark.parametrize("name", CASES)
def test_compiled_as_one_graph(name: str, place: Place) -> None:
    case = make(place, name, **({} if name == "low" else {"dtype": place.quick}))
    eager = case.run(place.backend)
    by_inductor = place.name == "triton_gpu" and name in ("paper", "symmetric", "padded", "bucket")
    compiler = "inductor" if by_inductor else "aot_eager"
    attend = compiled(lambda given: given.attend(place.backend), compiler)
    for key, tensor in differentiate(case, attend).items():
        assert torch.equal(tensor, eager[key]), key


@at(*WITH_WINDOWS)
def test_compiled_decoding(place: Place) -> None:
    case = make(place, "causal")
    case = replace(case, q=case.q[:, :, -1:], key_norms=case.k.norm(dim=-1).amax(-1))
    attend = compiled(lambda given: given.attend(place.backend))
    with torch.no_grad():
        torch.testing.assert_close(attend(case), case.attend(place.backend))
        if place.backend == "triton":
            assert torch.equal(attend(case), case.attend(place.backend))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's own
@at("blocked", "auto", "triton_gpu", "blocked_gpu")
def test_compiled_by_inductor(place: Place) -> None:
    """The default compiler, with code of its own before and after the operator."""
    torch.compiler.reset()

    def block(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return ts.alibi_attention(q.sin(), k * 2.0, v + 1.0, slopes, backend=place.backend).square()

    case = make(place, "causal")
    assert case.slopes is not None
    results = []
    for function in (block, torch.compile(block, fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in (case.q, case.k, case.v, case.slopes)]
        out = function(*leaves)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, case.upstream())))
    for eager, found in zip(*results, strict=True):
        if place.device == "cpu":
            torch.testing.assert_close(found, eager)
        else:
            torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-4)


# Autocast

AUTOCAST: dict[str, dict[str, Any]] = {
    "linear": {"slopes": torch.tensor([0.1003, 0.0507, 0.0113])},
    "windows": {"slopes": torch.tensor([0.9003, 0.507, 0.1113])},
    "bucket": {"bias": "bucket"},
}


def to_cast(place: Place, bias: str) -> Case:
    return make(place, "paper", heads=3, queries=70 if place.interpreted else 500, **AUTOCAST[bias])


def lowered(case: Case, dtype: torch.dtype) -> Case:
    return replace(case, q=case.q.to(dtype), k=case.k.to(dtype), v=case.v.to(dtype))


@pytest.mark.parametrize("where", ["forward", "forward_and_backward"])
@pytest.mark.parametrize("bias", AUTOCAST)
def test_autocast_converts_the_inputs_and_nothing_else(bias: str, where: str, place: Place) -> None:
    """The same bits as for inputs converted by hand: nothing inside attention is done in another dtype."""
    if place.backend == "reference" and where == "forward_and_backward":
        pytest.skip("autograd differentiates the reference: its products follow an autocast around backward()")
    case = to_cast(place, bias)
    for dtype in (torch.bfloat16, torch.float16) if place.name == "triton_gpu" else (place.low,):
        expected = lowered(case, dtype).run(place.backend)

        def attend(given: Case, dtype: torch.dtype = dtype) -> Tensor:
            with torch.autocast(place.device, dtype):
                return given.attend(place.backend)

        if where == "forward":
            results = differentiate(case, attend)
        else:
            with torch.autocast(place.device, dtype):
                results = case.run(place.backend)
        assert results["out"].dtype == dtype
        for name, tensor in results.items():
            assert name == "out" or tensor.dtype == torch.float32
            assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


def test_slopes_stay_float32_under_autocast(place: Place) -> None:
    case = to_cast(place, "linear")
    with torch.autocast(place.device, place.low):
        out = case.attend(place.backend)
    assert case.slopes is not None
    rounded = replace(lowered(case, place.low), slopes=case.slopes.to(place.low).float()).attend(place.backend)
    assert not torch.equal(out, rounded)


@at("reference", "blocked", "blocked_gpu")
def test_autocast_leaves_float64_alone(place: Place) -> None:
    case = place.case(queries=100, dtype=torch.float64)
    with torch.autocast(place.device, torch.bfloat16):
        out = case.attend(place.backend)
    assert out.dtype == torch.float64
    assert torch.equal(out, case.attend(place.backend))


@at(*WITH_WINDOWS)
def test_autocast_and_compile_together(place: Place) -> None:
    case = make(place, "paper")
    attend = compiled(lambda given: given.attend(place.backend))

    def under_autocast(given: Case) -> Tensor:
        with torch.autocast(place.device, place.low):
            return attend(given)

    expected = lowered(case, place.low).run(place.backend)
    for name, tensor in differentiate(case, under_autocast).items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


# Autograd


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(use_reentrant: bool, place: Place) -> None:
    case = make(place, "causal")
    assert case.slopes is not None
    expected = case.run(place.backend)
    leaves = [t.clone().requires_grad_() for t in (case.q, case.k, case.v, case.slopes)]

    def attend(*tensors: Tensor) -> Tensor:
        return ts.alibi_attention(*tensors, backend=place.backend)

    out = checkpoint(attend, *leaves, use_reentrant=use_reentrant)
    out.backward(case.upstream())
    assert torch.equal(out, expected["out"])
    for leaf, name in zip(leaves, ("q", "k", "v", "slopes"), strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, expected[name]), name


@at(*WITH_WINDOWS)
@pytest.mark.parametrize("name", ["causal", "left_right", "bucket", "packed", "transposed"])
def test_saved_tensor_hooks(name: str, place: Place) -> None:
    """Everything that may be large goes through the hooks, and whatever they give back is used."""
    case = make(place, name)
    expected = case.run(place.backend)
    seen = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tuple(tensor.shape))
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = case.run(place.backend)
    assert seen.count(tuple(case.q.shape)) >= 2
    for key, tensor in results.items():
        if place.backend == "triton":
            assert torch.equal(tensor, expected[key]), key
        torch.testing.assert_close(tensor, expected[key])


@slow_in_interpreter
@at(*WITH_WINDOWS)
@pytest.mark.parametrize("layout", ["columns", "room behind", "shifted"])
def test_hooks_that_change_the_layout(layout: str, place: Place) -> None:
    """Of all that is saved, log-sum-exp and windows included."""
    case = place.case(batch=2, queries=450, slopes=place.steep)
    expected = case.run(place.backend)

    def unpack(tensor: Tensor) -> Tensor:
        if tensor.dim() < 3:
            return tensor
        if layout == "columns":
            return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
        if layout == "room behind":
            size = (*tensor.shape[:-1], tensor.shape[-1] + 8)
            room = torch.full(size, 7, dtype=tensor.dtype, device=tensor.device)
            room[..., : tensor.shape[-1]] = tensor
            return room[..., : tensor.shape[-1]]
        flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:]  # four bytes on
        return flat.copy_(tensor.flatten()).view(tensor.shape)

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        results = case.run(place.backend)
    for key, tensor in results.items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-4, atol=1e-4, msg=key)


@at(*WITH_WINDOWS)
def test_inputs_changed_in_place_are_noticed(place: Place) -> None:
    case = make(place, "causal")
    q, k = case.q.clone().requires_grad_(), case.k.clone()
    out = replace(case, q=q, k=k).attend(place.backend)
    k.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_inputs_are_left_alone(place: Place) -> None:
    for name in ("long", "padded"):
        case = make(place, name)
        copies = {n: getattr(case, n).clone() for n in ("q", "k", "v", "slopes")}
        case.run(place.backend)
        for leaf, tensor in copies.items():
            assert torch.equal(getattr(case, leaf), tensor), (name, leaf)


def test_inference_mode(place: Place) -> None:
    case = make(place, "causal")
    expected = case.attend(place.backend)
    with torch.inference_mode():
        out = case.attend(place.backend)
        assert out.is_inference()
        assert torch.equal(out, expected)
        made_inside = replace(case, q=case.q.clone(), k=case.k.clone(), v=case.v.clone())
        assert torch.equal(made_inside.attend(place.backend), expected)
    with torch.no_grad():
        leaf = replace(case, q=case.q.clone().requires_grad_())
        assert not leaf.attend(place.backend).requires_grad


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("slopes",), ("q", "v"), ("k", "slopes")], ids="+".join)
def test_only_some_inputs_ask_for_a_gradient(wanted: tuple[str, ...], place: Place) -> None:
    for features in ({"queries": 70}, {"queries": 200 if place.interpreted else 700, "slopes": place.steep}):
        case = place.case(**features)
        everything = case.run(place.backend)
        leaves = {name: getattr(case, name).clone().requires_grad_() for name in wanted}
        replace(case, **leaves).attend(place.backend).backward(case.upstream())
        for name, leaf in leaves.items():
            assert leaf.grad is not None, name
            if place.backend == "triton":
                assert torch.equal(leaf.grad, everything[name]), name
        place.judge(case).check(everything | {name: leaf.grad for name, leaf in leaves.items()})


def test_finite_differences(place: Place) -> None:
    """Directional derivatives, from outputs alone: no formula for a gradient is shared with what is tested."""
    case = place.case(
        batch=1, heads=1, queries=40, dim=16, causal=False, slopes=torch.tensor([0.3]), future=torch.tensor([0.5])
    )
    results, upstream = case.run(place.backend), case.upstream().double()
    generator = torch.Generator().manual_seed(5)
    step = 2.0**-7
    for name in ("q", "k", "v", "slopes", "future"):
        tensor = getattr(case, name)
        direction = torch.randn(tensor.shape, generator=generator).to(place.device)
        with torch.no_grad():
            there, back = (
                replace(case, **{name: tensor + s * direction}).attend(place.backend) for s in (step, -step)
            )
        slope = float(((there.double() - back.double()) * upstream).sum()) / (2.0 * step)
        expected = float((results[name].double() * direction).sum())
        scale = float(results[name].double().norm() * direction.norm())
        assert math.isclose(slope, expected, abs_tol=2e-3 * scale), name


# What is refused


@at(*WITH_WINDOWS)
def test_double_backward_is_refused(place: Place) -> None:
    case = make(place, "short")
    q = case.q.clone().requires_grad_()
    out = replace(case, q=q).attend(place.backend)
    (gradient,) = torch.autograd.grad(out, q, case.upstream(), create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward.*reference"):
        gradient.sum().backward()


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "grad": lambda attend, q: torch.func.grad(lambda x: attend(x).sum())(q),
    "vjp": lambda attend, q: torch.func.vjp(attend, q)[1](torch.ones_like(q)),
    "jvp": lambda attend, q: torch.func.jvp(attend, (q,), (torch.ones_like(q),)),
    "vmap": lambda attend, q: torch.func.vmap(attend)(torch.stack((q, q))),
    "jacrev": lambda attend, q: torch.func.jacrev(attend)(q),
    "jacfwd": lambda attend, q: torch.func.jacfwd(attend)(q),
    "vmap_of_grad": lambda attend, q: torch.func.vmap(torch.func.grad(lambda x: attend(x).sum()))(
        torch.stack((q, q))
    ),
}


@at("blocked", "auto", "interpreted", "triton_gpu", "blocked_gpu")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own use of its scripts
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused(name: str, place: Place) -> None:
    for queries in (1, 20, 70):
        case = place.case(batch=1, heads=2, queries=queries, keys=70, dim=4)
        with pytest.raises(NotImplementedError, match=r"torch\.func.*vmap.*backend='reference'"):
            TRANSFORMS[name](of_queries(case, place), case.q)


@at(*WITH_WINDOWS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own use of its scripts
@pytest.mark.parametrize("queries", [1, 70])
def test_forward_mode_is_refused(queries: int, place: Place) -> None:
    case = place.case(queries=queries, keys=70)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(case.q, torch.ones_like(case.q))
        with pytest.raises(NotImplementedError, match=r"forward-mode derivatives: use backend='reference'"):
            of_queries(case, place)(dual)


@slow_in_interpreter
@at(*WITH_WINDOWS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traced_by_torch_jit(place: Place) -> None:
    case = make(place, "causal")
    for q in (case.q, case.q[:, :, -1:]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that sizes are constants to it
            traced = torch.jit.trace(
                lambda q, k, v: ts.alibi_attention(q, k, v, case.slopes, backend=place.backend), (q, case.k, case.v)
            )
        torch.testing.assert_close(traced(q, case.k, case.v), of_queries(case, place)(q))
