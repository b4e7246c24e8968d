"""What users of such layers have been bitten by and a kernel can show, emulated in both buckets."""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest

from jitmoe import fp8, reference
from jitmoe.emulate.compile import NoHostCompiler, compiler
from jitmoe.emulate.mega_moe import EmulatedLayer
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import choose
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.problem import MAX_TOKENS, MoeProblem

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

# Ragged ends of both GEMMs' tiles, and scale blocks that hold gate and up.
HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K = 384, 208, 6, 3
MAX_CALL = 100
NAN_CODE, NAN_BF16, INF_BF16 = 0x7F, 0x7FC0, 0x7F80
LAYER = reference.random_layer(NUM_EXPERTS, HIDDEN, INTERMEDIATE, seed=0)


def make_plan(bucket, hidden, intermediate, num_experts, top_k) -> MegaMoePlan:
    num_tokens = {"decode": 1, "prefill": MAX_TOKENS}[bucket]
    plan = choose(MoeProblem(num_tokens, hidden, intermediate, num_experts, top_k), GPUS["h200"])
    assert plan.bucket == bucket
    # Some calls of the decode bucket are sorted by every block for itself, the larger ones are not.
    return dataclasses.replace(plan, num_local_pairs=30) if bucket == "decode" else plan


PLANS = {
    bucket: make_plan(bucket, HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K)
    for bucket in ("decode", "prefill")
}


class Call(NamedTuple):
    x: object  # bf16 bits, or (codes, scale)
    ids: np.ndarray
    weights: np.ndarray

    def run(self, emulated: EmulatedLayer, **arguments) -> np.ndarray:
        return emulated(self.x, self.ids, self.weights, **arguments)

    def rows(self, rows) -> "Call":
        x = tuple(part[rows] for part in self.x) if isinstance(self.x, tuple) else self.x[rows]
        return Call(x, self.ids[rows], self.weights[rows])

    def reference(self, layer=LAYER) -> np.ndarray:
        x = self.x if isinstance(self.x, tuple) else (self.x, None)
        return reference.mega_moe(*x, self.ids, self.weights, *layer, requantize=True)


def make_call(num_tokens, routing="uniform", seed=0, x_is_fp8=True) -> Call:
    tokens = reference.random_tokens(num_tokens, HIDDEN, NUM_EXPERTS, TOP_K, seed, routing)
    x = fp8.quantize_tokens(tokens.x) if x_is_fp8 else fp8.encode_bf16(tokens.x)
    return Call(x, tokens.topk_ids, tokens.topk_weights)


def to_one_expert(call: Call) -> Call:
    """All rows in the same tiles, where they could reach each other."""
    return call._replace(ids=np.full_like(call.ids, 2))


def assert_close(y, ref):
    assert reference.relative_error(y, ref) < 4e-3
    assert reference.worst_element(y, ref) < 0.06


@pytest.fixture(params=PLANS, scope="module")
def plan(request):
    return PLANS[request.param]


@pytest.fixture(scope="module")
def emulated(plan):
    return EmulatedLayer(plan, LAYER, max_tokens=MAX_CALL, num_blocks=3)


# Zero tokens


def test_no_tokens(emulated):
    """An empty launch writes nothing and leaves the counters ready for the next."""
    call = make_call(5)
    assert call.rows(slice(0, 0)).run(emulated).shape == (0, HIDDEN)
    assert_close(call.run(emulated), call.reference())


def test_experts_without_tokens_are_not_read(plan, emulated):
    """NaN in the weights and scales of idle experts, before and after the busy ones."""
    call = make_call(20)
    call = call._replace(ids=np.where(call.ids % 2 == 1, call.ids, -1))
    layer = reference.Layer(*(part.copy() for part in LAYER))
    for codes, scale in ((layer.w13, layer.w13_scale), (layer.w2, layer.w2_scale)):
        codes[::2], scale[::2] = NAN_CODE, np.nan
    poisoned = EmulatedLayer(plan, layer, max_tokens=20, num_blocks=3)
    assert np.array_equal(call.run(poisoned), call.run(emulated))


# NaN and Inf out of nothing


@pytest.mark.parametrize("x_is_fp8", [True, False])
def test_nan_and_inf_stay_in_their_row(emulated, x_is_fp8):
    """And fill it: an error upstream must not look like a number."""
    call = to_one_expert(make_call(40, x_is_fp8=x_is_fp8))
    clean = call.run(emulated)
    if x_is_fp8:
        codes, scale = call.x
        codes[3, 200] = NAN_CODE
        scale[9, 1], scale[20, 2], scale[21, 0] = np.nan, np.inf, -np.inf
    else:
        call.x[3, 200], call.x[9, 383] = NAN_BF16, 0xFFFF
        call.x[20, 0], call.x[21, 1] = INF_BF16, INF_BF16 | 0x8000
    call.weights[30, 0], call.weights[31, 2] = np.nan, np.inf
    bad = [3, 9, 20, 21, 30, 31]
    y = fp8.decode_bf16(call.run(emulated))
    assert not np.isfinite(y[bad]).any()
    good = np.setdiff1d(np.arange(40), bad)
    assert np.array_equal(fp8.encode_bf16(y[good]), clean[good])


