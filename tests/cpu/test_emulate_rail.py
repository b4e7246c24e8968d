"""Rails of the emulated machine: what puts and signals bring, what orders them, and what is
reported where nothing does. Rank 0 sends, rank 1 receives.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from rail_plan import NUM_BYTES, RailPlan, render_kernel, run

from jitmoe.emulate.compile import NoHostCompiler, compiler
from jitmoe.emulate.run import EmulationError
from jitmoe.jit import nvrtc
from jitmoe.jit.render import templates_dir

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

RAILS = ["memory", "delayed", "gin"]
SEEDS = range(8)
POISON = 0xFFFFFFFF


def passes(directory, body, rail, **options) -> list:
    """The results of every seed."""
    return [run(directory, body, rail, seed=seed, **options) for seed in SEEDS]


def failure(directory, body, rail, **options) -> str:
    """The report of a kernel that fails under some seed."""
    for seed in SEEDS:
        try:
            run(directory, body, rail, seed=seed, **options)
        except EmulationError as error:
            return str(error)
    pytest.fail("nothing was reported")


# 4 KiB from byte 0 of rank 0 go to byte 4096 of rank 1; its signal is at byte 8192. A thread writes
# and reads 16 words.
SOURCE, TARGET, SIGNAL = 0, 1024, 2048  # in words
FILL = """
    for (u32 i = thread_idx(); i < 1024; i += 64) own<u32>(p, 0)[i] = 5000 + i;
"""
PUTS = "for (u32 i = 0; i < 4; ++i) put(p, 1, 4096 + i * 1024, i * 1024, 1024);"
FIRST_PUTS, LAST_PUT = PUTS.replace("i < 4", "i < 3"), PUTS.replace("i = 0", "i = 3")
ADD = "signal_add(p, 1, 8192, 7);"
FLUSH = "flush(p);"
SYNC = "sync_block();"
AWAIT = "await(p, 8192, 7);"
READ = """
    for (u32 i = thread_idx(); i < 1024; i += 64) p.result[i] = own<u32>(p, 4096)[i];
"""
VALUES = 5000 + np.arange(1024)


def warp(number, *statements) -> str:
    return f"if (thread_idx() / 32 == {number}) {{\n" + "\n".join(statements) + "\n}\n"


def ranks(send, receive) -> str:
    return f"if (p.rank == 0) {{\n{send}\n}} else if (p.rank == 1) {{\n{receive}\n}}\n"


def send(*statements) -> str:
    return FILL + SYNC + warp(0, *statements)


GOOD = ranks(send(PUTS, ADD, FLUSH), AWAIT + READ)


def received(results) -> np.ndarray:
    """What rank 1 read."""
    return results[1][1]


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("delays", [True, False])
@pytest.mark.parametrize("rail", RAILS)
def test_puts_arrive_before_their_signal(tmp_path, rail, delays, checked):
    for results in passes(tmp_path, GOOD, rail, delays=delays, checked=checked):
        assert np.array_equal(received(results), VALUES)
        assert results[1][0][SIGNAL : SIGNAL + 2].tolist() == [7, 0]


@pytest.mark.parametrize("rail", RAILS)
@pytest.mark.parametrize("num_bytes", [0, 16, 528, 2064, 4080])
def test_puts_of_any_size(tmp_path, rail, num_bytes):
    """And not a byte more."""
    body = ranks(send(f"put(p, 1, 4096, 0, {num_bytes});", ADD, FLUSH), AWAIT + READ)
    for results in passes(tmp_path, body, rail):
        words = num_bytes // 4
        assert np.array_equal(received(results)[:words], VALUES[:words])
        assert not received(results)[words:].any()


@pytest.mark.parametrize("rail", RAILS)
def test_flushes_and_signals_of_nothing(tmp_path, rail):
    nothing = FLUSH + "signal_add(p, 1, 8200, 1);" + FLUSH
    body = ranks(send(nothing, PUTS, ADD, FLUSH, nothing), AWAIT + READ)
    for results in passes(tmp_path, body, rail):
        assert np.array_equal(received(results), VALUES)
        assert results[1][0][SIGNAL + 2] == 2


@pytest.mark.parametrize("rail", RAILS)
def test_every_node_to_every_other(tmp_path, rail):
    """More puts than any queue has places, a signal to each node behind all of them."""
    body = (
        """
    for (u32 i = thread_idx(); i < 512; i += 64) own<u32>(p, 0)[i] = p.rank * 1000 + i;
    sync_block();
    for (u32 i = thread_idx() / 32; i < 16; i += 2) {
        for (u32 to = 0; to < kNumNodes; ++to) {
            if (to != p.rank) put(p, to, 4096 + p.rank * 1024 + i * 64, i * 128, 64);
        }
    }
    for (u32 to = 0; to < kNumNodes; ++to) {
        if (to != p.rank) signal_add(p, to, 8192, u64(1) << 8 * p.rank);
    }
    flush(p);
    u64 all = 0;
    for (u32 from = 0; from < kNumNodes; ++from) all += u64(2 * (from != p.rank)) << 8 * from;
    while (load_acquire_sys(own<u64>(p, 8192)) != all) {
    }"""
        + READ
    )
    for results in passes(tmp_path, body, rail, num_ranks=3, delays=True):
        for rank, (_, result) in enumerate(results):
            for other in {0, 1, 2} - {rank}:
                rows = result[other * 256 : other * 256 + 256].reshape(16, 16)
                expected = other * 1000 + np.arange(16)[:, None] * 32 + np.arange(16)
                assert np.array_equal(rows, expected)


@pytest.mark.parametrize("rail", RAILS)
def test_signals_of_two_warps_add_up(tmp_path, rail):
    """Each stands for its own warp's puts, and carries into the upper word."""
    of_warp = "const u32 w = thread_idx() / 32; put(p, 1, 4096 + w * 2048, w * 2048, 2048);"
    body = ranks(
        FILL + SYNC + of_warp + "signal_add(p, 1, 8192, 0x80000000u); flush(p);",
        "await(p, 8192, u64(1) << 32);" + READ,
    )
    for results in passes(tmp_path, body, rail, delays=True):
        assert np.array_equal(received(results), VALUES)
        assert results[1][0][SIGNAL : SIGNAL + 2].tolist() == [0, 1]


