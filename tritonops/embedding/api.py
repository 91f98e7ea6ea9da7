"""tritonops.embedding: validation, autograd, vmap."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _checks, _watch
from ..dispatch import override
from .op import NAME, check_forward, execute, execute_backward, padding_row

_op = torch.ops.tritonops.embedding.default
_op_backward = torch.ops.tritonops.embedding_backward.default

# How a vmap rule makes its call: an operator's rule by the operator (autograd.Function is not available inside it), the
# Function's by the routed one.
Call = Callable[..., Tensor]


def _front(x: Tensor, dim: int | None, size: int) -> Tensor:
    """`x` with its vmapped dimension in front; expanded where it has none."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _stacked_ids(ids: Tensor, num_embeddings: int) -> Tensor:
    """Ids [B, ...] of B tables as ids of the tables stacked, [B * V, D]; -1, which is refused, for one out of range."""
    first = torch.arange(ids.shape[0], device=ids.device) * num_embeddings
    inside = (ids >= 0) & (ids < num_embeddings)
    return torch.where(inside, ids + first.view(-1, *[1] * (ids.dim() - 1)), -1)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, indices, ctx.padding_idx, ctx.scale_grad_by_freq, ctx.flags = inputs
    ctx.save_for_backward(indices)
    ctx.num_embeddings = weight.shape[0]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """grad_weight[v] = sum of grad[t] over tokens t with id v, but 0 for padding_idx."""
    (indices,) = ctx.saved_tensors
    args = (ctx.num_embeddings, ctx.padding_idx, ctx.scale_grad_by_freq, ctx.flags)
    return gradient(grad, indices, *args), None, None, None, None


def _vmap(
    call: Call,
    info: Any,
    in_dims: tuple[int | None, ...],
    weight: Tensor,
    indices: Tensor,
    padding_idx: int,
    scale_grad_by_freq: bool,
    flags: int,
) -> tuple[Tensor, int]:
    """Batched ids of one table are one lookup; a batch of tables with the same ids is one table with wider rows."""
    table_dim, ids_dim = in_dims[:2]
    # Frequencies are counted in each lookup of the batch, so shared tables cannot be folded with scale_grad_by_freq.
    if table_dim is None and not scale_grad_by_freq:
        ids = _front(indices, ids_dim, info.batch_size)
        return call(weight, ids, padding_idx, scale_grad_by_freq, flags), 0
    tables = _front(weight, table_dim, info.batch_size)
    size, v, columns = tables.shape
    if ids_dim is None:
        wide = tables.movedim(0, 1).reshape(v, size * columns)
        out = call(wide, indices, padding_idx, scale_grad_by_freq, flags)
        return out.view(*indices.shape, size, columns), indices.dim()
    ids = indices.movedim(ids_dim, 0)
    out = call(tables.reshape(size * v, columns), _stacked_ids(ids, v), -1, scale_grad_by_freq, flags)
    if padding_idx >= 0:
        out = torch.where((ids == padding_idx).unsqueeze(-1), out.detach(), out)
    return out, 0


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(weight: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool, flags: int) -> Tensor:
        call = _watch.implementation((weight, indices), execute, _op)
        return call(weight, indices, padding_idx, scale_grad_by_freq, flags)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        return _vmap(lookup, info, in_dims, *args)


torch.library.register_autograd("tritonops::embedding", _backward, setup_context=_setup_context)
torch.library.register_vmap("tritonops::embedding", functools.partial(_vmap, _op))


def lookup(weight: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool, flags: int) -> Tensor:
    """The differentiable lookup, travelling as _watch.route says."""
    args = (weight, indices, padding_idx, scale_grad_by_freq, flags)
    return _watch.travel((weight, indices), args, execute, _Embedding, _op)


def _setup_context_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, indices, _, ctx.padding_idx, ctx.scale_grad_by_freq, ctx.flags = inputs
    ctx.save_for_backward(indices)