@pytest.mark.parametrize("zero", [0x0000, 0x8000])
def test_zero_rows_give_zeros(emulated, zero):
    """No 0/0, and no minus either."""
    call = to_one_expert(make_call(20, x_is_fp8=False))
    call.x[::2] = zero
    y = call.run(emulated)
    assert not y[::2].any()
    assert_close(y, call.reference())


def test_tiny_and_huge_rows(emulated):
    """Amax whose reciprocal would overflow, gates whose exponential does, values near the largest
    that squares to a float."""
    sizes = [1e-40, 1e-38, 1e-12, 1e-4, 1.0, 30.0, 1e4, 1e15]
    tokens = reference.random_tokens(24, HIDDEN, NUM_EXPERTS, TOP_K, 0)
    x = fp8.encode_bf16(tokens.x * np.float32(np.repeat(sizes, 3))[:, None])
    call = Call(x, tokens.topk_ids, tokens.topk_weights)
    y, ref = call.run(emulated), call.reference()
    assert np.isfinite(fp8.decode_bf16(y)).all() and ref[12:].any(axis=1).all()
    assert reference.worst_element(y, ref) < 0.06


def test_overflow_stays_in_its_row(emulated):
    """A product beyond float between the GEMMs is not a finite result."""
    call = to_one_expert(make_call(20))
    clean = call.run(emulated)
    call.x[1][5] *= 1e30
    y = call.run(emulated)
    assert not np.isfinite(fp8.decode_bf16(y[5])).any()
    assert np.array_equal(np.delete(y, 5, axis=0), np.delete(clean, 5, axis=0))


def test_zero_and_subnormal_scales(plan):
    call = make_call(12)
    codes, scale = call.x
    scale[0], scale[1], scale[2, 1], scale[3, 2] = 0.0, 1e-45, 0.0, 1e-39
    layer = reference.Layer(*(part.copy() for part in LAYER))
    layer.w13_scale[0, 1], layer.w2_scale[1, 0], layer.w2_scale[2, :, 1] = 0.0, 0.0, 1e-42
    y = call.run(EmulatedLayer(plan, layer, max_tokens=12, num_blocks=3))
    assert not y[:2].any()
    assert_close(y, call.reference(layer))


