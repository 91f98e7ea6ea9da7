"""Reading the assembler's log and the disassembler's text, and the screen, all without a compiler."""

from __future__ import annotations

import pytest

from tritonops.device import named_device
from tritonops.toolchain.assembler import last_line
from tritonops.toolchain.resources import (
    COLLAPSED_REGISTERS,
    COLLAPSED_SPILL_BYTES,
    Resources,
    count_sass,
    parse_resource_log,
    screen,
)

LOG = """ptxas info    : Compiling entry function 'k1' for 'sm_90'
ptxas info    : Function properties for k1
    40 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'k2' for 'sm_90'
ptxas info    : Function properties for k2
    384 bytes stack frame, 512 bytes spill stores, 640 bytes spill loads
ptxas info    : Used 255 registers, 400 bytes cmem[0]"""


def test_reg_05_a_stack_frame_is_no_spill():
    r = parse_resource_log(LOG)
    assert (r["k1"].spill_stores, r["k1"].registers) == (0, 24)
    assert (r["k2"].spill_stores, r["k2"].spill_loads, r["k2"].registers) == (512, 640, 255)
    assert (r["k1"].frame, r["k2"].frame) == (40, 384)
    assert list(r) == ["k1", "k2"]


def test_without_a_log_nothing_is_known():
    assert parse_resource_log("") == {}
    r = parse_resource_log("ptxas info    : Compiling entry function 'k1' for 'sm_90'")["k1"]
    assert (r.registers, r.spill_stores, r.spill_loads, r.frame, r.static_shared, r.sass) == (None,) * 6


def test_a_device_function_is_not_taken_for_the_kernel():
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k1' for 'sm_80'
ptxas info    : Function properties for helper
    96 bytes stack frame, 64 bytes spill stores, 64 bytes spill loads
ptxas info    : Function properties for k1
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem, 400 bytes cmem[0]"""
    assert parse_resource_log(log) == {"k1": Resources(40, 0, 0, 0, 512)}


SASS = """.section .text.k,"ax",@progbits
.text.k:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   MOV R2, R1 ;
        /*0020*/              @!P0 LDGSTS.E.BYPASS.128 [R3], desc[UR4][R8.64] ;
        /*0030*/               @P1 REDG.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R5 ;
        /*0040*/                   RED.E.ADD.F32.FTZ.RN [R2], R5 ;
        /*0050*/              @!PT ATOMG.E.ADD.STRONG.GPU PT, R5, desc[UR4][R2.64], R5 ;
        /*0060*/              @UP0 UTMALDG.2D [UR8], [UR4], desc[URZ] ;
        /*0070*/                   HGMMA.64x256x16.F32 R24, gdesc[UR4], R24, gsb0 ;
        /*0080*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0090*/                   QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24 ;
        /*00a0*/             @!UP1 UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UPT ;
        /*00b0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00c0*/                   MEMBAR.ALL.GPU ;
        /*00d0*/                   STL.128 [R1+0x10], R4 ;
        /*00e0*/                   LDL.LU R4, [R1] ;
        /*00f0*/                   CCTL.IVALL ;
        /*0100*/                   EXIT ;
.L_x_0:
        /*0110*/                   BRA `(.L_x_0);
        /*0120*/                   NOP;
"""


def test_sass_classes():
    counts = count_sass(SASS)
    assert {k: v for k, v in counts.items() if v} == {
        "LDGSTS": 1, "RED": 2, "ATOM": 1, "UTMALDG": 1, "HGMMA": 1, "HMMA": 1, "IMMA/QGMMA": 1, "UTCMMA": 1,
        "BAR": 1, "MEMBAR": 1, "STL": 1, "LDL": 1, "CCTL": 1, "total": 18,
    }  # fmt: skip
    assert counts["UTMASTG"] == 0


COLLAPSED = Resources(registers=32, spill_stores=1672, spill_loads=1800, frame=900, static_shared=0)


def test_the_collapse_is_rejected_with_its_numbers():
    reason = screen(COLLAPSED, 0, "sm_90-132")
    assert reason is not None and "register collapse: 32 registers with 1672 bytes" in reason


@pytest.mark.parametrize(
    "resources",
    [
        Resources(255, 4496, 3980, 2384, 0),
        Resources(COLLAPSED_REGISTERS + 1, 4496, 3980, 2384, 0),
        Resources(32, COLLAPSED_SPILL_BYTES, 4, 600, 0),
        Resources(32, 0, 0, 2000, 0),
        Resources(32, None, None, None, 0),
        Resources(),
    ],
)
def test_other_spills_and_unknowns_are_not_rejected(resources):
    assert screen(resources, 1024, "sm_90-132") is None


def test_an_unknown_spill_is_judged_by_the_frame():
    reason = screen(Resources(40, None, None, 1920), 0, "sm_89-128")
    assert reason is not None and "40 registers with 1920 bytes" in reason


@pytest.mark.parametrize(
    ("device", "limit"),
    [("sm_80-108", 166912), ("sm_90-132", 232448), ("sm_86", 101376), (named_device("sm_100-148"), 232448)],
)
def test_shared_memory_counts_static_and_dynamic(device, limit):
    fits = Resources(128, 0, 0, 0, static_shared=512)
    assert screen(fits, limit - 512, device) is None
    reason = screen(fits, limit - 511, device)
    assert reason == f"shared memory: {limit + 1} bytes a block, the device has {limit}"


def test_a_device_that_is_no_gpu_is_refused():
    with pytest.raises(ValueError, match="sm_90"):
        screen(Resources(), 0, "H200")


FATAL = "ptxas fatal   : Unsupported .version 8.6"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"Internal error\n`ptxas` stderr:\n{FATAL}\n\nRepro command: ptxas -v", FATAL),
        ("at 3:4:\n    x = y\n    ^\nNameError('y is not defined')\n", "NameError('y is not defined')"),
        ("", "no message"),
    ],
)
def test_the_line_that_says_most(text, line):
    assert last_line(text) == line
    assert last_line(RuntimeError(text)) == (line if line == FATAL else f"RuntimeError: {line}")
