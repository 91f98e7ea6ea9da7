"""The devices a public report is replayed on: torch's kernels and ours, on the CPU and on a GPU."""

from __future__ import annotations

import pytest

import tritonops

_PARAMS = [
    pytest.param(("cpu", None), id="cpu"),
    pytest.param(("cpu", "vendor"), id="interpreter", marks=pytest.mark.interpret),
    pytest.param(("cuda", None), id="cuda", marks=pytest.mark.gpu),
    pytest.param(("cuda", "vendor"), id="cuda-own", marks=pytest.mark.gpu),
]


@pytest.fixture(params=_PARAMS)
def dev(request: pytest.FixtureRequest):
    """ "cpu" or "cuda"; under the interpreter, and in one of the two GPU runs, no torch kernel may serve."""
    device, exclude = request.param
    tritonops.clear_cache()
    with tritonops.use(exclude=exclude):
        yield device
    tritonops.clear_cache()


@pytest.fixture(params=[_PARAMS[0], _PARAMS[2]])
def torch_dev(request: pytest.FixtureRequest) -> str:
    """ "cpu" or "cuda", with whatever serves by default: for dtypes that only torch's kernels have."""
    return request.param[0]
