"""PTX as data, as C++ and as a program; and a kernel as nvcc compiled it, held to the CPU's results."""

from __future__ import annotations

import ctypes
import itertools
import math
import shutil
import struct
import subprocess

import ptx_lane
import pytest
import torch
from ptx.syntax import Brace, Instruction, Label, Place, PtxError, Registers, parse
from ptx.translate import translate

SNIPPET = """
.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 128 .b8 buffer[];

.visible .entry kernel(
    .param .align 8 .b8 kernel_param_0[24]
)
.maxntid 32, 1, 1
{
    .reg .pred %p<2>;
    .reg .b32 %r<3>;
    .loc 1 7 3
    mov.u32 %r1, %tid.x;
    .loc 2 20 5, function_name $L__info0, inlined_at 1 9 3
    // begin inline asm
    {.reg .b16 h; cvt.u16.u32 h, %r1;}
    // end inline asm
    setp.eq.s32 %p1, %r1, 0;
    @!%p1 bra $L__BB0_1;
    st.shared.v2.u32 [buffer+8], {%r1, %r2};
$L__BB0_1:
    ret;
}
    .file 1 "/tree/csrc/kernel.cuh"
    .file 2 "/tree/csrc/wrappers.h"
    .section .debug_str { info: .b8 95 }
"""


def test_a_snippet_as_data():
    module = parse(SNIPPET, ("wrappers.h",))
    (entry,) = module.entries
    assert module.shared == {"buffer"}
    assert (entry.name, entry.parameter, entry.parameter_bytes) == ("kernel", "kernel_param_0", 24)
    assert entry.statements == [
        Brace(True),
        Registers("pred", ("%p0", "%p1")),
        Registers("b32", ("%r0", "%r1", "%r2")),
        Place("/tree/csrc/kernel.cuh", 7),
        Instruction(15, "", "mov.u32", ("%r1", "%tid.x")),
        Place("/tree/csrc/kernel.cuh", 9),  # where the wrapper was called
        Brace(True),
        Registers("b16", ("h",)),
        Instruction(18, "", "cvt.u16.u32", ("h", "%r1")),
        Brace(False),
        Instruction(20, "", "setp.eq.s32", ("%p1", "%r1", "0")),
        Instruction(21, "!%p1", "bra", ("$L__BB0_1",)),
        Instruction(22, "", "st.shared.v2.u32", ("[buffer+8]", "{%r1, %r2}")),
        Label("$L__BB0_1"),
        Instruction(24, "", "ret", ()),
        Brace(False),
    ]


def test_a_snippet_as_cpp():
    text = translate(parse(SNIPPET, ("wrappers.h",)), "x.ptx", lambda name: True, "/tree/csrc")
    assert 'extern "C" void kernel(Parameters<24> parameters) {' in text
    assert '#line 7 "/tree/csrc/kernel.cuh"' in text
    assert "r1_ = static_cast<uint32_t>(ThreadIndex().x);" in text
    assert "if (!p1_) { goto _L__BB0_1_; }" in text
    # What nobody wrote is NaN, or all ones; what nobody uses is left out.
    assert "uint32_t r2_ = static_cast<uint32_t>(~0ull);" in text
    assert "r0_" not in text
    left_out = translate(parse(SNIPPET), "x.ptx", lambda name: False)
    assert 'NotTranslated("kernel")' in left_out
    assert "goto" not in left_out


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("frob.b32 %r1, %r2;", "no such word"),
        ("add.b32 %r1, %r1, %r2;", "no such word"),  # bits cannot be added
        ("add.rn.bf16 %r1, %r1, %r2;", "no such word"),
        ("add.s32 %r1, %r2;", "another number of operands"),
        ("add.s32 %r1, %r2, %r7;", "%r7 is no register"),
        ("cvt.rn.satfinite.e4m3x2.f32 %r1, %r1, %r2;", ""),
        ("bar.sync 1;", "a barrier of a part of the block"),
        ("shfl.sync.bfly.b64 %r1, %r2, 1, 31, -1;", "not in this form"),
        ("atom.global.acquire.gpu.add.u32 %r1, [buffer], 1;", "no such order of memory"),
        ("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1, %r2}, [buffer];", "not in this form"),
        ("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {}, {}, {}, {};", "another number of registers"),
        ("@%p1 st.param.b32 [kernel_param_0], %r1;", "a parameter is written to"),
    ],
)
def test_an_unknown_instruction_is_named(line, why):
    module = parse(SNIPPET.replace("ret;", line))
    with pytest.raises(PtxError) as caught:
        translate(module, "x.ptx", lambda name: True)
    words = " ".join(line.rstrip(";").split())
    assert str(caught.value).startswith(f"x.ptx: kernel: line 24: unknown instruction: {words}")
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            ".address_size 64",
            ".address_size 64\n.global .b8 table[4];",
            "unknown directive of a module: .global",
        ),
        ("[24]\n)", "[24],\n .param .u64 second\n)", "kernel has other parameters than one struct by value"),
        (".maxntid", ".explicitcluster\n.maxntid", "kernel: unknown directive in"),
        ("ret;", ".local .align 8 .b8 depot[8];", "line 24: not understood: .local .align 8"),
        (".loc 1 7 3", ".loc 1 seven", "line 14: not understood: .loc 1 seven"),
    ],
)
def test_nothing_is_left_out_silently(old, new, message):
    with pytest.raises(PtxError, match=message.replace(".", r"\.")):
        parse(SNIPPET.replace(old, new))


