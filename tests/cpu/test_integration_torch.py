"""jitmoe.integrations.torch on a CPU: the operators, emulated, and what they refuse."""

import math
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from jitmoe import mxfp4, quantize, reference
from jitmoe.emulate.compile import NoHostCompiler, compiler

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'jitmoe[torch]'")

import torch_layer  # noqa: E402
from torch_layer import (  # noqa: E402
    BF16_LAYER,
    BF16_WEIGHTS,
    HIDDEN,
    WEIGHTS,
    error,
    quantized,
    tokens,
)

from jitmoe import Activation  # noqa: E402
from jitmoe.integrations import torch as integration  # noqa: E402
from jitmoe.integrations import torch_scales  # noqa: E402
from jitmoe.integrations.torch import mega_moe  # noqa: E402
from jitmoe.reference_biases import random_biases  # noqa: E402

NEW_OP, OUT_OP = torch.ops.jitmoe.mega_moe.default, torch.ops.jitmoe.mega_moe_out.default

try:
    compiler()
except NoHostCompiler as error_:
    pytest.skip(str(error_), allow_module_level=True)

BACKENDS = ("eager", "aot_eager")  # of torch.compile; these need no compiler


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def emulate(*given, **kwargs):
    return mega_moe(*given, backend="emulated", **kwargs)


def refusal(kind, call):
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300, "one sentence"
    return message


# Results


@pytest.mark.parametrize("num_tokens", [1, 20, 150])
def test_results(num_tokens):
    given = tokens(num_tokens)
    y = emulate(*given, *WEIGHTS)
    assert y.dtype == torch.bfloat16 and y.shape == given.x.shape and y.is_contiguous()
    assert error(y, given) < 4e-3


def test_quantised_x_wide_ids_and_bf16_weights():
    x, ids, router = tokens(7)
    router = router.bfloat16()
    codes, scale = quantized(x)
    y = emulate(codes, ids.long(), router, *WEIGHTS, x_scale=scale)
    assert error(y, (x, ids, router)) < 4e-3


@pytest.mark.parametrize("num_tokens", [1, 20, 150])
@pytest.mark.parametrize("activation", ["swiglu", "geglu_tanh"])
def test_bf16_weights(num_tokens, activation):
    given = tokens(num_tokens)
    y = emulate(*given, *BF16_WEIGHTS, activation=activation)
    assert y.dtype == torch.bfloat16 and y.shape == given.x.shape
    assert error(y, given, BF16_LAYER, activation=activation) < 3e-3


def test_out():
    given = tokens(7)
    memory = torch.full((7, HIDDEN + 64), 7.0, dtype=torch.bfloat16)
    out = memory[:, :HIDDEN]
    assert emulate(*given, *WEIGHTS, out=out) is out
    assert torch.equal(out, emulate(*given, *WEIGHTS)) and (memory[:, HIDDEN:] == 7).all()


def test_no_tokens():
    assert emulate(*tokens(0), *WEIGHTS).shape == (0, HIDDEN)


def powers_of_two():
    """The layer's scales rounded to powers of two: as e8m0, and the layer for the oracle."""
    exponents = [scale.log2().round().exp2() for scale in WEIGHTS[2:]]
    layer = torch_layer.LAYER
    layer = layer._replace(w13_scale=exponents[0].numpy(), w2_scale=exponents[1].numpy())
    return [scale.to(torch.float8_e8m0fnu) for scale in exponents], layer


@pytest.mark.parametrize(
    "shapes",
    [((4, 256, 1), (4, 256, 1)), ((4, 256), (4, 256)), ((4,), (4,)), ((4, 2), (4, 1))],
    ids=str,
)
@pytest.mark.parametrize("token_shape", [(7, 2), (7,), (7, 1), (1,), ()])
def test_other_scales(shapes, token_shape):
    """Of channels, experts and halves; of tokens and of all."""
    x, ids, router = tokens(7)
    codes, _ = quantized(x)
    generator = torch.Generator().manual_seed(3)
    scales = [0.004 * (1 + torch.rand(shape, generator=generator)) for shape in shapes]
    scale = 0.01 * (1 + torch.rand(token_shape, generator=generator))
    layer = torch_layer.LAYER
    layer = layer._replace(w13_scale=scales[0].numpy(), w2_scale=scales[1].numpy())
    y = emulate(codes, ids, router, *WEIGHTS[:2], *scales, x_scale=scale)
    args = codes.view(torch.uint8).numpy(), scale.numpy(), ids.numpy(), router.numpy(), *layer
    ref = reference.mega_moe(*args, requantize=True)
    assert reference.relative_error(y.float().numpy(), ref) < 4e-3
    compiled = torch.compile(emulate, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(codes, ids, router, *WEIGHTS[:2], *scales, x_scale=scale), y)


