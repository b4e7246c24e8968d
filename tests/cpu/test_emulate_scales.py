"""Weight scales of channels and experts, token scales, scales in e8m0: emulated, against the
oracle.
"""

import ml_dtypes
import numpy as np
import pytest
from parts import with_small_parts

from jitmoe import ExpertWeights, fp8, mega_moe, reference, trace
from jitmoe.emulate.compile import NoHostCompiler, build, compiler
from jitmoe.emulate.mega_moe import EmulatedLayer
from jitmoe.jit.render import render
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import plans_of_model
from jitmoe.plan.problem import MoeProblem

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

# 150 tokens are prefill: tiles with tokens as rows, and short ones with tokens as columns.
EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 256, 208, 2
BUCKETS = {"decode": 20, "prefill": 150}
SHAPES = {  # of w13_scale and w2_scale
    "channel": ((EXPERTS, 2 * INTERMEDIATE), (EXPERTS, HIDDEN)),
    "channel, 1": ((EXPERTS, 2 * INTERMEDIATE, 1), (EXPERTS, HIDDEN, 1)),
    "expert": ((EXPERTS,), (EXPERTS,)),
    "expert, 1": ((EXPERTS, 1), (EXPERTS, 1)),
    "expert, 1, 1": ((EXPERTS, 1, 1), (EXPERTS, 1, 1)),
    "half": ((EXPERTS, 2), (EXPERTS,)),
    "half, 1": ((EXPERTS, 2, 1), (EXPERTS, 1, 1)),
}


def random_scales(shape, seed):
    """Of either side of what suits the weights: a wrong one is far from the right one."""
    rng = np.random.default_rng(seed)
    return (0.002 * np.exp2(rng.uniform(-2, 2, shape))).astype(np.float32)


def random_layer(kind="channel", intermediate=INTERMEDIATE, hidden=HIDDEN, shapes=None):
    layer = reference.random_layer(EXPERTS, hidden, intermediate, seed=1, format=f"fp8_{kind}")
    shapes = shapes or (layer.w13_scale.shape, layer.w2_scale.shape)
    scales = (random_scales(shape, seed) for seed, shape in enumerate(shapes))
    return layer._replace(**dict(zip(("w13_scale", "w2_scale"), scales, strict=True)))


def wrap(layer, **options):
    return ExpertWeights(layer.w13, layer.w2, layer.w13_scale, layer.w2_scale, **options)


def call_arrays(num_tokens, hidden=HIDDEN, scales=None, routing="unused"):
    """x as bf16 or as codes and their scales, ids and router weights."""
    tokens = reference.random_tokens(num_tokens, hidden, EXPERTS, TOP_K, 2, routing)
    x = fp8.encode_bf16(tokens.x)
    if scales is not None:
        x = fp8.quantize_tokens(tokens.x, scales=scales)
    return x, tokens.topk_ids, tokens.topk_weights


def oracle(given, layer, **variant):
    x, *rest = given
    x = x if isinstance(x, tuple) else (x, None)
    return reference.mega_moe(*x, *rest, *layer, requantize=True, **variant)


def check(given, layer, **variant):
    order = {name: variant[name] for name in ("gate_up",) if name in variant}
    rest = {name: value for name, value in variant.items() if name not in order}
    y = mega_moe(*given, wrap(layer, **order), backend="emulated", **rest)
    ref = oracle(given, layer, **variant)
    assert reference.relative_error(y, ref) < 4e-3
    assert reference.worst_element(y, ref) < 0.06
    return y