def test_which_kernels_are_wanted():
    bf16_64 = "_ZN2sb4cuda13ForwardKernelINS0_4Bf16ELi64EEEvNS0_16ForwardArgumentsE"
    neither = "_ZN2sb4cuda11CurveKernelENS0_15BudgetArgumentsE"
    assert ptx_lane.is_wanted(bf16_64, (("Fp16", 64), ("Bf16", 64)))
    assert not ptx_lane.is_wanted(bf16_64, (("Fp16", 64), ("Bf16", 32)))
    assert ptx_lane.is_wanted(neither, (("Bf16", 64),))
    assert ptx_lane.is_wanted(neither, ())


# ---- programs: a warp runs them, lane l from word 4 l of the input ----

U32, ALL = 1 << 32, 0xFFFFFFFF
WORDS = (0, 1, 5, 31, 32, 255, 0x1234, 0x7FFFFFFF, 0x80000000, 0x89ABCDEF, ALL)
FINITE = (0.0, -0.0, 1.0, -1.0, 1.00390625, 3e-6, 9.2e-41, 65519.0, 65520.0, 1e30, -2.5e-5)
FLOATS = torch.tensor([*FINITE, math.inf, -math.inf, math.nan]).tolist()  # as near as fp32 has them


def signed(x):
    return x - U32 if x >> 31 else x


def insert(a, b, at, count):
    mask = ((1 << count) - 1 << at) & ALL
    return b & ~mask | a << at & mask


def pick(a, b, which):
    result = 0
    for i in range(4):
        byte = (b << 32 | a) >> 8 * (which >> 4 * i & 7) & 255
        if which >> 4 * i & 8:
            byte = 255 if byte >> 7 else 0
        result |= byte << 8 * i
    return result


