"""Embedding lookup."""

from .api import embedding

__all__ = ["embedding"]
