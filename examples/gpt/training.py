"""Training steps, timed."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import GPT, Config, Ops


@dataclass
class Run:
    name: str
    losses: list[float]
    seconds: list[float]
    model: GPT

    @property
    def step_ms(self) -> float:
        """Median of the steps after the first three, which compile and warm up."""
        return 1e3 * statistics.median(self.seconds[3:] or self.seconds)


def step(model: GPT, ids: Tensor, targets: Tensor) -> Tensor:
    config = model.config
    with torch.autocast(ids.device.type, config.dtype, enabled=config.dtype != torch.float32):
        logits = model(ids)
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.detach()


def train(name: str, ops: Ops, config: Config, data: list[tuple[Tensor, Tensor]]) -> Run:
    device = data[0][0].device
    torch.manual_seed(0)
    model = GPT(config).to(device)
    model.ops = ops
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, seconds = [], []
    for ids, targets in data:
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = step(model, ids, targets)
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    return Run(name, losses, seconds, model)
