"""Every term of the certificate is held by a check of its own, under every setting of torch for matrix products."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.ops.bounds import CHECKS
from tests.ops.mutants import CAMPAIGNS, ROOT, Mutant, applied, parse

PRODUCTS = ("mean_of_near_keys", "mean_of_near_keys_ahead", "nearest_keys", "rounding", "decoding")


@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str) -> None:
    CHECKS[name]()


class CoarseProducts(TorchDispatchMode):
    """Every matrix product of float32 rounds its inputs to bfloat16, as torch may where a setting allows it."""

    NAMES = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "vdot", "matmul", "linear")

    def __init__(self) -> None:
        super().__init__()
        self.rounded = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if func._opname in self.NAMES and any(tensor.dtype == torch.float32 for tensor in tensors):
            self.rounded += 1
            args = tree_map(
                lambda leaf: (
                    leaf.bfloat16().float()
                    if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32
                    else leaf
                ),
                args,
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", PRODUCTS)
def test_no_bound_rests_on_a_matrix_product_that_may_be_rounded(name: str) -> None:
    with CoarseProducts() as mode:
        CHECKS[name]()
    assert mode.rounded == 0, "a product of float32 matrices follows torch's settings: add up products instead"


def test_coarse_products_are_coarse() -> None:
    a, b = torch.rand(16, 16), torch.rand(16, 16)
    with CoarseProducts() as mode:
        coarse = (a @ b, torch.einsum("ij,jk->ik", a, b), torch.einsum("bij,bjk->bik", a[None], b[None])[0])
        exact = a.double() @ b.double()
    assert mode.rounded == 3
    for product in coarse:
        assert float((product - exact).abs().max()) > 1e-4


SETTINGS = {
    "high": "torch.set_float32_matmul_precision('high')",
    "medium": "torch.set_float32_matmul_precision('medium')",
    "mkldnn": "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "flush": "torch.set_flush_denormal(True)",
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_check_under_a_setting(setting: str) -> None:
    """In a process of its own, because torch's two ways to say it do not mix."""
    run = "from tests.ops.bounds import CHECKS; [check() for check in CHECKS.values()]"
    code = f"import torch; torch.set_num_threads(1); {SETTINGS[setting]}; {run}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_the_tables_of_mutants_fit_the_source(campaign: str) -> None:
    mutants = CAMPAIGNS[campaign].mutants()
    names = [mutant.name for mutant in mutants]
    assert len(set(names)) == len(names)
    for mutant in mutants:
        assert applied(mutant)


def test_a_table_that_does_not_fit_says_so() -> None:
    gone = Mutant("gone", [("windows.py", "a line that was changed", "")], "rounding")
    with pytest.raises(LookupError, match=r"mutant 'gone'.*holds 0 times instead of once.*change the table"):
        applied(gone)
    with pytest.raises(ValueError, match=r"'dies in: \.\.\.' or 'survives: \.\.\.'"):
        parse("\n== a\nlives\n@ windows.py\n- a\n+ b")
    with pytest.raises(ValueError, match="a line starts with"):
        parse("\n== a\ndies in: rounding\nwindows.py\n- a\n+ b")
    with pytest.raises(ValueError, match="needs a file"):
        parse("\n== a\ndies in: rounding\n@ windows.py\n- a")


def test_every_mutant_names_a_check() -> None:
    for mutant in CAMPAIGNS["cpu"].mutants():
        assert mutant.survives or mutant.check in CHECKS, mutant.name
