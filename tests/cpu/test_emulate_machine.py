"""The emulated machine: orderings that exist, races where they do not, misuse, ranks, clusters."""

import re

import numpy as np
import pytest
from machine_plan import PLAN, render_kernel, run

from jitmoe.emulate.compile import NoHostCompiler, build, compiler
from jitmoe.emulate.run import Array, EmulationError, Rank, launch
from jitmoe.jit import nvrtc

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

SEEDS = range(4)


def failure(directory, body, **options) -> str:
    """The report of a kernel that fails under some seed."""
    for seed in SEEDS:
        try:
            run(directory, body, seed=seed, **options)
        except EmulationError as error:
            return str(error)
    pytest.fail("nothing was reported")


def passes(directory, body, **options):
    for seed in SEEDS:
        results = run(directory, body, seed=seed, **options)
    return results


def test_a_barrier_orders_and_its_absence_is_a_race(tmp_path):
    write = "smem.words[thread_idx()] = thread_idx();"
    read = "p.words[thread_idx()] = smem.words[127 - thread_idx()];"
    ((_, words),) = passes(tmp_path, write + "sync_block();" + read)
    assert np.array_equal(words[:128], np.arange(127, -1, -1))
    report = failure(tmp_path, write + "\n" + read)
    assert "data race on words[0]" in report
    assert report.count("work warp") >= 2 and report.count("kernel.cpp:") == 2


def test_a_shuffle_orders_nothing(tmp_path):
    body = """
    const u32 warp = warp_idx();
    if (lane_idx() == 0) smem.words[warp] = 7;
    {sync}
    p.words[thread_idx()] = smem.words[warp];"""
    passes(tmp_path, body.replace("{sync}", "sync_warp();"))
    shuffle = "if (__ballot_sync(kFullMask, true) == 0) return;"
    assert "data race on words" in failure(tmp_path, body.replace("{sync}", shuffle))


MESSAGE = """
    u32* flag = p.words + 128;
    if (block_idx() == 0) {
        p.words[thread_idx()] = thread_idx() + 1;
        sync_block();
        if (thread_idx() == 0) {post};
    } else {
        while ({poll} != 1) {
        }
        p.data[block_idx() * 128 + thread_idx()] = u8(p.words[thread_idx()]);
    }"""
RELEASE, RELAXED = "add_release_gpu(flag, 1)", "fetch_add_relaxed_gpu(flag, 1)"
ACQUIRE, POLL = "load_acquire_gpu(flag)", "load_relaxed_gpu(flag)"


@pytest.mark.parametrize(
    "post, poll, is_ordered",
    [
        (RELEASE, ACQUIRE, True),
        (RELAXED, ACQUIRE, False),
        (RELEASE, POLL, False),
        ("emu::fetch_add(flag, 1, emu::kRelease, emu::kCta)", ACQUIRE, False),
    ],
)
def test_release_and_acquire_with_scopes(tmp_path, post, poll, is_ordered):
    body = MESSAGE.replace("{post}", post).replace("{poll}", poll)
    if is_ordered:
        passes(tmp_path, body, num_blocks=3)
    else:
        assert "data race on words" in failure(tmp_path, body, num_blocks=3)


@pytest.mark.parametrize("scope", ["kSys", "kGpu"])
def test_ranks_exchange_through_peers_memory_at_system_scope(tmp_path, scope):
    body = """
    u32* peer = p.peers[p.rank ^ 1];
    peer[thread_idx()] = 100 * p.rank + thread_idx();
    sync_block();
    if (thread_idx() == 0) emu::fetch_add(peer + 128, 1, emu::kRelease, emu::SCOPE);
    while (emu::load(p.words + 128, emu::kAcquire, emu::SCOPE) != 1) {
    }
    p.data[thread_idx()] = u8(p.words[thread_idx()]);""".replace("SCOPE", scope)
    if scope == "kGpu":
        assert "of rank 1" in failure(tmp_path, body, num_ranks=2)
        return
    ranks = passes(tmp_path, body, num_ranks=2)
    for rank, (data, _) in enumerate(ranks):
        assert np.array_equal(data[0, :128], 100 * (1 - rank) % 256 + np.arange(128))


