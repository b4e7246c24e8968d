"""jitmoe.integrations.transformers on a CPU: a tiny FP8 Qwen3-MoE through the emulated kernel, and
the experts that are refused.
"""

from types import MethodType, SimpleNamespace

import pytest

from jitmoe.emulate.compile import NoHostCompiler, compiler

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'jitmoe[transformers]'")
transformers = pytest.importorskip(
    "transformers", reason="needs transformers: pip install 'jitmoe[transformers]'"
)

from qwen3_moe import NAMES, bf16_model, fp8_model  # noqa: E402
from torch_layer import (  # noqa: E402
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    LAYER,
    NO_GATE,
    NO_GATE_BF16,
    TOP_K,
    WEIGHTS,
    error,
    no_gate_weights,
    tokens,
)
from transformers.activations import ACT2FN  # noqa: E402
from transformers.integrations import finegrained_fp8, moe  # noqa: E402

from jitmoe import Activation, reference  # noqa: E402
from jitmoe.integrations import transformers as integration  # noqa: E402
from jitmoe.integrations import transformers_gates as gates  # noqa: E402
from jitmoe.integrations import transformers_refusals as refusals  # noqa: E402
from jitmoe.reference_activations import activate  # noqa: E402

try:
    compiler()
except NoHostCompiler as error_:
    pytest.skip(str(error_), allow_module_level=True)


@pytest.fixture(autouse=True)
def registered():
    """Emulated, and gone afterwards."""
    torch._dynamo.reset()
    integration.register(backend="emulated")
    yield
    for registry in (finegrained_fp8.FP8ExpertsInterface, moe.ExpertsInterface):
        registry._global_mapping.pop("jitmoe")


def fp8_experts(**changes):
    return fp8_model(num_hidden_layers=1, **changes).model.layers[0].mlp.experts


