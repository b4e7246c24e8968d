"""Checkpoints with static scales of activations in the integrations: as near to the layer that is
not quantised as the frameworks' own scheme, or nearer, and scales that mean nothing.
"""

from dataclasses import replace

import pytest

from jitmoe.emulate.compile import NoHostCompiler, compiler

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'jitmoe[torch]'")

import sglang_interface as sglang  # noqa: E402
import stand_in  # noqa: E402
import static_scheme  # noqa: E402
import vllm_interface as vllm  # noqa: E402
from torch_layer import EXPERTS, error, fp8_layer, mx_layer, tokens  # noqa: E402

from jitmoe.integrations.static_scales import check_static  # noqa: E402

try:
    compiler()
except NoHostCompiler as error_:
    pytest.skip(str(error_), allow_module_level=True)

SHAPES = [(), (1,), (1, 1)]
ALL2ALL = vllm.ParallelConfig(use_all2all_kernels=True)


def vllm_run(given, weights, a1, a2, moe_parallel_config=None, **quantisation):
    """vLLM's prepare step quantises with a1_scale, which it hands on as it is."""
    moe = vllm.MoEConfig(moe_parallel_config=moe_parallel_config or vllm.ParallelConfig())
    w1, w2, w1_scale, w2_scale = weights
    quantisation = {"quant_dtype": torch.float8_e4m3fn, "block_shape": None} | quantisation
    quant = vllm.QuantConfig(w1_scale, w2_scale, a1_scale=a1, a2_scale=a2, **quantisation)

    def quantize(x):
        is_fp8 = quant.quant_dtype == torch.float8_e4m3fn
        return static_scheme.quantized(x, a1) if is_fp8 else x, a1

    with stand_in.adapter("vllm", vllm.PLACES) as module:
        experts = module.JitmoeExperts(moe, quant, backend="emulated")
        x, ids, router = given
        return vllm.run(experts, quantize, x, w1, w2, router, ids)


def sglang_run(given, weights, a1, a2, x_scale=None):
    """x_scale: x comes in e4m3 with it."""
    w13, w2, *scales = weights
    names = dict(zip(("w13_scale", "w2_scale"), scales, strict=True))
    quant = sglang.TritonMoeQuantInfo(w13, w2, use_fp8_w8a8=True, **names)
    quant = replace(quant, a13_scale=a1, a2_scale=a2)
    x, ids, router = given
    topk = sglang.StandardTopKOutput(router, ids, torch.zeros(len(x), EXPERTS))
    x = x if x_scale is None else static_scheme.quantized(x, x_scale)
    with stand_in.adapter("sglang", sglang.PLACES) as module:
        sglang.FACTORIES.clear()
        module.register(backend="emulated")
        runner = sglang.MoeRunner(
            sglang.resolve_moe_runner_backend("jitmoe"), sglang.MoeRunnerConfig()
        )
        return runner.run(sglang.StandardDispatchOutput(x, x_scale, topk), quant).hidden_states


def cases(given, scales, shape=()):
    """The layer, its weights and calibrated scales, and what it gives exactly and by those."""
    layer, weights = fp8_layer(scales)
    a1, a2 = static_scheme.calibrated(given, weights)
    a2 = a2.max()
    exact = static_scheme.layer(given, weights)
    theirs = static_scheme.noise(static_scheme.layer(given, weights, a1, a2), exact)
    return layer, weights, a1.reshape(shape), a2.reshape(shape), exact, theirs


# Results


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scales", ["channel", "tensor"])
def test_tokens_in_bf16(scales, shape):
    given = tokens(20)
    layer, weights, *static, exact, theirs = cases(given, scales, shape)
    for run in (vllm_run, sglang_run):
        y = run(given, weights, *static)
        assert error(y, given, layer) < 4e-3
        assert static_scheme.noise(y, exact) < theirs < 0.1


@pytest.mark.parametrize("run", [vllm_run, sglang_run])
def test_outliers(run):
    """A static scale that holds them leaves few bits to the other tokens."""
    given = static_scheme.outliers(20)
    _, weights, a1, a2, exact, theirs = cases(given, "tensor")
    assert static_scheme.noise(run(given, weights, a1, a2), exact) < 0.1 < 0.2 < theirs