def test_a_stall_names_rank_and_flag(tmp_path):
    body = "while (p.rank == 1 && load_acquire_gpu(p.words + 5) == 0) {\n}"
    report = failure(tmp_path, body, num_ranks=2)
    assert report.startswith("stall")
    line = "work warp 3 of block 0 of rank 1 waits for flag words@rank1 + 20 bytes, which holds 0"
    assert line in report


LOAD = """
    init_barriers(smem, 1);
    {before}
    if (thread_idx() == 0) {
        {fence}
        arrive_expect_bytes(&smem.barriers[0], 8192);
        load_tile_2d(smem.tiles[0], &p.map, &smem.barriers[0], 0, 0);
    }
    {wait}
    {after}"""


def load(before="", fence="", wait="wait(&smem.barriers[0], 0);", after="") -> str:
    body = LOAD
    for name, text in (("before", before), ("fence", fence), ("wait", wait), ("after", after)):
        body = body.replace("{" + name + "}", text)
    return body


def test_a_tensor_copy_is_ordered_by_its_barrier_alone(tmp_path):
    read = "p.words[thread_idx()] = smem.tiles[0][thread_idx() * 64];"
    passes(tmp_path, load(after=read))
    assert "data race on tiles[0]" in failure(tmp_path, load(wait="", after=read))


def test_copies_of_a_thread_are_its_own_to_wait_for(tmp_path):
    copy = "copy_4_async(smem.words + thread_idx(), p.data + 4 * thread_idx());\n"
    read = "p.words[thread_idx()] = smem.words[thread_idx()];"
    ((data, words),) = passes(tmp_path, copy + "wait_for_copies();" + read)
    assert np.array_equal(words[:128], data.reshape(-1).view(np.uint32)[:128])
    assert "data race on words[" in failure(tmp_path, copy + read)
    others = read.replace("smem.words[thread_idx()]", "smem.words[127 - thread_idx()]")
    passes(tmp_path, copy + "wait_for_copies(); sync_block();" + others)
    assert "data race on words[" in failure(tmp_path, copy + "wait_for_copies();" + others)
    assert "data race on words[" in failure(tmp_path, copy + "sync_block();" + others)
    again = "wait_for_copies();" + read + copy.replace("4 * ", "512 + 4 * ") + "wait_for_copies();"
    ((data, words),) = passes(tmp_path, copy + again + read)
    assert np.array_equal(words[:128], data.reshape(-1).view(np.uint32)[128:256])


def test_a_wrong_byte_count_lets_readers_in_too_early(tmp_path):
    body = load(after="p.words[thread_idx()] = smem.tiles[0][thread_idx() * 64];")
    assert "data race on tiles[0]" in failure(tmp_path, body.replace("8192", "4096"))


def test_generic_writes_need_a_proxy_fence_before_a_tensor_copy_reads_or_overwrites(tmp_path):
    scribble = "smem.tiles[0][thread_idx() * 64] = 1; sync_block();"
    report = failure(tmp_path, load(before=scribble))
    assert "fence.proxy.async is missing" in report
    passes(tmp_path, load(before=scribble, fence="fence_async_shared();"))
    # In global memory the copy brings garbage instead, which shows in what it is used for.
    make = "p.data[thread_idx()] = 5; sync_block();"
    use = "p.words[thread_idx()] = smem.tiles[0][thread_idx()];"
    ((_, words),) = passes(tmp_path, load(before=make, after=use))
    assert (words[:128] == 0xFF).all()
    ((_, words),) = passes(tmp_path, load(before=make, fence="fence_async_global();", after=use))
    assert (words[:128] == 5).all()