def test_largest_codes(plan):
    """+-448 everywhere: sums of 128 products are far beyond what e4m3 and f16 hold."""
    rng = np.random.default_rng(0)

    def largest(*shape):
        return rng.choice(np.array([0x7E, 0xFE], np.uint8), shape)

    layer = LAYER._replace(w13=largest(*LAYER.w13.shape), w2=largest(*LAYER.w2.shape))
    call = make_call(12)
    call = call._replace(x=(largest(12, HIDDEN), np.full((12, HIDDEN // 128), 1e-3, np.float32)))
    y = call.run(EmulatedLayer(plan, layer, max_tokens=12, num_blocks=3))
    assert_close(y, call.reference(layer))


# Layout misread silently


def test_every_channel_in_its_place(plan):
    """By hand: gate and up have codes and scales of their own, a row of w2 picks one channel."""
    w13 = np.zeros(LAYER.w13.shape, np.uint8)
    w13[:, :INTERMEDIATE, 0], w13[:, INTERMEDIATE:, 0] = 0x40, 0x44  # gate 2, up 3, times scales
    w13_scale = np.ones(LAYER.w13_scale.shape, np.float32)
    block_scale = np.float32([1, 0.5, 2, 4])
    w13_scale[...] = block_scale[:, None]
    picked = np.arange(HIDDEN) * 5 % INTERMEDIATE
    w2 = np.zeros(LAYER.w2.shape, np.uint8)
    w2[:, np.arange(HIDDEN), picked] = 0x38  # 1
    w2_scale = np.ones(LAYER.w2_scale.shape, np.float32)
    w2_scale[:, 1:, :] = 3
    w2_scale[:, :, 1] *= 5
    x = np.zeros((1, HIDDEN), np.uint8)
    x[0, 0] = 0x38
    call = Call(
        (x, np.ones((1, HIDDEN // 128), np.float32)),
        np.array([[-1, 4, -1]], np.int32),
        np.float32([[9, 0.5, 9]]),
    )
    layer = reference.Layer(w13, w13_scale, w2, w2_scale)
    y = fp8.decode_bf16(call.run(EmulatedLayer(plan, layer, max_tokens=1, num_blocks=3)))

    gate = 2 * block_scale[np.arange(INTERMEDIATE) // 128]
    up = 3 * block_scale[(INTERMEDIATE + np.arange(INTERMEDIATE)) // 128]
    wanted = 0.5 * (gate / (1 + np.exp(-gate)) * up)[picked]
    wanted *= np.where(np.arange(HIDDEN) < 128, 1, 3) * np.where(picked < 128, 1, 5)
    np.testing.assert_allclose(y[0], wanted, rtol=2**-4 + 2**-8)  # half a step of e4m3, of bf16


# Bad expert ids


@pytest.mark.parametrize(
    "bad",
    [
        np.int32([-1, NUM_EXPERTS, 2**31 - 1, -(2**31)]),
        np.int64([-1, NUM_EXPERTS, 2**31, 2**32, 2**32 + 1, 2**62, -(2**63), 2**63 - 1]),
    ],
    ids=["int32", "int64"],
)
def test_bad_ids_are_unused_slots(emulated, bad):
    """Neither an address nor cut to 32 bits, and the weight beside them is not looked at."""
    call = make_call(40)
    ids = call.ids.astype(bad.dtype)
    ids.reshape(-1)[::2] = np.resize(bad, 60)
    ids[7] = bad[:TOP_K]
    is_bad = (ids < 0) | (ids >= NUM_EXPERTS)
    weights = np.where(is_bad, np.float32(np.nan), call.weights)
    y = Call(call.x, ids, weights).run(emulated)
    plain = call._replace(ids=np.where(is_bad, -1, ids).astype(np.int32))
    assert np.array_equal(y, plain.run(emulated))
    assert not y[7].any()
    assert_close(y, plain.reference())


def test_an_expert_twice_in_a_token_counts_twice(emulated):
    call = make_call(20, "one_expert")
    call.weights[:] = [1, np.nan, np.nan]
    once = call.run(emulated)
    call.ids[:, 2] = call.ids[:, 0]
    call.weights[:] = [0.5, np.nan, 0.5]
    assert np.array_equal(call.run(emulated), once)


@pytest.mark.parametrize("bucket", PLANS)
def test_300_experts_in_a_workspace_without_room_to_spare(bucket):
    """One row for each of 300 experts: as many gaps between experts as there can be."""
    num_tokens, top_k, num_experts = 38, 8, 300
    plan = make_plan(bucket, 128, 16, num_experts, top_k)
    layer = reference.random_layer(num_experts, 128, 16, seed=0)
    tokens = reference.random_tokens(num_tokens, 128, num_experts, top_k, 0)
    ids = np.random.default_rng(0).permutation(num_tokens * top_k).astype(np.int32)
    call = Call(fp8.encode_bf16(tokens.x), ids.reshape(num_tokens, top_k), tokens.topk_weights)
    y = call.run(EmulatedLayer(plan, layer, max_tokens=num_tokens, num_blocks=2))
    assert_close(y, call.reference(layer))


# Unwanted non-determinism


def test_rows_do_not_depend_on_their_batch(emulated):
    """Alone, in another order or among fewer: tiles of other widths, the same bits."""
    call = make_call(90, "zipf")
    y = call.run(emulated)
    rng = np.random.default_rng(0)
    for rows in (rng.permutation(90), np.arange(40, 60), np.arange(3, 8), [17]):
        assert np.array_equal(call.rows(rows).run(emulated), y[rows])


@pytest.mark.parametrize("x_is_fp8", [True, False])
def test_buckets_agree(x_is_fp8):
    """A batch that grows from one bucket into the other does not change its rows."""
    call = make_call(40, "unused", x_is_fp8=x_is_fp8)
    decode, prefill = (call.run(EmulatedLayer(plan, LAYER, 40, 2)) for plan in PLANS.values())
    assert np.array_equal(decode, prefill)


# State between launches


def test_launches_in_one_workspace(plan):
    """Smaller batches after larger ones, other routings and formats, an odd and an even number of
    launches between like ones: what a workspace of its own gives."""
    calls = [
        make_call(70, "uniform", seed=1),
        make_call(3, "hot_expert", seed=2, x_is_fp8=False),
        make_call(9, "unused", seed=3),
        make_call(0),
        make_call(70, "one_expert", seed=4, x_is_fp8=False),
    ]
    wanted = [call.run(EmulatedLayer(plan, LAYER, len(call.ids), num_blocks=3)) for call in calls]
    shared = EmulatedLayer(plan, LAYER, max_tokens=70, num_blocks=3)
    for idx in (0, 1, 0, 2, 3, 4, 1, 1, 4, 0):
        assert np.array_equal(calls[idx].run(shared, seed=idx), wanted[idx])


def test_launch_after_one_that_gave_up(plan):
    """What Workspace.reset() does after a time-out, zero counters, is all it takes."""
    call = make_call(40)
    emulated = EmulatedLayer(plan, LAYER, max_tokens=40, num_blocks=3)
    wanted = call.run(emulated)
    emulated._control["banks"].view(np.uint32)[plan.bank_words(40) + 64] = 7  # blocks past the head
    call.run(emulated, expire=True)
    assert emulated.status[0] == 1
    for counters in emulated._control.values():
        counters[:] = 0
    emulated.status[:] = 0
    for _ in range(2):
        assert np.array_equal(call.run(emulated), wanted)
        assert emulated.status[0] == 0