@pytest.mark.parametrize("num_tokens", BUCKETS.values())
@pytest.mark.parametrize("gate_up", ["gate_first", "up_first"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_weight_scales(shapes, gate_up, num_tokens):
    layer, given = random_layer(shapes=shapes), call_arrays(num_tokens)
    check(given, layer, gate_up=gate_up)
    other = {"gate_first": "up_first", "up_first": "gate_first"}[gate_up]
    y = mega_moe(*given, wrap(layer, gate_up=gate_up), backend="emulated")
    assert reference.relative_error(y, oracle(given, layer, gate_up=other)) > 0.1


@pytest.mark.parametrize("num_tokens", BUCKETS.values())
@pytest.mark.parametrize("intermediate", [16, 80, 144, 336])
def test_ends_inside_tiles(intermediate, num_tokens):
    """And of hidden inside a tile of GEMM 2."""
    layer = random_layer(intermediate=intermediate, hidden=384)
    check(call_arrays(num_tokens, hidden=384), layer)


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("num_tokens", [3, 20, 40, 150])
def test_races(bucket, num_tokens):
    """Every width of a tile, in the checked build."""
    layer = random_layer(intermediate=80)
    plan = plan_of(bucket, HIDDEN, 80)
    emulated = EmulatedLayer(plan, layer, max_tokens=num_tokens, num_blocks=2, checked=True)
    given = call_arrays(num_tokens)
    y = emulated(*given, seed=num_tokens)
    assert reference.relative_error(y, oracle(given, layer)) < 4e-3


@pytest.mark.parametrize("checked", [False, True])
def test_extra_tokens(checked):
    """A tile that takes a few more tokens along, as columns beside rows."""
    layer, plan = random_layer(intermediate=144), plan_of("prefill", HIDDEN, 144)
    num_tokens = plan.tile_tokens - 3
    assert num_tokens > plan.block_tokens
    emulated = EmulatedLayer(plan, layer, num_tokens, num_blocks=2, checked=checked)
    given = call_arrays(num_tokens, routing="one_expert")
    y = emulated(*given)
    assert reference.relative_error(y, oracle(given, layer)) < 4e-3
    assert reference.worst_element(y, oracle(given, layer)) < 0.06


def plan_of(bucket, hidden, intermediate):
    problem = MoeProblem(1, hidden, intermediate, EXPERTS, TOP_K, "fp8_channel")
    return plans_of_model(problem, GPUS["h200"])[bucket]


@pytest.mark.parametrize("checked", [False, True])
def test_tiles_in_parts(checked):
    """Sums are scaled once, when parts are joined, and parts that join nothing leave no copies."""
    layer = random_layer(intermediate=256)
    plan = plan_of("decode", HIDDEN, 256)
    emulated = EmulatedLayer(plan, layer, max_tokens=4, num_blocks=16, checked=checked)
    text = with_small_parts(render(plan, layer="emulated"))
    emulated.executable = build(text, plan.name, checked=checked)
    for num_tokens in (1, 2, 3):
        given = call_arrays(num_tokens)
        ys = [emulated(*given, seed=seed) for seed in range(1 if checked else 4)]
        assert reference.relative_error(ys[0], oracle(given, layer)) < 4e-3
        assert all((y == ys[0]).all() for y in ys)


@pytest.mark.parametrize("num_tokens", BUCKETS.values())
def test_kinds_agree_where_they_mean_the_same(num_tokens):
    """Powers of two scale exactly, wherever they are applied."""
    layer, given = random_layer("block"), call_arrays(num_tokens)
    blocks = layer.w13_scale.shape, layer.w2_scale.shape
    ys = {}
    for name, shapes in {"block": blocks, **SHAPES}.items():
        scales = [np.ones(shape, np.float32) for shape in shapes]
        for expert in range(EXPERTS):
            for scale in scales:
                scale[expert] = 2.0 ** (expert - 9)
        weights = ExpertWeights(layer.w13, layer.w2, *scales)
        ys[name] = mega_moe(*given, weights, backend="emulated")
        assert np.array_equal(ys[name], ys["block"]), name


@pytest.mark.parametrize("num_tokens", [1, *BUCKETS.values()])
@pytest.mark.parametrize("kind", ["block", "channel"])
@pytest.mark.parametrize("scales", ["token", "tensor"])
def test_token_scales(scales, kind, num_tokens):
    """Of a token or of all: as many for each group of 128 channels give the same bits."""
    layer, ((codes, scale), *rest) = random_layer(kind), call_arrays(num_tokens, scales=scales)
    scale = scale * np.float32(1.5)
    y = check(((codes, scale), *rest), layer)
    weights = wrap(layer)
    wide = np.broadcast_to(scale.reshape(-1, 1), (num_tokens, HIDDEN // 128))
    rows = scale.reshape(-1)
    narrow = rows.reshape(()) if scales == "tensor" else rows[::-1].copy()[::-1]
    for other in (wide, wide.copy(), rows, narrow):
        again = mega_moe((codes, other), *rest, weights, backend="emulated")
        assert np.array_equal(again, y), other.shape


@pytest.mark.parametrize("kind", ["block", "channel", "tensor"])
@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.float8_e8m0fnu])
def test_powers_of_two(kind, dtype):
    layer, given = random_layer(kind), call_arrays(20)
    bits = [
        np.random.default_rng(seed).integers(116, 120, scale.shape).astype(np.uint8)
        for seed, scale in enumerate((layer.w13_scale, layer.w2_scale))
    ]
    wide = [np.exp2(b.astype(np.float32) - 127) for b in bits]
    layer = layer._replace(w13_scale=wide[0], w2_scale=wide[1])
    y = check(given, layer)
    weights = ExpertWeights(layer.w13, layer.w2, *(b.view(dtype) for b in bits))
    assert weights.format == f"fp8_{kind}" and weights.num_bytes == wrap(layer).num_bytes
    assert np.array_equal(mega_moe(*given, weights, backend="emulated"), y)


@pytest.mark.parametrize("num_tokens", BUCKETS.values())
def test_strided_scales(num_tokens):
    """Of channels as columns of a larger array, from the last to the first."""
    layer, given = random_layer(), call_arrays(num_tokens)
    apart = np.zeros((2 * INTERMEDIATE, EXPERTS + 3), np.float32)
    apart[::-1, :EXPERTS] = layer.w13_scale[..., 0].T
    views = apart[::-1, :EXPERTS].T
    weights = ExpertWeights(layer.w13, layer.w2, views, layer.w2_scale)
    y = mega_moe(*given, weights, backend="emulated")
    assert np.array_equal(y, mega_moe(*given, wrap(layer), backend="emulated"))


def test_traces_and_other_variants():
    layer, given = random_layer("tensor"), call_arrays(150)
    variant = {"activation": "swiglu_oai", "apply_router_weight_on_input": True}
    y = check(given, layer, routed_scaling_factor=2.5, **variant)
    out = np.empty_like(given[0])
    options = {"routed_scaling_factor": 2.5, "out": out, "backend": "emulated", **variant}
    assert trace(*given, wrap(layer), **options).summary()
    assert np.array_equal(out, y)


def test_tiny_layers_of_which_two_kinds_may_be_meant():
    """A block's 128 rows, or a half's 80: the keyword says which."""
    layer = random_layer("tensor", intermediate=80, hidden=128)
    w13_scale = random_scales((EXPERTS, 2, 1), 3)
    given = call_arrays(20, hidden=128)
    block = ExpertWeights(layer.w13, layer.w2, w13_scale, layer.w2_scale)
    halves = ExpertWeights(layer.w13, layer.w2, w13_scale, layer.w2_scale, scales="tensor")
    assert (block.format, halves.format) == ("fp8_block", "fp8_tensor")
    for weights, scale in ((block, w13_scale), (halves, w13_scale[..., 0])):
        y = mega_moe(*given, weights, backend="emulated")
        ref = oracle(given, layer._replace(w13_scale=scale))
        assert reference.relative_error(y, ref) < 4e-3
