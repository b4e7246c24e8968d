"""Results against the oracle: shapes, routings, token counts, formats."""

import pytest

from jitmoe import Activation, ExpertWeights, mega_moe, reference
from jitmoe.plan.formats import FORMATS, format_of
from jitmoe.plan.memory_map import align
from jitmoe.reference_biases import random_biases

EXACT_BOUND = 2.6e-2  # the noise of the format, at sizes that average it out

# num_experts, hidden, intermediate, top_k: multiples of the tiles, ragged ends of both GEMMs, one
# k-block, more experts than warps or lanes divide, one expert.
SHAPES = {
    "even": (16, 512, 256, 4),
    "ragged_192": (8, 384, 192, 2),
    "ragged_208": (12, 256, 208, 3),
    "ragged_320": (8, 640, 320, 2),
    "tiny_16": (4, 128, 16, 2),
    "many_experts": (300, 256, 128, 8),
    "one_expert": (1, 256, 384, 1),
    "wide": (5, 1152, 1040, 5),
    "top_32": (64, 256, 128, 32),
}


@pytest.mark.parametrize("num_tokens", [1, 7, 60, 333, 2100])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(make_layer, make_call, workspace, shape, num_tokens):
    *sizes, top_k = SHAPES[shape]
    call = make_call(make_layer(*sizes), num_tokens, top_k)
    # Few channels and tokens average little of the format's noise out.
    bound = EXACT_BOUND if min(sizes[1:]) >= 256 and num_tokens > 50 else 4e-2
    call.check(call.run(call.fp8, workspace), bound)
    call.check(call.run(call.bf16, workspace), bound)


@pytest.mark.parametrize("num_tokens", [5, 64, 700, 3000])
@pytest.mark.parametrize("routing", reference.ROUTINGS)
def test_routings(make_layer, make_call, workspace, routing, num_tokens):
    call = make_call(make_layer(24, 512, 256), num_tokens, 4, routing)
    call.check(call.run(call.fp8, workspace), 4e-2)


@pytest.mark.parametrize("num_tokens", [16, 1500])
def test_outliers(make_layer, make_call, workspace, num_tokens):
    """Channels 30 times as large as the others: accumulation and scales are per 128 channels."""
    call = make_call(make_layer(8, 1024, 512, outliers=8), num_tokens, 2, outliers=8)
    call.check(call.run(call.fp8, workspace), 5e-2)


# Of bf16 weights: the same ends, rows that end inside a k-block of 64, and few tiles of many
# k-blocks, which decode cuts.
BF16_BOUND = 5e-3
BF16_SHAPES = {
    "even": (16, 512, 256, 4),
    "ragged_208": (12, 272, 208, 3),
    "ragged_rows": (8, 144, 80, 2),
    "tiny_16": (4, 16, 16, 2),
    "many_experts": (300, 256, 128, 8),
    "one_expert": (1, 320, 384, 1),
    "parts": (2, 4112, 2064, 2),
    "gpt_oss": (32, 2880, 2880, 4),
    "top_32": (64, 256, 128, 32),
}


@pytest.mark.parametrize("num_tokens", [1, 7, 60, 333, 2100])
@pytest.mark.parametrize("shape", BF16_SHAPES)
def test_bf16_shapes(make_layer, make_call, workspace, shape, num_tokens):
    *sizes, top_k = BF16_SHAPES[shape]
    call = make_call(make_layer(*sizes, format="bf16"), num_tokens, top_k)
    y = call.run(call.bf16, workspace)
    call.check(y, BF16_BOUND)
    assert (y == call.run(call.bf16, workspace)).all(), "the same bits"


@pytest.mark.parametrize("num_tokens", [5, 64, 700, 3000])
@pytest.mark.parametrize("routing", reference.ROUTINGS)
def test_bf16_routings(make_layer, make_call, workspace, routing, num_tokens):
    call = make_call(make_layer(24, 528, 272, format="bf16"), num_tokens, 4, routing)
    call.check(call.run(call.bf16, workspace), BF16_BOUND)