INTEGERS = {
    "add.s32 d, a, b;": lambda a, b, c: a + b,
    "sub.u32 d, a, b;": lambda a, b, c: a - b,
    "mul.lo.s32 d, a, b;": lambda a, b, c: a * b,
    "mul.hi.u32 d, a, b;": lambda a, b, c: a * b >> 32,
    "mul.hi.s32 d, a, b;": lambda a, b, c: signed(a) * signed(b) >> 32,
    "mad.lo.s32 d, a, b, c;": lambda a, b, c: a * b + c,
    "{.reg .b64 w; mul.wide.s32 w, a, b; shr.s64 w, w, 8; cvt.u32.u64 d, w;}": (
        lambda a, b, c: signed(a) * signed(b) >> 8
    ),
    "{.reg .b32 h; .reg .b64 w; mov.b64 w, {a, b}; mov.b64 {h, d}, w;}": lambda a, b, c: b,
    "{.reg .b16 h; cvt.u16.u32 h, a; cvt.s32.s16 d, h;}": lambda a, b, c: (a + 0x8000) % 0x10000 - 0x8000,
    "min.s32 d, a, b;": lambda a, b, c: min(signed(a), signed(b)),
    "max.u32 d, a, b;": lambda a, b, c: max(a, b),
    "abs.s32 d, a;": lambda a, b, c: abs(signed(a)),
    "neg.s32 d, a;": lambda a, b, c: -a,
    "not.b32 d, a;": lambda a, b, c: ~a,
    "and.b32 d, a, -32;": lambda a, b, c: a & ~31,
    "xor.b32 d, a, 0x80000000;": lambda a, b, c: a ^ 0x80000000,
    "shl.b32 d, a, b;": lambda a, b, c: a << min(b, 32),
    "shr.u32 d, a, b;": lambda a, b, c: a >> min(b, 32),
    "shr.s32 d, a, b;": lambda a, b, c: signed(a) >> min(b, 32),
    "bfi.b32 d, a, b, 5, 8;": lambda a, b, c: insert(a, b, 5, 8),
    "bfi.b32 d, a, b, 29, 9;": lambda a, b, c: insert(a, b, 29, 9),
    "prmt.b32 d, a, b, c;": pick,
    "prmt.b32 d, a, b, 0x5410;": lambda a, b, c: a & 0xFFFF | b << 16,
    "popc.b32 d, a;": lambda a, b, c: a.bit_count(),
    "{.reg .pred p; setp.lt.s32 p, a, b; selp.b32 d, a, c, p;}": (
        lambda a, b, c: a if signed(a) < signed(b) else c
    ),
    "{.reg .pred p; mov.b32 d, c; setp.hi.u32 p, a, b; @!p mov.b32 d, 7;}": (
        lambda a, b, c: c if a > b else 7
    ),
    "{.reg .b32 m; or.b32 m, b, 1; div.u32 d, a, m;}": lambda a, b, c: a // (b | 1),
    "{.reg .b32 m; or.b32 m, b, 1; rem.s32 d, a, m;}": (
        lambda a, b, c: int(math.fmod(signed(a), signed(b | 1)))
    ),
}


def bits(x):
    return struct.unpack("I", struct.pack("f", x))[0]


def pack(dtype):
    def packed(a, b, c):
        low, high = torch.tensor([b, a]).to(dtype).view(torch.int16).tolist()
        return (high & 0xFFFF) << 16 | low & 0xFFFF

    return packed


# a, b and c hold floats, and fa, fb, fc the same; what a function returns as a float becomes its bits.
REALS = {
    "min.f32 fd, fa, fb;": lambda a, b, c: b if a != a else a if b != b else min(a, b),
    "max.f32 fd, fa, fb;": lambda a, b, c: b if a != a else a if b != b else max(a, b),
    "fma.rn.f32 fd, fa, fb, fc;": lambda a, b, c: (torch.tensor(a).double() * b + c).float().item(),
    "mul.f32 fd, fa, 0f3FC00000;": lambda a, b, c: (torch.tensor(a) * 1.5).item(),
    "neg.f32 fd, fa;": lambda a, b, c: -a,
    "cvt.rn.bf16x2.f32 d, fa, fb;": pack(torch.bfloat16),
    "cvt.rn.f16x2.f32 d, fa, fb;": pack(torch.float16),
    "{.reg .b32 m; .reg .b16 h; shr.u32 m, a, 16; cvt.u16.u32 h, m; cvt.f32.f16 fd, h;}": (
        lambda a, b, c: torch.tensor(bits(a) >> 16).to(torch.uint16).view(torch.float16).float().item()
    ),
    "ex2.approx.ftz.f32 fd, 0fC1200000;": lambda a, b, c: 2.0**-10,
    **{
        f"{{.reg .pred p; setp.{name}.f32 p, fa, fb; selp.b32 d, 1, 0, p;}}": function
        for name, function in {
            "lt": lambda a, b, c: int(a < b),
            "ne": lambda a, b, c: int(a < b or a > b),
            "neu": lambda a, b, c: int(a != b),
            "gtu": lambda a, b, c: int(not a <= b),
            "leu": lambda a, b, c: int(not a > b),
            "num": lambda a, b, c: int(a == a and b == b),
        }.items()
    },
}


def shuffled(lane, how, by):
    """Where a lane of a part of eight takes from, and whether that is in the part."""
    source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": lane & 24 | by & 7}[how]
    inside = source // 8 == lane // 8
    return (source if inside else lane), inside


