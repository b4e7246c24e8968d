"""jitmoe.integrations on a GPU: the operators in streams, graphs and torch.compile, and a model."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch with CUDA")
if not torch.cuda.is_available():
    pytest.skip(f"PyTorch {torch.__version__} finds no GPU", allow_module_level=True)

from torch_layer import HIDDEN, LAYER, WEIGHTS, error, quantized, tokens  # noqa: E402

from jitmoe.integrations import torch as integration  # noqa: E402
from jitmoe.integrations.static_scales import check_static  # noqa: E402
from jitmoe.integrations.torch import mega_moe  # noqa: E402

NEW_OP, OUT_OP = torch.ops.jitmoe.mega_moe.default, torch.ops.jitmoe.mega_moe_out.default


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def weights():
    return cuda(WEIGHTS)


def cuda(tensors):
    return [tensor.cuda() for tensor in tensors]


def check(y, given, layer=LAYER):
    assert y.is_cuda and y.dtype == torch.bfloat16 and y.shape == given[0].shape
    assert error(y.cpu(), [tensor.cpu() for tensor in given], layer) < 1e-2


@pytest.mark.parametrize("num_tokens", [1, 20, 700])
def test_results(weights, num_tokens):
    given = cuda(tokens(num_tokens))
    check(mega_moe(*given, *weights), given)
    x, ids, router = given
    codes, scale = cuda(quantized(x.cpu()))
    router = router.bfloat16()
    check(mega_moe(codes, ids.long(), router, *weights, x_scale=scale), (x, ids, router))


@pytest.mark.parametrize("num_tokens", [9, 700])
def test_variants(weights, num_tokens):
    x, ids, router = cuda(tokens(num_tokens))
    for variant in (
        {"activation": "swiglu_oai", "gate_up": "up_first"},
        {"activation": "geglu_erf", "apply_router_weight_on_input": True},
        {"routed_scaling_factor": 2.5, "first_expert": 3},
    ):
        given = x, ids + variant.get("first_expert", 0), router
        y = mega_moe(*given, *weights, **variant)
        assert error(y.cpu(), [tensor.cpu() for tensor in given], **variant) < 1e-2


def test_no_tokens(weights):
    assert mega_moe(*cuda(tokens(0)), *weights).shape == (0, HIDDEN)


def test_out_and_streams(weights):
    """On the current stream, whichever it is."""
    given = cuda(tokens(20))
    out = torch.full_like(given[0], float("nan"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert mega_moe(*given, *weights, out=out) is out
        doubled = 2 * out
    stream.synchronize()
    check(out, given)
    assert torch.equal(doubled, 2 * out)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_than_the_current():
    given = [tensor.to("cuda:1") for tensor in tokens(20)]
    y = mega_moe(*given, *(tensor.to("cuda:1") for tensor in WEIGHTS))
    assert y.device.index == 1 and torch.cuda.current_device() == 0
    check(y, given)


def test_e8m0_scales(weights):
    scales = [scale.log2().round().exp2() for scale in WEIGHTS[2:]]
    layer = LAYER._replace(w13_scale=scales[0].numpy(), w2_scale=scales[1].numpy())
    given = cuda(tokens(20))
    scales = [scale.to(torch.float8_e8m0fnu).cuda() for scale in scales]
    for _ in range(2):
        check(mega_moe(*given, *weights[:2], *scales), given, layer)
    assert integration.f32(scales[0]) is integration.f32(scales[0])


def test_memory_of_weights_is_let_go(weights):
    """And what lies there next is read, not what lay there before."""
    given = cuda(tokens(20))
    before = torch.cuda.memory_allocated()
    mine = [tensor.clone() for tensor in weights]
    places = [tensor.data_ptr() for tensor in mine]
    y = mega_moe(*given, *mine)
    misses = integration._known_weights.cache_info().misses
    del mine
    assert torch.cuda.memory_allocated() - before <= 2 * y.nbytes
    again = [tensor.clone() for tensor in weights[:3]] + [2 * weights[3]]
    doubled = mega_moe(*given, *again)
    if places == [tensor.data_ptr() for tensor in again]:
        assert integration._known_weights.cache_info().misses == misses
    assert torch.equal(doubled, 2 * y)


def test_opcheck(weights):
    """Weights as bytes: PyTorch's checks cannot compare e4m3."""
    given = cuda(tokens(5))
    codes = [tensor.view(torch.uint8) for tensor in weights[:2]]
    torch.library.opcheck(NEW_OP, (*given, *codes, *weights[2:]))
    out = torch.empty_like(given[0])
    torch.library.opcheck(OUT_OP, (out, *given, *codes, *weights[2:]))


