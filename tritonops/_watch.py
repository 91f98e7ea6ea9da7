"""How a call must travel: straight to the implementation, through an autograd.Function, or through the op.

Straight is cheapest (an op boundary costs 13 us on an H200 host, more than torch.mm itself), but whoever watches
operators (a compiler, a dispatch or function mode, a tensor subclass, the profiler) must see the op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from . import _compat

DIRECT, FUNCTION, OP = 0, 1, 2

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def watched() -> bool:
    """Whether a mode, the profiler or a tracer looks at the operators that are called."""
    if torch._C._len_torch_dispatch_stack() or _compat.profiler_active() or torch._C._is_tracing():
        return True
    # torch.set_default_device pushes a DeviceContext, which watches nothing.
    return bool(torch._C._len_torch_function_stack()) and not all(
        isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()
    )


def implementation(
    tensors: Iterable[torch.Tensor | None], direct: Callable[..., Any], operator: Callable[..., Any]
) -> Callable[..., Any]:
    """What a Function's forward calls on these tensors: `operator` where somebody watches or the dispatcher must help.

    The memory of a tensor with the negative bit set does not hold its values; the dispatcher makes a copy that does.
    """
    if watched() or any(t is not None and t.is_neg() for t in tensors):
        return operator
    return direct


def route(*tensors: torch.Tensor | None) -> int:
    """DIRECT, FUNCTION or OP for a call on these tensors.

    Raises:
        NotImplementedError: forward-mode differentiation where only the operator could serve, which has no rule for it
            and would drop the tangent.
    """
    if torch.compiler.is_compiling():
        _refuse_forward_mode()
        return OP
    grad, plain = False, True
    for t in tensors:
        if t is None:
            continue
        if type(t) not in _PLAIN or t.is_meta or t.is_neg() or _compat.batched_by_autograd(t):
            plain = False
        grad = grad or t.requires_grad
    # An operator has no rule for func.grad; the Function's forward calls the operator where somebody watches.
    if plain and _compat.functorch_active():
        return OP if _compat.functionalizing() else FUNCTION
    if not plain or watched():
        _refuse_forward_mode()
        return OP
    if (grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0:
        return FUNCTION
    return DIRECT


def _refuse_forward_mode() -> None:
    if forward_ad._current_level >= 0:
        raise NotImplementedError(
            "tritonops has no forward-mode derivatives (jvp): use reverse mode (torch.func.vjp, jacrev)"
        )


def travel(
    tensors: tuple[torch.Tensor | None, ...],
    arguments: tuple[Any, ...],
    direct: Callable[..., Any],
    function: type[torch.autograd.Function],
    operator: Callable[..., Any],
) -> Any:
    """Make a call on `tensors` the way that `route` says: `direct`, through `function`, or through `operator`."""
    way = route(*tensors)
    if way == DIRECT:
        return direct(*arguments)
    return function.apply(*arguments) if way == FUNCTION else operator(*arguments)
