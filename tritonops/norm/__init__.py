"""Layer and RMS normalisation."""

from .api import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
