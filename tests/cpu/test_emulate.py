"""The kernels themselves against the oracle, emulated; and what the emulator says of wrong ones."""

import dataclasses
import re

import numpy as np
import pytest

from jitmoe import fp8, reference
from jitmoe.emulate.compile import NoHostCompiler, build, compiler
from jitmoe.emulate.mega_moe import EmulatedLayer
from jitmoe.emulate.run import EmulationError
from jitmoe.jit.render import render, templates_dir
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import choose
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.problem import MAX_TOKENS, MoeProblem

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)


def make_plan(bucket, hidden, intermediate, num_experts, top_k, **fields) -> MegaMoePlan:
    num_tokens = {"decode": 1, "prefill": MAX_TOKENS}[bucket]
    plan = choose(MoeProblem(num_tokens, hidden, intermediate, num_experts, top_k), GPUS["h200"])
    assert plan.bucket == bucket
    plan = dataclasses.replace(plan, **{"num_stages": 4 if bucket == "decode" else 3} | fields)
    plan.check(GPUS["h200"])
    return plan


def random_layer(plan, seed=0):
    return reference.random_layer(plan.num_experts, plan.hidden, plan.intermediate, seed)


def check(emulated: EmulatedLayer, num_tokens, routing="uniform", x_is_fp8=False, seed=0):
    """One launch against the oracle; returns y.

    An activation that rounds the other way may be a few percent of some element.
    """
    plan = emulated.plan
    tokens = reference.random_tokens(
        num_tokens, plan.hidden, plan.num_experts, plan.top_k, seed, routing
    )
    codes, scale = fp8.quantize_tokens(tokens.x)
    x = (codes, scale) if x_is_fp8 else fp8.encode_bf16(tokens.x)
    y = emulated(x, tokens.topk_ids, tokens.topk_weights, seed=seed)
    ref = reference.mega_moe(
        codes, scale, tokens.topk_ids, tokens.topk_weights, *emulated.layer, requantize=True
    )
    assert reference.relative_error(y, ref) < 4e-3
    assert reference.worst_element(y, ref) < 0.06
    return y


CASES = {
    "decode": make_plan("decode", 512, 256, 8, 2),
    "decode, ragged, shared routing": make_plan("decode", 256, 208, 8, 4, num_local_pairs=2),
    "decode, unrolled": make_plan("decode", 640, 320, 16, 3, unroll_k=2),
    "prefill": make_plan("prefill", 512, 192, 8, 2),
    "prefill, wide": make_plan("prefill", 640, 384, 4, 2),
    # 200 tokens: 133 rows each, so some tiles take tokens beyond 128 along.
    "prefill, extra tokens": make_plan("prefill", 640, 208, 3, 2),
    "prefill, no extra tokens": make_plan("prefill", 384, 208, 3, 2, extra_tokens=0),
}


@pytest.fixture(params=CASES, scope="module")
def emulated(request):
    plan = CASES[request.param]
    return EmulatedLayer(plan, random_layer(plan), max_tokens=200, num_blocks=3)


@pytest.mark.parametrize("num_tokens", [1, 9, 40, 200])
@pytest.mark.parametrize("x_is_fp8", [True, False])
def test_token_counts(emulated, num_tokens, x_is_fp8):
    check(emulated, num_tokens, x_is_fp8=x_is_fp8, seed=num_tokens)


@pytest.mark.parametrize("routing", reference.ROUTINGS)
def test_routings(emulated, routing):
    check(emulated, 70, routing, seed=1)


def test_every_seed_and_grid_gives_the_same_bits(emulated):
    first = check(emulated, 65, seed=3)
    tokens = reference.random_tokens(
        65, emulated.plan.hidden, emulated.plan.num_experts, emulated.plan.top_k, 3
    )
    x = fp8.encode_bf16(tokens.x)
    for num_blocks in (1, 2, 6):
        other = EmulatedLayer(emulated.plan, emulated.layer, max_tokens=65, num_blocks=num_blocks)
        for seed in (7, 8):
            assert np.array_equal(other(x, tokens.topk_ids, tokens.topk_weights, seed=seed), first)


@pytest.mark.parametrize("x_is_fp8", [True, False])
def test_a_block_with_more_tokens_than_it_sorts_at_a_time(x_is_fp8):
    plan = make_plan("prefill", 256, 128, 32, 32)  # 128 tokens of 32 slots at a time
    emulated = EmulatedLayer(plan, random_layer(plan), max_tokens=140, num_blocks=1)
    check(emulated, 140, x_is_fp8=x_is_fp8)