def refused(call):
    with pytest.raises(NotImplementedError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300, "one sentence"
    return message


# Results


@pytest.mark.parametrize("num_tokens", [1, 20])
@torch.no_grad()
def test_experts(num_tokens):
    """Ids int64 and weights in the model's type; ids of no expert here are unused slots."""
    experts, given = fp8_experts(), tokens(num_tokens)
    ids, router = given.topk_ids.long(), given.topk_weights.bfloat16()
    assert num_tokens == 1 or ((ids < 0).any() and (ids >= EXPERTS).any())
    y = experts(given.x, ids, router)
    assert y.dtype == torch.bfloat16 and y.shape == given.x.shape
    assert error(y, (given.x, ids, router)) < 4e-3


def bf16_experts():
    return bf16_model("jitmoe", num_hidden_layers=1).model.layers[0].mlp.experts


def layer_of(experts):
    """The bf16 weights of an experts module, for the oracle."""
    w13, w2 = (
        tensor.detach().view(torch.uint16).numpy()
        for tensor in (experts.gate_up_proj, experts.down_proj)
    )
    return reference.Layer(w13, None, w2, None)


@pytest.mark.parametrize("num_tokens", [1, 20, 150])
@torch.no_grad()
def test_bf16_experts(num_tokens):
    experts, given = bf16_experts(), tokens(num_tokens)
    ids, router = given.topk_ids.long(), given.topk_weights.bfloat16()
    y = experts(given.x, ids, router)
    assert y.dtype == torch.bfloat16 and y.shape == given.x.shape
    assert error(y, (given.x, ids, router), layer_of(experts)) < 3e-3


@pytest.mark.parametrize(
    ("act_fn", "activation"),
    [
        (torch.nn.SiLU(), "swiglu"),
        (ACT2FN["gelu"], "geglu_erf"),
        (ACT2FN["gelu_pytorch_tanh"], "geglu_tanh"),
        (ACT2FN["relu2"], "reglu2"),
    ],
)
@torch.no_grad()
def test_activations(act_fn, activation):
    """In both formats."""
    given = tokens(9)
    for experts, layer in ((bf16_experts(), None), (fp8_experts(), LAYER)):
        experts.act_fn = act_fn
        y = experts(*given)
        wanted = layer or layer_of(experts)
        assert error(y, given, wanted, activation=activation) < 4e-3
        assert gates.activation_of(experts) == activation
        assert activation == "swiglu" or error(y, given, wanted) > 1e-2


@torch.no_grad()
def test_bf16_model():
    """Logits beside eager's, and tokens one by one."""
    prompt = torch.arange(12)[None]
    model, reference_model = (bf16_model(kind, num_hidden_layers=1) for kind in ("jitmoe", "eager"))
    logits, wanted = (m(prompt).logits.float() for m in (model, reference_model))
    assert (logits - wanted).norm() < 0.01 * wanted.norm()
    longer = model.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert longer.shape == (1, 15)
    model.set_experts_implementation("eager")
    assert torch.equal(model(prompt).logits.float(), wanted)


@torch.no_grad()
def test_strided_arguments():
    experts, given = fp8_experts(), tokens(6)
    wide = torch.stack([given.x, given.x], dim=-1)[..., 0]
    ids, router = (t.repeat(1, 2)[:, :TOP_K] for t in given[1:])
    assert not any(tensor.is_contiguous() for tensor in (wide, ids, router))
    assert torch.equal(experts(wide, ids, router), experts(*given))


@torch.no_grad()
def test_scales_in_powers_of_two():
    experts, given = fp8_experts(scale_fmt="ue8m0"), tokens(6)
    assert experts.down_proj_scale_inv.dtype == torch.float8_e8m0fnu
    scales = [getattr(experts, name).float().numpy() for name in NAMES[2:]]
    layer = LAYER._replace(w13_scale=scales[0], w2_scale=scales[1])
    assert error(experts(*given), given, layer) < 4e-3


def no_gate_experts(format: str):
    """Of a Nemotron-H, and as its FP8 checkpoints would be loaded."""
    from transformers.models.nemotron_h import configuration_nemotron_h, modeling_nemotron_h

    config = configuration_nemotron_h.NemotronHConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    config._experts_implementation = "jitmoe"
    experts = modeling_nemotron_h.NemotronHExperts(config)
    if format != "bf16":
        config.hidden_act = config.mlp_hidden_act  # where FP8Experts looks
        model = torch.nn.ModuleDict({"mixer": torch.nn.ModuleDict({"experts": experts})})
        model.config = config
        quantisation = transformers.FineGrainedFP8Config()
        finegrained_fp8.replace_with_fp8_linear(model, quantization_config=quantisation)
        experts = model["mixer"]["experts"]
        assert type(experts).__name__ == "FP8Experts" and not experts.has_gate
    layer = NO_GATE_BF16 if format == "bf16" else NO_GATE
    names = ("up_proj", "down_proj", "up_proj_scale_inv", "down_proj_scale_inv")
    for name, tensor in zip(names, no_gate_weights(layer), strict=False):
        setattr(experts, name, torch.nn.Parameter(tensor, requires_grad=False))
    return experts, layer


@pytest.mark.parametrize("num_tokens", [1, 20, 150])
@pytest.mark.parametrize("format", ["bf16", "fp8_block"])
@torch.no_grad()
def test_experts_without_a_gate(format, num_tokens):
    (experts, layer), given = no_gate_experts(format), tokens(num_tokens)
    ids, router = given.topk_ids.long(), given.topk_weights.bfloat16()
    y = experts(given.x, ids, router)
    assert y.dtype == torch.bfloat16 and y.shape == given.x.shape
    assert error(y, (given.x, ids, router), layer, activation="relu2_no_gate") < 4e-3
    experts.act_fn = torch.nn.SiLU()
    y = experts(given.x, ids, router)
    assert error(y, (given.x, ids, router), layer, activation="silu_no_gate") < 4e-3
    experts.act_fn = torch.nn.Tanh()
    assert "needs activation silu, gelu or relu2, got Tanh" in refused(lambda: experts(*given))


@torch.no_grad()
def test_nemotron_experts_are_their_own():
    """Beside the loop of the module itself."""
    experts, _ = no_gate_experts("bf16")
    given = reference.random_tokens(20, HIDDEN, EXPERTS, TOP_K, 2)
    x, ids, router = (torch.from_numpy(part) for part in given)
    given = x.bfloat16(), ids.long(), router
    y = experts(*given).float()
    experts.config._experts_implementation = "eager"
    wanted = experts(*given).float()
    assert (y - wanted).norm() < 0.01 * wanted.norm()


# Gates by the fields of a configuration, with limits that the values pass, and the activations that
# they mean.
GATES = [
    ({"swiglu_limit": 0.5}, Activation("swiglu_clamped", 1.0, 0.5, 0.0)),
    ({"swiglu_limit": 1, "swiglu_alpha": 1.7}, Activation("swiglu_oai", 1.7, 1.0, 1.0)),
    ({"hidden_act": "gelu"}, "geglu_erf"),
    ({"hidden_act": "gelu_pytorch_tanh"}, "geglu_tanh"),
    ({"hidden_act": "gelu_new"}, "geglu_tanh"),
    ({"hidden_act": "swish"}, "swiglu"),
]


@pytest.mark.parametrize(("fields", "activation"), GATES, ids=str)
@torch.no_grad()
def test_gates(fields, activation):
    """Of the oracle's formula, which is that of the module's own `_apply_gate`."""
    experts, given = fp8_experts(**fields), tokens(9)
    y = experts(*given)
    assert error(y, given, activation=activation) < 4e-3
    if activation != "swiglu":
        assert error(y, given) > 0.05, "the fields matter"
    gate, up = 4 * torch.randn(2, 1000, generator=torch.Generator().manual_seed(1)).double()
    mid = activate(gate.numpy(), up.numpy(), activation)
    own = experts._apply_gate(torch.cat([gate, up])[None])[0]
    assert torch.allclose(own, torch.from_numpy(mid), atol=1e-9)


@pytest.mark.parametrize(("fields", "activation"), GATES, ids=str)
@torch.no_grad()
def test_compiled_gates(fields, activation):
    experts, given = fp8_experts(**fields), tokens(5)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), experts(*given))