def test_e8m0_scales_are_converted_once():
    given, (scales, layer) = tokens(7), powers_of_two()
    y = emulate(*given, *WEIGHTS[:2], *scales)
    assert error(y, given, layer) < 4e-3
    assert torch.equal(emulate(*given, *WEIGHTS[:2], *(s.view(torch.uint8) for s in scales)), y)
    first = torch_scales.f32(scales[0])
    assert first.dtype == torch.float32 and torch_scales.f32(scales[0]) is first
    scales[0].copy_(scales[0].clone())  # written: may hold other values now
    assert torch_scales.f32(scales[0]) is not first
    with torch.inference_mode():
        fresh = scales[0].clone()
        assert torch.equal(torch_scales.f32(fresh), first)


def biased(dtype=torch.float32):
    """Biases as tensors, and for the oracle."""
    sizes = torch_layer.EXPERTS, HIDDEN, torch_layer.INTERMEDIATE
    biases = random_biases(*sizes, seed=3)
    names = "w13_bias", "w2_bias"
    tensors = [torch.from_numpy(bias).to(dtype) for bias in biases]
    return dict(zip(names, tensors, strict=True)), dict(zip(names, biases, strict=True))


@pytest.mark.parametrize("gate_up", ["gate_first", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_and_orders(gate_up, dtype):
    given, (tensors, biases) = tokens(7), biased(dtype)
    y = emulate(*given, *WEIGHTS, **tensors, gate_up=gate_up)
    assert error(y, given, gate_up=gate_up, **biases) < 4e-3
    assert error(y, given, gate_up=gate_up) > 0.1


def test_expert_counts():
    given, counts = tokens(7), torch.full((torch_layer.EXPERTS,), 5, dtype=torch.int32)
    version = counts._version
    y = emulate(*given, *WEIGHTS, expert_counts=counts)
    ids = given.topk_ids
    assert counts.tolist() == [5 + int((ids == e).sum()) for e in range(torch_layer.EXPERTS)]
    assert counts._version > version and torch.equal(y, emulate(*given, *WEIGHTS))


# MXFP4

MX_FORMATS = ("mxfp4_fp8", "mxfp4_bf16")


@pytest.mark.parametrize("format", MX_FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 20, 200])
def test_mxfp4(format, num_tokens):
    """In every type that stands for its codes and scales."""
    given, (layer, weights) = tokens(num_tokens), torch_layer.mx_layer(format)
    y = emulate(*given, *weights, format=format)
    assert error(y, given, layer, format=format) < 4e-3
    for codes, scales in [(torch.int8, torch.float8_e8m0fnu), (torch.float4_e2m1fn_x2, None)]:
        others = [w.view(codes) for w in weights[:2]]
        others += [s if scales is None else s.view(scales) for s in weights[2:]]
        assert torch.equal(emulate(*given, *others, format=format), y)


@pytest.mark.parametrize("format", MX_FORMATS)
@pytest.mark.parametrize("gate_up", ["gate_first", "up_first", "interleaved"])
def test_mxfp4_biases_and_orders(gate_up, format):
    """As in gpt-oss."""
    given, (tensors, biases) = tokens(7), biased()
    layer, weights = torch_layer.mx_layer(format)
    kwargs = {"gate_up": gate_up, "format": format, "activation": "swiglu_oai"}
    y = emulate(*given, *weights, **tensors, **kwargs)
    assert error(y, given, layer, **kwargs, **biases) < 4e-3


@pytest.mark.parametrize("gate_up", [None, "gate_first", "up_first", "interleaved"])
@pytest.mark.parametrize(("rows", "groups"), [(128, 4), (448, 9), (96, 1), (544, 12)])
@pytest.mark.parametrize("format", MX_FORMATS)
def test_packed_scales_are_those_of_numpy(format, rows, groups, gate_up):
    """Of scales that lie in any order."""
    generator = torch.Generator().manual_seed(rows)
    wide = torch.randint(90, 130, (3, rows, 2 * groups), dtype=torch.uint8, generator=generator)
    turned = torch.randint(90, 130, (3, groups, rows), dtype=torch.uint8, generator=generator)
    for scales in (wide[..., ::2], wide[..., :groups].contiguous(), turned.mT):
        wanted = quantize.pack_scales(scales.numpy(), format, gate_up)
        made = torch_scales.pack_scales(scales.view(torch.float8_e8m0fnu), format, gate_up)
        assert made.dtype == torch.int32 and made.is_contiguous()
        assert np.array_equal(made.numpy().view(np.uint32), wanted)
        assert mxfp4.packed_shape(3, rows, 32 * groups, format, gate_up) == made.shape


def test_packed_scales_of_any_size_are_those_of_numpy():
    """Up to 2^127 and down to 2^-127, of rows all apart."""
    scales = torch.randint(0, 255, (2, 64, 8), dtype=torch.uint8)
    scales[0] = torch.arange(64)[:, None] // 4  # rows whose f32 is subnormal
    scales[1, ::2] = 254 - torch.arange(8)
    made = torch_scales.pack_scales(scales, "mxfp4_fp8", "gate_first")
    wanted = quantize.pack_scales(scales.numpy(), "mxfp4_fp8", "gate_first")
    assert np.array_equal(made.numpy().view(np.uint32), wanted)
    scales[1, 7, 3] = 255
    with pytest.raises(ValueError, match=r"up to 2\^127, got e8m0 code 255; 255 is NaN"):
        torch_scales.pack_scales(scales, "mxfp4_fp8", "gate_first")


@pytest.mark.parametrize("format", MX_FORMATS)
def test_mxfp4_without_a_gate(format):
    sizes = torch_layer.EXPERTS, HIDDEN, torch_layer.INTERMEDIATE
    layer = reference.random_layer(*sizes, seed=1, format=format, gated=False)
    weights = map(torch.from_numpy, (layer.w13, layer.w2, *layer[1::2]))
    kwargs = {"format": format, "activation": "relu2_no_gate"}
    weights = list(weights)
    for given in (tokens(7), tokens(200)):
        assert error(emulate(*given, *weights, **kwargs), given, layer, **kwargs) < 4e-3


@pytest.mark.parametrize("format", MX_FORMATS)
def test_mxfp4_scales_are_packed_once(monkeypatch, format):
    given, (_, weights) = tokens(3), torch_layer.mx_layer(format)
    made, pack = [], torch_scales.pack_scales
    monkeypatch.setattr(torch_scales, "pack_scales", lambda *a: (made.append(0), pack(*a))[1])
    layer = partial(emulate, *given, *weights, format=format)
    y = layer()
    assert len(made) == 2 and torch.equal(layer(), y) and len(made) == 2
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(), y) and len(made) == 2
    layer(gate_up="interleaved")
    assert len(made) == 3, "of w13 alone"
    weights[3].add_(1)  # twice as large
    doubled = layer().float()
    assert len(made) == 5 and torch.allclose(doubled, 2 * y.float(), rtol=0.02)
    with torch.inference_mode():
        fresh = weights[3].clone()
        assert torch.equal(emulate(*given, *weights[:3], fresh, format=format), layer())