# What the receiver must do

LOOK = "while (emu::load(own<u64>(p, 8192), emu::kRelaxed, emu::kSys) < 7) {\n}"
LOOK_GPU = "while (emu::load(own<u64>(p, 8192), emu::kAcquire, emu::kGpu) < 7) {\n}"


@pytest.mark.parametrize("rail", RAILS)
@pytest.mark.parametrize("wait", ["", LOOK, LOOK_GPU, "await(p, 8192, 0);"])
def test_who_does_not_acquire_the_signal_races(tmp_path, rail, wait):
    report = failure(tmp_path, GOOD.replace(AWAIT, wait), rail)
    assert report.startswith("data race on symmetric@rank1 + ")
    if rail == "gin":
        assert re.search(
            r"(atomic store|write) by a put of work warp 0 of block 0 of rank 0", report
        )


@pytest.mark.parametrize("rail", RAILS)
def test_who_reads_early_sees_something_else(tmp_path, rail):
    """Without the checks too, under some schedule: nothing yet, or poison on the network."""
    linger = "" if rail == "memory" else "for (u32 i = 0; i < 30; ++i) sync_block();"
    body = GOOD.replace(AWAIT, linger)
    seen = np.concatenate([received(r) for r in passes(tmp_path, body, rail, checked=False)])
    assert (seen == 0).any() or (seen == POISON).any()
    if rail == "gin":
        assert (seen == POISON).any()


@pytest.mark.parametrize("rail", RAILS)
def test_other_blocks_learn_of_puts_from_who_acquired(tmp_path, rail):
    tell = warp(
        0, AWAIT, "sync_warp(); if (lane_idx() == 0) store_release_gpu(own<u32>(p, 8200), 1);"
    )
    learn = "while (load_acquire_gpu(own<u32>(p, 8200)) == 0) {\n}" + READ
    only_first = f"if (block_idx() == 0) {{ {send(PUTS, ADD, FLUSH)} }}"
    body = ranks(only_first, f"if (block_idx() == 0) {{ {tell} }} else {{ {learn} }}")
    for results in passes(tmp_path, body, rail, num_blocks=2):
        assert np.array_equal(received(results), VALUES)
    broken = body.replace("load_acquire_gpu", "load_relaxed_gpu")
    assert "data race on symmetric@rank1" in failure(tmp_path, broken, rail, num_blocks=2)


