"""mega_moe(..., backend="emulated"): NumPy in, NumPy out, refused in the words of the CUDA path."""

import ml_dtypes
import numpy as np
import pytest

import jitmoe
from jitmoe import ExpertWeights, LocalGroup, MoeProblem, fp8, mega_moe, reference
from jitmoe.emulate.compile import NoHostCompiler, compiler
from jitmoe.plan.gpu import gpu_spec
from jitmoe.plan.heuristics import choose
from jitmoe.run import driver
from jitmoe.run.symmetric import Group

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 256, 208, 2
DECODE, PREFILL = 20, 150  # tokens
LAYER = reference.random_layer(EXPERTS, HIDDEN, INTERMEDIATE, seed=1)

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(autouse=True)
def no_driver(monkeypatch):
    """Nothing here asks a GPU."""
    monkeypatch.setattr(driver, "driver", lambda: pytest.fail("asked the driver"))


@pytest.fixture(scope="module")
def weights():
    return ExpertWeights(LAYER.w13, LAYER.w2, LAYER.w13_scale, LAYER.w2_scale)


def call_arrays(num_tokens, x="bits", seed=2):
    """Arguments of mega_moe() but the weights; x is named by its kind."""
    tokens = reference.random_tokens(num_tokens, HIDDEN, EXPERTS, TOP_K, seed, routing="unused")
    codes, scale = fp8.quantize_tokens(tokens.x)
    kinds = {
        "bits": fp8.encode_bf16(tokens.x),
        "bf16": tokens.x.astype(ml_dtypes.bfloat16),
        "codes": (codes, scale),
        "e4m3": (fp8.view_e4m3(codes), scale),
    }
    return {"x": kinds[x], "topk_ids": tokens.topk_ids, "topk_weights": tokens.topk_weights}


def emulate(weights, given, **kwargs):
    return mega_moe(weights=weights, **given, backend="emulated", **kwargs)


def check(y, given):
    x, scale = given["x"] if isinstance(given["x"], tuple) else (given["x"], None)
    args = x, scale, given["topk_ids"], given["topk_weights"], *LAYER
    assert reference.relative_error(y, reference.mega_moe(*args, requantize=True)) < 4e-3


def refusal(call, kind=ValueError):
    with pytest.raises(kind) as error:
        call()
    message = str(error.value)
    assert "\n" not in message and len(message) < 300, "one sentence"
    return message


class Alone(Group):
    """A group of one rank which needs no driver, as a PeerGroup does; nobody is to be met."""

    num_ranks, ranks, device = 1, (0,), 0
    allocate = agree = barrier = close = None


def test_a_group_of_one_rank_is_the_same_call(weights):
    """So that a program for many ranks runs with one; arguments of a LocalGroup are lists."""
    given, scaled = call_arrays(DECODE), {"routed_scaling_factor": 2.5}
    y = emulate(weights, given, **scaled)
    same = emulate(weights, given, group=Alone(), max_num_tokens=DECODE, **scaled)
    assert np.array_equal(same, y)
    lists = {name: [value] for name, value in given.items()}
    [same] = emulate([weights], lists, group=LocalGroup(1, device=0), **scaled)
    assert np.array_equal(same, y)
    message = refusal(lambda: emulate([weights], given, group=LocalGroup(1, device=0)))
    assert "x must be a list with an item for each of the 1 ranks" in message


@pytest.mark.parametrize("num_tokens", [1, DECODE, PREFILL])
@pytest.mark.parametrize("x", ["bits", "bf16", "codes", "e4m3"])
def test_results(weights, num_tokens, x):
    given = call_arrays(num_tokens, x)
    y = emulate(weights, given)
    assert isinstance(y, np.ndarray) and y.shape == (num_tokens, HIDDEN)
    assert y.dtype == (np.uint16 if x in ("bits", "codes") else ml_dtypes.bfloat16)
    check(y, given)


def test_wide_ids_bf16_weights_and_types_of_weights():
    e4m3 = ml_dtypes.float8_e4m3fn
    w13, w2 = LAYER.w13.view(e4m3), LAYER.w2.view(e4m3)
    weights = ExpertWeights(w13, w2, LAYER.w13_scale, LAYER.w2_scale)
    assert repr(weights).endswith("device=host)")
    given = call_arrays(DECODE)
    given["topk_ids"] = given["topk_ids"].astype(np.int64)
    for dtype in (ml_dtypes.bfloat16, np.uint16):
        given["topk_weights"] = fp8.encode_bf16(given["topk_weights"]).view(dtype)
        check(emulate(weights, given), given)
        given["topk_weights"] = fp8.to_float(given["topk_weights"].view(np.uint16), np.float32)