@torch.no_grad()
def test_scales_of_experts():
    """As FP8Experts without blocks allocates them: of halves of gate_up_proj."""
    experts, given = fp8_experts(), tokens(6)
    scales = [0.004 * (1 + torch.rand(EXPERTS, n, 1)) for n in (2, 1)]
    experts.block_size = None
    for name, scale in zip(NAMES[2:], scales, strict=True):
        setattr(experts, name, torch.nn.Parameter(scale, requires_grad=False))
    layer = LAYER._replace(w13_scale=scales[0].numpy(), w2_scale=scales[1].numpy())
    assert error(experts(*given), given, layer) < 4e-3


@torch.no_grad()
def test_model():
    """Logits of a prompt, beside the same model in bf16, and tokens one by one.

    Gate, up and what follows from them are off by 2.6 % each, the noise of e4m3. One layer, since
    another's router may choose by that noise.
    """
    prompt = torch.arange(12)[None]
    model, reference = (make(num_hidden_layers=1) for make in (fp8_model, bf16_model))
    logits, wanted = (m(prompt).logits.float() for m in (model, reference))
    assert (logits - wanted).norm() < 0.06 * wanted.norm()
    model = fp8_model()
    longer = model.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert longer.shape == (1, 15)


@torch.no_grad()
def test_another_implementation_and_back():
    model, given = fp8_model(), tokens(4)
    experts = model.model.layers[0].mlp.experts
    before = [getattr(experts, name).data_ptr() for name in NAMES]
    bits = [getattr(experts, name).view(torch.uint8).clone() for name in NAMES]
    y = experts(*given)
    model.set_experts_implementation("grouped_mm")
    assert experts.config._experts_implementation == "grouped_mm"
    model.set_experts_implementation("jitmoe")
    assert torch.equal(experts(*given), y)
    assert before == [getattr(experts, name).data_ptr() for name in NAMES]
    for name, codes in zip(NAMES, bits, strict=True):
        assert torch.equal(getattr(experts, name).view(torch.uint8), codes)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@torch.no_grad()
