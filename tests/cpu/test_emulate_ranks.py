"""Ranks with several launches each, emulated: messages, scopes, drift, a rank that ends.

A rank in its second launch meets others that are in their first.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
from machine_plan import PLAN, launches_of, make_ranks, render_kernel

from jitmoe import fp8, reference
from jitmoe.emulate.compile import NoHostCompiler, build, compiler
from jitmoe.emulate.ranks import EmulatedRanks
from jitmoe.emulate.run import Array, EmulationError, launch
from jitmoe.jit import nvrtc
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import choose
from jitmoe.plan.problem import MAX_TOKENS, MoeProblem

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

SEEDS = range(8)

# Block 0 sends 16 words to every rank, block 1 waits for those of every rank and keeps them by
# launch. Two banks by the launch's parity, flags that only grow, no closing barrier.
EXCHANGE = """
    const u32 number = p.launch + 1, bank = number % 2 * 64;
    if (block_idx() == 0) {
        const u32 place = 16 * p.rank + thread_idx();
        for (u32 to = 0; to < RANKS && thread_idx() < 16; ++to)
            p.peers[to][bank + place] = 64 * p.launch + place;
        sync_block();
        if (thread_idx() < RANKS) {
            u32* const flag = p.peers[thread_idx()] + 128 + p.rank;
            {send}
        }
        return;
    }
    if (thread_idx() < RANKS) {
        u32* const flag = p.words + 128 + thread_idx();
        {wait}
    }
    sync_block();
    if (thread_idx() >= 16 * RANKS) return;
    p.data[64 * p.launch + thread_idx()] = u8(p.words[bank + thread_idx()]);"""
RELEASE = "store_release_sys(flag, number);"
ACQUIRE = "while (load_acquire_sys(flag) < number) {\n}"


def exchange(num_ranks, send=RELEASE, wait=ACQUIRE) -> str:
    body = EXCHANGE.replace("RANKS", str(num_ranks))
    return body.replace("{send}", send).replace("{wait}", wait)


def run(directory, body, num_ranks=2, num_launches=3, seed=0, checked=True, **options):
    """(report, data of every rank) after launches of 2 blocks."""
    executable = build(render_kernel(directory, body), PLAN.name, checked)
    ranks = make_ranks(num_ranks, num_blocks=2)
    launches = launches_of(ranks, num_launches)
    report = launch(executable, PLAN, launches, in_stream=True, seed=seed, timeout_s=60, **options)
    return report, [rank.arrays["data"].data.reshape(-1) for rank in ranks]


def failure(directory, body, **options) -> str:
    """The report of launches that fail under some seed."""
    for seed in SEEDS:
        try:
            run(directory, body, seed=seed, **options)
        except EmulationError as error:
            return str(error)
    pytest.fail("nothing was reported")


def check_exchange(directory, body, num_ranks=2, **options):
    for seed in SEEDS:
        _, data = run(directory, body, num_ranks, seed=seed, **options)
        for received in data:
            kept = received[:192].reshape(3, 64)[:, : 16 * num_ranks]
            assert np.array_equal(kept, np.arange(192).reshape(3, 64)[:, : 16 * num_ranks])


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_messages_over_several_launches(tmp_path, num_ranks, delays):
    check_exchange(tmp_path, exchange(num_ranks), num_ranks, delays=delays)


def test_counters_of_all_ranks(tmp_path):
    send = "add_release_sys(p.peers[thread_idx()] + 128, 1);"
    wait = "while (load_acquire_sys(p.words + 128) < 3 * number) {\n}"
    check_exchange(tmp_path, exchange(3, send, wait), 3, delays=True)


@pytest.mark.parametrize(
    "send, wait",
    [
        ("store_relaxed_sys(flag, number);", ACQUIRE),
        (RELEASE, ACQUIRE.replace("acquire", "relaxed")),
        ("store_relaxed_sys(flag, number); fence_sys();", ACQUIRE),
        (RELEASE, "fence_sys();" + ACQUIRE.replace("acquire", "relaxed")),
    ],
    ids=["no release", "no acquire", "late fence", "early fence"],
)
def test_a_missing_order_is_a_race(tmp_path, send, wait):
    report = failure(tmp_path, exchange(2, send, wait))
    assert report.startswith("data race on words@rank")
    assert "no release and acquire, barrier or completion orders them" in report
    assert re.search(r"of block 1 of launch \d of rank [01], lane", report)


FENCED_RELEASE = "fence_sys(); store_relaxed_sys(flag, number);"
FENCED_ACQUIRE = ACQUIRE.replace("acquire", "relaxed") + "fence_sys();"


@pytest.mark.parametrize("send", [RELEASE, FENCED_RELEASE])
@pytest.mark.parametrize("wait", [ACQUIRE, FENCED_ACQUIRE])
def test_a_fence_makes_a_relaxed_access_order(tmp_path, send, wait):
    check_exchange(tmp_path, exchange(2, send, wait), delays=True)


@pytest.mark.parametrize(
    "send, wait",
    [
        (RELEASE.replace("sys", "gpu"), ACQUIRE),
        (RELEASE, ACQUIRE.replace("sys", "gpu")),
        (FENCED_RELEASE.replace("fence_sys", "fence_gpu"), ACQUIRE),
        (RELEASE, FENCED_ACQUIRE.replace("fence_sys", "fence_gpu")),
        (FENCED_RELEASE.replace("relaxed_sys", "relaxed_gpu"), ACQUIRE),
    ],
    ids=["release", "acquire", "fence before a store", "fence after a load", "fenced store"],
)
def test_gpu_scope_orders_nothing_between_ranks(tmp_path, send, wait):
    report = failure(tmp_path, exchange(2, send, wait))
    assert "data race on words@rank" in report
    is_of_fence = "fence_gpu" in send + wait  # else the flag itself is no atomic to both
    assert is_of_fence or re.search(
        "not atomic to each other: at (gpu and sys|sys and gpu)", report
    )


def test_atomics_of_gpu_scope_are_none_to_other_ranks(tmp_path):
    add = "if (thread_idx() == 0) ADD(p.peers[0], 1);"
    for scope, is_right in (("sys", True), ("gpu", False)):
        body = add.replace("ADD", f"add_release_{scope}")
        if is_right:
            run(tmp_path, body)
        else:
            assert "not atomic to each other: at gpu and gpu scope" in failure(tmp_path, body)
    run(tmp_path, add.replace("ADD", "add_release_gpu"), num_ranks=1)


def test_streams_are_not_ordered_among_themselves(tmp_path):
    """With one bank a rank's second launch writes what the other still reads in its first."""
    body = exchange(2).replace("number % 2 * 64", "0")
    report = failure(tmp_path, body, delays=True)
    assert "data race on words@rank" in report
    later, before = re.findall(r"of launch (\d) of rank (\d)", report)[:2]
    assert later[0] != before[0] and later[1] != before[1]