@pytest.mark.parametrize("rail", RAILS)
@pytest.mark.parametrize("pause", ["", "for (u32 i = 0; i < 200; ++i) sync_block();"])
def test_a_word_that_is_written_meanwhile_is_a_race(tmp_path, rail, pause):
    write = pause + "if (thread_idx() == 0) *own<u64>(p, 8192) = 0;"
    report = failure(tmp_path, ranks(send(PUTS, ADD, FLUSH), write), rail)
    assert report.startswith("data race on symmetric@rank1 + 8192 bytes")
    assert ("atomic store by a put" in report) == (rail == "gin")


# What the sender must do


@pytest.mark.parametrize("rail", RAILS)
@pytest.mark.parametrize(
    "early", [(ADD, PUTS), (FIRST_PUTS, ADD, LAST_PUT)], ids=["all", "the last"]
)
def test_a_signal_before_its_puts_is_found(tmp_path, rail, early):
    body = ranks(send(*early, FLUSH), AWAIT + READ)
    assert "data race on symmetric@rank1" in failure(tmp_path, body, rail)
    results = passes(tmp_path, body, rail, checked=False)
    assert any(not np.array_equal(received(r), VALUES) for r in results)


@pytest.mark.parametrize("rail", ["delayed", "gin"])
def test_a_signal_is_behind_the_puts_of_its_own_warp_alone(tmp_path, rail):
    body = ranks(send(PUTS) + SYNC + warp(1, ADD) + SYNC + warp(0, FLUSH), AWAIT + READ)
    results = passes(tmp_path, body, rail, checked=False)
    assert any(not np.array_equal(received(r), VALUES) for r in results)
    if rail == "gin":
        report = failure(tmp_path, body, rail)
        assert "data race on symmetric@rank1" in report and "by a put of work warp 0" in report


def test_a_signal_is_behind_the_puts_to_its_own_node_alone(tmp_path):
    """Rank 1 learns from rank 2 of puts that only rank 2's signal is behind of."""
    forward = "if (p.rank == 2) {" + AWAIT + warp(0, ADD, FLUSH) + "}"
    add = ADD.replace("p, 1", "p, 2")
    body = ranks(send(PUTS, add, FLUSH), AWAIT + READ) + forward
    report = failure(tmp_path, body, "gin", num_ranks=3)
    assert "data race on symmetric@rank1" in report and "by a put of work warp 0" in report
    results = passes(tmp_path, body, "gin", num_ranks=3, delays=True, checked=False)
    assert any((received(r) == POISON).any() for r in results)


def test_a_signal_is_behind_all_puts_before_it(tmp_path):
    """Not only those since the signal before, which may itself be late."""
    body = ranks(send(PUTS, ADD, "signal_add(p, 1, 8200, 7);", FLUSH), "await(p, 8200, 7);" + READ)
    passes(tmp_path, body, "gin", delays=True)
    for seed in range(40):
        results = run(tmp_path, body, "gin", seed=seed, delays=True, checked=False)
        assert np.array_equal(received(results), VALUES)


def test_a_signal_is_not_behind_later_puts(tmp_path):
    """Though they were issued before it was acquired."""
    linger = "for (u32 i = 0; i < 100; ++i) sync_block();"
    body = ranks(send(FIRST_PUTS, ADD, LAST_PUT, FLUSH), AWAIT + linger + READ)
    assert "earlier write by a put" in failure(tmp_path, body, "gin")


def test_a_signal_takes_nothing_else_along(tmp_path):
    """What reaches a peer's memory by another way than a put needs another release."""
    store = "reinterpret_cast<u32*>(p.rail_peers[1] + 4096)[lane_idx()] = 1;"
    body = ranks(send(store, ADD, FLUSH), AWAIT + READ)
    passes(tmp_path, body, "memory")
    report = failure(tmp_path, body, "gin")
    assert "data race on symmetric@rank1 + 40" in report or "+ 41" in report
    assert "earlier write by work warp 0 of block 0 of rank 0" in report