def test_wide_ids_bf16_weights_and_strides():
    plan = CASES["decode"]
    emulated = EmulatedLayer(plan, random_layer(plan), max_tokens=20)
    tokens = reference.random_tokens(20, plan.hidden, plan.num_experts, plan.top_k, 0)
    codes, scale = fp8.quantize_tokens(tokens.x)
    apart = np.zeros((20, plan.hidden + 32), np.uint8)
    apart[:, : plan.hidden] = codes
    weights = fp8.encode_bf16(tokens.topk_weights)
    ids = tokens.topk_ids.astype(np.int64)
    y = emulated((apart[:, : plan.hidden], np.asfortranarray(scale)), ids, weights)
    ref = reference.mega_moe(codes, scale, ids, weights, *emulated.layer, requantize=True)
    assert reference.relative_error(y, ref) < 4e-3


def test_a_stall_says_who_waits_for_what():
    plan = CASES["prefill, wide"]
    emulated = EmulatedLayer(plan, random_layer(plan), max_tokens=8, num_blocks=2)
    emulated._control["banks"][:] = 1  # counters that no launch left so
    with pytest.raises(EmulationError, match="seed 5") as caught:
        check(emulated, 8, seed=5)
    report = str(caught.value)
    assert re.search(r"load warp 0 of block \d .*waits for flag banks", report)
    assert re.search(
        r"math warp 11 of block 0 waits for named barrier 0: 352 of 384 threads", report
    )


def test_waits_give_up_when_the_clock_runs_out():
    plan = CASES["decode"]
    emulated = EmulatedLayer(plan, random_layer(plan), max_tokens=8, num_blocks=2)
    emulated._control["banks"].view(np.uint32)[64] = 5  # blocks that finished the head
    tokens = reference.random_tokens(8, plan.hidden, plan.num_experts, plan.top_k, 0)
    emulated(fp8.encode_bf16(tokens.x), tokens.topk_ids, tokens.topk_weights, expire=True)
    assert emulated.status[0] == 1 and emulated.status[1] in range(1, 8)
    assert emulated.report.startswith("stall")


def test_a_wait_under_multiplies_in_flight_reports_too():
    plan = dataclasses.replace(CASES["prefill"], unroll_k=4)
    emulated = EmulatedLayer(plan, random_layer(plan), max_tokens=8, num_blocks=2)
    arrive = "if (i == wanted) arrive(&smem.task_wanted[slot.stage]);"
    text = render(plan, layer="emulated")
    assert arrive in text
    emulated.executable = build(
        text.replace(arrive, f"{arrive}\nif (i == 1) continue;"), plan.name, checked=False
    )
    tokens = reference.random_tokens(8, plan.hidden, plan.num_experts, plan.top_k, 0)
    inputs = fp8.encode_bf16(tokens.x), tokens.topk_ids, tokens.topk_weights
    with pytest.raises(EmulationError, match=r"math warp 4 .* waits for mbarrier full\[1\]"):
        emulated(*inputs)
    emulated(*inputs, expire=True)
    assert emulated.status[0] == 1


def test_out_of_bounds_is_caught():
    plan = CASES["decode"]
    emulated = EmulatedLayer(plan, random_layer(plan), max_tokens=8, num_blocks=2)
    tokens = reference.random_tokens(8, plan.hidden, plan.num_experts, plan.top_k, 0)
    too_few = tokens.topk_ids[:4]
    with pytest.raises(EmulationError, match="of topk_ids, which has 32"):
        emulated(fp8.encode_bf16(tokens.x), too_few, tokens.topk_weights)


def test_every_device_function_has_a_twin():
    """A device file stands for itself where it has no PTX, and else has every function twice."""
    device, emulated = templates_dir() / "device", templates_dir() / "emulated"
    for path in device.iterdir():
        if not (emulated / path.name).exists():
            assert "asm" not in path.read_text(), f"{path.name} has PTX and no emulated twin"
            continue
        names = [
            set(re.findall(r"^DEVICE [^()=]*?(\w+)\(", file.read_text(), re.MULTILINE))
            for file in (path, emulated / path.name)
        ]
        assert names[0] and names[0] <= names[1], path.name
