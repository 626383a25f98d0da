"""The PTX interpreter itself, on programs of a few lines; tests/cpu/test_compiled_kernels.py runs the kernels in it."""

import numpy as np
import pytest
import torch

from tests.ptx.expressions import NAMESPACE
from tests.ptx.host import CompiledKernel
from tests.ptx.machine import Deadlock, Machine
from tests.ptx.memory import Memory, Region, TensorMap
from tests.ptx.program import PARAM, parse

HEAD = """
.visible .entry f(.param .u64 out)
{
 .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b64 %rd<9>;
 .shared .align 8 .b8 box[512];
 ld.param.u64 %rd1, [out];
 mov.u32 %r1, %tid.x;
 mul.wide.u32 %rd2, %r1, 4;
 add.s64 %rd3, %rd1, %rd2;
"""


def run(body: str, threads: int = 32) -> np.ndarray:
    """Runs a body in which %rd3 is the address of the thread's word of the output. Returns the words."""
    out = torch.zeros(threads, dtype=torch.int32)
    parameters = np.zeros(16, np.uint8)
    parameters[:8] = np.frombuffer(out.data_ptr().to_bytes(8, "little"), np.uint8)
    machine = Machine(parse(HEAD + body + "\n ret;\n}\n"))
    machine.launch(Memory([CompiledKernel.region(out)], parameters), {}, 1, threads, 0)
    return out.numpy()


def test_lanes_go_different_ways_and_meet_again():
    """Each lane loops as often as its number; a guarded branch, and one scope's labels and registers in another."""
    found = run("""
     mov.u32 %r2, 0; mov.u32 %r3, %r1;
     LOOP: setp.eq.s32 %p1, %r3, 0;
     @%p1 bra DONE;
     { .reg .b32 %r2; mov.u32 %r2, 1000; }
     add.s32 %r2, %r2, %r1; sub.s32 %r3, %r3, 1;
     bra LOOP;
     DONE: vote.sync.ballot.b32 %r4, 1, -1;
     popc.b32 %r5, %r4; mad.lo.s32 %r2, %r2, 100, %r5;
     st.global.u32 [%rd3], %r2;""")
    assert found.tolist() == [100 * i * i + 32 for i in range(32)]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("mov.b32 %r2, 0x80000001; shr.s32 %r3, %r2, 31;", -1),
        ("mov.b32 %r2, 0x80000001; shr.u32 %r3, %r2, 31;", 1),
        ("mov.b32 %r2, -7; div.s32 %r3, %r2, 2;", -3),
        ("mov.b32 %r2, -7; rem.s32 %r3, %r2, 4;", -3),
        ("mov.b32 %r2, -3; mul.hi.s32 %r3, %r2, 5;", -1),
        ("mov.b32 %r2, 0x0F0F; lop3.b32 %r3, %r2, 0x00FF, 0x3333, 0xE8;", 0x033F),
        ("mov.b32 %r2, 0x44332211; prmt.b32 %r3, %r2, 0, 0x4123;", 0x223344),
        ("mov.b32 %r2, 0xABCD; bfe.u32 %r3, %r2, 4, 8;", 0xBC),
        ("mov.b32 %r2, 0xF; bfi.b32 %r3, %r2, 0, 8, 4;", 0xF00),
        ("mov.f32 %f1, 0f3F808000; cvt.rn.bf16.f32 %rs1, %f1; cvt.u32.u16 %r3, %rs1;", 0x3F80),
        ("mov.f32 %f1, 0f3F818000; cvt.rn.bf16.f32 %rs1, %f1; cvt.u32.u16 %r3, %rs1;", 0x3F82),
        ("mov.f32 %f1, 0f40200000; cvt.rni.s32.f32 %r3, %f1;", 2),
        ("mov.f32 %f1, 0f7FC00000; setp.gtu.f32 %p1, %f1, 0f00000000; selp.b32 %r3, 5, 6, %p1;", 5),
        ("mov.f32 %f1, 0f7FC00000; setp.gt.f32 %p1, %f1, 0f00000000; selp.b32 %r3, 5, 6, %p1;", 6),
        ("mov.b32 %r2, 0x40003F80; mul.bf16x2 %r3, %r2, %r2;", 0x40803F80),
    ],
)
def test_instructions(line, value):
    assert set(run(f"{line} st.global.u32 [%rd3], %r3;").tolist()) == {value}


