"""Remembering choices and serving calls from them; falling through when a variant fails."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Hashable
from typing import Any

import cachetools
import torch

from .. import _compat, _env
from ..device import DeviceInfo
from ..errors import VariantUnavailable
from . import override, record, select, store
from .problem import Problem
from .variant import Choice, OpSpec

_log = logging.getLogger("tritonops")

# FIFO: a read does not change the order, so hits need no lock.
_memo: cachetools.FIFOCache[Hashable, Choice] = cachetools.FIFOCache(maxsize=8192)
_lock = threading.RLock()
_compat.renew_after_fork(_lock)

# Triton raises these as RuntimeError, for whatever kernel comes next; nothing runs in that CUDA context again.
_BROKEN_CONTEXT = re.compile(
    r"Triton Error \[CUDA\]: .*(device-side assert|illegal (memory access|instruction)|misaligned address|"
    r"unspecified launch failure|launch timed out|uncorrectable)"
)


def serve(
    spec: OpSpec, key: Hashable, device: DeviceInfo, problem: Callable[[], Problem], args: tuple[Any, ...]
) -> Any:
    """Run the op on `args` with the variant remembered for `key`, or chosen now.

    Args:
        key: everything the choice depends on; equal keys have equal problems.
        problem: builds the Problem, called on a miss only.

    Raises:
        VariantUnavailable: a forced variant failed or cannot serve.
    """
    # Not get(): it looks twice, and another thread may empty the memo between the two.
    try:
        choice = _memo[key]
    except KeyError:
        choice = None
    if choice is None:
        choice = _decide(spec, key, device, problem)
    recorder = record.active
    if recorder is not None:
        recorder.add(key, choice.problem)
    while True:
        try:
            if device.kind == "cuda" and device.index != torch.cuda.current_device():
                with torch.cuda.device(device.index):
                    return choice.variant.run(choice, *args)
            return choice.variant.run(choice, *args)
        except Exception as error:
            if choice.variant.kernel is None or _belongs_to_caller(error):
                raise
            choice = _fall_through(spec, key, choice, error)


def _belongs_to_caller(error: Exception) -> bool:
    """Errors that another variant would meet as well: memory, bad ids, and a broken CUDA context."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | IndexError | VariantUnavailable):
        return True
    sticky = getattr(torch, "AcceleratorError", None)
    return (sticky is not None and isinstance(error, sticky)) or bool(_BROKEN_CONTEXT.search(str(error)))


def _decide(spec: OpSpec, key: Hashable, device: DeviceInfo, problem: Callable[[], Problem]) -> Choice:
    with _lock:
        choice = _memo.get(key)
        if choice is not None:
            return choice
        built = problem()
        decision = select.choose(spec, built, device)
        choice = Choice(spec.variants()[decision.variant], built, device, decision)
        _memo[key] = choice
    if _env.log_decisions():
        _log.info("%s", decision)
    return choice


def _fall_through(spec: OpSpec, key: Hashable, choice: Choice, error: Exception) -> Choice:
    variant, problem, device = choice.variant, choice.problem, choice.device
    why = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200] if str(error).strip() else ''}"
    select.quarantine(spec.name, variant.id, device, why)
    with _lock:
        for stale in [k for k, c in _memo.items() if c.variant is variant and c.device == device]:
            del _memo[stale]
    if override.forced(problem.flags, spec.name, spec.variants()) is not None:
        raise VariantUnavailable(
            f"tritonops.{spec.name}: the forced variant {variant.id!r} failed on "
            f"{device.name or device.table_name}: {why}"
        ) from error
    following = _decide(spec, key, device, lambda: problem)
    store.warn_once(
        f"quarantine {device.kind} {device.index} {spec.name} {variant.id}",
        f"tritonops.{spec.name}: variant {variant.id} failed on {device.name or device.table_name} ({why}); "
        f"it is set aside in this process and {following.variant.id} serves",
    )
    return following


def clear_cache() -> None:
    """Forget every remembered choice, loaded table and quarantined variant; compiled kernels stay."""
    with _lock:
        _memo.clear()
        store.clear()
        select.clear_quarantine()
