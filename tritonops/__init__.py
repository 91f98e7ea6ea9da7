"""tritonops: matmul, layer_norm, rms_norm and embedding, each call served by the best variant for this GPU."""

from .dispatch.explain import explain, variants
from .dispatch.memo import clear_cache
from .dispatch.override import use
from .dispatch.record import record
from .errors import TableError, TritonOpsError, TritonOpsWarning, VariantUnavailable
from .matmul.api import linear, matmul

__version__ = "0.1.0"

__all__ = [
    "TableError",
    "TritonOpsError",
    "TritonOpsWarning",
    "VariantUnavailable",
    "clear_cache",
    "explain",
    "linear",
    "matmul",
    "record",
    "use",
    "variants",
]