def test_shuffles():
    """Out of range: the lane's own value."""
    found = run("shfl.sync.up.b32 %r2|%p1, %r1, 2, 0, -1; @!%p1 mov.u32 %r2, 99; st.global.u32 [%rd3], %r2;")
    assert found.tolist() == [99, 99, *range(30)]
    found = run("shfl.sync.bfly.b32 %r2, %r1, 16, 31, -1; st.global.u32 [%rd3], %r2;")
    assert found.tolist() == [i ^ 16 for i in range(32)]


HANDOVER = """
 mov.u32 %r2, box;
 setp.ne.s32 %p1, %r1, 0;
 @!%p1 mbarrier.init.shared::cta.b64 [%r2], {count};
 bar.sync 0;
 setp.lt.u32 %p2, %r1, 32;
 @%p2 bra WAIT;
 st.shared.u32 [%r2+16], 7;
 mbarrier.arrive.shared::cta.b64 _, [%r2];
 bra END;
 WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r2], 0;
 @!%p3 bra WAIT;
 ld.shared.u32 %r3, [%r2+16];
 st.global.u32 [%rd3], %r3;
 END:
"""


def test_a_warp_waits_for_another():
    """The waiting warp comes first in turn."""
    assert run(HANDOVER.format(count=32), 64)[:32].tolist() == [7] * 32
    with pytest.raises(Deadlock, match="warp 0 at"):
        run(HANDOVER.format(count=33), 64)


def test_shared_memory_starts_as_nan():
    found = run("mov.u32 %r2, box; ld.shared.f32 %f1, [%r2+8]; st.global.f32 [%rd3], %f1;")
    assert np.isnan(found.view(np.float32)).all()


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("st.global.u32 [%rd3+4], %r1;", IndexError, "no tensor holds"),
        ("st.global.u32 [%rd3+-4], %r1;", IndexError, "no tensor holds"),
        ("st.global.u32 [%rd3+2], %r1;", IndexError, "misaligned"),
        ("mov.u32 %r2, box; ld.shared.u32 %r2, [%r2+1048576];", IndexError, "shared memory has"),
        ("frobnicate.u32 %r2, %r1;", NotImplementedError, "frobnicate"),
        ("add.cc.u32 %r2, %r1, %r1;", NotImplementedError, "add.cc"),
        ("add.u32 %r2, %r1, %unknown;", NotImplementedError, "unknown"),
    ],
)
def test_what_is_wrong_or_unknown_raises(line, error, message):
    with pytest.raises(error, match=message):
        run(line)


def test_tensor_copies():
    """A box beyond the tensor's end: zeros there; the swizzle exchanges 16-byte units; out again, inside alone."""
    data = torch.arange(5 * 128, dtype=torch.int16).view(5, 128)
    region = CompiledKernel.region(data)
    tensor = TensorMap(region, data.data_ptr(), 2, [128, 5], [2, 256], [64, 8], 3)
    tensor.check()
    index, inside = tensor.places([64, 3])
    box = np.where(inside, region.words[2][index], 0).reshape(8, 64)
    assert (box[:2] == data[3:, 64:].numpy()).all() and not box[2:].any()
    shared = np.empty(8 * 64, np.int16)
    shared[tensor.shared_places(0)] = box.reshape(-1)
    units = shared.reshape(8, 8, 8)
    assert all(
        (units[row, unit ^ row] == box[row, 8 * unit : 8 * unit + 8]).all() for row in (0, 1, 5) for unit in (0, 3)
    )
    for wrong in (dict(address=data.data_ptr() + 2), dict(strides=[2, 258]), dict(box=[128, 8]), dict(shape=[128, 6])):
        with pytest.raises(ValueError, match="TMA"):
            TensorMap(**{**vars(tensor), **wrong}).check()


def test_namespace_and_parameters_do_not_overlap_memory():
    assert PARAM > 1 << 48 and "where" in NAMESPACE
    assert Region(0, 16, np.zeros(16, np.uint8), 0).words[8].size == 2