def test_launches_of_a_rank_are_ordered(tmp_path):
    body = """
    const u32 i = block_idx() * 128 + thread_idx();
    if (p.launch == 1) {
        p.data[i] = u8(p.words[255 - i]);
    } else {
        p.words[i] = i + 100 * p.launch;
    }"""
    for seed in SEEDS:
        _, data = run(tmp_path, body, seed=seed, delays=True)
        for kept in data:
            assert np.array_equal(kept[:256], np.arange(255, -1, -1))


# Every rank tells all how far it has come, and keeps by how much it was ever ahead of the last.
LEAD = """
    if (thread_idx() != 0 || block_idx() != 0) return;
    for (u32 to = 0; to < 3; ++to) store_relaxed_sys(p.peers[to] + p.rank, p.launch);
    u32 lead = 0;
    for (u32 from = 0; from < 3; ++from) {
        const u32 other = load_relaxed_sys(p.words + from);
        lead = other + lead < p.launch ? p.launch - other : lead;
    }
    p.data[p.launch] = u8(lead);
    for (u32 to = 0; to < 3; ++to) store_release_sys(p.peers[to] + 8 + p.rank, p.launch + 1);
    {wait}"""
WAIT_FOR_ALL = """
    for (u32 from = 0; from < 3; ++from) {
        while (load_acquire_sys(p.words + 8 + from) < p.launch + 1) {
        }
    }"""