@pytest.mark.parametrize("gate_up", ["gate_first", "interleaved"])
def test_mxfp4_scales_packed_before(gate_up):
    _, weights = torch_layer.mx_layer("mxfp4_fp8")
    kwargs = {"format": "mxfp4_fp8", "gate_up": gate_up}
    scales = [
        integration.pack_scales(scale, "mxfp4_fp8", order)
        for scale, order in zip(weights[2:], (gate_up, None), strict=True)
    ]
    for given in (tokens(5), tokens(200)):
        y = emulate(*given, *weights[:2], *scales, **kwargs)
        assert torch.equal(y, emulate(*given, *weights, **kwargs))


@pytest.mark.parametrize("op", [NEW_OP, OUT_OP], ids=["new", "out"])
def test_opcheck_mxfp4(op):
    arguments = [*tokens(5), *torch_layer.mx_layer("mxfp4_fp8")[1]]
    if op is OUT_OP:
        arguments.insert(0, torch.empty_like(arguments[0]))
    kwargs = {"backend": "emulated", "format": "mxfp4_fp8"}
    assert set(torch.library.opcheck(op, arguments, kwargs).values()) == {"SUCCESS"}


@pytest.mark.parametrize("format", MX_FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_mxfp4(format, backend):
    weights = torch_layer.mx_layer(format)[1]

    def layer(x, ids, router):
        return emulate(2 * x, ids, router, *weights, format=format) + 1

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    given = tokens(5)
    assert torch.equal(compiled(*given), layer(*given))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "mxfp4"}, "format must be mxfp4_fp8 or mxfp4_bf16, got 'mxfp4'; leave it out"),
        ({"format": "bf16"}, "format must be mxfp4_fp8 or mxfp4_bf16, got 'bf16'; leave it out"),
        ({"w13_scale": lambda s: s.float()}, "w13_scale must have dtype e8m0 or u8, got float32"),
        (
            {"w13_scale": lambda s: s[..., :4]},
            r"w13_scale must have shape \[4, 256, 8\], got \[4, 256, 4\]; pass a scale for each",
        ),
        ({"w2_scale": lambda s: s * 0 + 255}, "got e8m0 code 255; 255 is NaN: look for what"),
        ({"w2_scale": lambda s: None}, "w13 is u8 and needs both scales, got w13_scale; pass"),
        (
            {"w13_scale": lambda s: integration.pack_scales(s[:, :, :4], "mxfp4_bf16")},
            r"w13_scale must have shape \[4, 1, 2, 256\], got \[4, 1, 1, 256\]; .*for this gate_up",
        ),
        ({"w13": lambda w: w.unflatten(-1, (8, 16))}, "w13 must have shape .num_experts, 2 . inte"),
    ],
    ids=str,
)
def test_misfits_of_mxfp4(change, message):
    names = ("x", "topk_ids", "topk_weights", "w13", "w2", "w13_scale", "w2_scale")
    weights = torch_layer.mx_layer("mxfp4_bf16")[1]
    given = dict(zip(names, (*tokens(3), *weights), strict=True)) | {"format": "mxfp4_bf16"}
    for name, alter in change.items():
        given[name] = alter(given[name]) if callable(alter) else alter
    with pytest.raises(ValueError, match=message):
        emulate(**given)