def test_the_proxy_fence_belongs_in_the_block_of_the_copy(tmp_path):
    body = """
    init_barriers(smem, 1);
    if (block_idx() == 0) {
        p.data[thread_idx()] = 9;
        {writer}
        sync_block();
        if (thread_idx() == 0) add_release_gpu(p.words + 200, 1);
    } else {
        if (thread_idx() == 0) {
            while (load_acquire_gpu(p.words + 200) != 1) {
            }
            {reader}
            arrive_expect_bytes(&smem.barriers[0], 8192);
            load_tile_2d(smem.tiles[0], &p.map, &smem.barriers[0], 0, 0);
        }
        wait(&smem.barriers[0], 0);
        p.words[thread_idx()] = smem.tiles[0][thread_idx()];
    }"""
    for fenced, value in (("reader", 9), ("writer", 0xFF)):
        text = body.replace("{" + fenced + "}", "fence_async_global();")
        text = text.replace("{writer}", "").replace("{reader}", "")
        ((_, words),) = passes(tmp_path, text, num_blocks=2)
        assert (words[:128] == value).all()


def test_reads_need_no_proxy_fence_before_they_are_overwritten(tmp_path):
    read = "p.words[thread_idx()] = smem.tiles[0][thread_idx() * 64];"
    passes(tmp_path, load(before=read + "sync_block();"))
    assert "data race on tiles[0]" in failure(tmp_path, load(before=read))


@pytest.mark.parametrize(
    "body, report",
    [
        ("if (thread_idx() == 0) arrive(&smem.barriers[0]);", "not an initialised mbarrier"),
        (
            "init_barriers(smem, 1); if (thread_idx() < 2) arrive(&smem.barriers[0]);"
            "sync_block(); if (thread_idx() == 0) wait(&smem.barriers[0], 0);",
            "stall",
        ),
        ("if (thread_idx() == 0) init_barrier(&smem.barriers[0], 0);", "with 0 arrivals"),
        (
            "init_barriers(smem, 2); if (thread_idx() == 0) { arrive(&smem.barriers[0]);"
            "wait(&smem.barriers[0], 0); }",
            "lacks 1 of 2 arrivals",
        ),
        ("sync_named(1, 96);", "threads at named barrier 1|stall"),
        ("if (lane_idx() < 31) sync_warp(); sync_block();", "stall"),
        ("p.words[thread_idx() == 5 ? 256 : thread_idx()] = 1;", "of words, which has 1024"),
        ("p.words[i32(thread_idx()) - 1] = 1;", "before words"),
        ("smem.words[thread_idx() + 200] = 1;", "index [0-9]+ out of bounds"),
        ("p.words[thread_idx()] = 1u << (thread_idx() + 30);", "shift exponent"),
        ("set_registers<240>(); set_registers<64>();", "setmaxnreg"),
    ],
)
def test_misuse_is_reported(tmp_path, body, report):
    assert re.search(report, failure(tmp_path, body))


def test_a_barrier_must_be_fenced_before_a_copy_completes_on_it(tmp_path):
    body = """
    if (thread_idx() == 0) {
        init_barrier(&smem.barriers[0], 1);
        arrive_expect_bytes(&smem.barriers[0], 8192);
        load_tile_2d(smem.tiles[0], &p.map, &smem.barriers[0], 0, 0);
        wait(&smem.barriers[0], 0);
    }"""
    assert "no fence.mbarrier_init" in failure(tmp_path, body)


CLUSTER = """
    init_barriers(smem, 128);
    const u32 other = cluster_rank() ^ 1;
    smem.words[thread_idx()] = 1000 * cluster_rank() + thread_idx();
    {sync}
    p.words[block_idx() * 128 + thread_idx()] = *map_shared(&smem.words[thread_idx()], other);
    {leave}"""


def test_a_cluster_reads_its_blocks_shared_memory(tmp_path):
    body = CLUSTER.replace("{leave}", "sync_cluster();")
    ((_, words),) = passes(
        tmp_path, body.replace("{sync}", "sync_cluster();"), num_blocks=2, cluster_size=2
    )
    assert np.array_equal(words, [*range(1000, 1128), *range(128)])
    missing = failure(tmp_path, body.replace("{sync}", ""), num_blocks=2, cluster_size=2)
    assert "data race on" in missing


def test_a_block_must_not_leave_before_others_have_used_its_shared_memory(tmp_path):
    body = CLUSTER.replace("{sync}", "sync_cluster();").replace("{leave}", "")
    assert "which is over" in failure(tmp_path, body, num_blocks=2, cluster_size=2)