@pytest.mark.parametrize("run", [vllm_run, sglang_run])
def test_nothing_is_cut_off(run):
    given = tokens(20)
    _, weights, a1, a2, exact, _ = cases(given, "tensor")
    a1, a2 = a1 / 8, a2 / 8
    theirs = static_scheme.noise(static_scheme.layer(given, weights, a1, a2), exact)
    assert static_scheme.noise(run(given, weights, a1, a2), exact) < 0.1 < 0.2 < theirs


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scales", ["channel", "tensor"])
def test_tokens_that_come_quantised(scales, shape):
    given = tokens(20)
    layer, weights, a1, a2, exact, theirs = cases(given, scales, shape)
    came = static_scheme.quantized(given.x, a1.reshape(())), a1.reshape(1, 1).expand(20, 1)
    for y in (
        vllm_run(given, weights, a1, a2, ALL2ALL),
        sglang_run(given, weights, a1, a2, x_scale=a1),
    ):
        assert error(y, given, layer, x=came) < 4e-3
        assert error(y, given, layer) > 1e-2, "x was quantised otherwise"
        assert static_scheme.noise(y, exact) < theirs


def test_scales_of_experts_leave_tokens_in_bf16():
    given = tokens(9)
    layer, weights, a1, a2, *_ = cases(given, "tensor")
    of_experts = a1 * torch.tensor([1.0, 2.0, 3.0, 4.0])
    y = vllm_run(given, weights, of_experts, a2.expand(EXPERTS), ALL2ALL)
    assert error(y, given, layer) < 4e-3
    assert torch.equal(y, sglang_run(given, weights, of_experts, a2.expand(EXPERTS, 1)))


def test_mxfp4_of_vllm_hands_tokens_on_in_bf16():
    """Beside a scale that they were not quantised with."""
    given, (layer, weights) = tokens(9), mx_layer("mxfp4_fp8")
    options = {"weight_quant_dtype": "mxfp4", "quant_dtype": "fp8"}
    a1 = torch.tensor(0.25)
    y = vllm_run(given, weights, a1, a1, ALL2ALL, **options)
    assert error(y, given, layer, format="mxfp4_fp8") < 4e-3


@pytest.mark.parametrize(
    "given", [tokens(20), static_scheme.outliers(20)], ids=["plain", "outliers"]
)
@torch.no_grad()
def test_transformers(given, monkeypatch):
    """Beside transformers' own loop over experts, of which each has scales of its own."""
    pytest.importorskip("transformers", reason="needs transformers: 'jitmoe[transformers]'")
    from transformers.integrations import finegrained_fp8

    experts, weights = transformers_experts(given)
    exact = static_scheme.layer(given, weights)

    # Options are named in 5.17 and come in order in 5.24.
    def linear(
        input, weight, weight_scale_inv, block_size, bias=None, activation_scale=None, *_, **__
    ):
        codes = static_scheme.quantized(input, activation_scale).double() * activation_scale
        rows = weight.shape[0] // weight_scale_inv.shape[0]
        scale = weight_scale_inv.double().repeat_interleave(rows, 0)
        return (codes @ (weight.double() * scale).T).to(input.dtype)

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", linear)
    x, ids, router = given
    known = (ids >= 0) & (ids < EXPERTS)  # its loop takes no others but EXPERTS, of nobody
    theirs = experts(x, torch.where(known, ids, EXPERTS).long(), router)
    by_formula = static_scheme.layer(
        given,
        weights,
        experts.gate_up_proj_activation_scale,
        experts.down_proj_activation_scale,
    )
    assert static_scheme.noise(theirs, by_formula) < 2e-2, "the formula is theirs"
    with registered():
        experts.config._experts_implementation = "jitmoe"
        y = experts(*given)
    ours, theirs = (static_scheme.noise(of, exact) for of in (y, theirs))
    assert ours < min(theirs, 0.1)
    if given.x.abs().max() > 1000:
        assert ours < theirs / 2


