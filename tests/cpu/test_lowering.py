"""Every kernel variant lowers and compiles without a GPU: no spills, no serialised wgmma, shared memory that fits.

Needs nvcc: skipped with a reason where there is none, but failed when FLASH_QLA_REQUIRE_NVCC=1 (CI sets it). Whatever
TileLang's disk cache holds is not compiled again; what it lacks is compiled by two processes ahead of the tests.
"""

import os
import re

import pytest

from flash_qla.testing import compiled

NAMES = [variant.name for variant in compiled.all_variants()]


@pytest.fixture(scope="module")
def compiling(nvcc, request):
    """Reports on their way, for the variants that this run has selected."""
    selected = [item.callspec.params["name"] for item in request.session.items if item.path == request.path
                and "name" in getattr(getattr(item, "callspec", None), "params", {})]  # fmt: skip
    # Under xdist every worker has tests of its own, and the cores are shared already: compile one's own, in order.
    on_demand = "PYTEST_XDIST_WORKER" in os.environ
    with compiled.Compiling([] if on_demand else selected) as running:
        yield None if on_demand else running


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_variant_compiles_without_spills(name, compiling):
    variant = next(variant for variant in compiled.all_variants() if variant.name == name)
    report = compiled.report(variant) if compiling is None else compiling.report(name)
    assert report.problems(variant.arch.smem_bytes, variant.known_spill_bytes) == [], report
    assert 0 < report.registers <= 255


def test_names_are_unique_and_fit_a_file_name():
    assert len(set(NAMES)) == len(NAMES) > 0
    assert [name for name in NAMES if not re.fullmatch(r"[\w=.+-]{1,200}", name)] == []


def test_ptxas_output_is_understood():
    """A spill or a serialised wgmma must not slip through the parser."""
    said = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to …\n"
        "ptxas info    : (C7517) warpgroup.wait is injected in around line 9 by compiler\n"
        "    8 bytes stack frame, 16 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 8 barriers, 8 bytes cumulative stack size, 1024 bytes smem\n"
    )
    found = compiled.parse_ptxas(said)
    assert found["registers"] == 168 and found["spill_bytes"] == 28 and found["stack_bytes"] == 8
    assert found["static_smem"] == 1024 and len(found["remarks"]) == 2
    report = compiled.Report("x", **found, dynamic_smem=230_000)
    assert len(report.notes) == 1 and "C7517" in report.notes[0]
    problems = report.problems(smem_limit=227 * 1024)
    assert len(problems) == 2, "the spill and the remark; 231,024 bytes fit 232,448"
    assert len(compiled.Report("x", **found, dynamic_smem=232_000).problems(227 * 1024)) == 3
    assert not any("spills" in problem for problem in report.problems(known_spill_bytes=28))
    assert any("spills" in problem for problem in report.problems(known_spill_bytes=27))
    assert compiled.Report("x", error="no").problems() == ["no"]
    clean = compiled.parse_ptxas(
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nUsed 40 registers"
    )
    assert compiled.Report("x", **clean).problems() == []


def test_dynamic_smem_is_read_from_the_host_stub():
    stub = (
        "(((TVMFFIAny*)stack_ffi_any)[0].v_int64) = ((int64_t)7);\n"
        "(((TVMFFIAny*)stack_ffi_any)[1].v_int64) = ((int64_t)61440);\n"
        "if (TVMFFIFunctionCall(solve_kernel_packed, (TVMFFIAny*) stack_ffi_any, 2, &result) != 0) {\n"
    )
    assert compiled.dynamic_smem("extern __shared__ uchar buf[];", stub) == 61440
    assert compiled.dynamic_smem("no dynamic shared memory", stub) == 0
    with pytest.raises(ValueError, match="stub"):
        compiled.dynamic_smem("extern __shared__ uchar buf[];", "something else")