def _double_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of the table is linear in dy: grad_dy[t] = grad[id of t], but 0 for padding_idx, divided by the id's
    number of occurrences with scale_grad_by_freq."""
    (indices,) = ctx.saved_tensors
    out = lookup(grad, indices, -1, False, ctx.flags)
    if ctx.scale_grad_by_freq:
        ids = indices.reshape(-1)
        counts = torch.zeros(grad.shape[0], dtype=torch.float32, device=ids.device)
        counts = counts.index_add(0, ids, torch.ones_like(ids, dtype=torch.float32))
        out = (out / counts[indices].unsqueeze(-1)).to(grad.dtype)
    if ctx.padding_idx >= 0:
        out = out.masked_fill((indices == ctx.padding_idx).unsqueeze(-1), 0)
    return out, None, None, None, None, None


def _vmap_backward(
    call: Call,
    info: Any,
    in_dims: tuple[int | None, ...],
    dy: Tensor,
    indices: Tensor,
    num_embeddings: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
    flags: int,
) -> tuple[Tensor, int]:
    """A batch of dy for the same ids is one dy with wider rows; for batched ids the gradients are stacked."""
    dy_dim, ids_dim = in_dims[:2]
    rows = _front(dy, dy_dim, info.batch_size)
    size, columns = rows.shape[0], rows.shape[-1]
    if ids_dim is None:
        wide = rows.movedim(0, -2).reshape(*indices.shape, size * columns)
        out = call(wide, indices, num_embeddings, padding_idx, scale_grad_by_freq, flags)
        return out.view(num_embeddings, size, columns), 1
    ids, count = indices.movedim(ids_dim, 0), size * num_embeddings
    stacked = _stacked_ids(ids, num_embeddings)
    if padding_idx < 0:
        out = call(rows, stacked, count, -1, scale_grad_by_freq, flags)
    else:
        # The padding tokens of every table go to one row more.
        stacked = torch.where(ids == padding_idx, count, stacked)
        out = call(rows, stacked, count + 1, count, scale_grad_by_freq, flags)[:count]
    return out.view(size, num_embeddings, columns), 0


class _EmbeddingBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        dy: Tensor, indices: Tensor, num_embeddings: int, padding_idx: int, scale_grad_by_freq: bool, flags: int
    ) -> Tensor:
        call = _watch.implementation((dy, indices), execute_backward, _op_backward)
        return call(dy, indices, num_embeddings, padding_idx, scale_grad_by_freq, flags)

    setup_context = staticmethod(_setup_context_backward)
    backward = staticmethod(_double_backward)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        return _vmap_backward(gradient, info, in_dims, *args)


torch.library.register_autograd(
    "tritonops::embedding_backward", _double_backward, setup_context=_setup_context_backward
)
torch.library.register_vmap("tritonops::embedding_backward", functools.partial(_vmap_backward, _op_backward))


def gradient(
    dy: Tensor, indices: Tensor, num_embeddings: int, padding_idx: int, scale_grad_by_freq: bool, flags: int
) -> Tensor:
    """The differentiable gradient of the table [num_embeddings, D], travelling as _watch.route says."""
    args = (dy, indices, num_embeddings, padding_idx, scale_grad_by_freq, flags)
    return _watch.travel((dy, indices), args, execute_backward, _EmbeddingBackward, _op_backward)


def embedding(
    indices: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    *,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """``weight[indices]``: torch.nn.functional.embedding.

    Args:
        indices: int32 or int64 ids in [0, V), any shape and strides, on weight's device.
        weight: table of shape (V, D), any strides. Float16, bfloat16 and float32 are served by the variant the dispatch
            table names; every other dtype by torch.
        padding_idx: row, in [-V, V), that gets no gradient; the lookup copies it like any other. None: no such row.
        scale_grad_by_freq: divide a row's gradient by how often its id occurs in `indices`.
        sparse: give `weight` a sparse gradient; the whole call is then torch's own.

    Returns:
        A contiguous copy of the rows, of shape ``indices.shape + (D,)`` and weight's dtype; autocast leaves it so.

    Differentiable in weight any number of times. 16-bit gradients are summed in float32 and rounded once, also on the
    CPU. The lookup gives the same bits always; its gradient does under ``use(policy="deterministic")`` or
    torch.use_deterministic_algorithms, and else may not (float32 atomics).

    Raises:
        IndexError: an id outside [0, V), on CPU tensors. On a GPU a device assert that names tritonops.embedding
            (torch's, where the vendor serves); nothing outside the table is read.
        RuntimeError: weight is not 2-D, ids are not int32 or int64, or devices differ, as torch's.
        AssertionError: padding_idx is outside [-V, V), as torch's.
        TypeError: an argument of the wrong kind, named.
    """
    _checks.is_tensor(NAME, indices=indices, weight=weight)
    if sparse:
        return F.embedding(indices, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq, sparse=True)
    _checks.strided(NAME, indices=indices, weight=weight)
    check_forward(weight, indices)
    row = padding_row(padding_idx, weight.shape[0])
    return lookup(weight, indices, row, scale_grad_by_freq, override.flags)