def test_compiled(backend):
    experts, given = fp8_experts(), tokens(5)
    compiled = torch.compile(experts, fullgraph=True, backend=backend)
    assert torch.equal(compiled(*given), experts(*given))


@torch.no_grad()
def test_compiled_model():
    model, prompt = fp8_model(), torch.arange(12)[None]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits = [m(prompt, use_cache=False).logits for m in (compiled, model)]
    assert torch.equal(*logits)


# Refusals


def test_register_refuses_other_backends():
    with pytest.raises(ValueError, match='must be "cuda" or "emulated", got \'triton\''):
        integration.register(backend="triton")


@torch.no_grad()
def test_experts_in_f32_are_refused():
    model = bf16_model("jitmoe", num_hidden_layers=1)
    experts = model.model.layers[0].mlp.experts
    experts.gate_up_proj.data = experts.gate_up_proj.data.float()
    message = refused(lambda: model(torch.arange(3)[None]))
    assert message.startswith("Qwen3MoeExperts of qwen3_moe: ")
    assert "needs weights in bfloat16 or FP8, got float32; load the model with" in message
    message = refused(lambda: experts(tokens(3).x.float(), *tokens(3)[1:]))
    assert "activations in bfloat16, got float32" in message


@torch.no_grad()
def test_the_cpu_is_used_only_if_asked():
    integration.register()
    experts = fp8_experts()
    with pytest.raises(TypeError, match="w13 must be on a GPU"):
        experts(*tokens(3))


def test_grad_is_refused():
    experts, given = fp8_experts(), tokens(3)
    given.x.requires_grad_()
    with pytest.raises(RuntimeError, match="no backward"):
        experts(*given)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("is_concatenated", False, "is_concatenated True"),
        ("is_transposed", True, "is_transposed False"),
        ("has_bias", True, "has_bias False"),
        ("has_post_expert_norm", True, "has_post_expert_norm False"),
        ("block_size", (1, 128), r"block_size \(128, 128\) or None, got \(1, 128\)"),
        ("activation_scheme", "other", 'dynamic or static, got other; choose "eager"'),
        ("swiglu_limit", 7.0, 'limit 7.0 as swiglu_limit, got None; choose "grouped_mm"'),
        ("swiglu_alpha", 1.702, "needs a swiglu_limit beside swiglu_alpha, got None"),
        ("limit", 10.0, "limit None as swiglu_limit, got 10.0"),
        ("gate_softcap", 5.0, "gate_softcap None"),
        ("act_fn", torch.nn.ReLU(), "activation silu, gelu or relu2, got ReLU"),
    ],
)
@torch.no_grad()
def test_other_experts_are_refused(field, value, words):
    experts = fp8_experts()
    setattr(experts, field, value)
    with pytest.raises(NotImplementedError, match=words) as caught:
        experts(*tokens(3))
    assert str(caught.value).startswith("FP8Experts of qwen3_moe: ")
    refused(lambda: experts(*tokens(3)))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("is_concatenated", False, r"_apply_gate act\(gate\) \* up, got _default_apply_gate"),
        ("has_post_expert_norm", True, "has_post_expert_norm False"),
        ("limit", 7.0, "up, cut off at the limit, got _default_apply_gate"),
        ("act_fn", ACT2FN["quick_gelu"], "activation silu, gelu or relu2, got Quick"),
        ("_apply_gate", lambda gate_up: gate_up, r"_apply_gate act\(gate\) \* up, got"),
    ],
)
@torch.no_grad()
def test_other_bf16_experts_are_refused(field, value, words):
    experts = bf16_experts()
    setattr(experts, field, value)
    with pytest.raises(NotImplementedError, match=words) as caught:
        experts(*tokens(3))
    assert str(caught.value).startswith("Qwen3MoeExperts of qwen3_moe: ")
    refused(lambda: experts(*tokens(3)))