def test_mxfp4_scales_are_not_packed_in_a_capture(monkeypatch):
    _, weights = torch_layer.mx_layer("mxfp4_bf16")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    message = refusal(
        RuntimeError,
        lambda: torch_scales.packed(weights[2], "w13_scale", weights[0], "mxfp4_bf16", "up_first"),
    )
    assert "w13_scale is to be packed once" in message and "call the layer before it" in message


# Other layers

VARIANTS = [
    {"activation": "geglu_erf"},
    {"activation": "swiglu_oai", "apply_router_weight_on_input": True},
    {"activation": Activation("swiglu_clamped", 1.5, 0.5, 0.25), "first_expert": 3},
    {"activation": Activation("swiglu_clamped", limit=math.inf), "gate_up": "up_first"},
    {"routed_scaling_factor": 2.5, "first_expert": 1},
]


@pytest.mark.parametrize("has_out", [False, True], ids=["new", "out"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_variants(variant, has_out):
    x, ids, router = tokens(9)
    given = x, ids + variant.get("first_expert", 0), router
    kwargs = {"out": torch.empty_like(x)} if has_out else {}
    y = emulate(*given, *WEIGHTS, **variant, **kwargs)
    assert error(y, given, **variant) < 4e-3
    assert not torch.equal(y, emulate(*given, *WEIGHTS))


@pytest.mark.parametrize("layer", [torch_layer.NO_GATE, torch_layer.NO_GATE_BF16])
def test_experts_without_a_gate(layer):
    given, weights = tokens(9), torch_layer.no_gate_weights(layer)

    def run(x, ids, router):
        return emulate(x, ids, router, *weights, activation="relu2_no_gate")

    y = run(*given)
    assert error(y, given, layer, activation="relu2_no_gate") < 4e-3
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), y)
    message = refusal(ValueError, lambda: emulate(*given, *weights))
    assert "one of relu2_no_gate, " in message and "got 'swiglu'; take one" in message