def test_strided_arguments():
    def apart(array, gap):
        wide = np.zeros((*array.shape[:-1], array.shape[-1] + gap), array.dtype)
        wide[..., : array.shape[-1]] = array
        return wide[..., : array.shape[-1]]

    w13_scale, w2_scale = apart(LAYER.w13_scale, 1), apart(LAYER.w2_scale, 3)
    weights = ExpertWeights(apart(LAYER.w13, 16), apart(LAYER.w2, 32), w13_scale, w2_scale)
    given = call_arrays(DECODE, "codes")
    codes, scale = given["x"]
    for scale_like in (np.asfortranarray(scale), scale[::-1].copy()[::-1]):
        y = emulate(weights, given | {"x": (apart(codes, 16), scale_like)})
        check(y, given)


def test_weights_are_views(weights):
    """What is written into the checkpoint's arrays is seen by the next call."""
    w2_scale = LAYER.w2_scale.copy()
    views = ExpertWeights(LAYER.w13, LAYER.w2, LAYER.w13_scale, w2_scale)
    given = call_arrays(DECODE)
    first = emulate(views, given)
    w2_scale *= 2
    second = emulate(views, given)
    assert np.array_equal(fp8.decode_bf16(second), 2 * fp8.decode_bf16(first))


@pytest.mark.parametrize("dtype", [np.uint16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("num_tokens", [DECODE, PREFILL])
def test_out(weights, num_tokens, dtype):
    """Tokens have several slots, none, or one, whose row goes to out as it is."""
    given = call_arrays(num_tokens)
    num_used = np.isin(given["topk_ids"], range(EXPERTS)).sum(axis=1)
    assert {0, 1, 2} <= set(num_used.tolist())
    memory = np.full((num_tokens, HIDDEN + 64), 7, dtype)
    out = memory[:, :HIDDEN]
    assert emulate(weights, given, out=out) is out
    check(out, given)
    assert (memory[:, HIDDEN:] == 7).all()
    assert np.array_equal(out.view(np.uint16), emulate(weights, given)), "the same bits"


def test_plans(weights, monkeypatch):
    """That of an H200 by default, whichever is passed otherwise."""
    seen = []
    monkeypatch.setattr(
        "jitmoe.fused_emulated.EmulatedLayer",
        lambda plan, layer, max_tokens, num_blocks, **_: (
            seen.append(plan) or (lambda x, *_, **__: np.zeros(x.shape, np.uint16))
        ),
    )
    given = call_arrays(PREFILL)
    emulate(weights, given)
    wanted = choose(MoeProblem(PREFILL, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K), gpu_spec("h200"))
    decode = choose(MoeProblem(1, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K), gpu_spec("h200"))
    emulate(weights, given, plan=decode)
    assert seen == [wanted, decode] and wanted.bucket == "prefill"
    other = choose(MoeProblem(1, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K + 1), gpu_spec("h200"))
    assert "plan again" in refusal(lambda: emulate(weights, given, plan=other))


@pytest.mark.parametrize("x", ["bits", "bf16", "codes", "e4m3"])
def test_no_tokens_is_no_work(weights, x, monkeypatch):
    monkeypatch.setattr("jitmoe.fused_emulated.EmulatedLayer", lambda *_: pytest.fail("launched"))
    given = call_arrays(0, x)
    y = emulate(weights, given)
    assert y.shape == (0, HIDDEN)
    assert y.dtype == (np.uint16 if x in ("bits", "codes") else ml_dtypes.bfloat16)
    out = np.empty((0, HIDDEN), np.uint16)
    assert emulate(weights, given, out=out) is out


X = call_arrays(DECODE)["x"]
CODES, SCALE = call_arrays(DECODE, "codes")["x"]


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"x": CODES}, ["x is e4m3", "no scales", "x=(x_fp8, x_scale)"]),
        ({"x": X.astype(np.float32)}, ["x must", "bf16 or u16", "got f32"]),
        ({"x": X.astype(">u2")}, ["x must", "bf16 or u16", "got >u2"]),
        ({"x": X[:, :128]}, ["x must", "[*, 256]", "got [20, 128]"]),
        ({"x": np.asfortranarray(X)}, ["x must be dense", "contiguous"]),
        ({"x": (CODES, SCALE[:19])}, ["x_scale must", "[20, 2], [20] or [1]", "got [19, 2]; pass"]),
        ({"x": (CODES, SCALE[:1, :1])}, ["x_scale must", "[20, 2], [20] or [1]", "got [1, 1]"]),
        (
            {"x": (CODES, SCALE.astype(ml_dtypes.float8_e8m0fnu))},
            ["x_scale must have dtype f32", "got e8m0; convert"],
        ),
        ({"topk_ids": np.zeros((20, 2), np.int16)}, ["topk_ids must", "i32 or i64", "int16"]),
        ({"topk_ids": np.zeros((19, 2), np.int32)}, ["topk_ids must", "[20, *]", "got [19, 2]"]),
        ({"topk_weights": np.zeros((20, 2))}, ["topk_weights must", "f32", "got f64"]),
        ({"out": np.zeros((20, 128), np.uint16)}, ["out must", "[20, 256]", "got [20, 128]"]),
        ({"out": X}, ["out, 0x", "overlaps x"]),
        (
            {"out": np.broadcast_to(np.uint16(0), (20, 256))},
            ["out must be dense", "contiguous"],
        ),
        ({"out": np.frombuffer(bytes(20 * 512 + 32), np.uint16)}, ["out must", "[20, 256]"]),
        ({"stream": 5}, ["stream must be None", "emulated", "got int; leave it out"]),
        ({"workspace": "mine"}, ["workspace must be None", "got str; leave it out"]),
        ({"backend": "cpu"}, ['"cuda" or "emulated"', "got 'cpu'"]),
    ],
)
def test_arguments_that_do_not_fit(weights, changes, parts):
    given = call_arrays(DECODE) | {"x": X, "backend": "emulated"} | changes
    message = refusal(lambda: mega_moe(weights=weights, **given))
    assert all(part in message for part in parts), message