def test_bf16_experts_refuse_grad():
    with pytest.raises(RuntimeError, match="no backward.* of w13, w2;"):
        bf16_experts()(*tokens(3))


@torch.no_grad()
def test_gelu_with_a_limit_is_refused():
    experts = fp8_experts(hidden_act="gelu", swiglu_limit=7.0)
    assert "needs activation silu, got GELUActivation" in refused(lambda: experts(*tokens(3)))


@torch.no_grad()
def test_a_gate_that_ignores_numbers_is_refused():
    experts = fp8_experts(swiglu_limit=7.0)
    experts._apply_gate = moe._default_apply_gate
    assert "_apply_gate act(gate) * up, cut off at the limit, got _default_apply_gate" in refused(
        lambda: experts(*tokens(3))
    )


@torch.no_grad()
def test_a_gate_of_ones_own_is_refused(monkeypatch):
    def _apply_gate(self, gate_up):
        return torch.sigmoid(gate_up.chunk(2, dim=-1)[0])

    experts = fp8_experts()
    experts._apply_gate = MethodType(_apply_gate, experts)
    assert "needs _apply_gate act(gate) * up, got" in refused(lambda: experts(*tokens(3)))
    experts._apply_gate = lambda gate_up: gate_up
    assert "<lambda>" in refused(lambda: experts(*tokens(3)))
    del experts._apply_gate
    assert experts(*tokens(3)).isfinite().all()
    monkeypatch.setattr(type(experts), "_apply_gate", _apply_gate)
    refused(lambda: experts(*tokens(3)))


@torch.no_grad()
def test_other_formats_are_refused():
    experts = fp8_experts()
    assert "activations in bfloat16, got float16; load the model" in refused(
        lambda: experts(tokens(3).x.half(), *tokens(3)[1:])
    )
    experts.gate_up_proj = torch.nn.Parameter(WEIGHTS[0].view(torch.int8), requires_grad=False)
    assert "scales of FP4 in float8_e8m0fnu, got float32; choose" in refused(
        lambda: experts(*tokens(3))
    )
    experts.gate_up_proj = torch.nn.Parameter(WEIGHTS[0].view(torch.float8_e5m2), False)
    assert 'float8_e4m3fn or FP4, got float8_e5m2; choose "eager"' in refused(
        lambda: experts(*tokens(3))
    )


def forms(gate, **how):
    return {form for form in gates.FORMS if gates.computes(gate, form, **how)}


def test_forms_of_gates():
    """A gate is judged by what it computes, and by what it reads."""
    assert forms(finegrained_fp8.FP8Experts._apply_gate) == set(gates.FORMS)

    def swapped(self, gate_up):
        up, gate = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def clamped(self, gate_up):
        return moe._default_apply_gate(self, gate_up.clamp(max=2))

    def clamped_after(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        act = self.act_fn(gate)
        return act * up if self.limit is None else act.clamp(max=self.limit) * up

    def always_silu(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def by_turns(self, gate_up):
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        return self.act_fn(gate) * up

    def unknown(self, gate_up):
        return moe._default_apply_gate(self, gate_up) if self.new_field is None else None

    assert forms(moe._default_apply_gate) == forms(clamped_after) == {"plain"}
    assert forms(moe._default_apply_gate, kind="geglu_erf") == {"plain"}
    assert forms(always_silu) == forms(always_silu, kind=None) == {"plain"}
    assert forms(by_turns, interleaved=True) == {"plain"}
    assert not any(map(forms, (swapped, clamped, by_turns, unknown)))
    assert not forms(always_silu, kind="geglu_erf")
    assert not forms(moe._default_apply_gate, kind=None), "it reads act_fn"
    assert not forms(moe._default_apply_gate, interleaved=True)


def test_names_without_a_model():
    assert refusals.named(SimpleNamespace()) == "SimpleNamespace"
