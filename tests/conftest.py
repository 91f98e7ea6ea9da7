"""Markers by folder, skips with their reasons, and clean surroundings for every test session."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest

_FOLDERS = {"gpu": "gpu", "interpret": "interpret", "static": "static"}
_POISONED = {"gpu", "interpret", "reports"}
_TESTS = Path(__file__).parent
ROOT = _TESTS.parent


def pytest_configure(config: pytest.Config) -> None:
    """A cache of Triton's and one of tritonops' that no earlier run has touched; workers of one run share them."""
    if hasattr(config, "workerinput"):
        import torch

        torch.set_num_threads(1)
        return
    config._tritonops_scratch = scratch = tempfile.mkdtemp(prefix="tritonops-tests-")
    os.environ["TRITON_CACHE_DIR"] = os.path.join(scratch, "triton")
    os.environ["TRITONOPS_CACHE_DIR"] = os.path.join(scratch, "tritonops")
    os.environ.pop("TRITONOPS_TABLE_DIR", None)
    os.environ.pop("TRITONOPS_LOG", None)


def pytest_unconfigure(config: pytest.Config) -> None:
    scratch = getattr(config, "_tritonops_scratch", None)
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)


def _folder(path: Path) -> str:
    return path.relative_to(_TESTS).parts[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {"gpu": _no_gpu(), "interpret": _no_interpreter(), "static": _no_compiler()}
    for item in items:
        marker = _FOLDERS.get(_folder(item.path))
        if marker:
            item.add_marker(marker)
        for name, reason in reasons.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


def _no_gpu() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return "no GPU here"
    return "TRITON_INTERPRET is set" if _interpreting() else None


def _no_interpreter() -> str | None:
    from tritonops._compat import interpreter_reason

    return interpreter_reason() or (
        None if _interpreting() else "runs in a process of its own, with TRITON_INTERPRET=1"
    )


def _no_compiler() -> str | None:
    from tritonops._compat import has_triton

    if not has_triton():
        return "triton is not installed"
    return "TRITON_INTERPRET is set" if _interpreting() else None


def _interpreting() -> bool:
    from tritonops._env import interpret

    return interpret()


@pytest.fixture(autouse=True)
def _poison(request: pytest.FixtureRequest):
    if _folder(request.path) not in _POISONED:
        yield
        return
    from tritonops.testing import poisoned

    with poisoned():
        yield


@pytest.fixture(autouse=True)
def _no_silent_fall_through(request: pytest.FixtureRequest):
    """A variant that fails is set aside with a warning and the next answers: in tests of kernels that is a failure."""
    if _folder(request.path) not in _POISONED:
        yield
        return
    from tritonops import TritonOpsWarning

    with warnings.catch_warnings():
        warnings.simplefilter("error", TritonOpsWarning)
        warnings.filterwarnings("ignore", "tritonops: no dispatch table", TritonOpsWarning)
        yield


@pytest.fixture(autouse=True)
def _seed():
    import torch

    torch.manual_seed(0)


@pytest.fixture
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture
def clean_dispatch():
    """Forget every remembered decision before and after the test."""
    import tritonops

    tritonops.clear_cache()
    yield
    tritonops.clear_cache()


@pytest.fixture
def table_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_dispatch: None) -> Path:
    """An empty directory that is searched first for dispatch tables."""
    monkeypatch.setenv("TRITONOPS_TABLE_DIR", str(tmp_path))
    return tmp_path
