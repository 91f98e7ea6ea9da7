"""The static toolchain on small kernels: the JIT's own specialisation, resources, the screen, and its errors."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.static import collapsing_kernel, kernels
from tritonops import _compat, launch
from tritonops.device import CPU, named_device
from tritonops.dispatch.problem import Problem
from tritonops.dispatch.variant import OpSpec, Variant
from tritonops.launch import LaunchRequest
from tritonops.toolchain import (
    AssemblerError,
    CompileError,
    compile_request,
    compile_variant,
    measure,
    screen,
    target_device,
)
from tritonops.toolchain.assembler import assembler, assembly_log, gpu_name, own_assembler
from tritonops.toolchain.cubin import kernel_info, sections
from tritonops.toolchain.resources import parse_resource_log

CAPABILITIES = (80, 90, 100)
DEVICES = ("sm_80-108", "sm_90-132", "sm_100-148")


def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def arguments(**changes) -> LaunchRequest:
    """A request for arguments_kernel; keywords replace run-time arguments by name."""
    given = {
        "x": empty(64, 4096),
        "y": empty(64, 4096, dtype=torch.float32),
        "ids": empty(64, dtype=torch.int64),
        "bias": None,
        "M": 64,
        "N": 4096,
        "big": 2**40,
        "scale": 0.5,
        "flag": True,
    } | changes
    meta = {"BLOCK": 1024, "MODE": "ids"}
    return LaunchRequest(kernels.arguments_kernel, (64,), tuple(given.values()), meta, launch.options(4))


def dot(m: int = 64, n: int = 64, k: int = 64, stages: int = 2, **options) -> LaunchRequest:
    args = (empty(m, 512), empty(512, n), empty(m, n, dtype=torch.float32), 512)
    meta = {"M": m, "N": n, "BLOCK_K": k}
    return LaunchRequest(kernels.dot_kernel, (1,), args, meta, launch.options(4, stages, **options))


def descriptors() -> LaunchRequest:
    from triton.tools.tensor_descriptor import TensorDescriptor

    x = TensorDescriptor.from_tensor(empty(256, 256), [64, 64])
    return LaunchRequest(kernels.descriptor_kernel, (4, 4), (x, x), {"BLOCK": 64}, launch.options(4))


def atomic(sem: str) -> LaunchRequest:
    x = empty(1024, dtype=torch.float32)
    return LaunchRequest(kernels.atomic_kernel, (8,), (x, x), {"BLOCK": 1024, "SEM": sem}, launch.options(4))


def collapsing(**options) -> LaunchRequest:
    """LayerNorm-backward-like column sums over rows of 16384 float32, 4 warps: 128 accumulators of each a thread."""
    n = 16384
    x, w, partial = (empty(*s, dtype=torch.float32) for s in ((4096, n), (n,), (128, n)))
    return LaunchRequest(
        collapsing_kernel.collapsing_kernel,
        (128,),
        (x, x, w, x, partial, partial, 4096, n, 32),
        {"BLOCK": n},
        launch.options(4, cap=False) | options,
    )


@pytest.fixture
def jit_key(monkeypatch: pytest.MonkeyPatch):
    """Triton's cache key of what its JIT compiles for a request, on a machine whose GPU is of a given capability."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    def key(request: LaunchRequest, capability: int) -> str:
        stub = SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            # The JIT keeps one cache for each device index.
            get_current_device=lambda: capability,
            get_current_stream=lambda device: 0,
        )
        monkeypatch.setattr(driver, "_active", stub, raising=False)
        if not hasattr(type(driver), "active"):  # before Triton 3.5 a plain attribute
            monkeypatch.setattr(driver, "active", stub)
        request.kernel.device_caches.pop(capability, None)
        return request.kernel.warmup(*request.args, grid=request.grid, **request.meta, **request.options).hash

    return key