SHUFFLES = {"up": (3, 0x1800), "down": (2, 0x181F), "bfly": (5, 0x181F), "idx": (11, 0x181F)}
WARP = "\n".join(
    f"shfl.sync.{how}.b32 d|p, a, {by}, {clamp}, -1; st.global.u32 [%rd2+{8 * i}], d;"
    f" selp.b32 d, 1, 0, p; st.global.u32 [%rd2+{8 * i + 4}], d;"
    for i, (how, (by, clamp)) in enumerate(SHUFFLES.items())
)
WARP += """
    setp.lt.u32 p, %r1, 5;
    vote.sync.ballot.b32 d, p, -1;        st.global.u32 [%rd2+32], d;
    redux.sync.add.u32 d, %r1, -1;        st.global.u32 [%rd2+36], d;
    shl.b32 b, %r1, 2;                    st.shared.u32 [b], %r1;
    bar.sync 0;
    xor.b32 b, b, 124;                    ld.shared.u32 d, [b];   st.global.u32 [%rd2+40], d;
"""
# out [16, 16] fp32 = a [16, 16] b [16, 16], bf16: both by cp.async to shared memory, a at 0 and b at 512.
MATRICES = """
    shl.b32 a, %r1, 4;
    ld.param.u64 %rd3, [matrices_param_0];
    mul.wide.u32 %rd4, %r1, 16;
    add.s64 %rd3, %rd3, %rd4;
    cp.async.cg.shared.global [a], [%rd3], 16, 16;
    cp.async.cg.shared.global [a+512], [%rd3+512], 16, 16;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    and.b32 b, %r1, 15;
    shr.u32 c, %r1, 4;
    shl.b32 b, b, 5;
    shl.b32 c, c, 4;
    add.s32 b, b, c;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%a0, %a1, %a2, %a3}, [b];
    ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%b0, %b1, %b2, %b3}, [b+512];
    mov.f32 fa, 0f00000000;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
      {%f0, %f1, %f2, %f3}, {%a0, %a1, %a2, %a3}, {%b0, %b1}, {fa, fa, fa, fa};
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
      {%f4, %f5, %f6, %f7}, {%a0, %a1, %a2, %a3}, {%b2, %b3}, {fa, fa, fa, fa};
    ld.param.u64 %rd3, [matrices_param_0+8];
    shr.u32 b, %r1, 2;
    shl.b32 b, b, 6;
    and.b32 c, %r1, 3;
    shl.b32 c, c, 3;
    add.s32 b, b, c;
    cvt.u64.u32 %rd4, b;
    add.s64 %rd3, %rd3, %rd4;
    st.global.v2.f32 [%rd3], {%f0, %f1};
    st.global.v2.f32 [%rd3+512], {%f2, %f3};
    st.global.v2.f32 [%rd3+32], {%f4, %f5};
    st.global.v2.f32 [%rd3+544], {%f6, %f7};
"""
RESULTS = 64  # words per lane
OFF_BY_TWO = "cvta.to.global.u64 %rd1, %rd1; ld.global.u32 d, [%rd1+2];"


def results_of(table):
    lines = []
    for i, text in enumerate(table):
        register, kind = ("fd", "f32") if "fd" in text else ("d", "u32")
        lines.append(f"{text} st.global.{kind} [%rd2+{4 * i}], {register};")
    return "\n".join(lines)


PROGRAMS = {
    "integers": results_of(INTEGERS),
    "reals": results_of(REALS),
    "warp": WARP,
    "matrices": MATRICES,
    "misaligned": OFF_BY_TWO,
}


def entry(name, body):
    return f"""
.visible .entry {name}(.param .align 8 .b8 {name}_param_0[16])
.maxntid 32, 1, 1
{{
    .reg .pred p;  .reg .b32 a, b, c, d, %r<2>, %a<4>, %b<4>;
    .reg .b64 %rd<5>;  .reg .f32 fa, fb, fc, fd, %f<8>;
    ld.param.u64 %rd1, [{name}_param_0];  ld.param.u64 %rd2, [{name}_param_0+8];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 16;  add.s64 %rd1, %rd1, %rd3;
    mul.wide.u32 %rd3, %r1, {4 * RESULTS};  add.s64 %rd2, %rd2, %rd3;
    ld.global.v4.u32 {{a, b, c, d}}, [%rd1];
    mov.b32 fa, a;  mov.b32 fb, b;  mov.b32 fc, c;
    {body}
    ret;
}}
"""


