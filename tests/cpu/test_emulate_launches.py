"""Launches of one stream that overlap, emulated: starts, what a wait orders, late inputs."""

import re

import numpy as np
import pytest
from machine_plan import PLAN, render_kernel, run

from jitmoe import fp8, reference
from jitmoe.emulate.compile import NoHostCompiler, build, compiler
from jitmoe.emulate.mega_moe import EmulatedLayer
from jitmoe.emulate.run import Array, EmulationError, Rank, launch
from jitmoe.jit import nvrtc
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import choose
from jitmoe.plan.problem import MAX_TOKENS, MoeProblem

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

SEEDS = range(6)


def stream(directory, body, num_launches=2, **options):
    """(data, words) of the launches; words are one array."""
    return run(directory, body, num_ranks=num_launches, in_stream=True, **options)


def passes(directory, body, **options) -> list:
    """The results of every seed."""
    return [stream(directory, body, seed=seed, **options) for seed in SEEDS]


def failure(directory, body, **options) -> str:
    """The report of launches that fail under some seed."""
    for seed in SEEDS:
        try:
            stream(directory, body, seed=seed, **options)
        except EmulationError as error:
            return str(error)
    pytest.fail("nothing was reported")


# Launch 0 cannot end before launch 1 has begun.
MEET = """
    if (p.rank == 0) {
        START
        while (load_relaxed_gpu(p.words) == 0) {
        }
    } else if (thread_idx() == 0) {
        store_relaxed_gpu(p.words, 1);
    }"""


def test_launches_overlap(tmp_path):
    passes(tmp_path, MEET.replace("START", "if (thread_idx() == 77) start_next_launch();"))


def test_without_start_next_launch_nothing_overlaps(tmp_path):
    report = failure(tmp_path, MEET.replace("START", ""))
    assert report.startswith("stall")
    assert "warp 3 of block 0 of launch 0 waits for flag words + 0 bytes" in report
    what = "the launch before it to let it start: 0 of 1 blocks do"
    assert f"warp 3 of block 0 of launch 1 waits for {what}" in report


START_IN_BLOCK_1 = "if (block_idx() == 0) return; if (block_idx() == 1) start_next_launch();"


def test_exit_counts_as_start(tmp_path):
    passes(tmp_path, MEET.replace("START", START_IN_BLOCK_1), num_blocks=2)
    report = failure(tmp_path, MEET.replace("START", START_IN_BLOCK_1), num_blocks=3)
    assert "to let it start: 2 of 3 blocks do" in report


def test_clusters_start_whole(tmp_path):
    body = MEET.replace("START", "start_next_launch();") + "sync_cluster();"
    passes(tmp_path, body, num_blocks=4, cluster_size=2)


def test_a_launch_that_does_not_end_stalls_who_waits(tmp_path):
    body = """
    start_next_launch();
    if (p.rank == 1) wait_for_previous_launch();
    while (p.rank == 0 && load_relaxed_gpu(p.words) == 0) {
    }"""
    report = failure(tmp_path, body)
    assert report.startswith("stall")
    assert "warp 0 of block 0 of launch 1 waits for the launch before it to end" in report


HAND_OVER = """
    {start}
    {wait}
    if (p.rank == 0) {
        p.words[thread_idx()] = thread_idx() + 1;
    } else {
        p.words[128 + thread_idx()] = p.words[127 - thread_idx()];
    }"""
START, WAIT = "start_next_launch();", "wait_for_previous_launch();"


def hand_over(start=START, wait=WAIT) -> str:
    return HAND_OVER.replace("{start}", start).replace("{wait}", wait)


def is_handed_over(words) -> bool:
    return np.array_equal(words[128:], np.arange(128, 0, -1))


@pytest.mark.parametrize(
    "wait",
    [WAIT, "if (thread_idx() == 99) wait_for_previous_launch(); sync_block();"],
    ids=["each thread", "one thread and a barrier"],
)
def test_a_wait_orders(tmp_path, wait):
    for launches in passes(tmp_path, hand_over(wait=wait)):
        assert is_handed_over(launches[0][1])


@pytest.mark.parametrize(
    "wait", ["", "if (thread_idx() == 99) wait_for_previous_launch();"], ids=["none", "one thread"]
)
def test_a_missing_wait_is_a_race_and_shows(tmp_path, wait):
    body = hand_over(wait=wait)
    report = failure(tmp_path, body)
    assert "data race on words +" in report
    assert "of block 0 of launch 0" in report and "of block 0 of launch 1" in report
    assert not all(is_handed_over(ls[0][1]) for ls in passes(tmp_path, body, checked=False))


def test_serial_launches_need_no_wait(tmp_path):
    for launches in passes(tmp_path, hand_over(start="", wait="")):
        assert is_handed_over(launches[0][1])


def test_nothing_to_wait_for(tmp_path):
    for in_stream in (False, True):
        run(tmp_path, WAIT + START + WAIT + "p.words[thread_idx()] = 1;", in_stream=in_stream)


