"""Bulk copies from shared to global memory on the emulated machine: their groups, what orders them,
and what is reported where nothing does.
"""

import re

import numpy as np
import pytest
from machine_plan import PLAN, render_kernel, run

from jitmoe.emulate.compile import NoHostCompiler, compiler
from jitmoe.emulate.run import EmulationError
from jitmoe.jit import nvrtc

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

SEEDS = range(6)


def failure(directory, body, **options) -> str:
    """The report of a kernel that fails under some seed."""
    for seed in SEEDS:
        try:
            run(directory, body, seed=seed, **options)
        except EmulationError as error:
            return str(error)
    pytest.fail("nothing was reported")


def passes(directory, body, **options) -> list:
    """The results of every seed."""
    return [run(directory, body, seed=seed, **options) for seed in SEEDS]


FILL = "reinterpret_cast<u32*>(smem.tiles[0])[thread_idx()] = 1000 + thread_idx();"
FENCE = "fence_async_shared();"
STORE = "store_bulk(p.words, smem.tiles[0], 512); commit_stores();"
WAIT, WAIT_READ = "wait_for_stores<0>();", "wait_for_stores_read<0>();"
READ = "p.data[thread_idx()] = u8(p.words[127 - thread_idx()]);"
VALUES = 1000 + np.arange(128)


def one_thread(*statements, sync="sync_block();") -> str:
    return sync + "\nif (thread_idx() == 0) {\n" + "\n".join(statements) + "\n}\n"


def store(wait=WAIT, fence=FENCE, before="", after="") -> str:
    """A store of what every thread has written."""
    return FILL + fence + one_thread(before, STORE, wait, after)


def test_a_store_arrives(tmp_path):
    for ((data, words),) in passes(tmp_path, store() + "sync_block();" + READ):
        assert np.array_equal(words[:128], VALUES) and not words[128:].any()
        assert np.array_equal(data[0, :128], VALUES[::-1] % 256)


def test_generic_writes_to_the_source_take_a_proxy_fence(tmp_path):
    """By who writes, or by who stores once it knows of the writes."""
    report = failure(tmp_path, store(fence=""))
    assert "data race on tiles[0]" in report and "fence.proxy.async is missing" in report
    assert "read by a bulk store of work warp 0" in report
    passes(tmp_path, store(fence="", before=FENCE))
    early = FENCE + FILL + one_thread(STORE, WAIT)
    assert "fence.proxy.async is missing" in failure(tmp_path, early)
    late = store(fence="", before=STORE + FENCE)
    assert "fence.proxy.async is missing" in failure(tmp_path, late)
    unordered = FILL + FENCE + one_thread(STORE, WAIT, sync="")
    assert "no release and acquire" in failure(tmp_path, unordered)


def test_what_a_copy_brought_is_stored_without_a_fence(tmp_path):
    body = "init_barriers(smem, 1);" + one_thread(
        "arrive_expect_bytes(&smem.barriers[0], 512);",
        "load_bulk(smem.tiles[0], p.data, 512, &smem.barriers[0]);",
        "wait(&smem.barriers[0], 0);",
        STORE,
        WAIT,
    )
    for ((data, words),) in passes(tmp_path, body):
        assert np.array_equal(words[:128], data.reshape(-1).view(np.uint32)[:128])


@pytest.mark.parametrize("wait", [WAIT, WAIT_READ])
def test_the_source_may_be_written_again_when_it_was_read(tmp_path, wait):
    overwrite = "sync_block(); reinterpret_cast<u32*>(smem.tiles[0])[thread_idx()] = 7;"
    for ((_, words),) in passes(tmp_path, store(wait) + overwrite):
        assert np.array_equal(words[:128], VALUES)
    report = failure(tmp_path, store(wait="") + overwrite + one_thread(WAIT))
    assert "data race on tiles[0]" in report
    assert "earlier read by a bulk store" in report
    others = store(wait) + overwrite.replace("sync_block();", "")
    assert "data race on tiles[0]" in failure(tmp_path, others)


