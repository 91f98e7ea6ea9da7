"""tritonops: matmul, layer_norm, rms_norm and embedding, each call served by the best variant for this GPU."""

from .dispatch.explain import explain, variants
from .dispatch.memo import clear_cache
from .dispatch.override import use
from .dispatch.record import record
from .embedding.api import embedding
from .errors import TableError, TritonOpsError, TritonOpsWarning, VariantUnavailable
from .matmul.api import linear, matmul
from .norm.api import layer_norm, rms_norm

__version__ = "0.1.0"

__all__ = [
    "TableError",
    "TritonOpsError",
    "TritonOpsWarning",
    "VariantUnavailable",
    "clear_cache",
    "embedding",
    "explain",
    "layer_norm",
    "linear",
    "matmul",
    "record",
    "rms_norm",
    "use",
    "variants",
]
