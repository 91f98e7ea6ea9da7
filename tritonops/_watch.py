"""How a call must travel: straight to the implementation, through an autograd.Function, or through the op.

Straight is cheapest (an op boundary costs 13 us on an H200 host, more than torch.mm itself), but whoever watches
operators (a compiler, a dispatch or function mode, a tensor subclass, the profiler) must see the op.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from . import _compat

DIRECT, FUNCTION, OP = 0, 1, 2

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def route(*tensors: torch.Tensor | None) -> int:
    """DIRECT, FUNCTION or OP for a call on these tensors."""
    if torch.compiler.is_compiling():
        return OP
    grad = False
    for t in tensors:
        if t is None:
            continue
        if type(t) not in _PLAIN or t.is_meta:
            return OP
        grad = grad or t.requires_grad
    if torch._C._len_torch_dispatch_stack() or _compat.profiler_active() or torch._C._is_tracing():
        return OP
    # torch.set_default_device pushes a DeviceContext, which watches nothing.
    if torch._C._len_torch_function_stack() and not all(
        isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()
    ):
        return OP
    if (grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0 or _compat.functorch_active():
        return FUNCTION
    return DIRECT