@pytest.mark.parametrize("start", [START, ""], ids=["overlapped", "serial"])
def test_a_wait_is_for_all_launches_before(tmp_path, start):
    """Launch 1 waits for none and may end first."""
    body = """
    {start}
    if (p.rank == 0) p.words[thread_idx()] = 7;
    if (p.rank != 2) return;
    wait_for_previous_launch();
    p.words[thread_idx() + 128] = p.words[thread_idx()];"""
    for launches in passes(tmp_path, body.replace("{start}", start), num_launches=3):
        assert (launches[0][1] == 7).all()


def test_tensor_copies_after_a_wait_need_no_proxy_fence(tmp_path):
    body = """
    start_next_launch();
    if (p.rank == 0) {
        p.words[thread_idx()] = 0x01010101 * thread_idx();
        return;
    }
    init_barriers(smem, 1);
    if (thread_idx() == 0) {
        wait_for_previous_launch();
        arrive_expect_bytes(&smem.barriers[0], 512);
        load_bulk(smem.tiles[0], p.words, 512, &smem.barriers[0]);
    }
    wait(&smem.barriers[0], 0);
    p.data[thread_idx()] = smem.tiles[0][4 * thread_idx()];"""
    for launches in passes(tmp_path, body):
        assert np.array_equal(launches[1][0][0, :128], np.arange(128))
    # Without the wait the copy brings garbage or what was there.
    for launches in passes(tmp_path, body.replace(WAIT, "")):
        assert not np.array_equal(launches[1][0][0, :128], np.arange(128))


@pytest.mark.parametrize("scope", ["kGpu", "kCta"])
def test_launches_of_a_stream_exchange_at_gpu_scope(tmp_path, scope):
    body = """
    start_next_launch();
    if (p.rank == 0) {
        p.words[thread_idx()] = thread_idx() + 1;
        sync_block();
        if (thread_idx() == 0) emu::fetch_add(p.words + 255, 1, emu::kRelease, emu::SCOPE);
    } else {
        while (emu::load(p.words + 255, emu::kAcquire, emu::SCOPE) == 0) {
        }
        p.data[thread_idx()] = u8(p.words[127 - thread_idx()]);
    }""".replace("SCOPE", scope)
    if scope == "kCta":
        assert "data race on words" in failure(tmp_path, body)
        return
    for launches in passes(tmp_path, body):
        assert np.array_equal(launches[1][0][0, :128], np.arange(128, 0, -1))


# Late inputs

OLD, NEW = 0, 5
LATE_WORDS = np.full(256, NEW, np.uint32)
READ_LATE = """
    start_next_launch();
    if (p.rank + 1 < LAUNCHES) return;
    {before}
    wait_for_previous_launch();
    {after}
    p.data[thread_idx()] = u8(value);"""
PLAIN, RELAXED = "u32 value = p.words[thread_idx()];", "u32 value = load_relaxed_gpu(p.words);"


def read_late(num_launches, before="", after="") -> tuple[str, dict]:
    """The last launch reads; what it reads is late, whatever comes before it."""
    body = READ_LATE.replace("{before}", before).replace("{after}", after)
    options = {"num_launches": num_launches, "late": {num_launches - 1: {"words": LATE_WORDS}}}
    return body.replace("LAUNCHES", f"{num_launches}u"), options


@pytest.mark.parametrize("num_launches", [1, 3])
def test_late_inputs_are_there_after_the_wait(tmp_path, num_launches):
    for read in (PLAIN, RELAXED):
        body, options = read_late(num_launches, after=read)
        for launches in passes(tmp_path, body, **options):
            assert (launches[-1][0][0, :128] == NEW).all() and (launches[-1][1] == NEW).all()


@pytest.mark.parametrize("num_launches", [1, 2])
def test_a_plain_read_before_the_wait_is_a_race(tmp_path, num_launches):
    body, options = read_late(num_launches, before=PLAIN)
    for seed in SEEDS:  # each: the write may come before the read, or long after it
        with pytest.raises(EmulationError) as caught:
            stream(tmp_path, body, seed=seed, **options)
        report = str(caught.value)
        assert re.search(r"data race on words \+ \d+ bytes\n", report)
        assert re.search(r"read by work warp \d of block 0.* at \S*kernel.cpp:\d+", report)
        assert "write of late contents, as what came before ended" in report


@pytest.mark.parametrize("num_launches", [1, 2])
def test_an_atomic_load_before_the_wait_sees_old_or_new(tmp_path, num_launches):
    body, options = read_late(num_launches, before=RELAXED)
    seen = {int(v) for launches in passes(tmp_path, body, **options) for v in launches[-1][0][0]}
    assert {OLD, NEW} <= seen
    # Its value is not that of later, plain reads.
    body, options = read_late(num_launches, before="u32 " + RELAXED[4:], after=PLAIN[4:])
    for launches in passes(tmp_path, body, **options):
        assert (launches[-1][0][0, :128] == NEW).all()