def leads(directory, wait, **options) -> list[int]:
    """By how many launches a rank was ahead of another at most, by seed."""
    body = LEAD.replace("{wait}", wait)
    outcomes = []
    for seed in range(16):
        _, data = run(directory, body, 3, 5, seed, checked=False, **options)
        outcomes.append(max(int(ahead[:5].max()) for ahead in data))
    return outcomes


def test_delays_let_ranks_drift_a_launch_apart_and_flags_no_more(tmp_path):
    drifts = leads(tmp_path, WAIT_FOR_ALL, delays=True)
    assert max(drifts) == 1 and drifts.count(1) >= 8
    assert max(leads(tmp_path, "", delays=True)) == 4  # all the way


WAIT_OR_GIVE_UP = """
    for (u32 from = 0; from < 3; ++from) {
        const u32* flag = p.words + 128 + from;
        wait_until(p, kWaitHead, from, number, [&] { return load_acquire_sys(flag) >= number; });
    }"""


# The same by votes: all lanes meet between two looks.
VOTE_OR_GIVE_UP = """
    const u32* flags = p.words + 128;
    wait_until(p, kWaitHead, 0, number, [&] {
        const bool is_set = lane_idx() >= 3 || load_acquire_sys(flags + lane_idx()) >= number;
        return __ballot_sync(kFullMask, !is_set) == 0;
    });"""
# A rank that gave up sends no more: others may have given up too, and still read.
LEAVE_IF_GIVEN_UP = "if (load_relaxed_gpu(p.header + kHeaderAbort) != 0) return;"


def kill_at(directory, step, seed, wait=WAIT_OR_GIVE_UP, checked=True, **options):
    """(report, status word 0 of every rank) of an exchange in which rank 1 ends."""
    body = LEAVE_IF_GIVEN_UP + exchange(3, wait="}{" + wait)
    executable = build(render_kernel(directory, body), PLAN.name, checked)
    ranks = make_ranks(3, num_blocks=2)
    options |= {"seed": seed, "kill": (1, step)}
    report = launch(executable, PLAN, launches_of(ranks, 3), in_stream=True, **options)
    return report, [int(rank.arrays["status"].data[0]) for rank in ranks]


@pytest.mark.parametrize("delays", [False, True])
def test_who_waits_for_a_killed_rank_gives_up(tmp_path, delays):
    rng = np.random.default_rng(0)
    seen = set()
    for seed in SEEDS:
        step = int(2 ** rng.uniform(0, 21 if delays else 17))
        report, status = kill_at(tmp_path, step, seed, expire=True, delays=delays)
        killed = re.search(r"rank 1 was killed at step (\d+): (\d+) of its threads", report)
        assert int(killed[1]) >= step and int(killed[2]) > 0
        assert status[0] == status[2] == 1
        assert "of rank 1 waits" not in report
        seen |= set(re.findall(r"of launch (\d) of rank [02] waits for flag", report))
    assert len(seen) > 1


def test_a_vote_over_flags_is_a_poll_too(tmp_path):
    """It never sleeps: that nothing changes any more takes a while to see."""
    report, status = kill_at(tmp_path, 1, 0, VOTE_OR_GIVE_UP, checked=False, expire=True)
    assert "stall: nothing changes any more" in report and status == [1, 0, 1]
    with pytest.raises(EmulationError) as caught:
        kill_at(tmp_path, 1, 0, VOTE_OR_GIVE_UP, checked=False)
    where = r"work warp \d of block 1 of launch 0 of rank 0 \(lanes 00000002\) waits for "
    assert re.search(where + r"flag words@rank0 \+ 516 bytes, which holds 0", str(caught.value))


