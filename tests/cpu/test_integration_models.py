"""Models of transformers with experts_implementation="jitmoe", tiny, emulated on a CPU: each beside
its own eager experts.
"""

import importlib.util
import inspect
import re
from functools import partial
from pathlib import Path

import pytest

from jitmoe.emulate.compile import NoHostCompiler, compiler

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'jitmoe[transformers]'")
transformers = pytest.importorskip(
    "transformers", reason="needs transformers: pip install 'jitmoe[transformers]'"
)

import tiny_models  # noqa: E402
from tiny_models import (  # noqa: E402
    BODIES,
    EAGER,
    LANGUAGE_MODELS,
    NOT_IN_FP8,
    REFUSED,
    experts_of,
    quantized,
)
from torch_layer import error  # noqa: E402
from transformers.integrations import finegrained_fp8, moe  # noqa: E402

from jitmoe import Activation, reference  # noqa: E402
from jitmoe.integrations import transformers as integration  # noqa: E402
from jitmoe.integrations.transformers_gates import activation_of  # noqa: E402

try:
    compiler()
except NoHostCompiler as error_:
    pytest.skip(str(error_), allow_module_level=True)

MODELS = LANGUAGE_MODELS | BODIES
LISTED = "5.24."  # the transformers that these are all models of
PROMPT = torch.arange(8)[None]
# Of eager experts in bf16, which round gate, up and every slot; and of e4m3 between the GEMMs.
NOISE, FP8_NOISE = 0.01, 0.06


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Emulated, and gone afterwards; a list that grows by one with every launch."""
    torch._dynamo.reset()
    done, run = [], integration.mega_moe
    monkeypatch.setattr(
        integration, "mega_moe", lambda *args, **kw: (done.append(0), run(*args, **kw))[1]
    )
    integration.register(backend="emulated")
    yield done
    for registry in (finegrained_fp8.FP8ExpertsInterface, moe.ExpertsInterface):
        registry._global_mapping.pop("jitmoe")


def build(name, **changes):
    version = transformers.__version__
    if tiny_models.config_class(name) is None:
        pytest.skip(f"transformers {version} has no {name}")
    model = tiny_models.build(name, **MODELS.get(name, {}) | changes)
    if not experts_of(model) and not version.startswith(LISTED):
        pytest.skip(f"experts of {name} do not go through the interface of transformers {version}")
    return model


def off(y, wanted):
    return float((y.float() - wanted.float()).norm() / wanted.float().norm())


def outputs(model):
    out = model(input_ids=PROMPT)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def generated(model, num_tokens=2):
    """Tokens, and the logits of each step: the prompt, then tokens one by one."""
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    counts = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
    out = model.generate(PROMPT, **counts, **options)
    return out.sequences[0, PROMPT.shape[1] :], out.logits


def listen(*experts) -> list:
    """Calls of experts modules, as they come: (module, arguments, those by name, y)."""
    calls = []
    for module in experts:
        module.register_forward_hook(lambda *call: calls.append(call), with_kwargs=True)
    return calls


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
@torch.no_grad()
def test_language_models(name, launches):
    """A prompt and a token after it, the latter if noise has chosen no other token."""
    model = build(name)
    calls = listen(*experts_of(model))
    tokens, wanted = generated(model)
    assert len(calls) == 2 and not launches
    model.set_experts_implementation("jitmoe")
    got, logits = generated(model)
    assert len(calls) == 4 and len(launches) == 2
    for i in range(2 if got[0] == tokens[0] else 1):
        assert off(calls[2 + i][-1], calls[i][-1]) < NOISE
        assert off(logits[i], wanted[i]) < 2 * NOISE


@pytest.mark.parametrize("name", BODIES)
@torch.no_grad()
def test_bodies(name, launches):
    model = build(name)
    calls = listen(*experts_of(model))
    wanted = outputs(model)
    assert len(calls) == 1 and not launches
    model.set_experts_implementation("jitmoe")
    assert off(outputs(model), wanted) < 2 * NOISE and len(launches) == 1
    assert off(calls[1][-1], calls[0][-1]) < NOISE


@pytest.mark.parametrize("name", [name for name in LANGUAGE_MODELS if name not in NOT_IN_FP8])
@torch.no_grad()
def test_fp8(name, launches):
    """The experts on the tokens that the model gives them, beside bf16 ones of the same values."""
    model = build(name)
    ((eager, experts),) = quantized(model)
    calls = listen(experts)
    model.set_experts_implementation("jitmoe")
    outputs(model)
    assert len(launches) == len(calls) == 1
    _, args, kwargs, y = calls[0]
    eager.config._experts_implementation = "eager"
    assert off(y, eager(*args, **kwargs)) < FP8_NOISE


HAS_FP4 = "expert_dtype" in inspect.signature(transformers.FineGrainedFP8Config).parameters


@pytest.mark.skipif(not HAS_FP4, reason="needs a transformers with FP4 experts, as 5.24")
@pytest.mark.parametrize("name", ["DeepseekV4Config", "Qwen3MoeConfig", "MiniMaxM2Config"])
@torch.no_grad()
def test_fp4(name, launches):
    """As `test_fp8`: experts of DeepSeek-V4 beside layers in FP8."""
    model = build(name)
    ((eager, experts),) = quantized(model, in_fp4=True)
    assert experts.gate_up_proj.dtype == torch.int8
    calls = listen(experts)
    model.set_experts_implementation("jitmoe")
    outputs(model)
    assert len(launches) == len(calls) == 1
    _, args, kwargs, y = calls[0]
    eager.config._experts_implementation = "eager"
    assert off(y, eager(*args, **kwargs)) < FP8_NOISE
    experts.config._experts_implementation = "jitmoe"
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*args, **kwargs), y)
    scale = experts.down_proj_scale_inv.float()
    experts.gate_up_proj_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
    with pytest.raises(NotImplementedError, match="scales of FP4 in float8_e8m0fnu, got float32"):
        experts(*args, **kwargs)


@pytest.mark.parametrize(
    "name", ["Qwen3MoeConfig", "MixtralConfig", "DeepseekV3Config", "Glm4MoeConfig"]
)
@torch.no_grad()
def test_fp8_models(name, launches):
    """Whole, two layers deep, with tokens one by one."""
    model = build(name, num_hidden_layers=2, mlp_layer_types=["sparse"] * 2)
    quantized(model)
    model.set_experts_implementation("jitmoe")
    tokens, logits = generated(model)
    assert len(launches) == 2 * 2 and len(tokens) == 2
    assert all(step.isfinite().all() for step in logits)


@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_refused(name):
    changes, words = REFUSED[name]
    model = build(name, **changes)
    model.set_experts_implementation("jitmoe")
    with pytest.raises(NotImplementedError, match=words) as caught:
        outputs(model)
    assert 'choose "grouped_mm"' in str(caught.value) and "\n" not in str(caught.value)
    model.set_experts_implementation("grouped_mm")
    assert outputs(model).isfinite().all()


def test_no_model_is_left_out():
    """Every experts class of the transformers that this was written for is in one of the lists."""
    if not transformers.__version__.startswith(LISTED):
        pytest.skip(f"the lists are those of transformers {LISTED}x")
    through, eager = set(), set()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = path.read_text(encoding="utf-8")
        if "\n@use_experts_implementation" in text:
            through.add(path.parent.name)
        elif re.search(r"^class \w+Experts\(nn.Module\)", text, re.MULTILINE):
            eager.add(path.parent.name)
    named = [tiny_models.config_class(name).__module__ for name in MODELS | REFUSED]
    assert {name.split(".")[2] for name in named} == through
    assert eager == EAGER


# examples/08_transformers_speed.py


class Event:
    """In place of a CUDA event."""

    def __init__(self, enable_timing):
        pass

    record = synchronize = lambda self: None
    elapsed_time = lambda self, other: 1.0  # noqa: E731


@torch.no_grad()
def test_speed_example(monkeypatch, launches):
    """Tiny models, one of which cannot be built, on a CPU with a clock that stands still."""
    path = Path(__file__).resolve().parents[2] / "examples/08_transformers_speed.py"
    spec = importlib.util.spec_from_file_location("speed", path)
    speed = importlib.util.module_from_spec(spec)
    monkeypatch.setattr("jitmoe.run.driver.num_devices", lambda: 1)
    spec.loader.exec_module(speed)
    for name, config, formats in speed.MODELS.values():
        assert config().num_hidden_layers == int(name.split()[-2]) and "bf16" in formats
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name, value in (("DEVICE", "cpu"), ("BACKEND", "emulated"), ("PREFILL", 4)):
        monkeypatch.setattr(speed, name, value)
    for name, value in (("PROMPT", 2), ("BATCHES", (2,)), ("WARMUPS", 0), ("STEPS", 1)):
        monkeypatch.setattr(speed, name, value)
    sizes = dict(tiny_models.SIZES) | {"vocab_size": 8192}
    models = []
    for name, formats in (
        ("GptOss", ("bf16",)),
        ("Broken", ("fp8",)),
        ("Mixtral", ("bf16", "fp8")),
    ):
        kind = getattr(transformers, f"{name}Config", None)
        known = {} if kind is None else tiny_models.known_sizes(kind, sizes)
        models.append((name, partial(kind, **known) if kind else partial(int, "no"), formats))
    rows = list(speed.rows(models))
    assert [row for row in rows if "failed" in row] == [
        {
            "model": "Broken",
            "format": "fp8",
            "failed": "ValueError: invalid literal for int() with base 10: 'no'",
        }
    ]
    ours = [row for row in rows if row.get("experts") == "jitmoe"]
    assert len(ours) == 3 * 2 and all(row["tokens_per_s"] in (2000, 4000) for row in ours)
    assert len(launches) == 3 * (2 + 3), "twice a prompt; a prompt and a token twice"
    theirs = [row for row in rows if row.get("experts") == "grouped_mm"]
    assert len(theirs) == len(ours)
    for row in theirs:
        assert "refused" in row if row["format"] == "fp8" else row["apart"] < 2 * NOISE


# gpt-oss: biases, rows by turns, transposed weights


def gpt_oss_experts(**changes):
    model = build("GptOssConfig", **changes)
    model.set_experts_implementation("jitmoe")
    return experts_of(model)[0]


def tokens(num_tokens, hidden):
    made = reference.random_tokens(num_tokens, hidden, 4, 2, seed=2, routing="unused")
    x, ids, router = map(torch.from_numpy, made)
    return x.bfloat16(), ids.long(), router.bfloat16()


def oracle(experts):
    """(layer, biases and order) of `experts` for the oracle."""

    def bits(name):
        tensor = getattr(experts, name).detach()
        tensor = tensor.transpose(1, 2) if tensor.ndim == 3 else tensor
        return tensor.contiguous().view(torch.uint16).numpy()

    layer = reference.Layer(bits("gate_up_proj"), None, bits("down_proj"), None)
    biases = {"w13_bias": bits("gate_up_proj_bias"), "w2_bias": bits("down_proj_bias")}
    return layer, biases | {"gate_up": "interleaved"}


@pytest.mark.parametrize("num_tokens", [1, 20, 150])
@torch.no_grad()
def test_gpt_oss_experts(num_tokens):
    """Of sizes that are multiples of 16 alone, as its own are."""
    experts = gpt_oss_experts(hidden_size=144, intermediate_size=48)
    given = tokens(num_tokens, 144)
    layer, order = oracle(experts)
    y = experts(*given)
    assert error(y, given, layer, activation="swiglu_oai", **order) < 3e-3
    assert error(y, given, layer, activation="swiglu", **order) > 0.05, "the function matters"
    order["w2_bias"] = 0 * order["w2_bias"]
    assert error(y, given, layer, activation="swiglu_oai", **order) > 0.01, "and so do biases"


@torch.no_grad()
def test_numbers_of_gpt_oss():
    experts = gpt_oss_experts()
    experts.alpha, experts.limit = 1.25, 0.75
    assert activation_of(experts) == Activation("swiglu_oai", 1.25, 0.75, 1.0)
    given = tokens(9, 128)
    layer, order = oracle(experts)
    for kind, is_right in ((activation_of(experts), True), ("swiglu_oai", False)):
        assert (error(experts(*given), given, layer, activation=kind, **order) < 3e-3) == is_right


@torch.no_grad()
def test_transposed_weights_are_laid_out_once():
    """In the same parameters, with the same values, and none held twice."""
    experts, given = gpt_oss_experts(), tokens(4, 128)
    mine = given[1].clamp(0, 3)  # eager and grouped_mm take no ids of others
    wanted = {}
    for kind in ("eager", "grouped_mm", "batched_mm"):
        experts.config._experts_implementation = kind
        wanted[kind] = experts(given[0], mine, given[2])
    experts.config._experts_implementation = "jitmoe"
    parameters = dict(experts.named_parameters())
    values = {name: parameter.clone() for name, parameter in parameters.items()}
    before = {name: parameter.detach() for name, parameter in parameters.items()}
    y = experts(*given)
    places = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    assert torch.equal(experts(*given), y)
    for name, parameter in experts.named_parameters():
        assert parameter is parameters[name] and parameter.data_ptr() == places[name]
        assert torch.equal(parameter, values[name]) and torch.equal(before[name], values[name])
        is_turned = parameter.ndim == 3
        assert parameter.is_contiguous() != is_turned
        storage = parameter.untyped_storage()
        assert storage.nbytes() == parameter.numel() * parameter.element_size()
    assert not [x for x in vars(experts).values() if isinstance(x, torch.Tensor)]
    for kind, y in wanted.items():
        experts.config._experts_implementation = kind
        assert torch.equal(experts(given[0], mine, given[2]), y)


@torch.no_grad()
def test_transposed_weights_that_change():
    """Written in place, loaded, and replaced."""
    experts, given = gpt_oss_experts(), tokens(4, 128)
    first = experts(*given)
    state = {name: value.flip(0).contiguous() for name, value in experts.state_dict().items()}
    flipped = (given[0], torch.where(given[1].clamp(0, 3) == given[1], 3 - given[1], -1), given[2])
    experts.load_state_dict(state)
    assert torch.equal(experts(*flipped), first)
    experts.down_proj.mul_(2)
    assert not torch.equal(experts(*flipped), first)
    for name, value in state.items():
        setattr(experts, name, torch.nn.Parameter(value, requires_grad=False))
    assert experts.down_proj.is_contiguous() and torch.equal(experts(*flipped), first)
    experts.down_proj.data = state["down_proj"].clone()
    assert experts.down_proj.is_contiguous() and torch.equal(experts(*flipped), first)


def test_transposed_weights_in_inference_mode():
    """Made inside it, and made outside."""
    given = tokens(4, 128)
    outside = gpt_oss_experts()
    with torch.inference_mode():
        inside = gpt_oss_experts()
        assert inside.down_proj.is_inference()
        y = inside(*given)
        assert torch.equal(outside(*given), y) and torch.equal(inside(*given), y)
    with torch.no_grad():
        outside.down_proj.add_(0)
        assert torch.equal(outside(*given), y)


def test_saved_and_loaded(tmp_path):
    """A checkpoint saved after a call is as one saved before it."""
    model, given = build("GptOssConfig"), tokens(4, 128)
    model.set_experts_implementation("jitmoe")
    with torch.no_grad():
        y = experts_of(model)[0](*given)
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.bfloat16, experts_implementation="jitmoe"
        )
        assert torch.equal(experts_of(loaded)[0](*given), y)


@torch.no_grad()
def test_transposed_weights_under_torch_compile():
    """Laid out by a call before it, or where the graph may break."""
    experts, given = gpt_oss_experts(), tokens(5, 128)
    whole = torch.compile(experts, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="must be laid out anew once, .* call the model before it"):
        whole(*given)
    torch._dynamo.reset()
    parts = torch.compile(gpt_oss_experts(), backend="aot_eager")(*given)
    y = experts(*given)
    assert torch.equal(whole(*given), y) and torch.equal(parts, y)


@torch.no_grad()
def test_compiled_models():
    """Gates of their own are judged while the graph is traced."""
    for name in ("DeepseekV4Config", "Lfm2MoeConfig", "MiniMaxM3VLTextConfig"):
        model = build(name)
        model.set_experts_implementation("jitmoe")
        experts, given = experts_of(model)[0], tokens(5, 128)
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*given), experts(*given))


def test_grad_of_biases_is_refused():
    with pytest.raises(RuntimeError, match="no backward.* w13_bias, w2_bias;"):
        gpt_oss_experts()(*tokens(3, 128))
