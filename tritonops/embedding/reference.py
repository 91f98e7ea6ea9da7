"""The float64 oracle of embedding and its error model."""

from __future__ import annotations

import torch
from torch import Tensor

# House rule: at most 1.05 times the vendor's error; a sum that the vendor happens to get exactly, in its own order, may
# be one rounding of float32 off in another order.
VENDOR_RATIO = 1.05
FLOAT32_ROUNDING = 2.0**-24


def embedding_reference(weight: Tensor, indices: Tensor) -> Tensor:
    """out[..., :] = weight[indices[...], :] in weight's dtype: a lookup copies, so the oracle is exact."""
    return weight[indices.long()].contiguous()


def embedding_backward_reference(
    dy: Tensor, indices: Tensor, num_embeddings: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """Float64 gradient of the table, [num_embeddings, D].

    grad[v, :] = sum of dy[t, :] over tokens t with id v, divided by their number with scale_grad_by_freq; zero for
    v = padding_idx (torch.nn.functional.embedding's definition).
    """
    columns = dy.shape[-1]
    ids = indices.reshape(-1).long()
    grad = torch.zeros(num_embeddings, columns, dtype=torch.float64, device=dy.device)
    grad.index_add_(0, ids, dy.reshape(ids.numel(), columns).double())
    if scale_grad_by_freq:
        grad /= torch.bincount(ids, minlength=num_embeddings).clamp(min=1)[:, None]
    if padding_idx >= 0:
        grad[padding_idx] = 0
    return grad


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Relative Frobenius error against a float64 tensor; absolute where that is zero."""
    difference = (actual.double() - exact).norm().item()
    scale = exact.norm().item()
    return difference / scale if scale else difference


def error_bound(vendor_error: float) -> float:
    """The largest relative error a variant may have where the vendor's is `vendor_error`."""
    return VENDOR_RATIO * vendor_error + FLOAT32_ROUNDING
