"""Attention inside torch: compiled, under autocast, checkpointed, in inference mode; and what it refuses to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import trainshort as ts
from tests.ops.budget import assert_within_budget
from tests.ops.cases import BACKENDS, left_padding, random_case
from tests.ops.dense import LEAVES, Case, differentiate
from trainshort.ops import operators as op
from trainshort.ops.problem import Problem

STEEP = torch.tensor([0.9, 0.3, 0.05])

CASES: dict[str, dict] = {
    "short": {"queries": 40},
    "one_query": {"queries": 1, "keys": 200},
    "causal": {"queries": 300},
    "windows": {"queries": 700, "slopes": STEEP},
    "symmetric": {"queries": 300, "causal": False},
    "left_right": {"queries": 300, "causal": False, "slopes": STEEP, "future": STEEP.flip(0), "offset": 0.5},
    "one_sided": {"queries": 300, "causal": False, "sees": ("past", "future", "both")},
    "slopes_by_row": {"queries": 300, "slopes": torch.stack((STEEP, STEEP.flip(0)))},
    "grouped": {"queries": 300, "heads": 6, "kv_heads": 2},
    "padded": {"queries": 300, "key_padding_mask": left_padding(300, 120, length=300)},
    "packed": {"batch": 1, "queries": 300, "cu_seqlens": torch.tensor([0, 100, 300])},
    "query_start": {"queries": 20, "keys": 300, "query_start": torch.tensor([200, 100])},
    "bucket": {"queries": 300, "bias": "bucket"},
    "no_bias": {"queries": 300, "bias": "none"},
    "bfloat16": {"queries": 300, "dtype": torch.bfloat16},
    "transposed": {"queries": 300},
}


def make(name: str) -> Case:
    case = random_case(**CASES[name])
    if name != "transposed":
        return case
    layout = {n: getattr(case, n).transpose(1, 2).contiguous().transpose(1, 2) for n in ("q", "k", "v")}
    return replace(case, **layout)


def operator_arguments(case: Case, requires_grad: bool) -> tuple:
    there = {name: getattr(case, name) for name in LEAVES if getattr(case, name) is not None}
    case = replace(case, **{name: t.detach().requires_grad_(requires_grad) for name, t in there.items()})
    return op.pack(
        Problem(
            q=case.q,
            k=case.k,
            v=case.v,
            bias=case.bias,
            scale=case.true_scale,
            **{n: value for n, value in case.arguments().items() if n not in ("scale", "tolerance")},
            tolerance=case.may_skip,
        )
    )


@pytest.mark.parametrize("name", CASES)
def test_the_operator_is_well_formed(name: str) -> None:
    """Schema, fake tensors (shapes, dtypes and strides), autograd registration, and compilation by AOT autograd."""
    arguments = operator_arguments(make(name), requires_grad=True)
    torch.library.opcheck(torch.ops.trainshort.blocked.default, arguments)


def test_the_operator_is_well_formed_without_gradients() -> None:
    arguments = operator_arguments(make("windows"), requires_grad=False)
    torch.library.opcheck(torch.ops.trainshort.blocked.default, arguments)


@pytest.mark.parametrize("want_bias", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_backward_operator_is_well_formed(name: str, want_bias: bool) -> None:
    case = make(name)
    arguments = operator_arguments(case, requires_grad=False)
    out, lse, windows = torch.ops.trainshort.blocked(*arguments)
    torch.library.opcheck(
        torch.ops.trainshort.blocked_backward.default,
        (case.upstream(), out, lse, windows, want_bias, *arguments),
        test_utils=("test_schema", "test_faketensor"),
    )


def assert_compiled_equals_eager(case: Case, compiled) -> None:
    eager = case.run("blocked")
    results = differentiate(case, compiled)
    for name, tensor in results.items():
        assert torch.equal(tensor, eager[name]), name


@pytest.mark.parametrize("name", CASES)
def test_compiled_as_one_graph(name: str) -> None:
    """AOT autograd traces forward and backward; the graph is then run as it stands."""
    torch.compiler.reset()
    compiled = torch.compile(lambda case: case.attend("blocked"), fullgraph=True, backend="aot_eager")
    assert_compiled_equals_eager(make(name), compiled)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("backend", ["blocked", "auto"])
def test_compiled_by_inductor(backend: str) -> None:
    """The default compiler, with code of its own before and after the operator."""
    torch.compiler.reset()

    def block(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return ts.alibi_attention(q.sin(), k * 2.0, v + 1.0, slopes, backend=backend).square()

    case = random_case(queries=300, slopes=STEEP)
    results = []
    for function in (block, torch.compile(block, fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in (case.q, case.k, case.v, STEEP)]
        out = function(*leaves)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, case.upstream())))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def attend_with_slopes(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    return ts.alibi_attention(q, k, v, slopes, backend="blocked")


def attend_with_the_papers_slopes(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    return ts.alibi_attention(q, k, v, backend="blocked")


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "all_dimensions"])
@pytest.mark.parametrize("function", [attend_with_slopes, attend_with_the_papers_slopes])
def test_compiled_once_for_all_lengths(function, dynamic: bool | None) -> None:
    """`automatic` compiles a second time for the second length; from then on one graph serves all of them."""
    torch.compiler.reset()
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=count)
    for length in (100, 257, 300, 640):
        case = random_case(queries=length, slopes=STEEP)
        assert torch.equal(compiled(case.q, case.k, case.v, STEEP), function(case.q, case.k, case.v, STEEP))
    assert len(graphs) == (2 if dynamic is None else 1)


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "all_dimensions"])
def test_compiled_for_all_lengths_backwards(dynamic: bool | None) -> None:
    torch.compiler.reset()
    compiled = torch.compile(attend_with_slopes, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (200, 333, 450):
        case = random_case(queries=length, slopes=STEEP)
        assert_compiled_equals_eager(case, lambda given: compiled(given.q, given.k, given.v, given.slopes))


def halved(case: Case) -> Case:
    return replace(case, q=case.q.bfloat16(), k=case.k.bfloat16(), v=case.v.bfloat16())


AUTOCAST = {
    "linear": {"slopes": torch.tensor([0.1003, 0.0507, 0.0113])},
    "windows": {"slopes": torch.tensor([0.9003, 0.507, 0.1113])},
    "bucket": {"bias": "bucket"},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["forward", "forward_and_backward"])
@pytest.mark.parametrize("bias", AUTOCAST)
def test_autocast_converts_the_inputs_and_nothing_else(bias: str, where: str, backend: str) -> None:
    """The same bits as for inputs converted by hand: nothing inside attention is done in another dtype."""
    if backend == "reference" and where == "forward_and_backward":
        pytest.skip("autograd differentiates the reference: its products follow an autocast around backward()")
    case = random_case(queries=500, **AUTOCAST[bias])
    expected = halved(case).run(backend)
    if where == "forward":

        def attend(given: Case) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return given.attend(backend)

        results = differentiate(case, attend)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            results = case.run(backend)
    assert results["out"].dtype == torch.bfloat16
    for name, tensor in results.items():
        assert name == "out" or tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_slopes_stay_float32_under_autocast(backend: str) -> None:
    case = random_case(queries=500, **AUTOCAST["linear"])
    with torch.autocast("cpu", torch.bfloat16):
        out = case.attend(backend)
    assert case.slopes is not None
    rounded = replace(halved(case), slopes=case.slopes.bfloat16().float()).attend(backend)
    assert not torch.equal(out, rounded)


@pytest.mark.parametrize("queries", [5, 900], ids=["few", "many"])
def test_windows_under_autocast(queries: int) -> None:
    """The certificate is not computed in 16 bits: its slack is that of float32."""
    case = random_case(queries=queries, keys=900, heads=8, slopes=torch.linspace(0.1, 0.2, 8), tolerance=0.05)
    expected = halved(case).windows(1)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(case.windows(1), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_leaves_float64_alone(backend: str) -> None:
    case = random_case(queries=100, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        out = case.attend(backend)
    assert out.dtype == torch.float64
    assert torch.equal(out, case.attend(backend))


def test_autocast_and_compile_together() -> None:
    torch.compiler.reset()
    case = random_case(queries=300)
    compiled = torch.compile(lambda given: given.attend("blocked"), fullgraph=True, backend="aot_eager")

    def attend(given: Case) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return compiled(given)

    expected = halved(case).run("blocked")
    for name, tensor in differentiate(case, attend).items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoint(backend: str, use_reentrant: bool) -> None:
    case = random_case(queries=300, slopes=STEEP)

    def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return ts.alibi_attention(q, k, v, slopes, backend=backend)

    def wrapped(given: Case) -> Tensor:
        return checkpoint(attend, given.q, given.k, given.v, given.slopes, use_reentrant=use_reentrant)

    expected = case.run(backend)
    leaves = [t.clone().requires_grad_() for t in (case.q, case.k, case.v, STEEP)]
    out = wrapped(replace(case, q=leaves[0], k=leaves[1], v=leaves[2], slopes=leaves[3]))
    out.backward(case.upstream())
    assert torch.equal(out, expected["out"])
    for leaf, name in zip(leaves, ("q", "k", "v", "slopes"), strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, expected[name]), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_inference_mode(backend: str) -> None:
    case = random_case(queries=300, slopes=STEEP)
    expected = case.attend(backend)
    with torch.inference_mode():
        out = case.attend(backend)
        assert out.is_inference()
        assert torch.equal(out, expected)
        made_inside = replace(case, q=case.q.clone(), k=case.k.clone(), v=case.v.clone())
        assert torch.equal(made_inside.attend(backend), expected)
    with torch.no_grad():
        leaf = replace(case, q=case.q.clone().requires_grad_())
        assert not leaf.attend(backend).requires_grad


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("slopes",), ("q", "v"), ("k", "slopes")], ids="+".join)
@pytest.mark.parametrize("backend", BACKENDS)
def test_only_some_inputs_ask_for_a_gradient(backend: str, wanted: tuple[str, ...]) -> None:
    for features in ({"queries": 100}, {"queries": 700, "slopes": STEEP}):
        case = random_case(**features)
        everything = case.run(backend)
        leaves = {name: getattr(case, name).clone().requires_grad_() for name in wanted}
        out = replace(case, **leaves).attend(backend)
        out.backward(case.upstream())
        assert_within_budget(
            everything | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}, case
        )
        for name, leaf in leaves.items():
            assert leaf.grad is not None, name


def test_double_backward_is_refused() -> None:
    case = random_case(queries=20)
    q = case.q.clone().requires_grad_()
    out = replace(case, q=q).attend("blocked")
    (gradient,) = torch.autograd.grad(out, q, case.upstream(), create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward.*reference"):
        gradient.sum().backward()


def test_double_backward_works_where_it_says_so() -> None:
    case = random_case(queries=20)
    q = case.q.clone().requires_grad_()
    out = replace(case, q=q).attend("reference")
    (gradient,) = torch.autograd.grad(out, q, case.upstream(), create_graph=True)
    gradient.sum().backward()
    assert q.grad is not None
    assert bool(torch.isfinite(q.grad).all())


def of_queries(case: Case, backend: str) -> Callable[[Tensor], Tensor]:
    return lambda q: ts.alibi_attention(q, case.k, case.v, case.slopes, backend=backend)


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own use of its scripts
@pytest.mark.parametrize("backend", ["blocked", "auto"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused(name: str, backend: str) -> None:
    for queries in (1, 20):
        case = random_case(batch=1, heads=2, queries=queries, keys=20, dim=4)
        with pytest.raises(NotImplementedError, match=r"torch\.func.*vmap.*backend='reference'"):
            TRANSFORMS[name](of_queries(case, backend), case.q)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_work_where_the_error_sends_people(name: str) -> None:
    case = random_case(batch=1, heads=2, queries=6, dim=4)
    assert TRANSFORMS[name](of_queries(case, "reference"), case.q) is not None


def test_transforms_of_attention_without_a_bias_are_torch_s_own() -> None:
    case = random_case(queries=20, bias="none")
    found = torch.func.grad(lambda q: ts.attention(q, case.k, case.v).square().sum())(case.q)
    q = case.q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(ts.attention(q, case.k, case.v).square().sum(), q)
    torch.testing.assert_close(found, expected)


def test_functionalize_is_no_transform_of_numbers() -> None:
    case = random_case(queries=20)
    attend = of_queries(case, "blocked")
    assert torch.equal(torch.func.functionalize(attend)(case.q), attend(case.q))


def test_many_gradients_at_once() -> None:
    case = random_case(queries=20)
    q = case.q.clone().requires_grad_()
    out = of_queries(case, "blocked")(q)
    upstream = torch.stack([case.upstream(), -case.upstream(), out.detach()])
    (found,) = torch.autograd.grad(out, q, upstream, is_grads_batched=True, retain_graph=True)
    for one, gradient in zip(found, upstream, strict=True):
        torch.testing.assert_close(one, *torch.autograd.grad(out, q, gradient, retain_graph=True))


def test_inputs_are_left_alone() -> None:
    case = random_case(queries=700, slopes=STEEP.clone())
    copies = {n: getattr(case, n).clone() for n in ("q", "k", "v", "slopes")}
    for backend in BACKENDS:
        case.run(backend)
        for name, tensor in copies.items():
            assert torch.equal(getattr(case, name), tensor), (backend, name)