@pytest.mark.parametrize("num_tokens", [16, 300, 2000])
@pytest.mark.parametrize(
    "variant",
    [
        {"activation": "swiglu_oai"},
        {"activation": "geglu_tanh"},
        {"activation": "geglu_erf"},
        {"routed_scaling_factor": 2.5},
        {"apply_router_weight_on_input": True, "routed_scaling_factor": -0.5},
    ],
    ids=str,
)
def test_bf16_variants(make_layer, make_call, workspace, variant, num_tokens):
    call = make_call(make_layer(8, 528, 320, format="bf16"), num_tokens, 2)
    call.check(call.run(call.bf16, workspace, **variant), BF16_BOUND, **variant)


# Of MXFP4: the same ends, rows that end inside a k-block of 128, few tiles of many k-blocks.
MX_BOUNDS = {"mxfp4_fp8": 4e-2, "mxfp4_bf16": BF16_BOUND}
MX_SHAPES = {
    "even": (16, 512, 256, 4),
    "ragged_224": (12, 384, 224, 3),
    "tiny_32": (4, 128, 32, 2),
    "many_experts": (300, 256, 128, 8),
    "one_expert": (1, 640, 352, 1),
    "parts_1": (2, 4224, 288, 2),
    "parts_2": (2, 384, 4128, 2),
    "top_32": (64, 256, 128, 32),
}
MX_CASES = [(format, *shape) for format in MX_BOUNDS for shape in MX_SHAPES.values()] + [
    (format, *shape)
    for format in MX_BOUNDS
    for shape in ((8, 352, 96, 2), (4, 32, 32, 2), (32, 2880, 2880, 4))  # the last is gpt-oss
]


def mx_inputs(call):
    """x as the format takes it."""
    return [call.bf16] + [call.fp8] * (call.scale is not None)


@pytest.mark.parametrize("num_tokens", [1, 7, 60, 333, 2100])
@pytest.mark.parametrize("case", MX_CASES, ids=str)
def test_mxfp4_shapes(make_layer, make_call, workspace, case, num_tokens):
    format, *sizes, top_k = case
    call = make_call(make_layer(*sizes, format=format), num_tokens, top_k)
    for x in mx_inputs(call):
        y = call.run(x, workspace)
        call.check(y, MX_BOUNDS[format])
        assert (y == call.run(x, workspace)).all(), "the same bits"


@pytest.mark.parametrize("num_tokens", [5, 64, 700, 3000])
@pytest.mark.parametrize("routing", reference.ROUTINGS)
@pytest.mark.parametrize("format", MX_BOUNDS)
def test_mxfp4_routings(make_layer, make_call, workspace, format, routing, num_tokens):
    call = make_call(make_layer(24, 640, 288, format=format), num_tokens, 4, routing)
    for x in mx_inputs(call):
        call.check(call.run(x, workspace), MX_BOUNDS[format])


@pytest.mark.parametrize("num_tokens", [16, 2000])
@pytest.mark.parametrize("scales", ["token", "tensor"])
def test_mxfp4_token_scales(make_layer, make_call, workspace, scales, num_tokens):
    import cupy

    from jitmoe.fp8 import quantize_tokens

    call = make_call(make_layer(12, 512, 320, format="mxfp4_fp8"), num_tokens, 3)
    codes, scale = quantize_tokens(call.tokens.x, cupy, scales)
    call = call._replace(codes=codes, scale=scale)
    call.check(call.run(call.fp8, workspace), MX_BOUNDS["mxfp4_fp8"])