REQUESTS = {
    "plain": lambda: arguments(),
    "ones": lambda: arguments(M=1, N=1, big=1),
    "odd": lambda: arguments(M=17, N=4095, big=2**40 + 1, flag=False, scale=1.0),
    "bias": lambda: arguments(bias=empty(4096, dtype=torch.bfloat16)),
    "misaligned": lambda: arguments(x=empty(64, 4097)[:, 1:], y=empty(64, 4097)[:, 1:]),
    "huge": lambda: arguments(N=2**31, big=2**63),
    "dot": lambda: dot(level=0),
    "descriptors": descriptors,
    "debug": lambda: dot(debug=True, sanitize_overflow=False),
}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", REQUESTS)
def test_the_code_is_the_one_that_a_launch_would_look_up(jit_key, name, capability):
    request = REQUESTS[name]()
    assert compile_request(request, f"sm_{capability}").key == jit_key(request, capability)


def test_what_is_specialised_and_what_is_not():
    base = compile_request(arguments(), "sm_90").key
    assert compile_request(arguments(M=1), "sm_90").key == base
    assert compile_request(arguments(M=17), "sm_90").key == base
    assert compile_request(arguments(N=1024), "sm_90").key == base
    changed = [{"N": 1000}, {"N": 1}, {"x": empty(64, 4097)[:, 1:]}, {"bias": empty(4096)}, {"big": 16}]
    keys = [compile_request(arguments(**c), "sm_90").key for c in changed]
    assert len({base, *keys}) == 1 + len(changed)


@pytest.mark.parametrize(("device", "capability"), list(zip(DEVICES, CAPABILITIES, strict=True)))
def test_what_is_returned(device, capability):
    c = compile_request(dot(), device)
    assert (c.kernel, c.target, c.capability, c.num_warps) == ("dot_kernel", f"sm_{capability}", capability, 4)
    assert f".target {gpu_name(capability)}" in c.ptx and ".visible .entry dot_kernel(" in c.ptx
    assert c.cubin[:4] == b"\x7fELF" and c.shared >= 2 * 64 * 64 * 2 and c.seconds > 0
    assert (c.triton, c.ptxas) == (_compat.triton_version(), assembler(capability).version)
    assert (c.enable_fp_fusion, c.ptx_options) == (True, None)


def test_options_can_be_replaced_and_removed():
    base = compile_request(dot(), "sm_90")
    assert ".maxnreg 255" in base.ptx
    assert ".maxnreg 64" in compile_request(dot(), "sm_90", options={"maxnreg": 64}).ptx
    assert ".maxnreg" not in compile_request(dot(), "sm_90", options={"maxnreg": None}).ptx
    wide = compile_request(dot(), "sm_90", options={"num_warps": 8, "ptx_options": "--register-usage-level=0"})
    assert (wide.num_warps, wide.ptx_options) == (8, "--register-usage-level=0")


def test_text_hash_is_of_the_code():
    c = compile_request(arguments(), "sm_90")
    text = sections(c.cubin)[".text.arguments_kernel"].bytes_of(c.cubin)
    assert len(text) > 500 and c.text_hash == hashlib.sha256(text).hexdigest()
    # M is not specialised, so this is the same code; a misaligned pointer is not.
    assert compile_request(arguments(M=9), "sm_90").text_hash == c.text_hash
    assert compile_request(arguments(x=empty(64, 4097)[:, 1:]), "sm_90").text_hash != c.text_hash


