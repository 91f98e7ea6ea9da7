"""DeviceInfo of drivers, names and machines without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tritonops
from dispatch_cases import Heard, pretend
from tritonops import device
from tritonops.device import CPU, INTERPRETER, DeviceInfo, device_info, named_device


@pytest.fixture
def driver(monkeypatch):
    """Properties the driver reports, by device index, and how often it was asked."""
    properties: dict[int, SimpleNamespace] = {}
    asked: list[int] = []

    def get(index: int) -> SimpleNamespace:
        asked.append(index)
        return properties[index]

    device._cuda_info.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_properties", get)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", None)
    yield properties, asked
    device._cuda_info.cache_clear()


def card(name: str, major: int, minor: int, sms: int, shared: int | None = None, l2: int | None = None):
    made = SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=sms)
    if shared is not None:
        made.shared_memory_per_block_optin = shared
    if l2 is not None:
        made.L2_cache_size = l2
    return made


CARDS = [
    (card("NVIDIA H200", 9, 0, 132, 232448, 60 << 20), ("sm_90", 90, "sm_90-132", 232448, 60 << 20)),
    (card("NVIDIA H100 80GB HBM3", 9, 0, 132, 232448), ("sm_90", 90, "sm_90-132", 232448, 0)),
    (card("NVIDIA H100 PCIe", 9, 0, 114, 232448), ("sm_90", 90, "sm_90-114", 232448, 0)),
    (card("NVIDIA A100-SXM4-80GB", 8, 0, 108), ("sm_80", 80, "sm_80-108", 166912, 0)),
    (card("Tesla T4", 7, 5, 40, 65536), ("sm_75", 75, "sm_75-40", 65536, 0)),
    (card("NVIDIA GB10", 12, 1, 48, 101376), ("sm_121", 121, "sm_121-48", 101376, 0)),
    (card("NVIDIA GB10", 12, 1, 48, 0), ("sm_121", 121, "sm_121-48", 101376, 0)),
    (card("NVIDIA X", 13, 7, 200), ("sm_137", 137, "sm_137-200", 49152, 0)),
]


@pytest.mark.parametrize(("properties", "want"), CARDS)
def test_what_the_driver_says(driver, properties, want) -> None:
    driver[0][0] = properties
    got = device_info(torch.device("cuda", 0))
    assert (got.arch, got.capability, got.table_name, got.shared_bytes, got.l2_bytes) == want
    assert (got.kind, got.name, got.index, got.runs_triton) == ("cuda", properties.name, 0, True)


def test_each_device_is_asked_once_and_no_index_is_the_current_one(driver) -> None:
    properties, asked = driver
    properties |= {0: CARDS[0][0], 1: CARDS[3][0]}
    for _ in range(3):
        assert device_info(torch.device("cuda", 0)).arch == "sm_90"
        assert device_info(torch.device("cuda")) is device_info(torch.device("cuda", 1))
    assert asked == [0, 1] and device_info(torch.device("cuda")).arch == "sm_80"


def test_an_amd_gpu_is_known_but_runs_none_of_our_kernels(driver, monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    driver[0][0] = SimpleNamespace(
        name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304
    )
    got = device_info(torch.device("cuda", 0))
    assert (got.arch, got.capability, got.table_name) == ("gfx942", 0, "gfx942-304")


def test_without_a_gpu(monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert device_info(torch.device("cpu")) is CPU and device_info(torch.device("meta")) is CPU
    assert (CPU.kind, CPU.capability, CPU.runs_triton, CPU.sms) == ("cpu", 0, False, 0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert device_info(torch.device("cpu")) is INTERPRETER and device_info(torch.device("meta")) is CPU
    assert INTERPRETER.runs_triton and INTERPRETER.capability == 0


def test_named_devices() -> None:
    assert named_device("sm_90-132") == DeviceInfo("cuda", "sm_90", 132, 232448)
    assert named_device("sm_80-108").shared_bytes == 166912
    assert named_device("sm_121-48").shared_bytes == 101376
    assert named_device("sm_137-1").shared_bytes == 49152
    assert (named_device("sm_90-132").name, named_device("sm_90-132").index) == ("", -1)
    assert named_device("sm_90-132").table_name == "sm_90-132"
    for bad in ("sm_90", "sm_90-0", "sm_90-00", "SM_90-132", "sm_90-132\n", "../sm_90-132", "sm_1-1", "sm_0900-1", ""):
        with pytest.raises(ValueError, match="^device: expected a name like 'sm_90-132'"):
            named_device(bad)


# Choices on cards that no table was made on

CALLS = {
    "matmul": ((1024, 4096), (4096, 1024)),
    "layer_norm": ((1024, 4096), (4096,), (4096,)),
    "layer_norm_backward": ((1024, 4096), (4096,), (4096,)),
    "rms_norm": ((1024, 4096), (4096,)),
    "rms_norm_backward": ((1024, 4096), (4096,)),
    "embedding": ((1024,), (5000, 4096)),
    "embedding_backward": ((1024,), (5000, 4096)),
}


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_new_small_card_gets_torch_and_ours_fit_its_shared_memory(clean, op, dtype) -> None:
    small = "sm_121-48"
    got = tritonops.explain(op, *CALLS[op], dtype=dtype, device=small)
    assert (got.variant, got.rule) == ("vendor", "no table")
    with tritonops.use(exclude="vendor"):
        ours = tritonops.explain(op, *CALLS[op], dtype=dtype, device=small)
        large = tritonops.explain(op, *CALLS[op], dtype=dtype, device="sm_90-132")
    assert ours.variant != "vendor"
    if op == "matmul" and dtype is not torch.float32:  # tiles that fit in 227 KiB, not in 99
        assert ours.variant != large.variant
        assert any("bytes of shared memory, sm_121 has 101376" in why for _, why in ours.rejected)


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA GB10"])
def test_a_card_without_tables_is_named_once_in_a_hundred_calls_of_each_op(clean, monkeypatch, name) -> None:
    arch, sms = {"NVIDIA H100 PCIe": ("sm_90", 114), "NVIDIA GB10": ("sm_121", 48)}[name]
    pretend(monkeypatch, DeviceInfo("cuda", arch, sms, 65536, name=name, index=0))
    a, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    ids = torch.tensor([0, 3, 3])
    with Heard() as heard:
        for i in range(100):
            tritonops.matmul(a, w).sum().backward()
            tritonops.layer_norm(a, w[0]).sum().backward()
            tritonops.rms_norm(a).sum().backward()
            tritonops.embedding(ids, w).sum().backward()
            if i % 20 == 0:
                tritonops.clear_cache()
    assert len(heard) == 1
    assert heard[0].startswith(f"tritonops: no dispatch table for {name} ({arch}-{sms}), looked for ")