HARNESS = """
#include <string>
extern "C" const char* run(int which, const void* in, void* out) {
  static std::string told;
  static void (*const programs[])(Parameters<16>) = {NAMES};
  Parameters<16> parameters;
  const void* const pointers[] = {in, out};
  std::memcpy(parameters.bytes, pointers, 16);
  try {
    Configure("");
    Launch("program", dim3(1), dim3(32), 1024, [&] { programs[which](parameters); });
    told = "";
  } catch (const std::exception& error) {
    told = error.what();
  }
  return told.c_str();
}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs a program on a tensor and returns [32, RESULTS] words."""
    csrc = ptx_lane.ROOT / "csrc"
    if not csrc.is_dir() or not shutil.which(ptx_lane.compiler()[0]):
        pytest.skip("no sources of the emulator, or no C++ compiler")
    folder = tmp_path_factory.mktemp("ptx")
    module = parse(SNIPPET.split(".visible")[0] + "".join(entry(*program) for program in PROGRAMS.items()))
    text = translate(module, "programs.ptx", lambda name: True)
    source, library = folder / "programs.cpp", folder / "programs.so"
    source.write_text(text + HARNESS.replace("NAMES", ", ".join(PROGRAMS)))
    runtime = sorted((csrc / "emulator").glob("*.cpp"))
    command = [
        *ptx_lane.compiler(),
        *ptx_lane.FLAGS,
        "-O0",
        "-fPIC",
        "-shared",
        f"-I{csrc}",
        source,
        *runtime,
    ]
    subprocess.run([*map(str, command), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).run
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    function.restype = ctypes.c_char_p

    def launch(name, words):
        out = torch.full((32, RESULTS), -1, dtype=torch.int32)
        told = function(list(PROGRAMS).index(name), words.data_ptr(), out.data_ptr())
        if told:
            raise RuntimeError(told.decode())
        return out

    return launch


def of_all_threes(run, name, table, values, as_words):
    """Compare each instruction's result with its function's, for all threes of values."""
    threes = list(itertools.product(values, values, values[::3]))
    for begin in range(0, len(threes), 32):
        part = threes[begin : begin + 32]
        words = torch.zeros(32, 4, dtype=torch.int64)
        words[: len(part), :3] = torch.tensor([[as_words(x) for x in three] for three in part])
        out = run(name, words.to(torch.uint32))
        for lane, three in enumerate(part):
            for i, (text, function) in enumerate(table.items()):
                yield text, three, out[lane, i].item() % U32, function(*three)


def test_integers(run):
    for text, three, got, want in of_all_threes(run, "integers", INTEGERS, WORDS, int):
        assert got == want % U32, (text, [hex(x) for x in three])


def test_reals(run):
    for text, three, got, want in of_all_threes(run, "reals", REALS, FLOATS, bits):
        if "x2" in text and any(x != x for x in three[:2]):
            continue  # which NaN it becomes is not said
        if isinstance(want, int):
            assert got == want, (text, three)
        else:
            got = struct.unpack("f", struct.pack("I", got))[0]
            assert got == want or (got != got and want != want), (text, three, got, want)


def test_lanes_and_shared_memory(run):
    words = torch.arange(32 * 4, dtype=torch.int32).reshape(32, 4)
    out = run("warp", words)
    for lane in range(32):
        for i, (how, (by, _)) in enumerate(SHUFFLES.items()):
            source, inside = shuffled(lane, how, by)
            assert out[lane, 2 * i : 2 * i + 2].tolist() == [4 * source, inside], (how, lane)
        assert out[lane, 8:11].tolist() == [0b11111, 31 * 32 // 2, 31 - lane]


def test_matrices(run):
    torch.manual_seed(0)
    a, b = torch.randn(2, 16, 16).bfloat16()
    out = run("matrices", torch.stack([a, b]))
    product = out.view(torch.float32).flatten()[:256].reshape(16, 16)
    torch.testing.assert_close(product, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_a_misaligned_access_stops_the_launch(run):
    with pytest.raises(RuntimeError, match=r"misaligned access of 4 bytes at .* at programs\.ptx:\d+"):
        run("misaligned", torch.zeros(33, 4, dtype=torch.int32))


@pytest.mark.skipif(ptx_lane.missing() != "", reason=ptx_lane.missing() or "-")
def test_budgets_as_nvcc_compiled_them():
    program = ptx_lane.build("test_cuda_tuning", (), "sm_90a", tsan=False)
    done = subprocess.run([str(program), "budgets_few"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