def test_batch_invariant(monkeypatch):
    """The argument gets to the layer; what it does there is tests/cpu/test_emulate_batches.py."""
    given, seen = tokens(5), []
    launch = integration.launch
    monkeypatch.setattr(
        integration, "launch", lambda *args, **kw: (seen.append(kw), launch(*args, **kw))
    )
    y = emulate(*given, *WEIGHTS, batch_invariant=True)
    assert torch.equal(y, emulate(*given, *WEIGHTS)), "no sum is cut at this size"
    assert [kw["batch_invariant"] for kw in seen] == [True, False]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_compiled_variants(variant, backend):
    def layer(x, ids, router):
        return emulate(x, ids, router, *WEIGHTS, **variant) + 1

    given = tokens(5)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    assert torch.equal(compiled(*given), layer(*given))


def test_misfit_variants():
    given = (*tokens(3), *WEIGHTS)
    for variant, message in [
        ({"activation": "silu"}, "activation must be one of swiglu, .*, got 'silu'"),
        ({"activation": 3}, "activation must be one of swiglu, .*, got 3"),
        ({"gate_up": "up"}, "gate_up must be one of gate_first, up_first, .*, got 'up'"),
        ({"first_expert": -1}, "first_expert must be an integer from 0 to "),
    ]:
        with pytest.raises(ValueError, match=message):
            emulate(*given, **variant)


# What PyTorch asks of operators


def checked_arguments():
    """Weights as bytes: PyTorch's checks cannot compare e4m3."""
    weights = [w.view(torch.uint8) if w.element_size() == 1 else w for w in WEIGHTS]
    return [*tokens(5), *weights]


@pytest.mark.parametrize("has_out", [False, True], ids=["new", "out"])
def test_opcheck(has_out):
    arguments, op = checked_arguments(), NEW_OP
    if has_out:
        arguments, op = (
            [torch.empty_like(arguments[0]), *arguments],
            OUT_OP,
        )
    results = torch.library.opcheck(op, arguments, {"backend": "emulated"})
    assert set(results.values()) == {"SUCCESS"}


def test_opcheck_quantised_x():
    x, *rest = checked_arguments()
    codes, scale = quantized(x)
    kwargs = {"x_scale": scale, "backend": "emulated"}
    torch.library.opcheck(NEW_OP, (codes.view(torch.uint8), *rest), kwargs)


def test_opcheck_biases_and_counts():
    tensors, _ = biased()
    arguments = checked_arguments()
    kwargs = tensors | {"backend": "emulated", "gate_up": "interleaved"}
    torch.library.opcheck(NEW_OP, arguments, kwargs)
    kwargs["expert_counts"] = torch.zeros(torch_layer.EXPERTS, dtype=torch.int32)
    torch.library.opcheck(OUT_OP, [torch.empty_like(arguments[0]), *arguments], kwargs)


def test_compiled_counts():
    def layer(x, ids, router, counts):
        return emulate(x, ids, router, *WEIGHTS, expert_counts=counts) + 1

    given = tokens(5)
    counts = [torch.zeros(torch_layer.EXPERTS, dtype=torch.int32) for _ in range(2)]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given, counts[0]), layer(*given, counts[1]))
    assert counts[0].any() and torch.equal(*counts)


@pytest.mark.parametrize("op", [NEW_OP, OUT_OP], ids=["new", "out"])
def test_opcheck_bf16_weights(op):
    arguments = [*tokens(5), *BF16_WEIGHTS]
    if op is OUT_OP:
        arguments.insert(0, torch.empty_like(arguments[0]))
    results = torch.library.opcheck(op, arguments, {"backend": "emulated", "activation": "swiglu"})
    assert set(results.values()) == {"SUCCESS"}


def test_schemas():
    assert not NEW_OP._schema.is_mutable and OUT_OP._schema.is_mutable
    written = [a.name for a in OUT_OP._schema.arguments if a.alias_info]
    assert written == ["out", "expert_counts"]


