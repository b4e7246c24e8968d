"""What mega_moe() and ExpertWeights refuse, naming what was got, what is allowed, what to do."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations, product
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from jitmoe import (
    Activation,
    ExpertWeights,
    MoeProblem,
    fused,
    mega_moe,
    planned,
    prepare,
    warmup,
    workspace_bytes,
)
from jitmoe.mxfp4 import packed_shape
from jitmoe.plan.formats import SCALES
from jitmoe.plan.gpu import gpu_spec
from jitmoe.plan.heuristics import choose, plans_of_model
from jitmoe.plan.scales import _weight_shapes
from jitmoe.plan.variant import Variant
from jitmoe.run import families
from jitmoe.weights import Memo

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, TOKENS = 4, 512, 192, 2, 3


class FakeArray:
    """What the door looks at in a CuPy array, and no memory behind it."""

    def __init__(self, shape, dtype, strides=None, ptr=1 << 20, device=0):
        self.shape = tuple(shape)
        dense = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
        self.dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
        self.itemsize = self.dtype.itemsize
        self.strides = tuple(self.itemsize * s for s in (strides or dense))
        self.data = SimpleNamespace(ptr=ptr, device_id=device)


FakeArray.__module__ = "cupy.fake"


class FakeTensor:
    """A PyTorch tensor on the host."""

    is_cuda, device = False, "cpu"
    shape, dtype = (1,), "torch.float32"

    def stride(self):
        return (1,)

    def data_ptr(self):
        return 1 << 20


FakeTensor.__module__ = "torch"


class FakeWorkspace:
    def __init__(self, device=0):
        self.device, self.ready = device, {}

    def check(self):
        pass


def weight_arrays(experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE):
    rows = 2 * intermediate
    return {
        "w13": FakeArray((experts, rows, hidden), "float8_e4m3fn"),
        "w2": FakeArray((experts, hidden, intermediate), "uint8"),
        "w13_scale": FakeArray((experts, -(-rows // 128), hidden // 128), "float32"),
        "w2_scale": FakeArray((experts, hidden // 128, -(-intermediate // 128)), "float32"),
    }


def call_arrays(tokens=TOKENS):
    return {
        "x": FakeArray((tokens, HIDDEN), "bfloat16"),
        "topk_ids": FakeArray((tokens, TOP_K), "int64"),
        "topk_weights": FakeArray((tokens, TOP_K), "float32"),
        "out": FakeArray((tokens, HIDDEN), "uint16", ptr=1 << 24),
    }


def layer_weights():
    return ExpertWeights(**weight_arrays())


def bf16_weights(dtype="bfloat16"):
    shapes = (EXPERTS, 2 * INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)
    return ExpertWeights(*(FakeArray(shape, dtype) for shape in shapes))


def refusal(call, kind=ValueError):
    with pytest.raises(kind) as error:
        call()
    message = str(error.value)
    assert "\n" not in message and len(message) < 300, "one sentence"
    return message


def test_weights_are_read():
    weights = layer_weights()
    assert (weights.num_experts, weights.hidden, weights.intermediate) == (4, 512, 192)
    assert weights.device == 0
    assert repr(weights) == "ExpertWeights(num_experts=4, hidden=512, intermediate=192, device=0)"
    up_first = ExpertWeights(**weight_arrays(), gate_up="up_first")
    assert repr(up_first).endswith("device=0, gate_up='up_first')")
    assert weights.num_bytes == 4 * MoeProblem(1, 512, 192, 4, 2).expert_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "uint16"])
def test_bf16_weights_are_read(dtype):
    weights = bf16_weights(dtype)
    assert weights.format == weights.problem(1, 2).format == "bf16"
    assert weights.num_bytes == 2 * 3 * EXPERTS * HIDDEN * INTERMEDIATE
    assert weights.scale_addresses == (0, 0) and weights.scale_strides == (0, 0, 0, 0)
    assert repr(weights).endswith("device=0, format='bf16')")


def test_bf16_weights_take_bf16_tokens():
    def call(**changes):
        given = call_arrays() | changes
        return refusal(lambda: mega_moe(weights=bf16_weights(), **given))

    codes = FakeArray((TOKENS, HIDDEN), "uint8")
    for x in (codes, (codes, FakeArray((TOKENS, HIDDEN // 128), "float32"))):
        assert "x is e4m3 and the weights are bf16; pass x in bf16" in call(x=x)
    assert "x must have dtype bf16 or u16, got f32" in call(x=FakeArray((3, 512), "float32"))
    plan = choose(MoeProblem(TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K), gpu_spec("h200"))
    message = call(stream=0, workspace=FakeWorkspace(), plan=plan)
    assert "the plan is for format 'fp8_block', the call has 'bf16'; plan again" in message
    message = refusal(
        lambda: mega_moe(
            weights=bf16_weights(),
            **call_arrays(),
            stream=0,
            workspace=FakeWorkspace(),
            plan="fast",
        ),
        TypeError,
    )
    assert message == "plan must be a MegaMoePlan, got str; leave it out"


CHANNELS = FakeArray((4, 384), "float32"), FakeArray((4, 512, 1), "float32")
EXPERT_SCALES = FakeArray((4, 1), "float32"), FakeArray((4,), "float32")
HALVES = FakeArray((4, 2), "float32"), FakeArray((4, 1, 1), "float32")


@pytest.mark.parametrize(
    "kind, scales, strides",
    [
        ("channel", CHANNELS, (384, 512, 1, 1, 192)),
        ("tensor", EXPERT_SCALES, (1, 1, 0, 0, 0)),
        ("tensor", HALVES, (2, 1, 0, 0, 1)),
    ],
)
def test_kinds_of_scales(kind, scales, strides):
    names = dict(zip(("w13_scale", "w2_scale"), scales, strict=True))
    for given in (names, names | {"scales": kind}):
        weights = ExpertWeights(**weight_arrays() | given)
        assert weights.format == f"fp8_{kind}" and weights.scale_strides == strides
        assert repr(weights).endswith(f"device=0, format='fp8_{kind}')")
    codes = 3 * 4 * 512 * 192
    assert weights.num_bytes == codes + 4 * sum(np.prod(scale.shape) for scale in scales)


def test_no_shape_means_two_kinds_but_in_tiny_layers():
    for hidden, intermediate in product((128, 256, 384, 1024), range(16, 400, 16)):
        sizes = (2 * intermediate, hidden, True), (hidden, intermediate, False)
        shapes = [{kind: set(_weight_shapes(kind, 4, *s)) for kind in SCALES} for s in sizes]
        for one, other in combinations(SCALES, 2):
            both = all(of[one] & of[other] for of in shapes)
            assert not both or (hidden, one, other) == (128, "block", "tensor")


def strided(shape, dtype, strides):
    return FakeArray(shape, dtype, strides)


@pytest.mark.parametrize(
    "name, array",
    [
        ("w13", strided((4, 384, 512), "uint8", (400_000, 1024, 1))),
        ("w2", strided((4, 512, 192), "float8_e4m3fn", (512 * 256, 256, 1))),
        ("w13_scale", strided((4, 3, 4), "float32", (100, 9, 1))),
    ],
)
def test_strided_weights_are_taken(name, array):
    weights = ExpertWeights(**weight_arrays() | {name: array})
    assert getattr(weights, name).strides == tuple(s // array.itemsize for s in array.strides)


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"w13": FakeArray((384, 512), "uint8")}, ["[num_experts, 2 * intermediate", "[384, 512]"]),
        ({"w13": FakeArray((4, 383, 512), "uint8")}, ["2 * intermediate", "[4, 383, 512]"]),
        (
            {"w13": FakeArray((4, 384, 512), "float16")},
            ["w13", "e4m3 or u8 with scales, or bf16 or u16 without", "got f16", "convert"],
        ),
        (
            {"w13": FakeArray((4, 384, 512), "bfloat16")},
            ["w13 is bf16", "no scales", "got w13_scale and w2_scale", "leave them out"],
        ),
        (
            {"w13": FakeArray((4, 384, 512), "uint16"), "w2_scale": None},
            ["w13 is u16", "no scales", "got w13_scale;"],
        ),
        ({"w13_scale": None}, ["w13 is e4m3", "needs both scales", "got w2_scale", "pass"]),
        ({"w13_scale": None, "w2_scale": None}, ["needs both scales", "got none"]),
        (
            {"w13": FakeArray((4, 384, 512), "bfloat16"), "w13_scale": None, "w2_scale": None},
            ["w2 must have dtype bf16 or u16, got u8"],
        ),
        ({"w2": FakeArray((4, 512, 191), "uint8")}, ["w2", "[4, 512, 192]", "got [4, 512, 191]"]),
        ({"w2": FakeArray((4, 192, 512), "uint8")}, ["w2", "[4, 512, 192]", "got [4, 192, 512]"]),
        ({"w2": FakeArray((4, 512, 192), "uint8", device=1)}, ["w2", "GPU 1", "GPU 0", "move"]),
        ({"w2_scale": FakeArray((4, 4, 1), "float32")}, ["w2_scale", "[4, 4, 2]", "got [4, 4, 1]"]),
        ({"w13_scale": FakeArray((4, 4, 4), "float32")}, ["w13_scale", "[4, 3, 4]", "[4, 4, 4]"]),
        ({"w13_scale": FakeArray((4, 3, 4), "float16")}, ["w13_scale", "f32", "got f16"]),
        (
            {"w13_scale": FakeArray((4, 383), "float32")},
            ["w13_scale must", "[4, 384] (output channels) or [4] (experts), got [4, 383]; count"],
        ),
        (
            {"w2_scale": FakeArray((4, 2), "float32")},
            ["w2_scale must", "(experts), got [4, 2]"],
        ),
        ({"w2_scale": FakeArray((), "float32")}, ["w2_scale must have shape", "got []"]),
        (
            {"w2_scale": FakeArray((4, 512), "float32")},
            ["w13_scale has scales for each block and w2_scale for each channel; expand"],
        ),
        (
            {"w13_scale": FakeArray((4, 2), "float32"), "w2_scale": FakeArray((4, 512), "float32")},
            ["w13_scale has scales for each tensor and w2_scale for each channel; expand"],
        ),
        (
            {"scales": "tensor"},
            ["w13_scale must have shape [4] (experts), got [4, 3, 4]", "take weights quantised so"],
        ),
        ({"scales": "row"}, ["scales must be one of block, channel, tensor, got 'row'; say"]),
        ({"w2_scale": FakeArray((4, 4, 2), "float32", device=1)}, ["w2_scale is on GPU 1", "move"]),
        (
            {"w13": strided((4, 384, 512), "uint8", (384 * 520, 520, 1))},
            ["w13", "multiples of 16 bytes", "520", "copy"],
        ),
        ({"w2": FakeArray((4, 512, 192), "uint8", ptr=8)}, ["w2", "16 bytes", "0x8", "copy"]),
        (
            {"w13": strided((4, 384, 512), "uint8", (384 * 512, 1, 384))},
            ["w13", "dense", "384", "contiguous"],
        ),
        (
            {"w13_scale": strided((4, 3, 4), "float32", (12, 1, 3))},
            ["w13_scale", "dense", "[12, 1, 3]", "contiguous"],
        ),
    ],
)
def test_weights_that_do_not_fit(changes, parts):
    message = refusal(lambda: ExpertWeights(**weight_arrays() | changes))
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "sizes, parts",
    [
        ({"hidden": 520}, ["hidden", "multiple of 128", "520", "pad"]),
        ({"hidden": 16_512}, ["hidden", "16,384", "got 16,512; shard the layer"]),
        ({"intermediate": 32_784}, ["intermediate", "32,768", "got 32,784; shard the layer"]),
        ({"intermediate": 24}, ["intermediate", "multiple of 16", "24", "pad"]),
        ({"experts": 1025}, ["num_experts", "1,024", "got 1,025; shard"]),
        ({"experts": 0}, ["num_experts", "from 1", "0"]),
    ],
)
def test_sizes_without_a_kernel(sizes, parts):
    message = refusal(lambda: ExpertWeights(**weight_arrays(**sizes)))
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("host", [np.zeros((3, 512), np.uint16), [[1.0]], None, 3.0])
@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_weights"])
def test_host_arrays(name, host):
    message = refusal(
        lambda: mega_moe(weights=layer_weights(), **call_arrays() | {name: host}), TypeError
    )
    assert message.startswith(f"{name} must be a GPU array, got ") and "cupy.asarray" in message


def test_host_tensors_and_strangers():
    arrays = weight_arrays()
    message = refusal(lambda: ExpertWeights(**arrays | {"w2": FakeTensor()}), TypeError)
    assert "w2 must be on a GPU, got a tensor on cpu" in message and ".cuda()" in message
    pytest.importorskip("cupy")
    message = refusal(lambda: ExpertWeights(**arrays | {"w2": object()}), TypeError)
    assert "w2 must be a GPU array" in message and "DLPack" in message and "object" in message


def test_strangers_without_cupy(monkeypatch):
    """Tensors of PyTorch need no CuPy to be read; of other libraries they do."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    message = refusal(lambda: ExpertWeights(**weight_arrays() | {"w2": object()}), TypeError)
    assert message.startswith("w2 is a builtins.object") and "CuPy is not installed" in message
    assert "pip install" in message