@pytest.mark.parametrize("num_tokens", [2, 16, 300, 2000])
@pytest.mark.parametrize("gate_up", ["gate_first", "up_first", "interleaved"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("format", MX_BOUNDS)
def test_mxfp4_variants(make_layer, make_call, workspace, format, has_bias, gate_up, num_tokens):
    """With scales of w13 that lie in another order."""
    import cupy

    sizes = (12, 512, 224)
    layer = make_layer(*sizes, format=format)
    codes, biases = layer.codes, random_biases(*sizes, seed=3, xp=cupy)
    named = {"w13_bias": biases.w13, "w2_bias": biases.w2} if has_bias else {}
    weights = ExpertWeights(
        codes.w13,
        codes.w2,
        cupy.asfortranarray(codes.w13_scale),
        codes.w2_scale,
        **named,
        gate_up=gate_up,
        format=format,
    )
    call = make_call(layer._replace(weights=weights), num_tokens, 3, "unused")
    for variant in (
        {"activation": "swiglu_oai", "routed_scaling_factor": 2.5},
        {"apply_router_weight_on_input": True},
    ):
        for x in mx_inputs(call):
            y = call.run(x, workspace, **variant)
            call.check(y, MX_BOUNDS[format], **variant, **named, gate_up=gate_up)


@pytest.mark.parametrize("num_tokens", [16, 300, 2000])
@pytest.mark.parametrize("format", MX_BOUNDS)
def test_mxfp4_scales_far_apart(make_layer, make_call, workspace, format, num_tokens):
    """Of a row's chunks; the largest that kernels take among them, of rows that are zeros. Sums of
    few that count are off by more where a code is on the other side of a tie, and an H200 cuts
    products of other sizes off: up to 6e-3 emulated.
    """
    import cupy

    layer = make_layer(12, 512, 224, format=format)
    rng, parts = cupy.random.default_rng(5), []
    for scale in (layer.codes.w13_scale, layer.codes.w2_scale):
        distance = rng.integers(0, 13, scale.shape)
        distance[..., 0] = 0
        parts.append((scale - distance).astype(cupy.uint8))
    w2 = layer.codes.w2.copy()
    w2[:, 7] = 0
    parts[1][:, 7] = {"mxfp4_fp8": 254, "mxfp4_bf16": 188}[format]
    codes = layer.codes._replace(w13_scale=parts[0], w2=w2, w2_scale=parts[1])
    weights = ExpertWeights(codes.w13, codes.w2, *parts, format=format)
    call = make_call(layer._replace(codes=codes, weights=weights), num_tokens, 3)
    for x in mx_inputs(call):
        y = call.run(x, workspace)
        call.check(y, 5e-2 if format == "mxfp4_fp8" else BF16_BOUND, rounded_bound=1.5e-2)
        assert not (y[:, 7] & 0x7FFF).any()


@pytest.mark.parametrize("num_tokens", [4, 64, 700])
@pytest.mark.parametrize("format", ["bf16", *MX_BOUNDS])
def test_launches_in_a_row(make_layer, make_call, workspace, format, num_tokens):
    """Each may begin while the one before ends, and reads what that wrote."""
    import cupy

    call = make_call(make_layer(32, 1024, 512, format=format), num_tokens, 4)
    ids, router = call.tokens.topk_ids, call.tokens.topk_weights

    def chain(after_each):
        x = call.bf16
        for _ in range(12):
            y = cupy.full(x.shape, 0xFFFF, cupy.uint16)
            weights = call.layer.weights
            mega_moe(x, ids, router, weights, routed_scaling_factor=4.0, out=y, workspace=workspace)
            after_each()
            x = y
        cupy.cuda.Device().synchronize()
        workspace.check()
        return x

    apart = chain(cupy.cuda.Device().synchronize)
    for _ in range(20):
        assert (chain(lambda: None) == apart).all()


ACTIVATIONS = [
    "swiglu_clamped",
    "swiglu_oai",
    Activation("swiglu_clamped", limit=1.5),
    Activation("swiglu_oai", alpha=0.7, limit=1.0, up_offset=-0.5),
    "geglu_tanh",
    "geglu_erf",
]


@pytest.mark.parametrize("num_tokens", [16, 300, 2000])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(make_layer, make_call, workspace, activation, num_tokens):
    """Small limits cut many gates and ups off: their standard deviation is about 1."""
    call = make_call(make_layer(12, 512, 320), num_tokens, 3)
    y = call.run(call.fp8, workspace, activation=activation)
    call.check(y, 4e-2, activation=activation)


@pytest.mark.parametrize("num_tokens", [16, 300, 2000])
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
def test_up_first(make_layer, make_call, workspace, activation, num_tokens):
    layer = make_layer(12, 512, 320)
    codes = layer.codes
    weights = ExpertWeights(
        codes.w13, codes.w2, codes.w13_scale, codes.w2_scale, gate_up="up_first"
    )
    call = make_call(layer._replace(weights=weights), num_tokens, 3)
    y = call.run(call.fp8, workspace, activation=activation)
    call.check(y, 4e-2, activation=activation, gate_up="up_first")


NO_GATE = {
    "relu2_no_gate": (12, 512, 272),
    "silu_no_gate": (3, 640, 208),
    "gelu_tanh_no_gate": (5, 384, 400),
    "gelu_erf_no_gate": (2, 4096, 400),
}


@pytest.mark.parametrize("num_tokens", [1, 300, 2000])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind, sizes", NO_GATE.items())
def test_no_gate(make_layer, make_call, workspace, kind, format, sizes, num_tokens):
    """Tiles that lack a group of channels, and such that are joined before the activation."""
    experts, hidden, intermediate = sizes
    form = format_of(format)
    sizes = experts, hidden, align(intermediate, form.intermediate_step)
    layer = make_layer(*sizes, format=format, gated=False)
    call = make_call(layer, num_tokens, 2)
    x = call.fp8 if form.quantizes else call.bf16
    y = call.run(x, workspace, activation=kind)
    call.check(y, 4e-2 if form.quantizes else BF16_BOUND, activation=kind)
    assert (y == call.run(x, workspace, activation=kind)).all(), "the same bits"


@pytest.mark.parametrize("num_tokens", [16, 300, 2000])
@pytest.mark.parametrize("format", ["fp8_block", "fp8_channel", "bf16", *MX_BOUNDS])
def test_no_gate_with_biases(make_layer, make_call, workspace, format, num_tokens):
    import cupy

    form = format_of(format)
    sizes = 8, 512, align(272, form.intermediate_step)
    layer = make_layer(*sizes, format=format, gated=False)
    biases = random_biases(*sizes, seed=3, xp=cupy, gated=False)
    biases = {"w13_bias": biases.w13, "w2_bias": biases.w2}
    codes = layer.codes
    scales = codes.w13_scale, codes.w2_scale
    said = format if form.is_mx else None
    weights = ExpertWeights(codes.w13, codes.w2, *scales, **biases, format=said)
    call = make_call(layer._replace(weights=weights), num_tokens, 2)
    x = call.fp8 if form.quantizes else call.bf16
    for variant in ({"activation": "relu2_no_gate"}, {"activation": "silu_no_gate"}):
        for on_input in (False, True):
            variant |= {"apply_router_weight_on_input": on_input, "routed_scaling_factor": 2.5}
            y = call.run(x, workspace, **variant)
            call.check(y, 4e-2 if form.quantizes else BF16_BOUND, **variant, **biases)


def with_scales(layer, w13_scale, w2_scale, **options):
    """The layer with other scales."""
    codes = layer.codes._replace(w13_scale=w13_scale, w2_scale=w2_scale)
    weights = ExpertWeights(codes.w13, codes.w2, w13_scale, w2_scale, **options)
    return layer._replace(codes=codes, weights=weights)


def apart(scale, seed):
    """Scales that differ by up to 4 from each other: a wrong one shows."""
    import cupy

    factors = cupy.random.default_rng(seed).random(scale.shape, dtype=cupy.float32)
    return scale * (0.5 + 1.5 * factors)


@pytest.mark.parametrize("num_tokens", [1, 16, 300, 2000])
@pytest.mark.parametrize("gate_up", ["gate_first", "up_first"])
@pytest.mark.parametrize("sizes", [(12, 512, 320), (3, 640, 208), (1, 4096, 128)], ids=str)
@pytest.mark.parametrize("scales", ["channel", "tensor"])
def test_weight_scales(make_layer, make_call, workspace, scales, sizes, gate_up, num_tokens):
    """Of channels, and of halves of w13; the last size has tiles in parts."""
    layer = make_layer(*sizes, format=f"fp8_{scales}")
    w13_scale, w2_scale = layer.codes.w13_scale, layer.codes.w2_scale
    if scales == "tensor":
        w13_scale = w13_scale[:, :, 0].repeat(2, axis=1)
    layer = with_scales(layer, apart(w13_scale, 1), apart(w2_scale, 2), gate_up=gate_up)
    call = make_call(layer, num_tokens, min(3, sizes[0]))
    call.check(call.run(call.fp8, workspace), 5e-2, gate_up=gate_up)
    call.check(call.run(call.bf16, workspace), 5e-2, gate_up=gate_up)


@pytest.mark.parametrize("num_tokens", [16, 2000])
@pytest.mark.parametrize("weight_scales", ["block", "channel"])
@pytest.mark.parametrize("scales", ["token", "tensor"])
def test_token_scales(make_layer, make_call, workspace, scales, weight_scales, num_tokens):
    import cupy

    from jitmoe.fp8 import quantize_tokens

    call = make_call(make_layer(12, 512, 320, format=f"fp8_{weight_scales}"), num_tokens, 3)
    codes, scale = quantize_tokens(call.tokens.x, cupy, scales)
    call = call._replace(codes=codes, scale=scale)
    y = call.run(call.fp8, workspace)
    call.check(y, 4e-2)
    wide = cupy.broadcast_to(scale.reshape(-1, 1), (num_tokens, 4)).copy()
    others = [wide, scale.reshape(-1) if scales == "token" else scale.reshape(())]
    assert all((call.run((codes, other), workspace) == y).all() for other in others)


@pytest.mark.parametrize("num_tokens", [16, 2000])
@pytest.mark.parametrize("scales", ["block", "channel", "tensor"])
def test_scales_in_powers_of_two(make_layer, make_call, workspace, scales, num_tokens):
    """e8m0 as bytes, strided: the bits of f32 scales of the same values."""
    import cupy

    layer = make_layer(12, 512, 320, format=f"fp8_{scales}")
    given = layer.codes.w13_scale, layer.codes.w2_scale
    exponents = [cupy.rint(cupy.log2(scale)).astype(cupy.int32) for scale in given]
    wide = [cupy.exp2(e.astype(cupy.float32)) for e in exponents]
    call = make_call(with_scales(layer, *wide), num_tokens, 3)
    y = call.run(call.fp8, workspace)
    call.check(y, 4e-2)
    bits = [cupy.asfortranarray((e + 127).astype(cupy.uint8)) for e in exponents]
    narrow = ExpertWeights(layer.codes.w13, layer.codes.w2, *bits)
    assert narrow.format == f"fp8_{scales}"
    call = call._replace(layer=call.layer._replace(weights=narrow))
    assert (call.run(call.fp8, workspace) == y).all()


@pytest.mark.parametrize("num_tokens", [16, 300, 2000])
@pytest.mark.parametrize("intermediate", [208, 384])
def test_interleaved(make_layer, make_call, workspace, intermediate, num_tokens):
    layer = make_layer(12, 512, intermediate)
    codes = layer.codes
    weights = ExpertWeights(
        codes.w13, codes.w2, codes.w13_scale, codes.w2_scale, gate_up="interleaved"
    )
    call = make_call(layer._replace(weights=weights), num_tokens, 3)
    for variant in ({}, {"activation": "swiglu_oai"}):
        y = call.run(call.fp8, workspace, **variant)
        call.check(y, 4e-2, gate_up="interleaved", **variant)


@pytest.mark.parametrize("num_tokens", [2, 16, 300, 2000])
@pytest.mark.parametrize("sizes", [(12, 512, 208), (4, 4096, 384)], ids=str)
@pytest.mark.parametrize("gate_up", ["gate_first", "interleaved"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_biases(make_layer, make_call, workspace, dtype, gate_up, sizes, num_tokens):
    """Two tokens of few experts: tiles in parts along k."""
    import cupy

    from jitmoe.fp8 import encode_bf16

    layer = make_layer(*sizes)
    codes, biases = layer.codes, random_biases(*sizes, seed=3, xp=cupy)
    given = [encode_bf16(bias, cupy) if dtype == "bf16" else bias for bias in biases]
    weights = ExpertWeights(
        codes.w13,
        codes.w2,
        codes.w13_scale,
        codes.w2_scale,
        w13_bias=given[0],
        w2_bias=given[1],
        gate_up=gate_up,
    )
    call = make_call(layer._replace(weights=weights), num_tokens, 3, "unused")
    wanted = {"w13_bias": biases.w13, "w2_bias": biases.w2, "gate_up": gate_up}
    for variant in (
        {"activation": "swiglu_oai", "routed_scaling_factor": 2.5},
        {"apply_router_weight_on_input": True},
    ):
        for x in (call.fp8, call.bf16):
            call.check(call.run(x, workspace, **variant), 4e-2, **variant, **wanted)


@pytest.mark.parametrize("num_tokens", [1, 60, 1500])
@pytest.mark.parametrize("format", ["fp8_block", "mxfp4_fp8"])
def test_expert_counts(make_layer, make_call, workspace, format, num_tokens):
    """Calls add up, overlapping ones too; y is what it is without."""
    import cupy

    call = make_call(make_layer(24, 512, 256, format=format), num_tokens, 4, "unused")
    plain = call.run(call.fp8, workspace)
    ids = call.tokens.topk_ids
    wanted = cupy.stack([(ids == expert).sum() for expert in range(24)])
    counts = cupy.zeros(24, cupy.int32)
    for _ in range(3):
        y = call.run(call.fp8, workspace, expert_counts=counts)
        assert (y == plain).all()
    assert (counts == 3 * wanted).all()
    for _ in range(20):
        mega_moe(
            call.fp8,
            ids,
            call.tokens.topk_weights,
            call.layer.weights,
            out=y,
            expert_counts=counts,
            workspace=workspace,
        )
    cupy.cuda.Device().synchronize()
    assert (counts == 23 * wanted).all() and (y == plain).all()


@pytest.mark.parametrize("num_tokens", [16, 300, 2000])
@pytest.mark.parametrize(
    "variant",
    [
        {"routed_scaling_factor": 2.5},
        {"apply_router_weight_on_input": True},
        {"apply_router_weight_on_input": True, "activation": "swiglu_oai"},
    ],
    ids=str,
)
def test_scaling_and_weights_on_input(make_layer, make_call, workspace, variant, num_tokens):
    call = make_call(make_layer(12, 512, 320), num_tokens, 3)
    tokens = call.tokens
    call = call._replace(tokens=tokens._replace(topk_weights=3 * tokens.topk_weights))
    call.check(call.run(call.fp8, workspace, **variant), 4e-2, **variant)
    call.check(call.run(call.bf16, workspace, **variant), 4e-2, **variant)


@pytest.mark.parametrize("num_tokens", [9, 900])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_first_expert(make_layer, make_call, workspace, dtype, num_tokens):
    """Global ids give the bits of local ones; ids of other ranks are unused slots."""
    import cupy

    call = make_call(make_layer(16, 512, 256), num_tokens, 4, "unused")
    ids = call.tokens.topk_ids.astype(dtype)
    is_mine = (ids >= 0) & (ids < 16)
    plain = call.run(call.fp8, workspace, topk_ids=ids)
    moved = cupy.where(is_mine, ids + 240, ids % 240)
    assert (plain == call.run(call.fp8, workspace, topk_ids=moved, first_expert=240)).all()
    call.check(plain, 4e-2)


def test_no_tokens(make_layer, make_call, workspace):
    import cupy

    layer = make_layer(16, 512, 256)
    x = cupy.zeros((0, 512), cupy.uint16)
    ids, router = cupy.zeros((0, 4), cupy.int32), cupy.zeros((0, 4), cupy.float32)
    assert mega_moe(x, ids, router, layer.weights, workspace=workspace).shape == (0, 512)


@pytest.mark.parametrize("num_tokens", [9, 900])
def test_tokens_without_experts_are_zero(make_layer, make_call, workspace, num_tokens):
    """Ids out of range, the extremes included, are unused slots and never an address."""
    import cupy

    call = make_call(make_layer(16, 512, 256), num_tokens, 4)
    ids = call.tokens.topk_ids.astype(cupy.int64)
    ids[::3] = cupy.asarray([-1, 16, 2**62, -(2**63)])
    call = call._replace(tokens=call.tokens._replace(topk_ids=ids))
    y = call.run(call.fp8, workspace)
    assert not y[::3].any()
    call.check(y, 4e-2)
    every = cupy.full_like(ids, -1)
    assert not call.run(call.fp8, workspace, topk_ids=every).any()


@pytest.mark.parametrize("num_tokens", [6, 800])
def test_number_formats(make_layer, make_call, workspace, num_tokens):
    """int64 ids and bf16 router weights give what int32 and f32 of the same values give."""
    import cupy

    from jitmoe.fp8 import decode_bf16, encode_bf16

    call = make_call(make_layer(16, 512, 256), num_tokens, 4)
    router = encode_bf16(call.tokens.topk_weights, cupy)
    plain = call.run(call.fp8, workspace, topk_weights=decode_bf16(router, cupy))
    other = call.run(
        call.fp8, workspace, topk_ids=call.tokens.topk_ids.astype(cupy.int64), topk_weights=router
    )
    assert (plain == other).all()


@pytest.mark.parametrize("num_tokens", [6, 800])
def test_strided_arguments(make_layer, make_call, workspace, num_tokens):
    """Views: rows of x and y with gaps, x_scale column-major, weights inside a larger tensor."""
    import cupy

    call = make_call(make_layer(6, 512, 256), num_tokens, 2)
    plain = call.run(call.fp8, workspace)

    x = cupy.zeros((num_tokens, 1024), cupy.uint8)
    x[:, 512:] = call.codes
    scale = cupy.asfortranarray(call.scale)
    y = cupy.full((num_tokens, 2 * 512), 0xFFFF, cupy.uint16)
    assert (call.run((x[:, 512:], scale), workspace, out=y[:, :512]) == plain).all()
    assert (y[:, 512:] == 0xFFFF).all()

    codes = call.layer.codes
    wide = [
        cupy.zeros((w.shape[0], w.shape[1] + 16, w.shape[2] + 128), w.dtype)
        for w in (codes.w13, codes.w2)
    ]
    w13, w2 = (big[:, 16:, 128:] for big in wide)
    w13[...], w2[...] = codes.w13, codes.w2
    layer = call.layer._replace(weights=ExpertWeights(w13, w2, codes.w13_scale, codes.w2_scale))
    assert (call._replace(layer=layer).run(call.fp8, workspace) == plain).all()


def test_gate_and_up_are_not_swapped(workspace):
    """An asymmetric case by hand: gate 2 and up 3 give silu(2) * 3 in every channel."""
    import cupy
    import numpy as np

    hidden, intermediate = 128, 64
    e4m3_one, codes = 0x38, lambda *shape: cupy.zeros(shape, cupy.uint8)
    w13, w2 = codes(1, 2 * intermediate, hidden), codes(1, hidden, intermediate)
    w13[0, :, 0] = e4m3_one  # gate = up = x[0], times the scales below
    w2[0] = e4m3_one
    w13_scale = cupy.ones((1, 1, 1), cupy.float32)
    w2_scale = cupy.full((1, 1, 1), 1 / intermediate, cupy.float32)
    w13[0, :intermediate, 0] = 0x40  # gate rows: 2
    w13[0, intermediate:, 0] = 0x44  # up rows: 3
    x = codes(1, hidden)
    x[0, 0] = e4m3_one
    y = mega_moe(
        (x, cupy.ones((1, 1), cupy.float32)),
        cupy.zeros((1, 1), cupy.int32),
        cupy.full((1, 1), 0.5, cupy.float32),
        ExpertWeights(w13, w2, w13_scale, w2_scale),
        workspace=workspace,
    )
    wanted = 0.5 * 3 * 2 / (1 + np.exp(-2.0))
    got = y.get().astype(np.float32)
    assert np.allclose(got, wanted, rtol=5e-3), (got[0, :4], wanted)


def test_beyond_32_bits(make_layer, make_call, workspace):
    """More than 2^31 weights, and more than 2^31 elements between the GEMMs and in the slices."""
    layer = make_layer(80, 7168, 2048)
    assert layer.codes.w13.size > 2**31
    call = make_call(layer, 40_000, 8)
    y = call.run(call.fp8, workspace)
    assert 40_000 * 8 * 7168 > 2**31
    some = slice(39_700, 40_000)
    few = call._replace(
        tokens=reference.Tokens(*(array[some] for array in call.tokens)),
        codes=call.codes[some],
        scale=call.scale[some],
    )
    few.check(y[some])
