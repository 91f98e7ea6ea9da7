"""Matrix products."""

from .api import linear, matmul

__all__ = ["linear", "matmul"]