def test_graph(weights):
    """Replays read what the inputs hold then."""
    given = cuda(tokens(20))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        mega_moe(*given, *weights)  # once before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = mega_moe(*given, *weights)
    for seed in (3, 4):
        for tensor, other in zip(given, tokens(20, seed), strict=True):
            tensor.copy_(other)
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        check(y, given)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(weights, mode):
    """The whole graph; with reduce-overhead as a CUDA graph of its own."""

    def layer(x, ids, router):
        return mega_moe(x * 2, ids, router, *weights) + 1

    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for num_tokens in (20, 33):
        for seed in range(4):
            given = cuda(tokens(num_tokens, seed))
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(*given), layer(*given))


def test_compiled_out(weights):
    def layer(x, ids, router):
        out = torch.zeros_like(x)
        mega_moe(x, ids, router, *weights, out=out)
        return out + 1

    given = cuda(tokens(20))
    assert torch.equal(torch.compile(layer, fullgraph=True)(*given), layer(*given))


def test_refusals(weights):
    given = cuda(tokens(3))
    with pytest.raises(TypeError, match='w13 must be on the CPU for backend="emulated"'):
        mega_moe(*given, *weights, backend="emulated")
    with pytest.raises(TypeError, match="x must be on a GPU, got a tensor on cpu"):
        mega_moe(given[0].cpu(), *given[1:], *weights)
    with pytest.raises(TypeError, match="w2 must be on a GPU"):
        mega_moe(*given, weights[0], weights[1].cpu(), *weights[2:])
    with torch.enable_grad(), pytest.raises(RuntimeError, match="no backward"):
        mega_moe(given[0].requires_grad_(), *given[1:], *weights)


# transformers


@pytest.fixture
def model():
    pytest.importorskip("transformers", reason="needs transformers")
    from qwen3_moe import fp8_model

    from jitmoe.integrations import transformers as integration

    integration.register()
    return fp8_model(num_hidden_layers=1).cuda()


@pytest.mark.parametrize("num_tokens", [1, 20, 700])
def test_experts(model, num_tokens):
    x, ids, router = cuda(tokens(num_tokens))
    given = x, ids.long(), router.bfloat16()
    check(model.model.layers[0].mlp.experts(*given), given)


def test_model(model):
    """Logits beside the same model in bf16, and tokens one by one."""
    from qwen3_moe import bf16_model

    prompt = torch.arange(12, device="cuda")[None]
    wanted = bf16_model(num_hidden_layers=1).cuda()(prompt).logits.float()
    logits = model(prompt).logits.float()
    assert (logits - wanted).norm() < 0.06 * wanted.norm()
    longer = model.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert longer.shape == (1, 20)


def test_compiled_experts(model):
    experts = model.model.layers[0].mlp.experts
    compiled = torch.compile(experts, fullgraph=True)
    given = cuda(tokens(20))
    assert torch.equal(compiled(*given), experts(*given))


def test_static_scales_are_not_read_in_a_capture():
    scale = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        check_static({"a2_scale": scale}, 1)
        scale.add_(0)
    with pytest.raises(ValueError, match="a2_scale must be positive and finite, got 0.0"):
        check_static({"a2_scale": scale}, 1)