@pytest.mark.parametrize("rail", RAILS)
def test_a_put_sends_what_its_warp_knows_of(tmp_path, rail):
    unordered = ranks(send(PUTS, ADD, FLUSH).replace(SYNC, ""), AWAIT + READ)
    report = failure(tmp_path, unordered, rail)
    assert report.startswith("data race on symmetric@rank0 + ")
    assert ("by a put of work warp 0" in report) == (rail == "gin")
    by_lanes = (
        "own<u32>(p, 0)[lane_idx()] = 9; put(p, 1, 4096, 0, 128);"  # all lanes, before the call
    )
    for results in passes(tmp_path, ranks(send(by_lanes, ADD, FLUSH), AWAIT + READ), rail):
        assert (received(results)[:32] == 9).all()


OVERWRITE = "for (u32 i = lane_idx(); i < 1024; i += 32) own<u32>(p, 0)[i] = 3;"


@pytest.mark.parametrize("rail", RAILS)
def test_the_source_may_be_written_after_a_flush(tmp_path, rail):
    for order in ((PUTS, ADD, FLUSH, OVERWRITE), (PUTS, FLUSH, OVERWRITE, ADD)):
        for results in passes(tmp_path, ranks(send(*order), AWAIT + READ), rail, delays=True):
            assert np.array_equal(received(results), VALUES)
    told = ranks(send(PUTS, ADD, FLUSH) + SYNC + warp(1, OVERWRITE), AWAIT + READ)
    for results in passes(tmp_path, told, rail):
        assert np.array_equal(received(results), VALUES)


@pytest.mark.parametrize("rail", ["delayed", "gin"])
def test_the_source_must_not_be_written_before_a_flush(tmp_path, rail):
    body = ranks(send(PUTS, "sync_warp();", OVERWRITE, ADD, FLUSH), AWAIT + READ)
    results = passes(tmp_path, body, rail, checked=False)
    assert any((received(r) == 3).any() for r in results)
    if rail == "gin":
        report = failure(tmp_path, body, rail)
        assert "data race on symmetric@rank0" in report and "earlier read by a put" in report


def test_an_acquired_answer_is_no_flush(tmp_path):
    """Though by then the source was read: a signal tells of targets."""
    answer = warp(0, "signal_add(p, 0, 8192, 7); flush(p);")
    body = ranks(send(PUTS, ADD, AWAIT, OVERWRITE, FLUSH), AWAIT + READ + SYNC + answer)
    assert "earlier read by a put" in failure(tmp_path, body, "gin")


@pytest.mark.parametrize("puts", [(PUTS, ADD), (PUTS, ADD, "sync_warp();"), (FLUSH, PUTS, ADD)])
def test_a_missing_flush_is_reported(tmp_path, puts):
    body = ranks(send(*puts), AWAIT)
    report = failure(tmp_path, body, "gin")
    assert "exit with puts that may not have read their source: a flush is missing" in report
    assert "work warp 0 of block 0 of rank 0" in report


def test_a_warp_flushes_its_own_puts(tmp_path):
    body = ranks(send(PUTS, ADD) + SYNC + warp(1, FLUSH), AWAIT + READ)
    assert "a flush is missing" in failure(tmp_path, body, "gin")


def test_delayed_puts_wait_for_a_signal_or_a_flush(tmp_path):
    body = ranks(send("put(p, 1, 4096, 0, 1024);"), "")
    for results in passes(tmp_path, body, "delayed"):
        assert not results[1][0].any()
    flushed = ranks(send("put(p, 1, 4096, 0, 1024);", FLUSH), "")
    for results in passes(tmp_path, flushed, "delayed"):
        assert np.array_equal(results[1][0][TARGET : TARGET + 256], VALUES[:256])


# Targets that are used again: the receiver answers when it has read.

ROUNDS = """
    for (u32 round = 1; round <= 4; ++round) {
        if (p.rank == 0) {
            {wait_for_answer}
            own<u32>(p, 0)[thread_idx()] = 100 * round + thread_idx();
            sync_block();
            if (thread_idx() < 32) {
                put(p, 1, 4096, 0, 256);
                signal_add(p, 1, 8192, 1);
                flush(p);
            }
            sync_block();
        } else {
            await(p, 8192, round);
            p.result[64 * round + thread_idx()] = own<u32>(p, 4096)[thread_idx()];
            sync_block();
            if (thread_idx() >= 32) signal_add(p, 0, 8192, 1);
        }
    }"""