def test_a_source_that_is_overwritten_too_early_shows(tmp_path):
    """Without the checks too, under some schedule."""
    overwrite = "for (u32 i = 0; i < 512; ++i) smem.tiles[0][i] = 7;"
    body = store(wait="", after=overwrite + WAIT)
    results = [run(tmp_path, body, seed=seed, checked=False) for seed in SEEDS]
    assert any((words[:128] == 0x07070707).all() for ((_, words),) in results)


@pytest.mark.parametrize("wait", ["", WAIT_READ, "wait_for_stores<1>();", "wait_for_copies();"])
def test_the_target_must_not_be_read_before_the_store_is_complete(tmp_path, wait):
    body = store(wait) + "sync_block();" + READ + one_thread(WAIT)
    report = failure(tmp_path, body)
    assert "data race on words" in report and "earlier write by a bulk store" in report
    results = [run(tmp_path, body, seed=seed, checked=False) for seed in SEEDS]
    assert any((data[0, :128] == 0xFF).all() for ((data, _),) in results)


def test_only_who_waited_may_read_the_target(tmp_path):
    assert "data race on words" in failure(tmp_path, store() + READ)


def test_generic_writes_to_the_target_take_a_proxy_fence(tmp_path):
    write = "p.words[thread_idx()] = 5;"
    report = failure(tmp_path, write + store())
    assert "data race on words" in report and "fence.proxy.async is missing" in report
    for ((_, words),) in passes(tmp_path, write + store(before="fence_async_global();")):
        assert np.array_equal(words[:128], VALUES)
    passes(tmp_path, READ + store())


def test_stores_that_are_under_way_are_in_no_order(tmp_path):
    assert "data race on words" in failure(tmp_path, store(wait=STORE + WAIT))
    passes(tmp_path, store(wait=WAIT + STORE + WAIT))


@pytest.mark.parametrize(
    "statement, report",
    [
        ("store_bulk(p.words, smem.tiles[0], 24);", "a bulk store of 24 bytes: not a multiple"),
        ("store_bulk(p.words, smem.tiles[0] + 8, 16);", r"bulk store at tiles\[0\] \+ 8: not a"),
        ("store_bulk(p.words + 1, smem.tiles[0], 16);", r"store at words \+ 4 bytes: not a mult"),
        ("store_bulk(p.words + 252, smem.tiles[0], 32);", "1008 bytes: out of bounds"),
        ("store_bulk(p.words + 256, smem.tiles[0], 16);", "byte 1024 of words, which has 1024"),
        ("store_bulk(p.words, p.data, 16);", "not in the block's shared memory"),
        ("store_bulk(p.data, smem.tiles[0], 32768);", "not in the block's shared memory"),
        ("store_bulk(smem.words, smem.tiles[0], 16);", "out of bounds"),
    ],
)
def test_misuse_is_reported(tmp_path, statement, report):
    assert re.search(report, failure(tmp_path, one_thread(statement, "commit_stores();", WAIT)))


def test_an_input_is_no_target(tmp_path):
    body = one_thread("store_bulk(p.data, smem.tiles[0], 16); commit_stores();", WAIT)
    late = {0: {"data": np.zeros((128, 256), np.uint8)}}
    report = failure(tmp_path, body, in_stream=True, late=late)
    assert "bulk store to the input data" in report


@pytest.mark.parametrize(
    "wait", ["", "wait_for_stores_read<1>();", "wait_for_copies();", WAIT + "store_again"]
)
def test_a_block_must_not_leave_before_its_stores_have_read(tmp_path, wait):
    wait = wait.replace("store_again", "store_bulk(p.words, smem.tiles[0], 512);" + WAIT)
    report = failure(tmp_path, store(wait))
    assert "exit with bulk stores that may not have read" in report
    assert "work warp 0 of block 0, lane 0" in report


def test_who_gives_up_may_leave_at_once(tmp_path):
    poll = "const u32 index = 0; poll_until(p, kWaitHead, index, 1, [&] {"
    poll += "return load_relaxed_gpu(p.words + 200) == 1; });"
    for seed in SEEDS:
        run(tmp_path, store("") + poll, seed=seed, expire=True)


def test_stores_land_after_their_block_has_left(tmp_path):
    for ((_, words),) in passes(tmp_path, store(WAIT_READ)):
        assert np.array_equal(words[:128], VALUES)