def transformers_experts(given):
    """FP8Experts of a static scheme, with scales of experts, and their weights."""
    from qwen3_moe import empty_fp8_model

    _, (w13, w2, w13_scale, w2_scale) = fp8_layer("tensor")
    weights = w13, w2, w13_scale.reshape(EXPERTS, -1).expand(EXPERTS, 2), w2_scale
    static = {"activation_scheme": "static", "weight_block_size": None}
    model = empty_fp8_model("eager", static, num_hidden_layers=1)
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj_activation_scale.shape == (EXPERTS,)
    a1, a2 = static_scheme.calibrated(given, weights)
    values = {
        "gate_up_proj": w13,
        "down_proj": w2,
        "gate_up_proj_scale_inv": weights[2].reshape(EXPERTS, 2, 1).contiguous(),
        "down_proj_scale_inv": w2_scale.reshape(EXPERTS, 1, 1),
        "gate_up_proj_activation_scale": a1.expand(EXPERTS).contiguous(),
        "down_proj_activation_scale": a2,
    }
    for name, value in values.items():
        assert getattr(experts, name).shape == value.shape, name
        setattr(experts, name, torch.nn.Parameter(value, requires_grad=False))
    return experts, weights


class registered:
    """The integration, emulated, and gone afterwards."""

    def __enter__(self):
        from transformers.integrations import finegrained_fp8, moe

        from jitmoe.integrations import transformers as integration

        self.registries = finegrained_fp8.FP8ExpertsInterface, moe.ExpertsInterface
        integration.register(backend="emulated")

    def __exit__(self, *_):
        for registry in self.registries:
            registry._global_mapping.pop("jitmoe")


# Refusals

WRONG = [
    (float("nan"), "positive and finite, got nan; pass"),
    (float("inf"), "positive and finite, got inf; pass"),
    (0.0, "positive and finite, got 0.0; pass"),
    (-2.0, "positive and finite, got -2.0; pass"),
    ([1.0, 1.0, 1.0, 0.0], "positive and finite, got 0.0; pass"),
    ([1.0, 1.0], r"one for each of 4 experts, got shape \[2\]; pass"),
    ([[1.0, 1.0]] * EXPERTS, r"one for each of 4 experts, got shape \[4, 2\]; pass"),
    ([], r"one for each of 4 experts, got shape \[0\]; pass"),
]


@pytest.mark.parametrize(("scale", "words"), WRONG, ids=str)
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("run", [vllm_run, sglang_run])
def test_scales_that_mean_nothing(run, which, scale, words):
    static = [torch.tensor(1.0), torch.tensor(1.0)]
    static[which] = torch.tensor(scale)
    name = ({vllm_run: "a1", sglang_run: "a13"}[run], "a2")[which]
    with pytest.raises(ValueError, match=f"^{name}_scale must be .*{words}") as caught:
        run(tokens(3), fp8_layer("tensor")[1], *static)
    assert "\n" not in str(caught.value)


@torch.no_grad()
def test_transformers_compiles():
    """Without a look at the values, which are checked at a call outside."""
    pytest.importorskip("transformers", reason="needs transformers: 'jitmoe[transformers]'")
    torch._dynamo.reset()
    given = tokens(20)
    experts, _ = transformers_experts(given)
    experts.config._experts_implementation = "jitmoe"
    with registered():
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*given), experts(*given))


@pytest.mark.parametrize("name", ["gate_up_proj_activation_scale", "down_proj_activation_scale"])
@torch.no_grad()
def test_transformers_refuses_the_same(name):
    pytest.importorskip("transformers", reason="needs transformers: 'jitmoe[transformers]'")
    given = tokens(20)
    experts, _ = transformers_experts(given)
    experts.config._experts_implementation = "jitmoe"
    with registered():
        getattr(experts, name)[2] = 0
        with pytest.raises(ValueError, match=f"^{name} must be positive and finite, got 0.0"):
            experts(*given)
        setattr(experts, name, torch.nn.Parameter(torch.ones(3), requires_grad=False))
        with pytest.raises(ValueError, match=rf"^{name} must be one number .* shape \[3\]"):
            experts(*given)


def test_values_are_read_once_and_after_a_write(monkeypatch):
    scale, reads, tolist = torch.ones(EXPERTS), [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(1) or tolist(self))
    for _ in range(3):
        check_static({"a": scale}, EXPERTS)
    with torch.inference_mode():
        of_inference = torch.ones(1)
        check_static({"a": of_inference}, EXPERTS)
        check_static({"a": of_inference}, EXPERTS)
    assert len(reads) == 2
    scale[1] = 0
    for _ in range(2):
        with pytest.raises(ValueError, match="got 0.0"):
            check_static({"a": scale}, EXPERTS)