@pytest.mark.parametrize(
    "request_", [dot(), dot(level=10, enable_fp_fusion=False), arguments()], ids=["dot", "flags", "arguments"]
)
@pytest.mark.parametrize("device", DEVICES)
def test_the_assembly_flags_are_tritons(device, request_, tmp_path):
    """Assembling the PTX again gives the code that Triton's cubin holds, so its log is about that code."""
    c = compile_request(request_, device)
    commands = []

    def run(command, **kwargs):
        commands.append([str(tmp_path / "again.cubin") if part == "/dev/null" else part for part in command])
        return subprocess.run(commands[-1], **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tritonops.toolchain.assembler.subprocess", SimpleNamespace(run=run))
        log = assembly_log(c.ptx, c.capability, assembler(c.capability), c)
    again = (tmp_path / "again.cubin").read_bytes()
    ours, tritons = (sections(cubin)[f".text.{c.kernel}"].bytes_of(cubin) for cubin in (again, c.cubin))
    # ptxas 12.9.86 swaps registers at random between runs on one input (seen for sm_100 products).
    assert len(ours) == len(tritons) and (ours == tritons or c.capability >= 100)
    stated, info = parse_resource_log(log)[c.kernel], kernel_info(c.cubin, c.kernel)
    assert (stated.registers, stated.frame, stated.static_shared) == (info.registers, info.frame, info.static_shared)
    # An empty frame is why measure() does not assemble again.
    assert info.frame != 0 or stated.spill_stores == stated.spill_loads == 0


@pytest.mark.parametrize(
    ("device", "product"), [("sm_80-108", "HMMA"), ("sm_90-132", "HGMMA"), ("sm_100-148", "UTCMMA")]
)
def test_resources_of_a_product(device, product):
    r = compile_request(dot(128, 128), device).resources
    assert 24 <= r.registers <= 255 and (r.spill_stores, r.spill_loads, r.frame, r.static_shared) == (0, 0, 0, 0)
    assert r.sass[product] > 0 and r.sass["LDL"] == r.sass["STL"] == 0
    assert {k for k in ("HMMA", "HGMMA", "UTCMMA") if r.sass[k]} == {product}
    assert r.sass["total"] > 100 and r.sass["LDGSTS"] > 0


def test_descriptors_are_copied_by_the_tma_unit():
    sass = compile_request(descriptors(), "sm_90-132").resources.sass
    assert (sass["UTMALDG"], sass["UTMASTG"], sass["LDG"], sass["STG"]) == (1, 1, 0, 0)


def test_atomics_by_ordering():
    relaxed = compile_request(atomic("relaxed"), "sm_90").resources.sass
    ordered = compile_request(atomic("acq_rel"), "sm_90").resources.sass
    assert relaxed["RED"] > 0 and relaxed["ATOM"] == relaxed["MEMBAR"] == relaxed["CCTL"] == 0
    assert ordered["MEMBAR"] > 0 and ordered["total"] > relaxed["total"]


def test_without_a_disassembler_instructions_are_unknown(monkeypatch, tmp_path):
    c = compile_request(dot(), "sm_90")
    monkeypatch.setenv("TRITON_NVDISASM_PATH", str(tmp_path / "nvdisasm"))
    r = measure(c)
    assert r.sass is None and r.registers > 0
    broken = tmp_path / "nvdisasm"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert measure(c).sass is None


def test_spills_by_an_assembler_that_did_not_make_the_cubin_are_unknown(monkeypatch):
    c = compile_request(collapsing(), "sm_90")
    monkeypatch.setitem(c.__dict__, "ptxas", "11.8.89")
    r = measure(c, sass=False)
    assert (r.spill_stores, r.spill_loads) == (None, None) and r.registers == 32 and r.frame > 1000


@pytest.mark.parametrize("device", DEVICES)
def test_the_planted_collapse_is_rejected_and_maxnreg_cures_it(device):
    c = compile_request(collapsing(), device)
    reason = screen(c.resources, c.shared, device)
    assert reason is not None and reason.startswith("register collapse: 32 registers with ")
    quick = measure(c, spills=False, sass=False)
    assert (quick.spill_stores, quick.sass) == (None, None) and screen(quick, c.shared, device) is not None
    assert c.resources.spill_stores > 5000 and c.resources.sass["STL"] > 1000
    cured = compile_request(collapsing(), device, options={"maxnreg": 255})
    assert screen(cured.resources, cured.shared, device) is None
    assert cured.resources.registers == 255 and 0 < cured.resources.spill_stores < 0.7 * c.resources.spill_stores


def test_more_shared_memory_than_a_block_can_have_is_rejected():
    c = compile_request(dot(128, 256, 64, stages=5), "sm_80-108")
    assert c.shared > 166912
    assert (
        screen(c.resources, c.shared, "sm_80-108") == f"shared memory: {c.shared} bytes a block, the device has 166912"
    )
    assert screen(c.resources, c.shared, "sm_90-132") is None


def planted(run, **record) -> tuple[OpSpec, Variant, Problem]:
    variant = Variant("planted/one", run, **record)
    spec = OpSpec(
        name="planted",
        load=lambda: [variant],
        dims=("N",),
        prefer=lambda problem, device: [],
        describe=lambda n: Problem("planted", {"N": n}, "float16"),
        sample=lambda problem, device: (torch.empty(4, problem.dims["N"], dtype=torch.float16, device=device),),
    )
    return spec, variant, spec.describe(4096)


def test_a_variant_gives_every_kernel_it_would_launch():
    seen = []

    def run(choice, x):
        seen.append((choice.variant.id, choice.problem.dims["N"], choice.device.sms, x.device.type))
        for kind in (arguments(x=x), arguments(N=1, x=x)):
            launch.launch(kind.kernel, (choice.device.sms,), kind.args, kind.meta, kind.options)
        launch.launch(kernels.dot_kernel, (0,), (), {}, {})
        return x

    first, second = compile_variant(*planted(run), "sm_90-132")
    assert seen == [("planted/one", 4096, 132, "meta")]
    assert first.kernel == second.kernel == "arguments_kernel" and first.key != second.key
    assert compile_variant(*planted(lambda choice, x: x), "sm_90-132") == []


def test_an_error_names_kernel_variant_target_and_cause():
    def run(choice, x):
        launch.launch(kernels.broken_kernel, (1,), (x,), {"BLOCK": 64}, launch.options(4))

    with pytest.raises(CompileError) as caught:
        compile_variant(*planted(run), "sm_90-132")
    error = caught.value
    assert not isinstance(error, AssemblerError)
    assert (error.kernel, error.variant, error.target) == ("broken_kernel", "planted/one", "sm_90")
    assert "\n" not in str(error) and "no_such_name is not defined" in error.problem
    assert str(error).startswith("planted/one (broken_kernel) does not compile for sm_90: ")
    assert error.__cause__ is not None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"options": {"no_such_option": 1}}, "no_such_option"),
        ({"options": {"num_warps": 3}}, "num_warps must be a power of 2"),
        ({"kernel": print}, "not a @triton.jit function"),
        ({"meta": {}}, "missing 2 required positional arguments"),
    ],
)
def test_wrong_requests_are_compile_errors(change, says):
    request = arguments()
    with pytest.raises(CompileError, match=says) as caught:
        compile_request(LaunchRequest(**{**request.__dict__, **change}), "sm_90")
    assert "\n" not in str(caught.value)


