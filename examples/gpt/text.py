"""The text to train on: Python's language reference, which every CPython carries."""

from __future__ import annotations

import re
from collections import Counter
from pydoc_data import topics

import torch
from torch import Tensor

from .model import Config


def load_tokens(vocab: int) -> tuple[Tensor, list[str]]:
    """Python's language reference as token ids, most frequent first, so that ids are Zipf-like; 0 is ``<unk>``."""
    text = "\n".join(topics.topics[k] for k in sorted(topics.topics))
    words = [m.group() for m in re.finditer(r"\w+|([^\w\s])\1*", text)]
    ranked = sorted(Counter(words).items(), key=lambda kv: (-kv[1], kv[0]))
    names = ["<unk>", *(w for w, _ in ranked[: vocab - 1])]
    index = {w: i for i, w in enumerate(names)}
    return torch.tensor([index.get(w, 0) for w in words]), names


def batches(ids: Tensor, config: Config, steps: int, device: str) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    span = torch.arange(config.context + 1)
    out = []
    for _ in range(steps):
        start = torch.randint(len(ids) - config.context - 1, (config.batch, 1), generator=g)
        window = ids[start + span].to(device)
        out.append((window[:, :-1].contiguous(), window[:, 1:].contiguous()))
    return out