def test_a_launch_finds_what_the_one_before_it_stored(tmp_path):
    start = "start_next_launch();"
    read = "wait_for_previous_launch();" + READ
    body = "if (p.rank == 0) {" + start + store(WAIT_READ) + "} else {" + read + "}"
    for _, (data, _) in passes(tmp_path, body, num_ranks=2, in_stream=True):
        assert np.array_equal(data[0, :128], VALUES[::-1] % 256)
    unwaited = body.replace("wait_for_previous_launch();", "")
    report = failure(tmp_path, unwaited, num_ranks=2, in_stream=True)
    assert "data race on words" in report


# Groups: the older store is of 256 bytes of tiles[0] to words, the newer one of the next 256.

OLD = "store_bulk(p.words, smem.tiles[0], 256);"
NEW = "store_bulk(p.words + 64, smem.tiles[0] + 256, 256);"
GROUP = "commit_stores();"
WRITE_OLD, WRITE_NEW = "smem.tiles[0][0] = 1;", "smem.tiles[0][256] = 1;"
READ_OLD, READ_NEW = "p.data[0] = u8(p.words[0]);", "p.data[1] = u8(p.words[64]);"


def wait_for(newest):
    return f"wait_for_stores<{newest}>();"


def wait_read(newest):
    return f"wait_for_stores_read<{newest}>();"


def groups(*statements) -> str:
    return FILL + FENCE + one_thread(*statements, wait_for(0))


@pytest.mark.parametrize(
    "statements",
    [
        (OLD, GROUP, NEW, GROUP, wait_read(1), WRITE_OLD, wait_read(0), WRITE_NEW),
        (OLD, GROUP, NEW, GROUP, wait_for(1), READ_OLD, WRITE_OLD, wait_for(0), READ_NEW),
        (OLD, GROUP, NEW, GROUP, wait_read(0), wait_for(1), READ_OLD, WRITE_NEW),
        (OLD, NEW, GROUP, wait_for(0), READ_OLD, READ_NEW, WRITE_OLD, WRITE_NEW),
        (OLD, GROUP, GROUP, wait_read(1), WRITE_OLD, NEW, GROUP, wait_for(1), READ_OLD),
        (GROUP, OLD, GROUP, wait_for(0), READ_OLD, NEW, GROUP, GROUP, wait_for(1), READ_NEW),
    ],
    ids=["read one by one", "one by one", "read, then one", "in one", "an empty one", "empty ones"],
)
def test_groups_that_are_waited_for_are_done(tmp_path, statements):
    for ((_, words),) in passes(tmp_path, groups(*statements)):
        assert np.array_equal(words[:128], VALUES)


@pytest.mark.parametrize(
    "statements, place",
    [
        ((OLD, GROUP, NEW, GROUP, wait_read(1), WRITE_NEW), "tiles[0] + 256"),
        ((OLD, GROUP, NEW, GROUP, wait_read(2), WRITE_OLD), "tiles[0]"),
        ((OLD, GROUP, NEW, wait_read(0), WRITE_NEW, GROUP), "tiles[0] + 256"),
        ((OLD, GROUP, NEW, GROUP, wait_for(1), READ_NEW), "words + 256 bytes"),
        ((OLD, GROUP, NEW, GROUP, wait_for(1), WRITE_NEW), "tiles[0] + 256"),
        ((OLD, GROUP, NEW, GROUP, wait_read(0), wait_for(1), READ_NEW), "words + 256 bytes"),
        ((OLD, GROUP, wait_read(0), READ_OLD), "words + 0 bytes"),
        ((OLD, GROUP, "wait_for_copy_groups<0>();", WRITE_OLD), "tiles[0]"),
        ((OLD, "commit_copies();", wait_read(0), WRITE_OLD, GROUP), "tiles[0]"),
    ],
)
def test_groups_that_are_not_waited_for_run_on(tmp_path, statements, place):
    report = failure(tmp_path, groups(*statements))
    assert report.startswith(f"data race on {place}\n")