@pytest.mark.parametrize("wait", ["try_wait_cluster", "try_wait"])
def test_arrivals_of_other_blocks_need_an_acquire_at_cluster_scope(tmp_path, wait):
    body = """
    init_barriers(smem, 128);
    sync_cluster();
    const u32 other = cluster_rank() ^ 1;
    *map_shared(&smem.words[thread_idx()], other) = 7 + cluster_rank();
    arrive_cluster(&smem.barriers[0], other);
    while (!WAIT(&smem.barriers[0], 0)) {
    }
    p.words[block_idx() * 128 + thread_idx()] = smem.words[127 - thread_idx()];
    sync_cluster();""".replace("WAIT", wait)
    options = {"num_blocks": 2, "cluster_size": 2}
    if wait == "try_wait":
        assert "data race on words" in failure(tmp_path, body, **options)
        return
    ((_, words),) = passes(tmp_path, body, **options)
    assert (words[:128] == 8).all() and (words[128:] == 7).all()


MULTICAST = """
    init_barriers(smem, 1);
    sync_cluster();
    if (thread_idx() == 0) {
        arrive_expect_bytes(&smem.barriers[0], 2 * 8192);
        load_tile_2d_multicast(smem.tiles[cluster_rank()], &p.map, &smem.barriers[0],
                               cluster_rank() * 128, 0, 3);
    }
    wait(&smem.barriers[0], 0);
    p.words[block_idx() * 128 + thread_idx()] =
        smem.tiles[0][thread_idx() / 2 * 128] + 1000 * smem.tiles[1][thread_idx() / 2 * 128];
    sync_cluster();"""


def test_multicast_lands_in_every_block(tmp_path):
    ((data, words),) = passes(tmp_path, MULTICAST, num_blocks=2, cluster_size=2)
    rows = np.repeat(np.arange(64), 2)
    chunk = rows % 8 * 16  # byte 0 of a swizzled row holds this byte of the row
    expected = data[rows, chunk] + 1000 * data[rows, 128 + chunk].astype(np.uint32)
    assert np.array_equal(words.reshape(2, 128), [expected, expected])


def test_cluster_functions_compile_for_the_device(tmp_path):
    body = MULTICAST + CLUSTER.replace("init_barriers(smem, 128);", "").replace(
        "{sync}", "arrive_cluster(&smem.barriers[1], 0); try_wait_cluster(&smem.barriers[1], 0);"
    ).replace("{leave}", "sync_cluster();")
    cubin = nvrtc.compile(render_kernel(tmp_path, body, "device"), "sm_90a", PLAN.name)
    assert cubin.resources.spill_store_bytes == 0


@pytest.mark.parametrize("hardware", [False, True])
def test_hardware_sums_differ_from_exact_ones_where_bits_are_cut_off(tmp_path, hardware):
    """One product of 2^14 and 31 of 1 / 64: all below the 13 bits that are kept."""
    body = """
    u8 large = 0x68, small = 0x20;  // 2^6 and 2^-3
    for (u32 i = thread_idx(); i < 8192; i += 128) smem.tiles[0][i] = smem.tiles[1][i] = small;
    sync_block();
    if (thread_idx() < 64) {
        const u32 row = thread_idx(), chunk = (row % 8) << 4;
        smem.tiles[0][row * 128 + chunk] = smem.tiles[1][row * 128 + chunk] = large;
    }
    fence_async_shared();
    sync_block();
    float d[4];
    wgmma_fence();
    wgmma<false, 0, 0>(d, descriptor_low(smem.tiles[0]), descriptor_low(smem.tiles[1]));
    wgmma_commit();
    wgmma_wait<0>();
    p.words[thread_idx()] = __float_as_uint(d[0]);"""
    executable = build(render_kernel(tmp_path, body), PLAN.name, checked=True)
    words = np.zeros(256, np.uint32)
    arrays = {"words": Array(words, writable=True)}
    launch(executable, PLAN, [Rank(arrays, {})], hardware_sums=hardware)
    exact = 4096 + 31 / 64
    expected = 4096.0 if hardware else exact
    assert (words[:128].view(np.float32) == np.float32(expected)).all()