def test_read_only_out(weights):
    out = np.zeros((DECODE, HIDDEN), np.uint16)
    out.flags.writeable = False
    assert "out must be writable" in refusal(lambda: emulate(weights, call_arrays(DECODE), out=out))


class OnGpu:
    """What the door looks at in a CuPy array."""

    def __init__(self, like):
        self.shape, self.dtype, self.strides = like.shape, like.dtype, like.strides
        self.itemsize = like.itemsize
        self.data = type("Memory", (), {"ptr": 1 << 20, "device_id": 0})


OnGpu.__module__ = "cupy.fake"


def gpu_weights():
    return ExpertWeights(*map(OnGpu, (LAYER.w13, LAYER.w2, LAYER.w13_scale, LAYER.w2_scale)))


def test_cuda_refuses_numpy(weights):
    """Arrays or weights, first call or later, and says what runs them."""
    given = call_arrays(DECODE)
    emulate(weights, given)
    on_gpu = {name: OnGpu(array) for name, array in given.items()}
    for call in (
        lambda: mega_moe(weights=weights, **given),
        lambda: mega_moe(weights=weights, **on_gpu),
        lambda: mega_moe(weights=gpu_weights(), **given),
        lambda: jitmoe.warmup(weights, TOP_K, DECODE),
    ):
        message = refusal(call, TypeError)
        assert "must be a GPU array, got numpy.ndarray" in message
        assert "cupy.asarray" in message and 'backend="emulated"' in message
    assert jitmoe.workspace_bytes(weights, DECODE, TOP_K) > 0


def test_emulation_refuses_other_arrays(weights):
    given = call_arrays(DECODE)
    for call in (
        lambda: emulate(weights, given | {"x": OnGpu(X)}),
        lambda: emulate(weights, given | {"topk_ids": given["topk_ids"].tolist()}),
        lambda: emulate(gpu_weights(), given),
        lambda: ExpertWeights(LAYER.w13, OnGpu(LAYER.w2), LAYER.w13_scale, LAYER.w2_scale),
    ):
        message = refusal(call, TypeError)
        assert 'must be a NumPy array for backend="emulated", got ' in message
    mixed = OnGpu(LAYER.w13), LAYER.w2, LAYER.w13_scale, LAYER.w2_scale
    assert "w2 must be a GPU array" in refusal(lambda: ExpertWeights(*mixed), TypeError)