def test_without_expiry_a_killed_rank_is_a_stall(tmp_path):
    with pytest.raises(EmulationError) as caught:
        kill_at(tmp_path, 1, seed=0)
    report = str(caught.value)
    assert report.startswith("rank 1 was killed at step 1: 768 of its threads had not ended")
    assert "block 1 of launch 0 of rank 0 waits for flag words@rank0 + 516 bytes" in report


def test_a_kill_of_who_has_ended_changes_nothing(tmp_path):
    report, status = kill_at(tmp_path, 1 << 40, seed=0)
    assert "rank 1 was killed" not in report and status == [0, 0, 0]


def test_seeds_repeat(tmp_path):
    for seed in range(3):
        reports = {run(tmp_path, exchange(2), seed=seed, delays=True)[0] for _ in range(2)}
        assert len(reports) == 1


@pytest.mark.parametrize(
    "field, number, name",
    [
        ("words", 256, "words"),
        ("data", 32768, "data@rank1"),
        ("status", 16, "status@launch2@rank1"),
    ],
)
def test_names_say_whose_memory_it_is(tmp_path, field, number, name):
    """`words` is everyone's, `data` a rank's, `status` a launch's."""
    body = f"if (p.rank == 1 && p.launch == 2) p.{field}[{number}] = 1;"
    executable = build(render_kernel(tmp_path, body), PLAN.name, checked=True)
    launches = launches_of(make_ranks(2), 3)
    words = launches[0].arrays["words"]
    for i, one in enumerate(launches):
        status = Array(np.zeros(16, np.uint32), writable=True)
        launches[i] = replace(one, arrays=one.arrays | {"words": words, "status": status})
    with pytest.raises(EmulationError, match=rf" of {name}, which has .* of launch 2 of rank 1, "):
        launch(executable, PLAN, launches, in_stream=True)


def test_streams_and_kills_that_do_not_exist_are_refused(tmp_path):
    launches = launches_of(make_ranks(2), 2)
    with pytest.raises(ValueError, match="a stream each unless in_stream"):
        launch(tmp_path, PLAN, launches)
    with pytest.raises(ValueError, match="no launch is in stream 2"):
        launch(tmp_path, PLAN, launches, in_stream=True, kill=(2, 0))


def test_system_scope_compiles_for_the_device(tmp_path):
    bodies = exchange(2, FENCED_RELEASE, FENCED_ACQUIRE), exchange(2, "add_release_sys(flag, 1);")
    for body in bodies:
        cubin = nvrtc.compile(render_kernel(tmp_path, body, "device"), "sm_90a", PLAN.name)
        assert cubin.resources.spill_store_bytes == 0


# The layer


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("bucket", ["decode", "prefill"])
def test_calls_of_a_layer_on_ranks_that_drift_apart(bucket, checked):
    """Three launches on each of two ranks with two experts each."""
    problem = MoeProblem({"decode": 1, "prefill": MAX_TOKENS}[bucket], 256, 128, 2, 2)
    plan = replace(choose(problem, GPUS["h200"]), num_ranks=2)
    layer = reference.random_layer(4, 256, 128, seed=0)
    halves = [
        reference.Layer(*(None if part is None else part[experts] for part in layer))
        for experts in (slice(0, 2), slice(2, 4))
    ]
    rounds, refs = [], []
    for sizes in ((7, 3), (0, 8), (5, 5)):
        tokens = [reference.random_tokens(n, 256, 4, 2, seed=n + 1) for n in sizes]
        rounds.append([(fp8.encode_bf16(t.x), *t[1:]) for t in tokens])
        for t in tokens:
            call = *fp8.quantize_tokens(t.x), *t[1:], *layer
            refs.append(reference.mega_moe(*call, requantize=True))
    for seed in range(1 if checked else 4):
        emulated = EmulatedRanks(plan, halves, rank_tokens=8, num_blocks=2, checked=checked)
        ys = emulated.run(rounds, seed=seed, delays=True)
        for y, ref in zip((y for of_round in ys for y in of_round), refs, strict=True):
            assert reference.relative_error(y, ref) < 4e-3
