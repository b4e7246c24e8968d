"""Kernels that call NCCL's device library: linked without a GPU, declared as NCCL declares it."""

import re
import shutil
import struct
from importlib.util import find_spec
from pathlib import Path

import pytest
from gin_plan import RailPlan, make_templates
from tiny_plan import TinyPlan

from jitmoe.jit import build, cache, link, nvrtc, render
from jitmoe.jit.nvrtc import CompileError, ToolchainError
from jitmoe.plan.transfer_pairs import combine_of, dispatch_plan
from jitmoe.run import nccl_rail

LIBRARY = "nccl_device"


@pytest.fixture(scope="module", autouse=True)
def toolchain():
    for find in (lambda: link.find(LIBRARY), link.version):
        try:
            find()
        except ToolchainError as error:
            pytest.skip(str(error))


@pytest.fixture
def templates(tmp_path, monkeypatch):
    directory = make_templates(tmp_path / "templates")
    use(directory, monkeypatch)
    monkeypatch.setenv("JITMOE_CACHE_DIR", str(tmp_path / "cache"))
    return directory


def use(directory, monkeypatch):
    monkeypatch.setattr(render, "templates_dir", lambda: directory)
    monkeypatch.setattr(build, "_memo", {})


def symbols(cubin: bytes) -> dict[str, bool]:
    """Name -> whether it is defined, of an ELF64's symbol table (System V ABI, "Symbol Table")."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count = struct.unpack_from("<HH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQII", cubin, start + i * size) for i in range(count)]
    found = {}
    for _, kind, _, _, at, num_bytes, names, _ in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        for entry in range(at, at + num_bytes, 24):
            name, info, _, section = struct.unpack_from("<IBBH", cubin, entry)
            begin = sections[names][4] + name
            text = cubin[begin : cubin.index(b"\0", begin)].decode()
            if info >> 4:  # not local
                found[text] = section != 0
    return found


# What a driver gives a cubin that it loads.
OF_THE_DRIVER = {"__assertfail", ".nv.reservedSmem.offset0", ".nv.reservedSmem.cap"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_put_signal_and_flush_link(templates, arch):
    built = build.build(RailPlan(arch))
    cubin = built.cubin
    cubin.resources.check(built.plan)
    assert cubin.resources.spill_store_bytes == cubin.resources.spill_load_bytes == 0
    assert 0 < cubin.resources.num_regs <= 255
    found = symbols(cubin.data)
    assert found["rail_test"]
    assert {name for name, is_defined in found.items() if not is_defined} <= OF_THE_DRIVER
    called = re.findall(r"called: _Z\d+(\w+?)P9ncclGin_C\S*: frame of \d+ bytes", cubin.log)
    assert sorted(called) == ["ncclGinFlushTimeout", "ncclGinPut", "ncclGinSignal_v3"]
    assert built.origin == "compiled"
    build._memo.clear()
    again = build.build(RailPlan(arch))
    assert again.origin == "disk" and again.cubin.resources == cubin.resources


@pytest.mark.timeout(300)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_dispatch_and_combine_link(arch):
    """The kernels themselves: without spills or setmaxnreg, which ptxas ignores beside calls."""
    sent = dispatch_plan(arch, 7168, 16, 8, 16, "fp8", True, alignment=128, num_nodes=2, rail="gin")
    rows = dispatch_plan(arch, 7168, 16, 8, 16, num_nodes=2, rail="gin")
    for outcome in build.build_many([sent, combine_of(rows)]):
        assert outcome.error is None, outcome.error
        found = symbols(outcome.built.cubin.data)
        assert found[outcome.plan.name]
        assert {name for name, is_defined in found.items() if not is_defined} <= OF_THE_DRIVER


def test_a_symbol_that_no_library_has_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("JITMOE_CACHE_DIR", str(tmp_path / "cache"))
    body = "extern __device__ void nobody_has_it();\n    nobody_has_it();\n"
    use(make_templates(tmp_path / "templates", body), monkeypatch)
    with pytest.raises(CompileError, match=r"rail_test-\w+.cu does not link for sm_90a") as caught:
        build.build(RailPlan("sm_90a"))
    assert "nobody_has_it" in caught.value.log and Path(caught.value.source).is_file()


SPILLING = """\
float v[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = p.to * thread_idx() + i;
    for (int k = 0; k < p.bytes; ++k) {
#pragma unroll
        for (int i = 0; i < 64; ++i) v[i] = v[i] * v[(i * 7 + 1) % 64] + k;
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) reinterpret_cast<float*>(p.header)[i * 128 + thread_idx()] = v[i];
"""


def test_a_kernel_that_spills_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("JITMOE_CACHE_DIR", str(tmp_path / "cache"))
    directory = make_templates(tmp_path / "templates", SPILLING)
    use(directory, monkeypatch)
    room = directory / "rail_test.cu.jinja"
    room.write_text(room.read_text().replace("(kNumThreads, 1)", "(kNumThreads, 16)"))
    with pytest.raises(CompileError, match="registers spill"):
        build.build(RailPlan("sm_90a"))
    assert not list((tmp_path / "cache").glob("rail_test-*"))


LOG = """\
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     144 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 64 registers, used 0 barriers, 664 bytes cumulative stack size
ptxas info    : Function properties for other
ptxas         .     520 bytes stack frame, 228 bytes spill stores, 368 bytes spill loads
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
"""


def test_spills_are_the_kernels_own():
    log = link.own_log(LOG)
    found = nvrtc.parse_log(log)
    assert (found.spill_store_bytes, found.spill_load_bytes, found.num_regs) == (8, 16, 64)
    assert found.stack_bytes == 144 and len(found.messages) == 1
    assert "called: other: frame of 520 bytes, 228 of them saved" in log


def test_without_a_library(templates, monkeypatch):
    missing = link.Library("nvidia.nccl", "lib/libnobody.ltoir", "get one")
    elsewhere = link.Library("nobody_has.this", "lib/libnobody.ltoir", "get one")
    for library in (missing, elsewhere):
        monkeypatch.setitem(link.LIBRARIES, LIBRARY, library)
        with pytest.raises(ToolchainError) as caught:
            build.build(RailPlan("sm_90a"))
        assert str(caught.value) == (
            f"the kernel needs libnobody.ltoir, and Python finds none in {library.package}; get one"
        )
    assert "pip install 'jitmoe[nccl12]'" in link._LINKER


def test_without_nvjitlink(templates, monkeypatch):
    from cuda.bindings import nvjitlink

    def fail():
        raise RuntimeError("Failure finding libnvJitLink.so")

    link.version.cache_clear()
    monkeypatch.setattr(nvjitlink, "version", fail)
    with pytest.raises(ToolchainError, match=r"nvJitLink was not found; pip install 'jitmoe\[nccl"):
        build.build(RailPlan("sm_90a"))
    link.version.cache_clear()


def test_a_linker_that_is_too_old():
    log = "ERROR_OUTDATED_LIBRARY (14): may need newer version of nvJitLink library"
    error = link._refusal("k.cu", "sm_90a", log)
    assert isinstance(error, ToolchainError) and "is older than what made its input" in str(error)
    assert link.version() in str(error)
    assert not isinstance(link._refusal("k.cu", "sm_90a", "other"), ToolchainError)


def test_the_version_is_complete():
    assert re.fullmatch(r"\d+\.\d+\.\d+", link.version())


def test_the_key_follows_library_and_linker(templates, monkeypatch, tmp_path):
    plan = RailPlan("sm_90a")
    source = render.render(plan)
    keys = [build.key_of(plan, source)]
    assert keys[0] == build.key_of(plan, source)
    copy = tmp_path / "libnccl_device.ltoir"
    shutil.copy(link.find(LIBRARY), copy)
    with monkeypatch.context() as patch:
        patch.setattr(link, "find", lambda name: copy)
        assert build.key_of(plan, source) == keys[0]  # where it lies decides nothing
        with copy.open("ab") as file:
            file.write(b"\0")
        keys.append(build.key_of(plan, source))
    with monkeypatch.context() as patch:
        patch.setattr(link, "version", lambda: "12.9.0")
        keys.append(build.key_of(plan, source))
    monkeypatch.setenv("JITMOE_LINEINFO", "1")
    keys.append(build.key_of(plan, source))
    assert len(set(keys)) == 4


def test_without_libraries_nothing_of_the_linker_decides(monkeypatch):
    """The key and the compiler are those of before there was a linker."""
    plan = TinyPlan("sm_90a")
    monkeypatch.setattr(link, "version", None)
    monkeypatch.setattr(link, "find", None)
    before = cache.key("text", plan.arch, nvrtc.version(), nvrtc.options())
    assert plan.libraries == () and build.key_of(plan, "text") == before


# What NVRTC must find to read NCCL's headers, which are for compilers with a standard library.
STANDARD = {
    "stdint.h": "".join(
        f"typedef {kind} {sign}int{bits}_t;\n"
        for bits, name in ((8, "char"), (16, "short"), (32, "int"), (64, "long long"))
        for sign, kind in (("", f"signed {name}"), ("u", f"unsigned {name}"))
    )
    + "typedef uint64_t uintptr_t;\ntypedef int64_t intptr_t;\n"
}
EMPTY = (
    *("stdbool.h", "stddef.h", "stdlib.h", "limits.h", "stdio.h", "string.h", "assert.h"),
    *("errno.h", "cstdint", "cstddef", "cstdlib", "cstring", "cassert", "climits", "cmath"),
    *("new", "algorithm", "utility", "type_traits", "tuple"),
)
CALLS = """
extern "C" __global__ void calls(const ncclDevComm* comm, ncclWindow_vidmem* window, ncclGin_C* gin,
                                 ncclCoopAny coop, ncclTeam team) {
    using namespace cuda::std;
    ncclCoopAnyInitThread(&coop);
    ncclGin_C_init(gin, 60, *comm, 3);
    ncclGinPut(gin, team, 1, window, 0, window, 0, 16, false, 0, ncclGinSignalOp_t(0), 0, false, 0,
               coop, false, nullptr, thread_scope(0), thread_scope(0));
    ncclGinSignal_v3(gin, team, 1, ncclGinSignalType(1), window, 8, 0, true, ncclGinSignalOp_t(1),
                     3, coop, false, nullptr, thread_scope(0), thread_scope(0), 0);
    if (ncclGinFlushTimeout(gin, coop, memory_order(2), false, nullptr, 5) != 0) __trap();
}
"""
# Of our types in namespace `ours`, beside NCCL's.
CHECKS = """
#define SAME(type) \
    static_assert(sizeof(ours::type) == sizeof(::type) && alignof(ours::type) == alignof(::type))
SAME(ncclTeam);
SAME(ncclCoopAny);
SAME(ncclGinSignalType);
SAME(ncclGinSignalOp_t);
SAME(ncclResult_t);
SAME(cuda::std::thread_scope);
SAME(cuda::std::memory_order);
static_assert(sizeof(::ncclGin_C) <= sizeof(ours::ncclGin_C));
static_assert(alignof(::ncclGin_C) <= alignof(ours::ncclGin_C));
static_assert(alignof(::ncclDevComm) <= ours::kGinCommAt);
static_assert(__INTADDR__(&((ncclTeam*)0)->rank) == __INTADDR__(&((ours::ncclTeam*)0)->rank));
static_assert(__INTADDR__(&((ncclTeam*)0)->stride) == __INTADDR__(&((ours::ncclTeam*)0)->stride));
static_assert(ours::kNcclSuccess == int(ncclSuccess));
static_assert(ours::kSignalNone == int(NCCL_GIN_SIGNAL_TYPE_NONE));
static_assert(ours::kSignalAtAddress == int(NCCL_GIN_SIGNAL_TYPE_VA));
static_assert(ours::kSignalInc == int(ncclGinSignalInc));
static_assert(ours::kSignalAdd == int(ncclGinSignalAdd));
static_assert(int(ours::cuda::std::kScopeSystem) == int(cuda::thread_scope_system));
static_assert(int(ours::cuda::std::memory_order::kAcquire) == int(cuda::memory_order_acquire));
static_assert(ours::kGinBackends == NCCL_GIN_BACKEND_MASK_ALL);
static_assert(int(ncclGinOptFlagsDefault) == 0);
"""


def declarations() -> str:
    """What rail_gin.cuh says of NCCL."""
    text = (render.templates_dir() / "device" / "rail_gin.cuh").read_text()
    return text[: text.index("// What one thread needs")]


def size_of_communicator() -> str:
    """A check that what nccl4py copies to the GPU is what the device library reads there."""
    nccl = pytest.importorskip("nccl.core", reason="needs nccl4py: pip install '.[nccl]'")
    from nccl.bindings import nccl as bindings

    if nccl.get_version().nccl_bindings.release != nccl_rail._device_release():
        return ""  # and a group refuses them together
    return f"static_assert(sizeof(ncclDevComm) == {len(bytes(bindings.DevComm()))});"


NAMES = "using u32 = unsigned int;\nusing u64 = unsigned long long;\n"


@pytest.fixture(scope="module")
def headers(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("standard")
    for name in EMPTY:
        (folder / name).write_text('#include "stdint.h"\n')
    for name, text in STANDARD.items():
        (folder / name).write_text(text)
    found = [str(folder), str(link.find(LIBRARY).parents[1] / "include")]
    for package in ("cuda_cccl", "cuda_runtime"):
        spec = find_spec(f"nvidia.{package}")
        if spec is None:
            pytest.skip(f"needs nvidia-{package.replace('_', '-')}-cu12, of the dev extra")
        found.append(str(Path(spec.submodule_search_locations[0]) / "include"))
    return found


def functions(text: str, include: list[str]) -> dict[str, list[tuple[str, str]]]:
    """External function -> the types of its parameters and result in PTX. That all of its mangled
    name is right is seen by linking: NVRTC spells the header's 64 bits otherwise.
    """
    from cuda.bindings import nvrtc as bindings

    _, program = bindings.nvrtcCreateProgram(text.encode(), b"calls.cu", 0, [], [])
    options = ["-arch=sm_90a", "-std=c++20", "-rdc=true", "-default-device"]
    options += [
        "-D__NCCL_DEVICE_LTOIR_LIB__",
        "-DNCCL_OS_LINUX",
        *(f"-I{path}" for path in include),
    ]
    (status,) = bindings.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    log = bytearray(bindings.nvrtcGetProgramLogSize(program)[1])
    bindings.nvrtcGetProgramLog(program, log)
    assert not int(status), log.decode()
    ptx = bytearray(bindings.nvrtcGetPTXSize(program)[1])
    bindings.nvrtcGetPTX(program, ptx)
    found = {}
    pattern = r"\.extern \.func\s+(?:\((.*?)\)\s*)?(\w+)\s*\((.*?)\)\s*;"
    for match in re.finditer(pattern, ptx.decode(), re.S):
        num_chars, rest = re.fullmatch(r"_Z(\d+)(\w+)", match[2]).groups()
        types = re.findall(r"\.param ([^_]*) _\w+?_param_\d+(\[\d+\])?", match[3])
        found[rest[: int(num_chars)]] = [*types, (match[1] or "", "")]
    return found


def test_declarations_are_those_of_the_headers(headers):
    header = '#include "nccl_device_wrapper.h"\n#include "nccl_device/gin.h"\n'
    beside = NAMES + "namespace ours {\n" + declarations() + "}\n" + CHECKS
    functions(header + beside + size_of_communicator(), headers)
    theirs, ours = functions(header + CALLS, headers), functions(NAMES + declarations() + CALLS, [])
    assert len(theirs) == 5 and {len(types) for types in theirs.values()} == {2, 5, 7, 17, 20}
    assert ours == theirs
