"""The emulated machine: what MXFP4 kernels take more of it than others do. Multiplies whose first
operand is in registers, matrices loaded into these, copies of tensors with the swizzle of 64 bytes,
groups of cp.async.
"""

from dataclasses import replace

import numpy as np
import pytest
from machine_plan import PLAN, random_data, render_kernel, run

from jitmoe import fp8
from jitmoe.emulate.compile import NoHostCompiler, compiler
from jitmoe.emulate.run import EmulationError
from jitmoe.jit import nvrtc

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

SEEDS = range(6)
KINDS = {"e4m3": replace(PLAN, quantizes=True), "bf16": replace(PLAN, quantizes=False)}
# Bytes become numbers whose products are floats: bf16 from 0.5 to below 2.
MASKS = {"e4m3": (0x7F7F7F7F, 0), "bf16": (0x007F007F, 0x3F003F00)}


def failure(directory, body, **options) -> str:
    """The report of a kernel that fails under some seed."""
    for seed in SEEDS:
        try:
            run(directory, body, seed=seed, **options)
        except EmulationError as error:
            return str(error)
    pytest.fail("nothing was reported")


# A is bytes 128 .. of rows 64 .. of data; the columns of B are bytes 0 .. of the first rows.
MULTIPLY = """
    init_barriers(smem, 1);
    if (thread_idx() == 0) {
        arrive_expect_bytes(&smem.barriers[0], 8192);
        load_tile_2d(smem.tiles[1], &p.map, &smem.barriers[0], 0, 0);
    }
    wait(&smem.barriers[0], 0);
    sync_block();
    for (u32 i = thread_idx(); i < 2048; i += 128) {
        u32& word = reinterpret_cast<u32*>(smem.tiles[1])[i];
        word = (word & MASK) | SET;
    }
    const u32 row = 64 + warp_idx() * 16 + lane_idx() / 4, column = 128 + lane_idx() % 4 * 4;
    u32 a[2][4];
    for (u32 i = 0; i < 8; ++i) {
        const u8* from = p.data + (row + i % 2 * 8) * 256 + column + i / 2 * 16;
        a[i / 4][i % 4] = (*reinterpret_cast<const u32*>(from) & MASK) | SET;
    }
    fence_async_shared();
    sync_block();
    const u32 b = descriptor_low(smem.tiles[1]);
    float d[NUM / 2];
    for (u32 i = 0; i < NUM / 2; ++i) d[i] = 1000.0f;
    BODY
    sync_block();
    for (u32 i = 0; i < NUM / 2; ++i) {
        const u32 to = (row - 64 + i % 4 / 2 * 8) * NUM + i / 4 * 8 + lane_idx() % 4 * 2 + i % 2;
        reinterpret_cast<float*>(p.data)[to] = d[i];
    }"""
FIRST = "wgmma_registers<ACCUMULATE, 0>(d, a[0], b);"
SECOND = "wgmma_registers<true, descriptor_step(32)>(d, a[1], b);"
FENCE, COMMIT, WAIT = "wgmma_fence();", "wgmma_commit();", "wgmma_wait<0>();"


def text_of(kind, num, *statements, accumulate=True):
    mask, bits = MASKS[kind]
    text = MULTIPLY.replace("BODY", "\n    ".join(statements)).replace("NUM", str(num))
    text = text.replace("ACCUMULATE", str(accumulate).lower())
    return text.replace("MASK", f"{mask:#x}u").replace("SET", f"{bits:#x}u")