def test_the_newest_group_runs_on(tmp_path):
    """Seen by its target, without the checks: under some schedules done, under others not."""
    body = groups(OLD, GROUP, NEW, GROUP, wait_for(1), READ_OLD, READ_NEW)
    done = []
    for seed in range(20):
        ((data, _),) = run(tmp_path, body, seed=seed, checked=False)
        assert data[0, 0] == 1000 % 256
        done.append(data[0, 1] == 1064 % 256)
        assert done[-1] or data[0, 1] == 0xFF
    assert any(done) and not all(done)


def test_groups_are_a_threads_own(tmp_path):
    waits = "sync_block(); if (thread_idx() == 32) {" + WAIT + WRITE_OLD + "}"
    body = groups(OLD, GROUP).replace(WAIT, "") + waits + one_thread(WAIT)
    assert "data race on tiles[0]" in failure(tmp_path, body)
    passes(tmp_path, body.replace("== 32", "== 0"))


def test_a_ring_of_slots(tmp_path):
    """A slot is written again when the store before the last has read it."""
    body = """
    u32* out = reinterpret_cast<u32*>(p.data);
    for (u32 i = 0; i < 8; ++i) {
        if (thread_idx() == 0) wait_for_stores_read<NEWEST>();
        sync_block();
        smem.words[i % 2 * 128 + thread_idx()] = 1000 * i + thread_idx();
        fence_async_shared();
        sync_block();
        if (thread_idx() == 0) {
            store_bulk(out + i * 128, smem.words + i % 2 * 128, 512);
            commit_stores();
        }
    }
    if (thread_idx() == 0) wait_for_stores<0>();"""
    expected = (1000 * np.arange(8)[:, None] + np.arange(128)).reshape(-1)
    for ((data, _),) in passes(tmp_path, body.replace("NEWEST", "1")):
        assert np.array_equal(data.reshape(-1).view(np.uint32)[:1024], expected)
    assert "data race on words[0]" in failure(tmp_path, body.replace("NEWEST", "2"))


# Other blocks, other ranks

EXCHANGE = """
    u32* peer = p.peers[p.rank ^ 1];
    smem.words[thread_idx()] = 100 * p.rank + thread_idx();
    fence_async_shared();
    sync_block();
    if (thread_idx() == 0) {
        store_bulk(peer, smem.words, 512);
        commit_stores();
        WAIT
        emu::fetch_add(peer + 128, 1, emu::kRelease, emu::SCOPE);
        wait_for_stores<0>();
    }
    while (emu::load(p.words + 128, emu::ORDER, emu::SCOPE) != 1) {
    }
    p.data[thread_idx()] = u8(p.words[thread_idx()]);"""


def exchange(wait=WAIT, order="kAcquire", scope="kSys") -> str:
    return EXCHANGE.replace("WAIT", wait).replace("ORDER", order).replace("SCOPE", scope)


@pytest.mark.parametrize("delays", [False, True])
def test_ranks_store_to_peers_memory(tmp_path, delays):
    for ranks in passes(tmp_path, exchange(), num_ranks=2, delays=delays):
        for rank, (data, words) in enumerate(ranks):
            assert np.array_equal(words[:128], 100 * (1 - rank) + np.arange(128))
            assert np.array_equal(data[0, :128], words[:128] % 256)


@pytest.mark.parametrize(
    "broken", [{"wait": ""}, {"wait": WAIT_READ}, {"order": "kRelaxed"}, {"scope": "kGpu"}]
)
def test_ranks_must_wait_release_and_acquire_at_system_scope(tmp_path, broken):
    report = failure(tmp_path, exchange(**broken), num_ranks=2)
    assert "data race on words" in report and "of rank" in report


def test_a_store_that_is_released_too_early_is_seen_late(tmp_path):
    """A peer reads something else, in the unchecked build, though it has acquired."""
    late = []
    for seed in range(20):
        ranks = run(tmp_path, exchange(WAIT_READ), num_ranks=2, seed=seed, checked=False)
        late += [(data[0, :128] == 0xFF).any() for data, _ in ranks]
    assert any(late)


def test_stores_compile_for_the_device(tmp_path):
    body = groups(OLD, GROUP, NEW, GROUP, wait_read(1), WRITE_OLD, wait_for(1), READ_OLD)
    cubin = nvrtc.compile(render_kernel(tmp_path, body, "device"), "sm_90a", PLAN.name)
    assert cubin.resources.spill_store_bytes == 0