ANSWERS = {
    "each thread": "await(p, 8192, round - 1);",
    "another warp": "if (thread_idx() >= 32) await(p, 8192, round - 1); sync_block();",
}


@pytest.mark.parametrize("rail", RAILS)
@pytest.mark.parametrize("who", ANSWERS)
def test_an_answer_frees_a_target(tmp_path, rail, who):
    body = ROUNDS.replace("{wait_for_answer}", ANSWERS[who])
    for results in passes(tmp_path, body, rail, delays=True):
        expected = 100 * np.arange(1, 5)[:, None] + np.arange(64)
        assert np.array_equal(received(results)[64:320].reshape(4, 64), expected)


@pytest.mark.parametrize("rail", RAILS)
@pytest.mark.parametrize(
    "wait", ["", LOOK.replace("< 7", "< round - 1"), "await(p, 8192, round - 2);"]
)
def test_a_target_that_may_be_in_use_is_a_race(tmp_path, rail, wait):
    wait = wait and f"if (round > 1) {{ {wait} }}"
    report = failure(tmp_path, ROUNDS.replace("{wait_for_answer}", wait), rail)
    assert "data race on symmetric@rank1 + 4" in report


@pytest.mark.parametrize("rail", RAILS)
def test_an_answer_travels_over_nodes(tmp_path, rail):
    """Rank 1 tells rank 2, which tells rank 0."""
    forward = """
    if (p.rank == 2) {
        for (u32 round = 1; round <= 4; ++round) {
            await(p, 8192, round);
            if (thread_idx() < 32) signal_add(p, 0, 8192, 1);
        }
        return;
    }"""
    body = forward + ROUNDS.replace("{wait_for_answer}", ANSWERS["each thread"])
    body = body.replace(
        "if (thread_idx() >= 32) signal_add(p, 0", "if (thread_idx() >= 32) signal_add(p, 2"
    )
    for results in passes(tmp_path, body, rail, num_ranks=3):
        expected = 100 * np.arange(1, 5)[:, None] + np.arange(64)
        assert np.array_equal(received(results)[64:320].reshape(4, 64), expected)


@pytest.mark.parametrize("rail", RAILS)
def test_an_answer_travels_between_blocks(tmp_path, rail):
    """The block that has the answer is not the one that puts."""
    told = "while (load_acquire_gpu(own<u32>(p, 8208)) < round - 1) {\n}"
    tell = """
    if (p.rank == 0 && block_idx() == 1) {
        for (u32 round = 1; round <= 4; ++round) {
            await(p, 8192, round);
            sync_block();
            if (thread_idx() == 0) store_release_gpu(own<u32>(p, 8208), round);
        }
        return;
    }
    if (block_idx() != 0) return;"""
    body = tell + ROUNDS.replace("{wait_for_answer}", told)
    for results in passes(tmp_path, body, rail, num_blocks=2):
        expected = 100 * np.arange(1, 5)[:, None] + np.arange(64)
        assert np.array_equal(received(results)[64:320].reshape(4, 64), expected)
    fenced = body.replace("store_release_gpu", "fence_gpu(), store_relaxed_gpu")
    passes(tmp_path, fenced, rail, num_blocks=2)
    broken = body.replace("store_release_gpu", "store_relaxed_gpu")
    assert "data race on symmetric@rank1 + 4" in failure(tmp_path, broken, rail, num_blocks=2)


# Launches, and ranks that end

AGAIN = ranks(
    "if (p.launch == 0) {" + send(PUTS, ADD, FLUSH) + "}",
    "if (p.launch == 1) {" + AWAIT + READ + "}",
)


def test_puts_land_though_the_launch_is_over(tmp_path):
    for results in passes(tmp_path, ranks(send(PUTS, ADD, FLUSH), ""), "gin", delays=True):
        assert np.array_equal(results[1][0][TARGET : TARGET + 1024], VALUES)
        assert results[1][0][SIGNAL] == 7
    for results in passes(tmp_path, AGAIN, "gin", num_launches=2, delays=True):
        assert np.array_equal(received(results), VALUES)