def product(kind, num, depth=64, accumulate=True):
    """Of the first `depth` bytes of rows."""
    mask, bits = MASKS[kind]
    words = random_data(0).view(np.uint32) & np.uint32(mask) | np.uint32(bits)
    codes = words.view(np.uint8 if kind == "e4m3" else np.uint16)
    values = (fp8.decode_e4m3 if kind == "e4m3" else fp8.decode_bf16)(codes).astype(np.float64)
    wide = codes.itemsize
    a = values[64:, 128 // wide : (128 + depth) // wide]
    return 1000 * accumulate + a @ values[:num, : depth // wide].T


def result(data, num):
    return data.reshape(-1).view(np.float32)[: 64 * num].reshape(64, num)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("num", [8, 16, 24, 32, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_multiplies_with_registers(tmp_path, kind, num, accumulate):
    """Two that are chained, the second 32 bytes further on in both operands."""
    statements = FENCE, FIRST, SECOND, COMMIT, WAIT
    text = text_of(kind, num, *statements, accumulate=accumulate)
    for checked in (False, True):
        ((data, _),) = run(tmp_path, text, plan=KINDS[kind], checked=checked)
        wanted = product(kind, num, accumulate=accumulate)
        np.testing.assert_allclose(result(data, num), wanted, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_registers_of_another_multiply_may_change(tmp_path, kind):
    """Behind a wait for its group, while the next is under way."""
    text = text_of(
        kind, 8, FENCE, FIRST, COMMIT, SECOND, COMMIT, "wgmma_wait<1>();", "a[0][1] = 0;", WAIT
    )
    for seed in SEEDS:
        ((data, _),) = run(tmp_path, text, plan=KINDS[kind], seed=seed)
        np.testing.assert_allclose(result(data, 8), product(kind, 8), rtol=1e-6)


@pytest.mark.parametrize("change", ["a[0][1] = 0;", "a[1][3] = 0;"])
@pytest.mark.parametrize("kind", KINDS)
def test_registers_must_not_change_under_a_multiply(tmp_path, kind, change):
    """The result is wrong, as it may be on a GPU."""
    text = text_of(kind, 8, FENCE, FIRST, SECOND, COMMIT, change, WAIT)
    is_wrong = []
    for seed in SEEDS:
        ((data, _),) = run(tmp_path, text, plan=KINDS[kind], seed=seed)
        is_wrong.append(not np.allclose(result(data, 8), product(kind, 8), rtol=1e-6))
    assert any(is_wrong)


@pytest.mark.parametrize(
    "statements",
    [
        (FIRST, COMMIT, WAIT),
        (FENCE, FIRST, COMMIT, WAIT, "a[1][0] ^= 0;", SECOND, COMMIT, WAIT),
    ],
    ids=["none", "behind a wait"],
)
def test_a_missing_fence_is_reported(tmp_path, statements):
    text = text_of("e4m3", 8, *statements)
    assert "since the last wgmma.fence" in failure(tmp_path, text)


def test_a_multiply_that_is_not_waited_for_is_reported(tmp_path):
    text = text_of("e4m3", 8, FENCE, FIRST, COMMIT)
    assert "exit with matrix multiplies in flight" in failure(tmp_path, text)


def test_lanes_must_agree(tmp_path):
    text = text_of(
        "e4m3", 8, FENCE, f"if (lane_idx() == 3) {{ {SECOND} }} else {{ {FIRST} }}", COMMIT, WAIT
    )
    assert "lanes of a warp issue different operations" in failure(tmp_path, text)


@pytest.mark.parametrize("kind", KINDS)
def test_multiplies_compile_for_the_device(tmp_path, kind):
    for num in (8, 64):
        text = text_of(kind, num, FENCE, FIRST, SECOND, COMMIT, WAIT)
        text = render_kernel(tmp_path, text, "device", KINDS[kind])
        assert nvrtc.compile(text, "sm_90a", PLAN.name).resources.spill_store_bytes == 0


# Matrices


MATRICES = """
    for (u32 i = thread_idx(); i < 2048; i += 128) {
        reinterpret_cast<u32*>(smem.tiles[0])[i] = reinterpret_cast<const u32*>(p.data)[i];
    }
    SYNC
    u32 m[NUM] = {};
    const u8* row = smem.tiles[0] + (warp_idx() * 16 + lane_idx() % 16) * 128;
    load_matrices(row + lane_idx() / 16 * 16, m);
    for (u32 i = 0; i < 2; ++i) p.words[thread_idx() * 2 + i] = m[NUM - 2 + i];"""


def matrices(num, sync="sync_block();"):
    return MATRICES.replace("NUM", str(num)).replace("SYNC", sync)


@pytest.mark.parametrize("num", [2, 4])
def test_matrices_are_loaded(tmp_path, num):
    """Rows 0 .. 7 and 8 .. 15 of a warp's 16, bytes 0 .. 15, and then 16 .. 31: a lane gets word
    l % 4 of row l / 4 of each.
    """
    ((data, words),) = run(tmp_path, matrices(num))
    rows = data.reshape(-1)[:8192].view(np.uint32).reshape(4, 2, 8, 32)  # warp, half, row, word
    chunk = rows[..., 4 * (num // 2 - 1) :][..., :4]
    assert np.array_equal(words.reshape(4, 8, 4, 2), chunk.transpose(0, 2, 3, 1))


def test_loads_of_matrices_are_watched(tmp_path):
    assert "data race on tiles[0]" in failure(tmp_path, matrices(4, sync=""))
    text = matrices(4).replace("load_matrices(row", "load_matrices(row + 8")
    assert "ldmatrix" in failure(tmp_path, text)


def test_loads_of_matrices_compile_for_the_device(tmp_path):
    for num in (2, 4):
        text = render_kernel(tmp_path, matrices(num), "device")
        assert nvrtc.compile(text, "sm_90a", PLAN.name).resources.spill_store_bytes == 0


# Swizzles of tensor copies


NARROW = """
    init_barriers(smem, 1);
    if (thread_idx() == 0) {
        arrive_expect_bytes(&smem.barriers[0], BYTES);
        load_tile_2d(smem.tiles[0], &p.narrow_map, &smem.barriers[0], 64, 32);
    }
    wait(&smem.barriers[0], 0);
    for (u32 i = thread_idx(); i < 256; i += 128) {
        const u32 row = i / 4, chunk = i % 4;
        const u8* from = smem.tiles[0] + row * 64 + (chunk ^ row / 2 % 4) * 16 + row % 4 * 4;
        p.words[i] = *reinterpret_cast<const u32*>(from);
    }"""


def test_rows_of_64_bytes_have_a_swizzle_of_their_own(tmp_path):
    """Chunk c of row r lands at c XOR r / 2 % 4."""
    ((data, words),) = run(tmp_path, NARROW.replace("BYTES", "4096"))
    rows = np.arange(64)
    chunks = data[32:96, 64:128].copy().view(np.uint32).reshape(64, 4, 4)
    assert np.array_equal(words.reshape(64, 4), chunks[rows, :, rows % 4])


def test_rows_of_64_bytes_are_as_many_bytes(tmp_path):
    assert "data race on tiles[0]" in failure(tmp_path, NARROW.replace("BYTES", "2048"))
    assert "stall" in failure(tmp_path, NARROW.replace("BYTES", "8192"))


# Groups of cp.async


OLD = "copy_4_async(smem.words + thread_idx(), p.data + 4 * thread_idx());"
NEW = "copy_4_async(smem.words + 128 + thread_idx(), p.data + 512 + 4 * thread_idx());"
GROUP = "commit_copies();"
READ_OLD = "p.words[thread_idx()] = smem.words[thread_idx()];"
READ_NEW = "p.words[128 + thread_idx()] = smem.words[128 + thread_idx()];"
NEIGHBOUR = "p.words[thread_idx()] = smem.words[127 - thread_idx()];"


def wait_for(newest):
    return f"wait_for_copy_groups<{newest}>();"


@pytest.mark.parametrize(
    "statements",
    [
        (OLD, GROUP, NEW, GROUP, wait_for(1), READ_OLD, wait_for(0), READ_NEW),
        (OLD, GROUP, NEW, GROUP, wait_for(0), READ_OLD, READ_NEW),
        (OLD, NEW, GROUP, wait_for(0), READ_NEW, READ_OLD),
        (OLD, GROUP, GROUP, wait_for(1), READ_OLD, NEW, GROUP, wait_for(0), READ_NEW),
        (OLD, GROUP, NEW, "wait_for_copies();", READ_OLD, READ_NEW),
    ],
    ids=["one by one", "both", "in one", "an empty one", "all"],
)
def test_groups_that_are_waited_for_have_landed(tmp_path, statements):
    for seed in SEEDS:
        ((data, words),) = run(tmp_path, "\n".join(statements), seed=seed)
        assert np.array_equal(words, data.reshape(-1).view(np.uint32)[:256])


@pytest.mark.parametrize(
    "statements",
    [
        (OLD, GROUP, NEW, GROUP, wait_for(1), READ_NEW, wait_for(0)),
        (OLD, GROUP, NEW, GROUP, wait_for(2), READ_OLD, wait_for(0)),
        (OLD, GROUP, NEW, wait_for(0), READ_NEW, "wait_for_copies();"),
        (OLD, wait_for(0), READ_OLD, "wait_for_copies();"),
    ],
    ids=["the newest", "two newest", "one not committed", "none committed"],
)
def test_groups_that_are_not_waited_for_may_not_have_landed(tmp_path, statements):
    """The checked build reports the read; without it the copy is later than the read."""
    text = "\n".join(statements)
    assert "data race on words[" in failure(tmp_path, text)
    late = []
    for seed in SEEDS:
        ((data, words),) = run(tmp_path, text, seed=seed, checked=False)
        read = slice(128, 256) if READ_NEW in statements else slice(0, 128)
        late.append(not np.array_equal(words[read], data.reshape(-1).view(np.uint32)[:256][read]))
    assert any(late)


def test_groups_are_a_threads_own(tmp_path):
    wait = OLD + GROUP + wait_for(0)
    ((data, words),) = run(tmp_path, wait + "sync_block();" + NEIGHBOUR)
    assert np.array_equal(words[127::-1], data.reshape(-1).view(np.uint32)[:128])
    assert "data race on words[" in failure(tmp_path, wait + NEIGHBOUR)


def test_a_ring_of_groups(tmp_path):
    """As role_gather has it: a slot is copied into again when what was read of it is behind."""
    text = """
    for (u32 i = 0; i < 6; ++i) {
        if (i >= 2) {
            wait_for_copy_groups<NEWEST>();
            p.words[thread_idx()] += smem.words[i % 2 * 128 + thread_idx()];
        }
        u32* slot = smem.words + i % 2 * 128 + thread_idx();
        if (i < 4) copy_4_async(slot, p.data + i * 512 + 4 * thread_idx());
        commit_copies();
    }"""
    ((data, words),) = run(tmp_path, text.replace("NEWEST", "1"))
    parts = data.reshape(-1)[:2048].view(np.uint32).reshape(4, 128)
    assert np.array_equal(words[:128], parts.sum(axis=0, dtype=np.uint32))
    assert "data race on words[" in failure(tmp_path, text.replace("NEWEST", "2"))
