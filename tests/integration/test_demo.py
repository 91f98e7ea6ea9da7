"""The demo's verdicts can fail, and what it reports is what happened."""

from __future__ import annotations

import os

import pytest
import torch

import gpt_demo
import tritonops
from gpt.decisions import collected
from gpt.model import OURS, TORCH, Config
from gpt.text import batches, load_tokens
from gpt.training import Run, train

TINY = Config(width=16, layers=1, heads=2, context=8, batch=2, vocab=256)


def _run(losses: list[float]) -> Run:
    return Run("run", losses, [1.0] * len(losses), None)


@pytest.mark.parametrize(
    "losses, agree",
    [
        ([4.0, 3.0], True),
        ([4.0, 3.0 * (1 + 0.9e-4)], True),
        ([4.0, 3.0 * (1 + 1.1e-4)], False),
        ([float("nan"), 3.0], False),
        ([4.0, float("nan")], False),
        ([4.0, float("inf")], False),
    ],
)
def test_curves_that_differ_fail(losses: list[float], agree: bool):
    assert gpt_demo.show_losses(_run([4.0, 3.0]), _run(losses), 1e-4) is agree


def test_text_is_zipf_like_and_batches_repeat():
    ids, names = load_tokens(4096)
    counts = torch.bincount(ids, minlength=len(names))
    assert names[0] == "<unk>" and len(ids) > 50_000 and int(ids.max()) < 4096
    assert torch.equal(counts[1:], counts[1:].sort(descending=True).values)
    first, second = batches(ids, TINY, 2, "cpu"), batches(ids, TINY, 2, "cpu")
    assert all(
        torch.equal(a[0], b[0]) and torch.equal(a[0][:, 1:], a[1][:, :-1]) for a, b in zip(first, second, strict=True)
    )
    assert first[0][0].shape == (2, 8)


def test_two_steps_with_either_set_of_ops_agree_and_every_call_is_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITONOPS_LOG", raising=False)
    ids, _ = load_tokens(TINY.vocab)
    data = batches(ids, TINY, 2, "cpu")
    theirs = train("torch", TORCH, TINY, data)
    with collected() as decisions:
        ours = train("ours", OURS, TINY, data)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert ours.losses[0] == pytest.approx(5.5, abs=0.5)  # ln 256
    calls = dict.fromkeys((d.op for d in decisions.made), 0)
    for decision in decisions.made:
        calls[decision.op] += decisions.count(decision)
    # Four linears and the head, each with two gradients; three norms; one lookup; two steps.
    assert calls == {
        "matmul": 2 * 3 * 5, "layer_norm": 2 * 3, "layer_norm_backward": 2 * 3, "embedding": 2, "embedding_backward": 2
    }  # fmt: skip
    assert os.environ.get("TRITONOPS_LOG", "") == ""


def test_counting_is_per_distinct_problem():
    a = torch.ones(3, 4)
    with collected() as decisions:
        for b in (torch.ones(4, 5), torch.ones(4, 5), torch.ones(4, 6)):
            tritonops.matmul(a, b)
    assert [(d.problem.dims["N"], decisions.count(d)) for d in decisions.made] == [(5, 2), (6, 1)]