def test_the_end_of_a_launch_lands_nothing(tmp_path):
    """The next launch of the sender must not take targets to be written, nor the receiver's."""
    twice = ranks(send(PUTS, FLUSH), "")
    report = failure(tmp_path, twice, "gin", num_launches=2)
    assert report.startswith("data race on symmetric@rank1") and "earlier write by a put" in report
    assert "data race on symmetric@rank1" in failure(
        tmp_path, AGAIN.replace(AWAIT, ""), "gin", num_launches=2
    )
    both = (
        ranks("", "if (p.launch == 1)" + READ)
        + f"if (p.rank == 0 && p.launch == 0) {{ {send(PUTS, FLUSH)} }}"
    )
    assert "data race on symmetric@rank1" in failure(tmp_path, both, "gin", num_launches=2)


def test_who_gives_up_may_leave_puts_behind(tmp_path):
    poll = "const u32 index = 0; poll_until(p, kWaitHead, index, 1, [&] {"
    poll += "return load_relaxed_gpu(p.header) == 1; });"
    for seed in SEEDS:
        run(tmp_path, ranks(send(PUTS) + poll, ""), "gin", seed=seed, expire=True)


def kept(directory, rail, step, seed) -> tuple[np.ndarray, int]:
    """What rank 1 has of 32 puts of 32 words, each with a bit of the signal behind it, of a rank
    that was killed.
    """
    many = "for (u32 i = 0; i < 32; ++i) { put(p, 1, 4096 + i * 128, i * 128, 128);"
    many += "signal_add(p, 1, 8192, u64(1) << i); }"
    body = ranks(FILL + SYNC + warp(0, many, FLUSH), "")
    words, _ = run(directory, body, rail, seed=seed, kill=(0, step), checked=False)[1]
    return words[TARGET : TARGET + 1024].reshape(32, 32), int(words[SIGNAL])


@pytest.mark.parametrize("rail", RAILS)
def test_a_killed_rank_sends_nothing_more(tmp_path, rail):
    """What a signal stands for has arrived; what was not sent never comes."""
    num_cut, num_lost, num_started = 0, 0, 0
    for step in range(500, 8500, 500):
        for seed in range(4):
            rows, bits = kept(tmp_path, rail, step, seed)
            arrived = (rows == VALUES.reshape(32, 32)).all(1)
            if bits:
                assert arrived[: bits.bit_length()].all()
            num_started += bits != 0
            num_cut += bits != 0xFFFFFFFF
            num_lost += (rows == POISON).any()
    assert num_cut and num_started
    assert (num_lost > 0) == (rail == "gin")
    rows, bits = kept(tmp_path, rail, 1, 0)
    assert bits == 0 and not rows.any()


# Misuse


@pytest.mark.parametrize(
    "statement, report",
    [
        ("put(p, 1, 4096, 0, 24);", "a put of 24 bytes: not a multiple of 16"),
        ("put(p, 1, 4100, 0, 16);", r"put at symmetric@rank1 \+ 4100 bytes: not a multiple of 16"),
        ("put(p, 1, 4096, 8, 16);", r"put at symmetric@rank0 \+ 8 bytes: not a multiple of 16"),
        (f"put(p, 1, {NUM_BYTES} - 16, 0, 32);", "put of 32 bytes at .*: out of bounds"),
        (f"put(p, 1, 0, {NUM_BYTES}, 16);", "put of 16 bytes at .*: out of bounds"),
        ("put(p, 0, 4096, 0, 16);", "a put to node 0, which is the own"),
        ("signal_add(p, 0, 8192, 1);", "a signal to node 0, which is the own"),
        ("signal_add(p, 1, 8196, 1);", r"symmetric@rank1 \+ 8196 bytes: not a multiple of 8"),
        (f"signal_add(p, 1, {NUM_BYTES}, 1);", "signal of 8 bytes at .*: out of bounds"),
        ("put(p, 1, 4096, 0, 16 * lane_idx());", "lanes have different values"),
        ("signal_add(p, 1, 8192, lane_idx());", "lanes have different values"),
        ("if (lane_idx() == 0) put(p, 1, 4096, 0, 16);", "waits for the other lanes|diverges"),
    ],
)
def test_misuse_is_reported(tmp_path, statement, report):
    body = ranks(warp(0, statement, FLUSH), "")
    assert re.search(report, failure(tmp_path, body, "gin"))


