"""The helpers that tests of kernels rest on must themselves be able to fail."""

from __future__ import annotations

import types

import pytest
import torch

from tritonops.testing import assert_close_to_oracle, poisoned, relative_error


def _inside_package(expression: str):
    """A function whose code runs with the package's own name, as an op's allocation does."""
    module = types.ModuleType("tritonops.matmul.example")
    module.torch = torch
    exec(f"def make(x): return {expression}", module.__dict__)
    return module.make


ALLOCATIONS = [
    "torch.empty(3, 4)",
    "torch.empty_like(x)",
    "torch.empty_strided((3, 4), (4, 1))",
    "x.new_empty((3, 4))",
    "x.new_empty_strided((3, 4), (1, 3))",
]


@pytest.mark.parametrize("expression", ALLOCATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_poison_fills_what_the_package_allocates(expression: str, dtype: torch.dtype):
    x = torch.zeros(3, 4, dtype=dtype)
    make = _inside_package(expression)
    with poisoned():
        assert make(x).isnan().all()
    assert torch.empty is not None and not hasattr(torch.empty, "__wrapped__")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_poison_reaches_fp8(dtype: torch.dtype):
    make = _inside_package("torch.empty_like(x)")
    with poisoned():
        assert make(torch.zeros(8, dtype=dtype)).float().isnan().all()


def test_poison_leaves_others_allocations_integers_and_meta_alone():
    with poisoned():
        assert _inside_package("torch.empty_like(x)")(torch.zeros(4, dtype=torch.int64)).dtype == torch.int64
        assert _inside_package("torch.empty(4, device='meta')")(None).device.type == "meta"
        buffer = torch.full((64,), 7.0)
        mine = torch.empty_like(buffer).fill_(1.0)
        assert mine.sum() == 64
        module = types.ModuleType("tritonopsish")
        module.torch = torch
        exec("def make(): return torch.zeros(4) + torch.empty(4).fill_(2)", module.__dict__)
        assert module.make().sum() == 8


def test_poison_ends_with_its_block_also_on_an_error():
    original = torch.empty, torch.Tensor.new_empty
    with pytest.raises(KeyError), poisoned():
        raise KeyError
    assert (torch.empty, torch.Tensor.new_empty) == original


def test_relative_error_is_the_relative_frobenius_norm():
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(torch.tensor([1e-3]), torch.tensor([0.0])) == pytest.approx(1e-3)
    assert relative_error(torch.empty(0), torch.empty(0)) == 0.0


@pytest.mark.parametrize(
    "got, exact", [(float("nan"), 1.0), (1.0, float("nan")), (float("inf"), -float("inf")), (3.0, float("inf"))]
)
def test_relative_error_is_infinite_where_only_one_is_finite_or_signs_differ(got: float, exact: float):
    assert relative_error(torch.tensor([1.0, got]), torch.tensor([1.0, exact])) == float("inf")
    assert relative_error(torch.tensor([1.0, exact]), torch.tensor([1.0, exact])) == 0.0


def test_the_bound_is_the_vendors_error_and_a_rounding():
    oracle = torch.linspace(1, 2, 1000, dtype=torch.float64)
    vendor = (oracle * (1 + 1e-5)).float()
    assert_close_to_oracle(vendor, oracle, vendor)
    assert_close_to_oracle((oracle * (1 + 1.04e-5)).float(), oracle, vendor)
    with pytest.raises(AssertionError, match=r"exceeds 1\.\d+e-05, 1.05 x the vendor's .*worst at"):
        assert_close_to_oracle((oracle * (1 + 1.1e-5)).float(), oracle, vendor)
    broken = vendor.clone()
    broken[17] = float("nan")
    with pytest.raises(AssertionError, match=r"worst at \(17,\): got nan"):
        assert_close_to_oracle(broken, oracle, vendor)
    with pytest.raises(AssertionError, match="shape"):
        assert_close_to_oracle(vendor[:-1], oracle, vendor)
    with pytest.raises(AssertionError, match="dtype"):
        assert_close_to_oracle(vendor.double(), oracle, vendor)