def test_operators_without_the_function_around_them():
    given, out = tokens(3), torch.empty(3, HIDDEN, dtype=torch.bfloat16)
    y = NEW_OP(*given, *WEIGHTS, backend="emulated")
    version = out._version
    assert OUT_OP(out, *given, *WEIGHTS, backend="emulated") is None
    assert torch.equal(y, out) and torch.equal(y, emulate(*given, *WEIGHTS))
    assert out._version > version
    given.x.requires_grad_()
    refusal(RuntimeError, lambda: NEW_OP(*given, *WEIGHTS, backend="emulated"))


def test_fake_tensors():
    with torch.device("meta"):
        x = torch.empty(33, HIDDEN, dtype=torch.bfloat16)
        ids, router = torch.empty(33, 2, dtype=torch.int64), torch.empty(33, 2)
    y = mega_moe(x, ids, router, *(w.to("meta") for w in WEIGHTS))
    assert (y.device.type, y.shape, y.dtype) == ("meta", (33, HIDDEN), torch.bfloat16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled(backend):
    """Whole graphs, with other numbers of tokens as well."""

    def layer(x, ids, router):
        return emulate(2 * x, ids, router, *WEIGHTS) + 1

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    for num_tokens in (5, 9):
        given = tokens(num_tokens)
        assert torch.equal(compiled(*given), layer(*given))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_bf16_weights(backend):
    def layer(x, ids, router):
        return emulate(2 * x, ids, router, *BF16_WEIGHTS, activation="geglu_erf") + 1

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    given = tokens(5)
    assert torch.equal(compiled(*given), layer(*given))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_out(backend):
    def layer(x, ids, router):
        out = torch.zeros_like(x)
        emulate(x, ids, router, *WEIGHTS, out=out)
        return out + 1

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    given = tokens(5)
    assert torch.equal(compiled(*given), layer(*given))


# Refusals


@pytest.mark.parametrize("has_out", [False, True], ids=["new", "out"])
def test_grad_is_refused(has_out):
    x, ids, router = tokens(3)
    kwargs = {"out": torch.empty_like(x)} if has_out else {}
    x.requires_grad_()
    message = refusal(RuntimeError, lambda: emulate(x, ids, router, *WEIGHTS, **kwargs))
    assert "no backward" in message and "of x;" in message and "torch.no_grad()" in message
    with torch.no_grad():
        emulate(x, ids, router, *WEIGHTS, **kwargs)
    with torch.inference_mode():
        emulate(x, ids, router, *WEIGHTS, **kwargs)
    router.requires_grad_()
    with pytest.raises(RuntimeError, match="of x, topk_weights;"):
        emulate(x, ids, router, *WEIGHTS, **kwargs)


def test_grad_is_refused_when_compiled():
    x, ids, router = tokens(3)
    x.requires_grad_()
    compiled = torch.compile(
        lambda x: emulate(x, ids, router, *WEIGHTS), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match="no backward"):
        compiled(x)
    with torch.no_grad():
        assert torch.equal(compiled(x), emulate(x, ids, router, *WEIGHTS))


def test_the_cpu_is_used_only_if_asked():
    given = tokens(3)
    message = refusal(TypeError, lambda: mega_moe(*given, *WEIGHTS))
    assert "w13 must be on a GPU" in message and "got a tensor on cpu" in message
    assert 'backend="emulated"' in message
    message = refusal(ValueError, lambda: mega_moe(*given, *WEIGHTS, backend="triton"))
    assert message == 'backend must be "cuda" or "emulated", got \'triton\''


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": lambda x: x.half()}, "x must have dtype bf16 or u16, got f16"),
        ({"x": lambda x: x[:, :128]}, r"x must have shape \[\*, 256\], got \[3, 128\]"),
        ({"topk_ids": lambda ids: ids.short()}, "topk_ids must have dtype i32 or i64"),
        ({"topk_weights": lambda router: router[:, :1]}, r"topk_weights must have shape \[3, 2\]"),
        ({"w13": lambda w: w.view(torch.float8_e5m2)}, "w13 must have dtype e4m3 or u8 with sc"),
        (
            {"w13": lambda w: w.bfloat16()},
            "w13 is bf16, bf16 takes no scales, got w13_scale and w2_",
        ),
        ({"w13_scale": lambda s: None}, "w13 is e4m3 and needs both scales, got w2_scale; pass"),
        ({"w2_scale": lambda s: s.double()}, "w2_scale must have dtype f32 or e8m0 or u8, got f64"),
        ({"w13_scale": lambda s: s[:, :1]}, r"w13_scale must have shape \[4, 2, 2\]"),
    ],
)
def test_misfits(change, message):
    names = ("x", "topk_ids", "topk_weights", "w13", "w2", "w13_scale", "w2_scale")
    given = dict(zip(names, (*tokens(3), *WEIGHTS), strict=True))
    for name, alter in change.items():
        given[name] = alter(given[name])
    with pytest.raises(ValueError, match=message):
        emulate(**given)