# Words of 64 bits, and masks


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_words_and_masks_of_all_ranks(tmp_path, num_ranks):
    body = """
    u8* const first = p.rank == 0 ? p.peers[0] : p.rail_peers[0];
    reinterpret_cast<u32*>(first + 4096)[64 * (p.rank + 1) + thread_idx()] = 10 * p.rank;
    sync_block();
    if (thread_idx() == 0) {
        add_release_sys(reinterpret_cast<u64*>(first + 8192), (u64(1) << 40) + 1);
        or_release_sys(reinterpret_cast<u32*>(first + 8200), 1u << p.rank);
    }
    if (p.rank != 0) return;
    WAIT
    for (u32 i = thread_idx(); i < 64 * kNumNodes; i += 64) p.result[i] = own<u32>(p, 4096)[64 + i];
    """
    add = "while (load_acquire_sys(own<u64>(p, 8192)) != kNumNodes * ((u64(1) << 40) + 1)) {\n}"
    mask = "while (load_acquire_sys(own<u32>(p, 8200)) != (1u << kNumNodes) - 1) {\n}"
    for wait in (add, mask):
        for results in passes(tmp_path, body.replace("WAIT", wait), "memory", num_ranks=num_ranks):
            told = results[0][1][: 64 * num_ranks].reshape(num_ranks, 64)
            assert (told == 10 * np.arange(num_ranks)[:, None]).all()
            assert results[0][0][SIGNAL : SIGNAL + 2].tolist() == [num_ranks, num_ranks << 8]
            assert results[0][0][SIGNAL + 2] == (1 << num_ranks) - 1
        relaxed = wait.replace("load_acquire_sys(", "emu::load(").replace(
            ")) !=", "), emu::kRelaxed, emu::kSys) !="
        )
        report = failure(tmp_path, body.replace("WAIT", relaxed), "memory", num_ranks=num_ranks)
        assert "data race on symmetric@rank0" in report


def test_a_word_of_64_bits_is_stored_and_shown_whole(tmp_path):
    store = "if (thread_idx() == 0) store_relaxed_sys(own<u64>(p, 8192), u64(5) << 32 | 6);"
    for results in passes(tmp_path, ranks(store, ""), "memory"):
        assert results[0][0][SIGNAL : SIGNAL + 2].tolist() == [6, 5]
    body = ranks(store + "sync_block(); await(p, 8192, u64(6) << 32);", "")
    report = failure(tmp_path, body, "memory")
    assert f"flag symmetric@rank0 + 8192 bytes, which holds {(5 << 32) + 6}" in report


# Texts


@pytest.mark.parametrize("rail", ["memory", "delayed"])
def test_rails_compile_for_the_device(tmp_path, rail):
    plan = RailPlan("sm_90a", rail, 2)
    words = (
        "or_release_sys(own<u32>(p, 8200), 1); store_relaxed_sys(own<u64>(p, 8208), u64(1) << 32);"
    )
    text = render_kernel(tmp_path, GOOD + words, plan, "device")
    cubin = nvrtc.compile(text, "sm_90a", plan.name)
    assert cubin.resources.spill_store_bytes == cubin.resources.stack_bytes == 0


def test_every_rail_has_the_same_functions():
    wanted = {"put", "signal_add", "flush"}
    paths = sorted(templates_dir().glob("*/rail_*.cuh"))
    assert {path.name for path in paths} >= {f"rail_{rail}.cuh" for rail in RAILS}
    for path in map(Path, paths):
        heads = re.findall(r"^DEVICE \w+ (\w+)\((.*)\)", path.read_text(), re.MULTILINE)
        assert wanted <= {name for name, _ in heads}, path
        arguments = {name: text for name, text in heads}
        assert arguments["put"] == "const Params& p, u32 node, i64 to, i64 from, u32 bytes", path
        assert arguments["signal_add"] == "const Params& p, u32 node, i64 at, u64 value", path
