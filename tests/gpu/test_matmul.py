"""Matmul variants on the GPU: 16-bit and tf32 numerics, batch invariance, graphs, streams, fall-through."""

from __future__ import annotations

import warnings

import pytest
import torch

import tritonops
from matmul_cases import CASES
from tritonops.device import device_info
from tritonops.dispatch import select
from tritonops.dispatch.variant import REGISTRY
from tritonops.matmul.op import describe
from tritonops.matmul.reference import oracle, tolerance

SPEC = REGISTRY["matmul"]
FAMILIES = ("tiled", "persistent", "tma_persistent", "padded")
REPRESENTATIVES = (
    "tiled/128x256x64-g8-w8-s3",
    "tiled/64x64x64-g8-w4-s4",
    "tiled/16x128x128-g8-w4-s4",
    "persistent/128x128x64-g8-w4-s3-p2",
    "persistent/128x256x64-g8-w8-s3-p1-flat",
    "tma_persistent/128x256x64-g8-w8-s4-p1-sub",
    "tma_persistent/128x256x64-g8-w8-s3-p1-flat",
    "padded/tma-128x256x64-g8-w8-s3-p1-sub",
    "padded/vendor",
)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-300))


@pytest.mark.parametrize("variant", REPRESENTATIVES)
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_error_is_the_vendors(variant, case) -> None:
    a, b = CASES[case](torch.bfloat16, "cuda")
    bias = torch.randn(b.shape[-1], device="cuda").bfloat16()
    reason = select.illegal(SPEC, SPEC.variants()[variant], describe(a, b, bias=bias), device_info(a.device))
    if reason is not None:
        with tritonops.use(variant={"matmul": variant}), pytest.raises(tritonops.VariantUnavailable):
            tritonops.matmul(a, b, bias=bias)
        return
    want = oracle(a, b, bias)
    with tritonops.use(variant={"matmul": variant}):
        got = tritonops.matmul(a, b, bias=bias)
    with tritonops.use(variant={"matmul": "vendor"}):
        vendor = tritonops.matmul(a, b, bias=bias)
    limit = tolerance(torch.bfloat16, torch.bfloat16, a.shape[-1])
    assert _error(got, want) <= max(1.05 * _error(vendor, want), limit / 2) <= limit * 1.05


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_float32_is_multiplied_exactly_also_where_tf32_is_allowed(family, precision) -> None:
    torch.set_float32_matmul_precision(precision)
    try:
        for layout in ("nn", "nt", "tn", "tt"):
            case = "ragged-" if family == "padded" else "tiles-"
            a, b = CASES[case + layout](torch.float32, "cuda")
            with tritonops.use(variant=family):
                got = tritonops.matmul(a, b)
            # padded/vendor is torch's kernel, which takes the permission.
            limit = tolerance(
                torch.float32, torch.float32, a.shape[-1], tf32=precision == "high" and family == "padded"
            )
            assert _error(got, oracle(a, b)) <= limit, layout
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batch_invariant_rows_do_not_depend_on_the_batch(layout, dtype) -> None:
    m, n, k = 333, 200, 1000
    a = torch.randn(m, k, device="cuda") if layout[0] == "n" else torch.randn(k, m, device="cuda").t()
    b = torch.randn(k, n, device="cuda") if layout[1] == "n" else torch.randn(n, k, device="cuda").t()
    a, b = a.to(dtype), b.to(dtype)
    with tritonops.use(policy="batch_invariant"):
        whole = tritonops.matmul(a, b)
        for rows in (slice(0, 1), slice(3, 20), slice(332, 333), slice(0, 256), slice(1, 333)):
            assert torch.equal(tritonops.matmul(a[rows], b), whole[rows])
            assert torch.equal(tritonops.matmul(a[rows].clone(), b), whole[rows])
        batched = tritonops.matmul(a.expand(2, m, k), b.expand(2, k, n))
        assert torch.equal(batched[1], whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_graph_replays_on_new_data(family) -> None:
    shape = (256, 511, 131) if family == "padded" else (256, 512, 128)
    a, b = (
        torch.randn(shape[0], shape[1], device="cuda").half(),
        torch.randn(shape[1], shape[2], device="cuda").half(),
    )
    with tritonops.use(variant=family):
        tritonops.matmul(a, b)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = tritonops.matmul(a, b)
        a.copy_(torch.randn_like(a))
        tritonops.clear_cache()
        graph.replay()
    assert _error(out, oracle(a, b)) <= tolerance(torch.float16, torch.float16, shape[1])


def test_streams_do_not_share_anything() -> None:
    a, b = torch.randn(512, 512, device="cuda").half(), torch.randn(512, 512, device="cuda").half()
    want = oracle(a, b)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    outs = []
    with tritonops.use(exclude="vendor"):
        for _ in range(10):
            for s in streams:
                with torch.cuda.stream(s):
                    outs.append(tritonops.matmul(a, b))
    torch.cuda.synchronize()
    assert max(_error(o, want) for o in outs) <= tolerance(torch.float16, torch.float16, 512)


def test_a_variant_that_cannot_launch_is_set_aside_once(monkeypatch) -> None:
    """A stage count whose buffers exceed shared memory, behind a requires() that does not see it."""
    import dataclasses

    from tritonops.dispatch import variant as records

    spec_variants = SPEC.variants()
    first = "tiled/128x256x64-g8-w8-s3"
    broken = dataclasses.replace(
        spec_variants[first], options={**spec_variants[first].options, "num_stages": 9}, requires=lambda p, d: None
    )
    monkeypatch.setitem(records._LOADED, "matmul", {**spec_variants, first: broken})
    a, b = torch.randn(512, 1024, device="cuda").half(), torch.randn(1024, 512, device="cuda").half()
    tritonops.clear_cache()
    try:
        with tritonops.use(variant=first), pytest.raises(tritonops.VariantUnavailable, match=first):
            tritonops.matmul(a, b)
        tritonops.clear_cache()
        monkeypatch.setattr(select, "_rank", lambda *_: select._Ranking((first, "vendor"), "test", "test"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                assert _error(tritonops.matmul(a, b), oracle(a, b)) < 1e-3
        assert len([w for w in caught if first in str(w.message)]) == 1
    finally:
        tritonops.clear_cache()


def test_the_current_device_is_left_alone() -> None:
    before = torch.cuda.current_device()
    tritonops.matmul(torch.randn(8, 8, device="cuda"), torch.randn(8, 8, device="cuda"))
    assert torch.cuda.current_device() == before