# Weights on a GPU, by their places


@pytest.mark.parametrize(
    ("name", "dtype", "typestr"),
    [("w13", "uint8", "|u1"), ("w2_scale", "float32", "<f4"), ("w2", "bfloat16", "<u2")],
)
def test_memory_describes_the_tensor(name, dtype, typestr):
    """NumPy reads the same dictionary for memory of the host."""
    tensor = torch.arange(2 * 6 * 8).to(getattr(torch, dtype)).reshape(2, 6, 8)[:, ::2, :5]
    place = (*integration._place(tensor)[:4], torch.device("cuda:0"))
    interface = integration.Memory(place, name).__cuda_array_interface__
    assert interface["typestr"] == typestr
    array = np.asarray(SimpleNamespace(__array_interface__=interface))
    wanted = (tensor.view(torch.uint16) if dtype == "bfloat16" else tensor).numpy()
    assert np.array_equal(array, wanted) and array.ctypes.data == tensor.data_ptr()


def test_scales_that_are_none_have_no_place(monkeypatch):
    monkeypatch.setattr(integration, "ExpertWeights", lambda *memory, **said: (said, *memory))
    monkeypatch.setattr(integration, "Memory", lambda place, name: name)
    integration._known_weights.cache_clear()
    try:
        places = [integration._place(part) for part in (*BF16_WEIGHTS, None, None)]
        known = integration._known_weights("up_first", None, *places)
        assert known == ({"gate_up": "up_first", "format": None}, "w13", "w2", None, None)
    finally:
        integration._known_weights.cache_clear()


def test_memory_of_a_wrong_type_is_refused():
    wrong = 0, (4, 256, 256), (65536, 256, 1), torch.float16, torch.device("cuda:0")
    message = refusal(ValueError, lambda: integration.Memory(wrong, "w13"))
    assert message.startswith("w13 must have dtype e4m3, u8, bf16 or u16, got float16")
    message = refusal(ValueError, lambda: integration.Memory(wrong, "w2_scale"))
    assert message.startswith("w2_scale must have dtype f32, got float16")
    assert integration.Memory(wrong[:3] + (torch.bfloat16, wrong[4]), "w2_bias")
    message = refusal(ValueError, lambda: integration.Memory(wrong, "w2_bias"))
    assert message.startswith("w2_bias must have dtype bf16, u16 or f32, got float16")


def test_weights_are_known_by_their_places(monkeypatch):
    """Made once for a place, held by no tensor, and at most so many."""
    made = []
    monkeypatch.setattr(integration, "ExpertWeights", lambda *m, **_: made.append(m) or m)
    integration._known_weights.cache_clear()
    known = partial(integration._known_weights, "gate_first", None)
    try:
        tensors = [w.clone() for w in WEIGHTS]
        monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda:0"))
        places = [integration._place(tensor) for tensor in tensors]
        first = known(*places)
        again = [w.view(torch.uint8).view(w.dtype) for w in tensors]  # other tensors, there
        assert known(*map(integration._place, again)) is first
        other = known(*places[:3], integration._place(tensors[3].clone()))
        assert other is not first and len(made) == 2
        assert integration._known_weights("up_first", None, *places) is not first
        assert len(made) == 3
        assert not any(isinstance(part, torch.Tensor) for part in first)
        assert integration._known_weights.cache_info().maxsize == integration.MAX_LAYERS
    finally:
        integration._known_weights.cache_clear()


def test_nothing_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        emulate(*tokens(3), *WEIGHTS)