def test_targets():
    assert target_device("sm_80") == named_device("sm_80-132")
    assert target_device("sm_80-108").sms == 108
    device = named_device("sm_90-114")
    assert target_device(device) is device
    with pytest.raises(ValueError, match="sm_90"):
        compile_request(arguments(), "H200")
    with pytest.raises(ValueError, match="not for 'cpu'"):
        compile_request(arguments(), CPU)


@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100, 103, 120])
def test_the_assembler_is_the_one_that_triton_takes(capability):
    from triton.backends.nvidia.compiler import get_ptxas

    found = get_ptxas(capability) if _compat.triton_at_least(3, 6) else get_ptxas()
    assert assembler(capability).path == found.path and assembler(capability).own
    assert assembler(capability).version.startswith(found.version + ".")


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def variable(capability: int) -> str:
    name = Path(own_assembler(capability).path).name
    return f"TRITON_{name.upper().replace('-', '_')}_PATH"


TOO_OLD = 'echo "ptxas fatal : Unsupported .version 8.6; current version is 8.5" >&2; exit 255'


@pytest.mark.parametrize("answers", [False, True], ids=["version unknown", "version told"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_int_23_an_old_assembler_is_one_message(monkeypatch, tmp_path, capsys, capability, answers):
    told = 'if [ "$1" = --version ]; then echo "Cuda compilation tools, release 12.4, V12.4.99"; exit 0; fi\n'
    path = script(tmp_path / "old_ptxas", (told if answers else "") + TOO_OLD)
    monkeypatch.setenv(variable(capability), path)
    with pytest.raises(AssemblerError) as caught:
        compile_request(arguments(), f"sm_{capability}")
    message = str(caught.value)
    assert "\n" not in message and path in message and own_assembler(capability).version in message
    assert f"version {'12.4.99' if answers else 'unknown'}" in message
    assert "it knows PTX up to 8.5 and got 8.6" in message and variable(capability) in message
    assert isinstance(caught.value, CompileError) and caught.value.path == path
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content", [None, "exit 0", "exec sleep 0 --no-such"], ids=["absent", "silent", "wrong"])
def test_a_missing_or_foreign_assembler_is_named(monkeypatch, tmp_path, content):
    path = str(tmp_path / "ptxas") if content is None else script(tmp_path / "ptxas", content)
    monkeypatch.setenv(variable(90), path)
    with pytest.raises(AssemblerError, match=f"{path} .version unknown. does not work with Triton"):
        compile_request(arguments(), "sm_90")
    monkeypatch.delenv(variable(90))
    assert compile_request(arguments(), "sm_90").kernel == "arguments_kernel"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_an_assembler_that_fails_on_kernels_alone_is_the_assemblers_fault(monkeypatch, tmp_path, capsys, capability):
    """An empty module passes, so the failure shows inside Triton, which prints the whole PTX."""
    own = own_assembler(capability).path
    text = f'for f; do case "$f" in *.ptx) if grep -q .entry "$f"; then {TOO_OLD}; fi;; esac; done\nexec "{own}" "$@"'
    path = script(tmp_path / "ptxas", text)
    monkeypatch.setenv(variable(capability), path)
    with pytest.raises(AssemblerError, match="it knows PTX up to 8.5 and got 8.6") as caught:
        compile_request(arguments(), f"sm_{capability}")
    assert path in str(caught.value) and caught.value.__cause__ is not None
    assert capsys.readouterr().out == ""


def test_a_kernel_that_both_assemblers_refuse_is_the_kernels_fault(monkeypatch, tmp_path):
    monkeypatch.setenv(variable(90), script(tmp_path / "ptxas", f'exec "{own_assembler(90).path}" "$@"'))
    with pytest.raises(CompileError, match="no-such-flag") as caught:
        compile_request(arguments(), "sm_90", options={"ptx_options": "--no-such-flag"})
    assert not isinstance(caught.value, AssemblerError)


def test_another_assembler_of_the_same_version_is_not_served_from_the_cache(monkeypatch, tmp_path):
    own = compile_request(arguments(), "sm_90")
    wrapper = script(tmp_path / "ptxas", f'exec "{own_assembler(90).path}" "$@"')
    monkeypatch.setenv(variable(90), wrapper)
    assert compile_request(arguments(), "sm_90").text_hash == own.text_hash
    script(
        tmp_path / "ptxas", f'[ "$1" = --version ] || set -- "$@" --opt-level 1\nexec "{own_assembler(90).path}" "$@"'
    )
    changed = compile_request(arguments(), "sm_90")
    assert changed.text_hash != own.text_hash and changed.ptxas == own.ptxas
    monkeypatch.delenv(variable(90))
    assert compile_request(arguments(), "sm_90").text_hash == own.text_hash


def test_gluon_kernels_compile_too():
    if not _compat.triton_at_least(3, 5):
        pytest.skip("Gluon needs Triton 3.5")
    from tests.static.gluon_kernel import gluon_copy_kernel

    x = empty(1024, dtype=torch.float32)
    request = LaunchRequest(gluon_copy_kernel, (4,), (x, x, 1024), {"BLOCK": 256}, launch.options(4))
    c = compile_request(request, "sm_90")
    assert c.kernel == "gluon_copy_kernel" and c.resources.sass["LDG"] == c.resources.sass["STG"] == 2


def test_a_cache_that_keeps_binaries_only(tmp_path, monkeypatch):
    """TRITON_STORE_BINARY_ONLY=1: registers are known, spills are not guessed."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "whole"))
    whole = compile_request(collapsing(), "sm_90")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "thin"))
    monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", "1")
    thin = compile_request(collapsing(), "sm_90")
    assert thin.ptx == "" and thin.cubin == whole.cubin and thin.text_hash == whole.text_hash
    assert (whole.resources.spill_stores or 0) > 0 and thin.resources.spill_stores is None
    assert (thin.resources.registers, thin.resources.frame) == (whole.resources.registers, whole.resources.frame)
    for compiled in (whole, thin):
        assert str(screen(compiled.resources, compiled.shared, "sm_90-132")).startswith("register collapse")
