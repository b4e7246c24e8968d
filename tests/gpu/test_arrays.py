"""Array families: what goes in comes out, and what cannot go in is refused in a sentence."""

import pytest

from jitmoe import ExpertWeights, mega_moe


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="needs PyTorch with CUDA")


@pytest.mark.parametrize("num_tokens", [5, 700])
def test_torch(make_layer, make_call, torch, num_tokens):
    """PyTorch tensors, fp8 dtypes and the current stream included; the result is a tensor."""
    call = make_call(make_layer(16, 512, 256), num_tokens, 4)
    codes = call.layer.codes
    share = torch.from_dlpack
    e4m3 = torch.float8_e4m3fn
    weights = ExpertWeights(
        share(codes.w13).view(e4m3), share(codes.w2).view(e4m3),
        share(codes.w13_scale), share(codes.w2_scale),
    )  # fmt: skip
    ids, router = share(call.tokens.topk_ids), share(call.tokens.topk_weights)
    x = share(call.tokens.x).to(torch.bfloat16)
    x_fp8 = (share(call.codes).view(e4m3), share(call.scale))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for given in (x, x_fp8):
            y = mega_moe(given, ids.long(), router, weights)
            stream.synchronize()
            assert y.dtype == torch.bfloat16 and y.shape == x.shape and y.device == x.device
            import cupy

            call.check(cupy.from_dlpack(y.view(torch.int16)).view(cupy.uint16), 4e-2)


def test_torch_graph(make_layer, make_call, torch):
    call = make_call(make_layer(16, 512, 256), 12, 4)
    x = torch.from_dlpack(call.tokens.x).to(torch.bfloat16)
    ids = torch.from_dlpack(call.tokens.topk_ids)
    router = torch.from_dlpack(call.tokens.topk_weights)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        eager = mega_moe(x, ids, router, call.layer.weights)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = mega_moe(x, ids, router, call.layer.weights)
        y.fill_(float("nan"))
        graph.replay()
        stream.synchronize()
    assert torch.equal(eager, y)


def test_returns_cupy_bf16(make_layer, make_call):
    import cupy

    call = make_call(make_layer(16, 512, 256), 5, 4)
    y = mega_moe(call.bf16, *call.tokens[1:], call.layer.weights)
    assert isinstance(y, cupy.ndarray) and y.itemsize == 2
    call.check(y.view(cupy.uint16), 4e-2)


def test_host_arrays_are_refused(make_layer, make_call):
    call = make_call(make_layer(16, 512, 256), 5, 4)
    with pytest.raises(TypeError, match="x must be .*GPU"):
        mega_moe(call.tokens.x.get(), *call.tokens[1:], call.layer.weights)


def test_shapes_that_differ_are_refused(make_layer, make_call):
    call = make_call(make_layer(16, 512, 256), 5, 4)
    with pytest.raises(ValueError, match=r"topk_weights must have shape \[5, 4\]"):
        mega_moe(
            call.bf16, call.tokens.topk_ids, call.tokens.topk_weights[:, :3], call.layer.weights
        )