def test_subclasses_of_tensors_are_tensors():
    class Parameter(FakeTensor):
        pass

    Parameter.__module__ = "somebody.layers"
    message = refusal(lambda: ExpertWeights(**weight_arrays() | {"w2": Parameter()}), TypeError)
    assert "got a tensor on cpu" in message


def test_weights_must_be_wrapped():
    message = refusal(lambda: mega_moe(weights=weight_arrays(), **call_arrays()), TypeError)
    assert "jitmoe.ExpertWeights" in message and "got dict" in message and "wrap" in message


E4M3 = FakeArray((TOKENS, HIDDEN), "float8_e4m3fn")
SCALE = FakeArray((TOKENS, HIDDEN // 128), "float32")
NO_SLOTS = {"topk_weights": FakeArray((3, 0), "float32")}
MANY_SLOTS = {"topk_weights": FakeArray((3, 33), "float32")}


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"x": E4M3}, ["x is e4m3", "no scales", "x=(x_fp8, x_scale)"]),
        ({"x": (E4M3,)}, ["x must be an array or a pair", "got a tuple of 1", "pass"]),
        ({"x": (E4M3, SCALE, SCALE)}, ["x must be an array or a pair", "got a tuple of 3"]),
        ({"x": FakeArray((3, 512), "float32")}, ["x must", "bf16 or u16", "got f32", "convert"]),
        ({"x": FakeArray((3, 256), "bfloat16")}, ["x must", "[*, 512]", "got [3, 256]"]),
        ({"x": FakeArray((512,), "bfloat16")}, ["x must", "[*, 512]", "got [512]"]),
        ({"x": FakeArray((3, 512), "bfloat16", device=2)}, ["x is on GPU 2", "GPU 0", "move"]),
        ({"x": strided((3, 512), "bfloat16", (1, 3))}, ["x must be dense", "[1, 3]", "contiguous"]),
        ({"x": strided((3, 512), "bfloat16", (513, 1))}, ["rows of x", "16 bytes", "513", "copy"]),
        ({"x": strided((3, 512), "bfloat16", (-512, 1))}, ["rows of x", "-512", "copy"]),
        ({"x": FakeArray((3, 512), "bfloat16", ptr=1026)}, ["rows of x", "0x402", "copy"]),
        (
            {"x": (E4M3, FakeArray((3, 3), "float32"))},
            ["x_scale must", "[3, 4], [3] or [1]", "got [3, 3]"],
        ),
        ({"x": (E4M3, FakeArray((3, 4), "float64"))}, ["x_scale must", "f32", "got f64"]),
        (
            {"x": (FakeArray((3, 512), "bfloat16"), SCALE)},
            ["x must", "e4m3 or u8", "got bf16", "convert"],
        ),
        ({"topk_ids": FakeArray((3, 2), "float32")}, ["topk_ids must", "i32 or i64", "got f32"]),
        ({"topk_ids": FakeArray((4, 2), "int32")}, ["topk_ids must", "[3, *]", "got [4, 2]"]),
        ({"topk_ids": strided((3, 2), "int32", (4, 1))}, ["topk_ids", "contiguous", "[4, 1]"]),
        ({"topk_weights": FakeArray((3, 3), "float32")}, ["topk_weights", "[3, 2]", "got [3, 3]"]),
        ({"topk_weights": FakeArray((3, 2), "float16")}, ["topk_weights", "f32", "got f16"]),
        (
            {"topk_weights": strided((3, 2), "float32", (1, 3))},
            ["topk_weights", "contiguous", "[1, 3]"],
        ),
        ({"out": FakeArray((3, 512), "float32")}, ["out must", "bf16", "got f32"]),
        ({"out": FakeArray((2, 512), "uint16")}, ["out must", "[3, 512]", "got [2, 512]"]),
        ({"out": FakeArray((3, 512), "uint16", device=1)}, ["out is on GPU 1", "move"]),
        ({"out": strided((3, 512), "uint16", (516, 1))}, ["rows of out", "516", "copy"]),
        ({"out": strided((3, 512), "uint16", (0, 1))}, ["rows of out overlap", "0 apart", "pass"]),
        ({"out": strided((3, 512), "uint16", (504, 1))}, ["rows of out overlap", "504 apart"]),
        ({"out": FakeArray((3, 512), "uint16")}, ["out, 0x100000", "overlaps x", "memory"]),
        ({"out": FakeArray((3, 512), "uint16", ptr=(1 << 20) + 2048)}, ["overlaps x"]),
        ({"out": FakeArray((3, 512), "uint16", ptr=(1 << 20) - 2048)}, ["overlaps x"]),
        ({"topk_ids": FakeArray((3, 0), "int64")} | NO_SLOTS, ["top_k", "from 1", "got 0"]),
        ({"topk_ids": FakeArray((3, 33), "int64")} | MANY_SLOTS, ["top_k", "got 33; split"]),
    ],
)
def test_arguments_that_do_not_fit(changes, parts):
    message = refusal(lambda: mega_moe(weights=layer_weights(), **call_arrays() | changes))
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("dtype", ["bfloat16", "uint16"])
def test_no_tokens_is_no_work(dtype):
    """Nothing of a GPU is touched: the arrays here have no memory."""
    arrays = call_arrays(tokens=0) | {"x": FakeArray((0, HIDDEN), dtype)}
    assert mega_moe(weights=layer_weights(), **arrays) is arrays["out"]
    pair = (FakeArray((0, HIDDEN), "uint8"), FakeArray((0, HIDDEN // 128), "float32"))
    assert mega_moe(weights=layer_weights(), **arrays | {"x": pair}) is arrays["out"]
    # As CuPy has it: an empty array's strides are 0 and so is its address.
    empty = {
        name: FakeArray(array.shape, array.dtype.name, strides=(0, 0), ptr=0)
        for name, array in arrays.items()
    }
    assert mega_moe(weights=layer_weights(), **empty) is empty["out"]


def test_too_many_tokens_are_refused_before_memory_is_taken(monkeypatch):
    monkeypatch.setattr(families, "empty_rows", lambda *_: pytest.fail("took memory"))
    given = call_arrays(tokens=262_145) | {"out": None}
    message = refusal(lambda: mega_moe(weights=layer_weights(), **given))
    assert "num_tokens" in message and "got 262,145; split" in message


def test_workspace_stream_and_plan_must_fit():
    def call(**kwargs):
        return refusal(
            lambda: mega_moe(weights=layer_weights(), **call_arrays(), **kwargs),
            TypeError if kwargs.get("stream") == "null" else ValueError,
        )

    message = call(stream=0, workspace=FakeWorkspace(device=1))
    assert "workspace is on GPU 1" in message and "weights are on GPU 0" in message
    message = call(stream="null", workspace=FakeWorkspace())
    assert "stream must be an address or a CuPy or PyTorch stream, got str" in message
    plan = choose(MoeProblem(8, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K + 1), gpu_spec("h200"))
    message = call(stream=0, workspace=FakeWorkspace(), plan=plan)
    assert "(512, 192, 4, 3)" in message and "(512, 192, 4, 2)" in message
    assert "plan again" in message


@pytest.mark.parametrize(
    "num_tokens, top_k, parts",
    [
        (262_145, 2, ["num_tokens", "262,144", "got 262,145; split"]),
        (-1, 2, ["num_tokens", "from 0", "got -1"]),
        (True, 2, ["num_tokens", "an integer", "got True"]),
        (1.0, 2, ["num_tokens", "an integer", "got 1.0"]),
        (1, 33, ["top_k", "32", "got 33; split"]),
        (1, 0, ["top_k", "from 1", "got 0"]),
        (1, True, ["top_k", "an integer", "got True"]),
    ],
)
def test_calls_without_a_kernel(num_tokens, top_k, parts):
    message = refusal(lambda: workspace_bytes(layer_weights(), num_tokens, top_k))
    assert all(part in message for part in parts), message


def test_rows_too_far_apart():
    x = FakeArray((TOKENS, HIDDEN), "bfloat16", strides=(1 << 36, 1))
    message = refusal(lambda: mega_moe(weights=layer_weights(), **call_arrays() | {"x": x}))
    assert "within 64 GiB" in message and "copy it" in message


# Calls that are right, with everything below the door replaced


class FakeKernel:
    grid = 132

    def __init__(self):
        self.launches = []

    def launch(self, params, stream, cooperative):
        self.launches.append((dict(params.values) | {"cooperative": cooperative}, stream))


class FakeParams:
    def __init__(self, plan):
        self.plan = plan

    def write_maps(self, *maps):
        self.maps = maps

    def copy(self):
        return FakeParams(self.plan)

    def write(self, *values):
        params = [param for param in self.plan.params if param.ctype != "TensorMap"]
        self.values = {p.name: v for p, v in zip(params, values, strict=True)}

    def address_writer(self, num_fields):
        names = list(self.values)[:num_fields]
        return lambda *addresses: self.values.update(zip(names, addresses, strict=True))


class RoomyWorkspace(FakeWorkspace):
    serials = iter(range(1000))
    generation, status_address, timeout_us = 1, 77, 99

    def __init__(self):
        super().__init__()
        self.serial = next(self.serials)

    def reserve(self, plan, num_tokens, stream):
        return plan.scratch(4096).offsets | plan.control(4096).offsets

    def capacity(self, plan):
        return 4096

    def bank_words(self, plan):
        return plan.bank_words(4096)

    def note_launch(self, stream):
        pass


@pytest.fixture
def kernel(monkeypatch):
    kernel = FakeKernel()
    cuda = SimpleNamespace(Device=lambda device: nullcontext())
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(planned, "device_spec", lambda device: gpu_spec("h200"))
    monkeypatch.setattr(prepare, "loaded", lambda plan, device: kernel)
    monkeypatch.setattr(prepare, "load", lambda plan, device: kernel)
    monkeypatch.setattr(prepare, "ParamBlock", FakeParams)
    monkeypatch.setattr(prepare, "encode_u8_map", lambda *_: bytes(128))
    return kernel


def test_parameters(kernel):
    weights, given = layer_weights(), call_arrays()
    x = strided((TOKENS, HIDDEN), "bfloat16", (1024, 1))
    assert (
        mega_moe(weights=weights, **given | {"x": x}, stream=5, workspace=RoomyWorkspace())
        is given["out"]
    )
    codes = FakeArray((TOKENS, HIDDEN), "uint8", ptr=1 << 28)
    scale = strided((TOKENS, HIDDEN // 128), "float32", (1, TOKENS))
    mega_moe(weights=weights, **given | {"x": (codes, scale)}, stream=6, workspace=RoomyWorkspace())
    (bf16, stream), (fp8, other) = kernel.launches
    assert (stream, other) == (5, 6)
    assert (bf16["x"], bf16["x_stride"], bf16["x_is_bf16"], bf16["x_scale"]) == (
        1 << 20,
        2048,
        1,
        0,
    )
    assert (fp8["x"], fp8["x_stride"], fp8["x_is_bf16"]) == (1 << 28, HIDDEN, 0)
    assert (fp8["x_scale"], fp8["x_scale_token_stride"]) == (1 << 20, 1)
    assert fp8["x_scale_group_stride"] == TOKENS
    for values in (bf16, fp8):
        assert (values["y"], values["y_stride"], values["num_tokens"]) == (1 << 24, HIDDEN, TOKENS)
        assert (values["ids_are_i64"], values["weights_are_bf16"]) == (1, 0)
        assert (values["status"], values["timeout_us"]) == (77, 99)
        assert values["first_stride"] == 83
    # Quantised tokens are all a few tokens need: blocks need not wait for each other.
    assert (bf16["cooperative"], fp8["cooperative"]) == (True, False)


def test_layouts_are_checked_once_and_addresses_always(kernel):
    weights, given, workspace = layer_weights(), call_arrays(), RoomyWorkspace()

    def call(**changes):
        mega_moe(weights=weights, **given | changes, stream=0, workspace=workspace)

    for _ in range(3):
        call()
    assert len(weights.calls) == 1 and len(kernel.launches) == 3
    floats = FakeArray((TOKENS, TOP_K), "float32")
    for _ in range(2):
        assert "i32 or i64, got f32" in refusal(lambda: call(topk_ids=floats))
        assert "x must be on a GPU" in refusal(lambda: call(x=FakeTensor()), TypeError)
        assert "on GPU 1" in refusal(lambda: call(out=FakeArray((3, 512), "uint16", device=1)))
    assert len(weights.calls) == 1 and len(kernel.launches) == 3
    moved = FakeArray((TOKENS, HIDDEN), "bfloat16", ptr=(1 << 20) + 8)
    assert "rows of x" in refusal(lambda: call(x=moved))
    beside = FakeArray((TOKENS, HIDDEN), "uint16", ptr=(1 << 20) + 2 * TOKENS * HIDDEN)
    call(out=beside)
    assert "overlaps" in refusal(lambda: call(out=FakeArray((TOKENS, HIDDEN), "uint16")))


def test_addresses_are_written_at_every_call(kernel):
    weights, given, workspace = layer_weights(), call_arrays(), RoomyWorkspace()
    other = {
        name: FakeArray(array.shape, array.dtype.name, ptr=array.data.ptr + (1 << 25))
        for name, array in given.items()
    }
    calls = (given, other, given)
    for call in calls:
        mega_moe(weights=weights, **call, stream=0, workspace=workspace)
    assert len(workspace.ready) == 1
    for (values, _), call in zip(kernel.launches, calls, strict=True):
        for name in ("x", "topk_ids", "topk_weights"):
            assert values[name] == call[name].data.ptr
        assert values["y"] == call["out"].data.ptr and values["x_scale"] == 0
        assert values["w13_scale"] == values["w2_scale"] == weights.w13_scale.ptr


def test_ready_launches_are_those_of_layouts_plan_and_memory(kernel, monkeypatch):
    weights, given, workspace = layer_weights(), call_arrays(), RoomyWorkspace()

    def call(num_ready, weights=weights, given=given, **kwargs):
        mega_moe(weights=weights, **given, stream=0, workspace=workspace, **kwargs)
        assert len(workspace.ready) == num_ready
        return kernel.launches[-1][0]

    call(1)
    assert call(2, given=call_arrays(tokens=TOKENS + 1))["num_tokens"] == TOKENS + 1
    call(3, weights=layer_weights())
    plan = choose(MoeProblem(TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K), gpu_spec("h200"))
    call(4, plan=plan)
    call(4, plan=replace(plan))
    workspace.generation, workspace.bank_words = 2, lambda plan: 12_345  # as when memory moves
    workspace.ready.clear()
    assert call(1)["bank_words"] == 12_345
    monkeypatch.setattr(fused, "MAX_READY", 1)
    call(1, plan=plan)


def test_variants_have_launches_of_their_own(kernel):
    weights, given, workspace = layer_weights(), call_arrays(), RoomyWorkspace()

    def call(num_ready, **kwargs):
        mega_moe(weights=weights, **given, stream=0, workspace=workspace, **kwargs)
        assert len(workspace.ready) == num_ready
        return kernel.launches[-1][0]

    plain = call(1)
    assert (plain["limit"], plain["mid_scale_unit"]) == (np.inf, 1 / 448)
    assert call(2, routed_scaling_factor=2.5)["mid_scale_unit"] == 2.5 / 448
    clamped = call(3, activation="swiglu_oai")
    assert [clamped[name] for name in ("alpha", "limit", "up_offset")] == [1.702, 7.0, 1.0]
    assert call(4, activation=Activation("swiglu_oai", limit=3))["limit"] == 3.0
    assert call(4, activation=Activation("swiglu_oai", limit=3))["limit"] == 3.0
    assert (plain["first_expert"], call(5, first_expert=96)["first_expert"]) == (0, 96)
    workspace.ready.popitem()
    call(5, apply_router_weight_on_input=True)
    assert call(5)["limit"] == np.inf
    plan = choose(MoeProblem(TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K), gpu_spec("h200"))
    message = refusal(lambda: call(6, plan=plan, activation="geglu_erf"))
    assert "is for activation 'swiglu', the call has 'geglu_erf'; plan again" in message
    message = refusal(lambda: call(6, plan=plan, apply_router_weight_on_input=True))
    assert "is for weight_on_input False, the call has True; plan again" in message
    assert "got 'relu'" in refusal(lambda: call(6, activation="relu"))
    assert "got ['swiglu']; take" in refusal(lambda: call(6, activation=["swiglu"]))
    message = refusal(lambda: call(6, routed_scaling_factor=np.ones(1)), TypeError)
    assert "routed_scaling_factor must be a number, got ndarray; pass a float" in message


def test_biases_and_counts_are_parameters(kernel):
    biases = {
        "w13_bias": FakeArray((EXPERTS, 2 * INTERMEDIATE), "bfloat16", (400, 1), ptr=1 << 25),
        "w2_bias": FakeArray((EXPERTS, HIDDEN), "uint16", ptr=1 << 26),
    }
    weights = ExpertWeights(**weight_arrays(), **biases)
    workspace = RoomyWorkspace()

    def call(**kwargs):
        mega_moe(weights=weights, **call_arrays(), stream=0, workspace=workspace, **kwargs)
        return kernel.launches[-1][0]

    plain = call()
    assert (plain["w13_bias"], plain["w2_bias"]) == (1 << 25, 1 << 26)
    assert (plain["w13_bias_stride"], plain["w2_bias_stride"]) == (800, 2 * HIDDEN)
    assert (plain["bias_bytes"], plain["expert_counts"]) == (2, 0)
    counts = FakeArray((EXPERTS,), "int32", ptr=1 << 27)
    assert call(expert_counts=counts)["expert_counts"] == 1 << 27
    assert call()["expert_counts"] == 0
    for wrong, part in (
        (FakeArray((EXPERTS,), "int64"), "dtype i32, got i64"),
        (FakeArray((EXPERTS + 1,), "int32"), "[4], got [5]; pass a counter for each"),
        (FakeArray((EXPERTS,), "int32", (2,)), "must be contiguous, got strides [2]"),
        (FakeArray((EXPERTS,), "int32", device=1), "expert_counts is on GPU 1, the weights"),
    ):
        assert part in refusal(lambda wrong=wrong: call(expert_counts=wrong))
    refusal(lambda: call(expert_counts=[0] * EXPERTS), TypeError)


@pytest.mark.parametrize("gate_up", ["gate_first", "up_first", "interleaved"])
def test_maps_of_w13(monkeypatch, gate_up):
    """Dimensions, strides and box as cuTensorMapEncodeTiled takes them; what the box lands is gate
    and up in groups of 8 rows.
    """
    maps = []
    monkeypatch.setattr(prepare, "encode_u8_map", lambda *given: maps.append(given) or b"")
    weights = ExpertWeights(**weight_arrays(), gate_up=gate_up)
    fields = Variant(**weights.variant_fields).plan_fields
    plan = choose(weights.problem(1, TOP_K), gpu_spec("h200"), **fields)
    prepare._weight_maps(weights, plan)
    _, dims, strides, box = maps[0]
    assert all(stride % 16 == 0 and 0 < stride < 1 << 40 for stride in strides)
    assert all(0 < n <= 256 for n in box) and np.prod(box) == plan.block_rows * plan.block_k
    assert np.prod(dims) == np.prod(weights.w13.shape)
    steps = [stride // HIDDEN for stride in strides]
    rows = [c * steps[0] + half * steps[1] + g * steps[2] for g, half, c in np.ndindex(2, 2, 8)]
    gate, up = list(range(16)), list(range(INTERMEDIATE, INTERMEDIATE + 16))
    if gate_up == "interleaved":
        gate, up = [2 * row for row in gate], [2 * row + 1 for row in gate]
    assert rows == gate[:8] + up[:8] + gate[8:] + up[8:]


def test_maps_of_both_buckets(monkeypatch):
    """The same weights serve both; a box of w2's is what the kernel of the plan lands."""
    format = "mxfp4_fp8"
    monkeypatch.setattr(prepare, "encode_u8_map", lambda *given: given[-1])
    shapes = (EXPERTS, 2 * INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)
    codes = [FakeArray((*shape[:2], shape[2] // 2), "uint8") for shape in shapes]
    packed = [
        FakeArray(packed_shape(*shape, format, order), "uint32")
        for shape, order in zip(shapes, ("gate_first", None), strict=True)
    ]
    weights = ExpertWeights(*codes, *packed, format=format)
    plans = plans_of_model(weights.problem(1, TOP_K), gpu_spec("h200"))
    landing = {name: plan.weight_k_bytes for name, plan in plans.items()}
    assert landing == {"decode": 128, "prefill": 64}
    for bucket in ("decode", "prefill", "decode"):
        _, box = prepare._weight_maps(weights, plans[bucket])
        assert box == [landing[bucket], 256, 1]


def test_maps_without_a_gate(monkeypatch):
    """Both of rows as they lie, which may be apart."""
    maps = []
    monkeypatch.setattr(prepare, "encode_u8_map", lambda *given: maps.append(given) or b"")
    w13 = FakeArray((EXPERTS, INTERMEDIATE, HIDDEN), "uint8", (2 * HIDDEN * 300, 2 * HIDDEN, 1))
    scale = FakeArray((EXPERTS, -(-INTERMEDIATE // 128), HIDDEN // 128), "float32")
    weights = ExpertWeights(**weight_arrays() | {"w13": w13, "w13_scale": scale})
    assert not weights.gated
    plan = choose(weights.problem(1, TOP_K), gpu_spec("h200"), activation="relu2_no_gate")
    prepare._weight_maps(weights, plan)
    for _, _, _, box in maps:
        assert box == [plan.block_k_bytes, plan.block_rows, 1]
    assert maps[0][1] == [HIDDEN, INTERMEDIATE, EXPERTS]
    assert maps[0][2] == [2 * HIDDEN, 2 * HIDDEN * 300]
    assert maps[1][1] == [INTERMEDIATE, HIDDEN, EXPERTS]


def test_bf16_launches(kernel):
    weights, workspace = bf16_weights(), RoomyWorkspace()
    mega_moe(
        weights=weights, **call_arrays(), routed_scaling_factor=2.5, stream=0, workspace=workspace
    )
    values = kernel.launches[-1][0]
    assert not values["cooperative"], "bf16 tokens are read as they are"
    assert values["w13_scale"] == values["w2_scale"] == values["w13_scale_row_stride"] == 0
    assert values["mid_scale_unit"] == 2.5 and values["x_stride"] == 2 * HIDDEN
    mega_moe(weights=layer_weights(), **call_arrays(), stream=0, workspace=workspace)
    assert kernel.launches[-1][0]["cooperative"], "they are quantised for FP8 weights"
    warmup(weights, TOP_K, 4096, stream=0, workspace=RoomyWorkspace())
    plans = {key[1] for key in weights.memo if key[0] == "prepared"}
    assert {(plan.bucket, plan.format) for plan in plans} == {
        ("decode", "bf16"),
        ("prefill", "bf16"),
    }


def test_warmup_prepares_the_variant(kernel):
    def plans(weights, **kwargs):
        warmup(weights, TOP_K, 4096, stream=0, workspace=RoomyWorkspace(), **kwargs)
        return [key[1] for key in weights.memo if key[0] == "prepared"]

    up_first = ExpertWeights(**weight_arrays(), gate_up="up_first")
    channels = weight_arrays() | dict(zip(("w13_scale", "w2_scale"), CHANNELS, strict=True))
    assert all(plan.format == "fp8_channel" for plan in plans(ExpertWeights(**channels)))
    options = {"activation": "geglu_tanh", "apply_router_weight_on_input": True}
    for weights, kwargs in ((layer_weights(), {}), (up_first, options)):
        decode, prefill = plans(weights, **kwargs)
        assert (decode.bucket, prefill.bucket) == ("decode", "prefill")
        for plan in (decode, prefill):
            assert plan.activation == kwargs.get("activation", "swiglu")
            assert plan.up_first == (weights is up_first) == plan.weight_on_input
    biases = {
        "w13_bias": FakeArray((EXPERTS, 2 * INTERMEDIATE), "float32"),
        "w2_bias": FakeArray((EXPERTS, HIDDEN), "float32"),
    }
    made = plans(ExpertWeights(**weight_arrays(), **biases, gate_up="interleaved"))
    assert all(plan.has_bias and plan.interleaved and not plan.up_first for plan in made)
    made = plans(ExpertWeights(**channels, **biases))
    assert all(plan.has_bias and plan.format == "fp8_channel" for plan in made)
    message = refusal(lambda: plans(layer_weights(), activation="silu"))
    assert "activation must be one of" in message and "got 'silu'" in message


def test_workspaces_of_the_past_are_forgotten(kernel):
    weights = layer_weights()
    for _ in range(100):
        mega_moe(weights=weights, **call_arrays(), stream=0, workspace=RoomyWorkspace())
    prepared = [value for key, value in weights.memo.items() if key[0] == "prepared"]
    assert [len(known) for known in prepared] == [prepare.MAX_WORKSPACES]


def test_memo_is_bounded():
    memo = Memo(3)
    for key in range(10):
        memo[key] = memo[key] = key
        assert key in memo and len(memo) <= 3