def test_a_poll_of_late_words_ends(tmp_path):
    body, options = read_late(1, before="u32 value; while (!(value = load_relaxed_gpu(p.words)));")
    for launches in passes(tmp_path, body, **options):
        assert (launches[0][0][0, :128] == NEW).all()


def test_a_write_before_the_wait_is_a_race(tmp_path):
    body, options = read_late(2, before="u32 value = 3; p.words[thread_idx()] = 3;")
    assert "data race on words" in failure(tmp_path, body, **options)


def test_late_inputs_stay_inputs(tmp_path):
    """Read-only memory, and a name of its own launch."""
    body = "BEFORE wait_for_previous_launch(); p.words[p.rank * 128 + thread_idx()] = READ;"
    late = {1: {"data": np.full((128, 256), 9, np.uint8)}}
    text = body.replace("BEFORE", START).replace("READ", "p.data[thread_idx()]")
    for (data, words), _ in passes(tmp_path, text, late=late):
        assert np.array_equal(words[:128], data[0, :128]) and (words[128:] == 9).all()
    report = failure(tmp_path, text + "if (p.rank == 1) p.data[0] = 1;", late=late)
    assert "of data@launch1, which has 32768 and is an input" in report
    look = "if (p.rank == 1 && p.data[thread_idx()] == 77) return;"
    text = body.replace("BEFORE", START + look).replace("READ", "1")
    assert "data race on data@launch1 +" in failure(tmp_path, text, late=late)


def test_a_seed_is_one_run(tmp_path):
    executable = build(render_kernel(tmp_path, hand_over()), PLAN.name, checked=True)
    for seed in SEEDS:
        reports = set()
        for _ in range(2):
            words = Array(np.zeros(256, np.uint32), writable=True)
            ranks = [Rank({"words": words}, {"rank": rank}) for rank in range(3)]
            reports.add(launch(executable, PLAN, ranks, in_stream=True, seed=seed))
        assert len(reports) == 1


def test_late_contents_are_refused_where_they_do_not_fit(tmp_path):
    words = Array(np.zeros(256, np.uint32))
    rank = Rank({"words": words}, {}, late={"words": np.zeros(4, np.uint32)})
    with pytest.raises(ValueError, match="late words has 16 bytes, the array has 1024"):
        launch(tmp_path, PLAN, [rank], in_stream=True)
    with pytest.raises(ValueError, match="in a stream only"):
        launch(tmp_path, PLAN, [rank])


def test_launch_functions_compile_for_the_device(tmp_path):
    cubin = nvrtc.compile(render_kernel(tmp_path, hand_over(), "device"), "sm_90a", PLAN.name)
    assert cubin.resources.spill_store_bytes == 0


# The layer


def make_layer(bucket):
    problem = MoeProblem({"decode": 1, "prefill": MAX_TOKENS}[bucket], 256, 128, 4, 2)
    return choose(problem, GPUS["h200"]), reference.random_layer(4, 256, 128, seed=0)


@pytest.mark.parametrize("bucket", ["decode", "prefill"])
def test_calls_of_a_layer_in_one_stream(bucket):
    """Calls of several sizes in one workspace, the second with inputs that arrive late."""
    plan, layer = make_layer(bucket)
    calls, refs = [], []
    for seed, num_tokens in enumerate((20, 5, 9)):
        tokens = reference.random_tokens(num_tokens, 256, 4, 2, seed)
        codes, scale = fp8.quantize_tokens(tokens.x)
        calls.append((fp8.encode_bf16(tokens.x), *tokens[1:]))
        refs.append(reference.mega_moe(codes, scale, *tokens[1:], *layer, requantize=True))
    x, ids, weights = calls[1]
    late = {"x": x, "topk_ids": ids, "topk_weights": weights}
    calls[1] = (np.full_like(x, 0xFFFF), np.full_like(ids, -1), np.zeros_like(weights), late)
    for checked in (False, True):
        emulated = EmulatedLayer(plan, layer, max_tokens=20, num_blocks=2, checked=checked)
        for seed in range(1 if checked else 3):
            for y, ref in zip(emulated.run_in_stream(calls, seed=seed), refs, strict=True):
                assert reference.relative_error(y, ref) < 4e-3
                assert reference.worst_element(y, ref) < 0.06


def test_launches_behind_one_that_gave_up_have_time_again():
    """They find its counters and give up too, each after a stall of its own."""
    plan, layer = make_layer("decode")
    tokens = reference.random_tokens(8, 256, 4, 2, 0)
    call = fp8.encode_bf16(tokens.x), *tokens[1:]
    emulated = EmulatedLayer(plan, layer, max_tokens=8, num_blocks=2)
    emulated._control["banks"].view(np.uint32)[64] = 5  # blocks that finished the head
    emulated.run_in_stream([call, call], expire=True)
    assert emulated.status[0] == 1
    assert "of launch 1 waits for flag banks" in emulated.report
