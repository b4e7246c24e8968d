"""What of `jitmoe bench` needs no GPU, and its flow with NumPy in CuPy's place."""

import json
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from jitmoe import links, measure, peers, reference
from jitmoe.bench import ceilings, methods, ranks, records, session, times
from jitmoe.bench.conditions import conditions
from jitmoe.bench.points import SHAPES, Points, calls_per_graph, named_shapes, token_counts
from jitmoe.bench.rows import HEADER, Point, Rates, line, rows_of
from jitmoe.bench.trial import Protocol, Result, trial
from jitmoe.bench.work import mean_work, work_of
from jitmoe.cli import app
from jitmoe.fp8 import encode_bf16
from jitmoe.jit import nvrtc
from jitmoe.measure import Errors
from jitmoe.peers.peer import Peer
from jitmoe.plan.formats import FORMATS
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.problem import MoeProblem
from jitmoe.plan.variant import DEFAULT, Activation, Variant
from jitmoe.run import driver

SMALL = MoeProblem(0, 256, 144, 4, 2)
H200 = GPUS["h200"]
ROOF = ceilings.Ceilings(4600.0, 4270.0, 1450.0, 1570.0, 790.0)


# Points


def test_points():
    assert list(named_shapes("S4, s1")) == ["S4", "S1"] and len(Points(SHAPES)) == 28
    assert token_counts("1, 8,32") == (1, 8, 32)
    assert [calls_per_graph(n) for n in (1, 128, 129, 512, 513)] == [8, 8, 4, 4, 2]


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: named_shapes("S1,S5"), "shapes must be of S1, S2, S3, S4, got 'S5'"),
        (lambda: token_counts("1,,8"), "tokens must be positive integers"),
        (lambda: token_counts("0"), "tokens must be positive integers"),
        (lambda: Points(SHAPES, routing="even"), "routing must be one of uniform, .* got 'even'"),
        (lambda: Points({"a": replace(SMALL, top_k=5)}), "needs top_k up to the 4 experts of a"),
        (lambda: Points(SHAPES, (10**6,)), "num_tokens must be"),
        (lambda: Points(SHAPES, (65_536,), num_ranks=8), "num_tokens must be .* got 524,288"),
        (lambda: Points({"a": SMALL}, num_ranks=512), "num_experts must be .* got 2,048"),
        (lambda: Points({"a": replace(SMALL, top_k=9)}, num_ranks=2), "up to the 8 experts of a"),
    ],
)
def test_points_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# Work and floors


def ids_of(layer, routing, num_tokens, **options):
    sizes = (num_tokens, 128, layer.num_experts, layer.top_k)
    return reference.random_tokens(*sizes, 0, routing, **options).topk_ids


def test_work_counts_what_is_named():
    layer = replace(SMALL, num_tokens=3)
    work = work_of(layer, np.array([[0, 2], [2, -1], [4, 2]]))
    assert (work.num_pairs, work.num_active) == (4, 2)
    assert work.weight_bytes == 2 * layer.expert_bytes
    assert work.num_bytes == work.weight_bytes + layer.activation_bytes
    assert work.flop == 4 * 6 * 256 * 144
    alone = work_of(replace(layer, gated=False), np.array([[0, 2], [2, -1], [4, 2]]))
    assert alone.flop == 4 * 4 * 256 * 144 and alone.weight_bytes < work.weight_bytes
    none = work_of(layer, np.full((3, 2), -1))
    assert none.flop == none.weight_bytes == 0
    mean = mean_work([work, none])
    assert mean.num_pairs == 2 and mean.activation_bytes == layer.activation_bytes


@pytest.mark.parametrize(
    "shape, num_tokens, floor_us",
    [("S1", 1, 75.9), ("S1", 128, 304), ("S1", 8192, 4009), ("S2", 1, 8.1), ("S4", 2048, 430)],
)
def test_floors_are_the_published(shape, num_tokens, floor_us):
    layer = replace(SHAPES[shape], num_tokens=num_tokens)
    work = work_of(layer, ids_of(layer, "uniform", num_tokens))
    assert work.floor(4645, 1440).us == pytest.approx(floor_us, rel=6e-3)
    assert work.floor(4645, 1440).bound == ("memory" if num_tokens <= 128 else "math")


def test_skewed_routings_hit_fewer_experts():
    layer = replace(SHAPES["S2"], num_tokens=32)
    active = {
        routing: work_of(layer, ids_of(layer, routing, 32, zipf_exponent=1.2)).num_active
        for routing in ("uniform", "zipf", "one_expert")
    }
    assert active["uniform"] > active["zipf"] > active["one_expert"] == 1
    flat = work_of(layer, ids_of(layer, "zipf", 32, zipf_exponent=0.0)).num_active
    assert flat > active["zipf"]


# Times


def test_summary():
    assert times.summary([3.0, 1.0]) == times.Times(2.0, 1.0, 3.0)
    assert times.summary([float(n) for n in range(11)]) == times.Times(5.0, 1.0, 9.0)
    assert times.replays_per_burst(5_000) == 2 and times.replays_per_burst(1e6) == 1


def test_read_kernel_compiles():
    assert nvrtc.compile(ceilings._READ, "sm_90a", "read.cu").resources.spill_store_bytes == 0


# Rows


def point(num_tokens=32):
    layer = replace(SHAPES["S1"], num_tokens=num_tokens)
    return Point("S1", layer, "uniform", work_of(layer, ids_of(layer, "uniform", 32)), 4, True)


def test_rows():
    measured = {"cool": times.Times(329.0, 328.0, 331.0), "hot": times.Times(340.0, 339.0, 341.0)}
    result = Result("ok", None, Errors(2.26e-2, 4.03e-3, 1.6e-2), measured, 15.61)
    rates, roofs = Rates(4645, 1440), {"cool": ROOF, "hot": replace(ROOF, read_gbps=4500.0)}
    cool, hot = rows_of(point(), methods.JITMOE["fp8_block"], result, rates, roofs)
    assert (cool["heat"], hot["heat"]) == ("cool", "hot")
    assert cool["us_median"] == 329.0 and hot["us_p90"] == 341.0 and cool["host_us"] == 15.6
    assert cool["of_floor"] == pytest.approx(cool["floor_us"] / 329, abs=1e-3)
    assert hot["run_floor_us"] == pytest.approx(hot["num_bytes"] / 4500e3, rel=1e-3)
    assert cool["gbps"] == round(cool["num_bytes"] / 329e3) and cool["bound"] == "memory"
    assert json.loads(json.dumps(cool, allow_nan=False)) == cool
    assert line(cool).endswith("  S1: jitmoe") and len(line(cool)) <= 100
    assert line(cool).index("S1: jitmoe") == HEADER.index("layer: method"), "columns line up"


def test_rows_of_what_was_not_timed():
    errors = Errors(float("inf"), float("inf"), float("inf"))
    result = Result("wrong", "allowed is a relative error of 0.01", errors)
    peer = Peer("a peer", False, 0.01)
    rates = Rates(4645, 1440)
    (row,) = rows_of(point(), peer, result, rates, {"cool": replace(ROOF, fp8_tflops=None)})
    assert row["us_median"] is row["of_floor"] is row["rel_error"] is None
    assert "WRONG S1: a peer: allowed is a relative error of 0.01" in line(row)
    json.dumps(row, allow_nan=False)


def test_conditions():
    facts = conditions("a GPU", "jitmoe bench")
    assert (facts["gpu"], facts["command"]) == ("a GPU", "jitmoe bench")
    assert facts["versions"]["numpy"] == np.__version__ and len(facts["date"]) == 10
    json.dumps(facts)


# The command


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(driver, "num_devices", lambda: 0)


def invoke(*args):
    return CliRunner().invoke(app, ["bench", *map(str, args)])


def test_without_a_gpu(no_gpu):
    result = invoke("--model", "deepseek-v3", "--ep", 8, "--tokens", "1,8")
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("jitmoe: no GPU here") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "args, words",
    [
        (["--shapes", "S7"], "shapes must be of S1"),
        (["--shapes", "S1", "--model", "kimi-k2"], "name the layer in one way"),
        (["--hidden", 256], "a layer by its sizes needs --intermediate"),
        (["--tokens", "many"], "tokens must be positive integers"),
        (["--routing", "even"], "routing must be one of"),
        (["--no-cool"], "nothing is left to time"),
        (["--ranks", 2, "--peers"], "--peers are timed on one rank"),
        (["--presum"], "--presum is of many ranks, got one"),
        (["--model", "deepseek-v3", "--ep", 2, "--ranks", 8], "--ranks must be up to the 2 ranks"),
    ],
)
def test_mistakes(args, words, no_gpu):
    result = invoke(*args)
    assert result.exit_code == 2 and words in result.stderr and result.stdout == ""


@pytest.mark.parametrize("status, code", [("ok", 0), ("wrong", 1)])
def test_command_prints_and_appends(status, code, tmp_path, monkeypatch):
    result = Result(status, None, Errors(0.02, 4e-3, 0.1), {"cool": times.Times(9, 8, 10)}, 15.0)
    measured = rows_of(
        point(), methods.JITMOE["fp8_block"], result, Rates(4645, 1440), {"cool": ROOF}
    )
    monkeypatch.setattr("jitmoe.cli_bench.gpu_to_measure", lambda command: H200)
    monkeypatch.setattr(session, "run", lambda *args, **options: iter(measured))
    out = tmp_path / "rows.jsonl"
    for _ in range(2):
        shown = invoke("--out", out)
        assert shown.exit_code == code and HEADER in shown.stdout, shown.output
    assert len(out.read_text().splitlines()) == 2
    assert (
        len(records.load(tmp_path)) == 2 and len(records.latest(records.load(tmp_path))) == 1 - code
    )
    shown = invoke("--json")
    assert json.loads(shown.stdout)[0]["us_median"] == 9 and "H200" in shown.stderr


# The flow, with NumPy in CuPy's place and a clock of its own


class FakeCupy(ModuleType):
    def __getattr__(self, name):
        return getattr(np, name)


@pytest.fixture
def cupy(monkeypatch):
    module = FakeCupy("cupy")
    nothing = SimpleNamespace(
        record=lambda stream: None, synchronize=lambda: None, free_all_blocks=lambda: None
    )
    module.asnumpy = np.asarray
    module.get_default_memory_pool = lambda: nothing
    module.cuda = SimpleNamespace(
        Device=lambda: nothing,
        Event=lambda: nothing,
        get_elapsed_time=lambda begin, end: 1.0,
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(measure, "oracle_namespace", lambda: np)
    monkeypatch.setattr(times.time, "sleep", lambda seconds: None)
    return module


@pytest.fixture
def bench(cupy, monkeypatch):
    """session.run's pieces that need a GPU, replaced; the oracle stands for the kernel."""

    def weight_sets(layer, variant):
        experts = measure.random_experts(SMALL, variant, 1, np)
        return [experts, experts], experts

    def of_oracle(layer, calls, weights, factor=1.0):
        def y(i):
            call = calls[i]
            return encode_bf16(factor * measure.references(call, weights[0]).requantized)

        ys = [y(0) for _ in calls]

        def launch():
            for i, out in enumerate(ys):
                out[:] = y(i)

        stream = SimpleNamespace(synchronize=lambda: None)
        return methods.Method(
            stream, len(calls), y, lambda: (launch, ys), lambda out: out, lambda: None
        )

    monkeypatch.setattr(measure, "weight_sets", weight_sets)
    monkeypatch.setattr(methods, "of_jitmoe", of_oracle)
    monkeypatch.setattr(ceilings, "measure", lambda heat: ROOF)
    monkeypatch.setattr(session, "calls_per_graph", lambda num_tokens: 2)
    monkeypatch.setattr(session, "_build_in_background", lambda points, gpu: None)
    monkeypatch.setattr(times, "HOT_S", 0.0)
    return of_oracle


def test_session_without_peers(bench):
    said = []
    points = Points({"small": SMALL}, (1, 3), "zipf")
    rows = list(session.run(points, Protocol(("cool", "hot"), 3), H200, say=said.append))
    assert [(r["num_tokens"], r["heat"]) for r in rows] == [
        (n, heat) for n in (1, 3) for heat in ("cool", "hot")
    ]
    # A millisecond for every event pair: bursts of 12 graphs of 2 calls.
    assert all(row["status"] == "ok" and row["us_median"] == 41.67 for row in rows)
    assert all(1e-3 < row["rel_error"] < 3e-2 and row["routing"] == "zipf" for row in rows)
    assert all(not row["is_cold"] for row in rows), "such weights fit into the L2 cache"
    assert "weights in L2" in line(rows[0])
    assert [text for text in said if "ceilings of this run, hot: read 4,600 GB/s" in text]


GPT_OSS = Variant("swiglu_oai", gate_up="interleaved", has_bias=True)


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        (Variant(Activation("swiglu_clamped", limit=0.2)), "swiglu_clamped"),
        (GPT_OSS, "swiglu_oai, interleaved, with biases"),
    ],
)
def test_session_of_another_variant(bench, monkeypatch, variant, said):
    """Calls and oracle have it, and peers, which have not, are left out."""
    heard = []
    points = Points({"small": SMALL}, (3,), variant=variant)
    monkeypatch.setattr(peers, "peers", lambda: pytest.fail("no peer is asked"))
    (row,) = session.run(points, Protocol(), H200, with_peers=True, say=heard.append)
    assert (row["status"], row["activation"]) == ("ok", variant.activation.kind)
    assert f"peers left out: they compute swiglu, gate first, these layers {said}" in heard
    call = measure.random_call(replace(SMALL, num_tokens=3), 0, variant=variant)
    experts = measure.random_experts(SMALL, variant, 1, np)
    wanted = measure.references(call, experts).exact
    plain = measure.references(call._replace(variant=DEFAULT), experts._replace(biases=None))
    assert reference.relative_error(wanted, plain.exact) > 0.1


@pytest.mark.parametrize("format", ["fp8_block", "bf16"])
def test_a_call_launches_with_its_activation(cupy, monkeypatch, format):
    seen = []
    monkeypatch.setattr(measure, "mega_moe", lambda *given, **wants: seen.append(wants))
    layer = replace(SMALL, num_tokens=3, format=format)
    call = measure.random_call(layer, 0, variant=Variant("geglu_erf"))
    call.launch(None, None, None)
    assert seen[0]["activation"] == Activation("geglu_erf")


@pytest.mark.parametrize("format", FORMATS)
def test_random_weights_are_those_of_the_variant(cupy, monkeypatch, format):
    """Sets of weights, of which the others have their experts moved; biases and order too."""
    layer = replace(SMALL, intermediate=160, format=format)
    runtime = SimpleNamespace(memGetInfo=lambda: (measure.SPARE_BYTES + (1 << 20), 0))
    monkeypatch.setattr(cupy.cuda, "runtime", runtime, raising=False)
    for variant in (DEFAULT, GPT_OSS):
        sets, first = measure.weight_sets(layer, variant=variant)
        assert len(sets) > 1 and {one.format for one in sets} == {format}
        assert {one.gate_up for one in sets} == {variant.gate_up}
        assert {one.has_bias for one in sets} == {variant.has_bias}
        assert np.array_equal(sets[0].tensors[0], first.layer.w13)
        assert np.array_equal(sets[1].tensors[0], np.roll(first.layer.w13, 1, axis=0))


@pytest.mark.parametrize("args", [["--shapes", "S1,S2"], ["--model", "nemotron-3-nano-30b-a3b"]])
def test_layers_without_a_gate(args, monkeypatch):
    """Of S1 to S4 by the activation, of a model by its own or another."""
    measured = []
    monkeypatch.setattr("jitmoe.cli_bench.gpu_to_measure", lambda command: H200)
    monkeypatch.setattr(
        session, "run", lambda points, *_, **__: measured.append(points) or iter([])
    )
    assert invoke(*args, "--activation", "relu2_no_gate", "--format", "bf16").exit_code == 0
    (points,) = measured
    assert points.variant.activation == Activation("relu2_no_gate")
    assert not any(layer.gated for layer in points.layers.values())
    assert invoke(*args, "--activation", "swiglu").exit_code == 0
    assert all(layer.gated for layer in measured[1].layers.values())


def test_weights_without_a_gate(cupy, monkeypatch):
    cupy.cuda.runtime = SimpleNamespace(memGetInfo=lambda: (0, 0))
    for gated, rows in ((True, 2 * 144), (False, 144)):
        variant = Variant("swiglu" if gated else "relu2_no_gate", has_bias=True)
        sets, first = measure.weight_sets(replace(SMALL, gated=gated), variant=variant)
        assert first.layer.w13.shape == (4, rows, 256) and first.biases.w13.shape == (4, rows)
        assert sets[0].gated == gated


def test_kernels_built_ahead_are_those_of_the_variant(monkeypatch):
    built = []
    monkeypatch.setattr(session, "build_many", lambda plans: built.extend(plans) or built)
    session._build_in_background(Points({"small": SMALL}, variant=GPT_OSS), H200)
    while len(built) < 2:
        times.time.sleep(0.01)
    assert {plan.activation for plan in built} == {"swiglu_clamped"}
    assert all(plan.interleaved and plan.has_bias for plan in built)


def test_session_with_peers(bench, monkeypatch):
    def module(name, reason=None, factor=1.0, fails=None):
        def prepare_or_fail(weights):
            if fails == "prepare":
                raise RuntimeError("no memory\nat all")

        return SimpleNamespace(
            PEER=Peer(name, True, 2.6e-2),
            available=lambda: reason,
            prepare=prepare_or_fail,
            factor=factor,
            fails=fails,
        )

    modules = [
        module("absent", reason="not importable"),
        module("right"),
        module("off", factor=1.1),
        module("unready", fails="prepare"),
        module("raising", fails="call"),
    ]

    def prepare_peer(module, weights):
        module.prepare(weights)
        return module, weights

    def of_peer(layer, calls, prepared):
        module, weights = prepared
        if module.fails == "call":
            raise RuntimeError("intermediate is limited to 64")
        return bench(layer, calls, weights, module.factor)

    monkeypatch.setattr(peers, "peers", lambda: modules)
    monkeypatch.setattr(methods, "prepare_peer", prepare_peer)
    monkeypatch.setattr(methods, "of_peer", of_peer)
    said = []
    points = Points({"small": SMALL}, (1, 3))
    rows = list(session.run(points, Protocol(), H200, with_peers=True, say=said.append))
    found = [(row["method"], row["num_tokens"], row["status"]) for row in rows]
    statuses = {
        "jitmoe": "ok",
        "right": "ok",
        "off": "wrong",
        "unready": "failed",
        "raising": "failed",
    }
    assert found == [(name, n, status) for name, status in statuses.items() for n in (1, 3)]
    reasons = {row["method"]: row["reason"] for row in rows}
    assert reasons["unready"] == "RuntimeError: no memory"
    assert reasons["off"] == "allowed is a relative error of 0.026"
    assert all(row["us_median"] is None for row in rows if row["status"] != "ok")
    assert "peer left out: absent: not importable" in said


def test_session_stops_at_its_time_limit(bench, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(session.time, "monotonic", lambda: next(clock))
    said = []
    points = Points({"a": SMALL, "b": SMALL}, (1, 2, 3, 4))
    rows = list(session.run(points, Protocol(), H200, time_limit_s=3, say=said.append))
    assert 0 < len(rows) < 4 and {row["shape"] for row in rows} == {"a"}
    assert said[-1] == f"the time limit of 3 s was reached: {8 - len(rows)} points are left out"


def test_a_graph_that_leaves_poison_is_wrong(bench, cupy):
    layer = replace(SMALL, num_tokens=3)
    experts = measure.random_experts(layer, DEFAULT, 1, np)
    calls = [measure.random_call(layer, seed) for seed in range(2)]
    references = measure.references(calls[0], experts)
    method = bench(layer, calls, [experts])
    assert trial(method, methods.JITMOE["fp8_block"], references, Protocol()).status == "ok"
    lazy = replace(method, capture=lambda: (lambda: None, method.capture()[1]))
    result = trial(lazy, methods.JITMOE["fp8_block"], references, Protocol())
    assert (result.status, result.reason) == ("wrong", "the graph left NaN in an output")
    stale = replace(method, capture=lambda: _constant(method, 1.0))
    result = trial(stale, methods.JITMOE["fp8_block"], references, Protocol())
    assert result.reason == "the graph gives another result than an eager call"


def _constant(method, value):
    _, ys = method.capture()

    def launch():
        for y in ys:
            y[:] = encode_bf16(np.full(y.shape, value))

    return launch, ys


# Many ranks


def test_calls_and_experts_of_ranks_are_views(cupy):
    layer = replace(SMALL, num_tokens=6)
    for format in ("fp8_block", "bf16"):
        variant = Variant("swiglu_oai", has_bias=True)
        call = measure.random_call(replace(layer, format=format), 0, variant=variant)
        experts = measure.random_experts(replace(layer, format=format), variant, 1, np)
        first, second = call.of_ranks(2)
        assert (first.variant, second.format) == (variant, format)
        for name in ("codes", "scale", "topk_ids", "topk_weights"):
            array, parts = getattr(call, name), (getattr(first, name), getattr(second, name))
            assert (
                (parts == (None, None))
                if array is None
                else (
                    np.array_equal(array, np.concatenate(parts))
                    and np.shares_memory(array, parts[1])
                )
            )
        assert isinstance(second.x, tuple) == (format == "fp8_block")
        of_two = experts.of_ranks(2)
        for whole, *parts in (
            *zip(experts.layer, *(one.layer for one in of_two), strict=True),
            *zip(experts.biases, *(one.biases for one in of_two), strict=True),
        ):
            assert whole is None or np.array_equal(whole, np.concatenate(parts))
        assert experts._replace(biases=None).of_ranks(2)[1].biases is None


class FakeGroup:
    """In LocalGroup's place; `is_open` while it may be used."""

    device, is_open = 0, False

    def __init__(self, num_ranks):
        self.num_ranks = num_ranks

    def __enter__(self):
        self.is_open = True
        return self

    def __exit__(self, *_):
        self.is_open = False


def test_a_launch_of_ranks(cupy, monkeypatch):
    """Lists by rank, outputs that are parts of one array, weights by turns."""
    cupy.cuda.Stream = lambda non_blocking: "a stream"
    seen = []
    monkeypatch.setattr(measure, "mega_moe", lambda *given, **wants: seen.append((given, wants)))
    monkeypatch.setattr(
        methods, "GroupWorkspace", lambda group: SimpleNamespace(group=group, check=None)
    )
    layer, group = replace(SMALL, num_tokens=6), FakeGroup(2)
    calls = [measure.random_call(layer, seed, variant=Variant("geglu_erf")) for seed in range(3)]
    method = methods.of_ranks(layer, calls, [["a", "b"], ["c", "d"]], group, False)
    y = method.call(1)
    ((x, ids, router, weights), wants) = seen[0]
    assert weights == ["c", "d"] and len(x) == 2 and len(x[0]) == 2
    assert np.array_equal(np.concatenate(ids), calls[1].topk_ids)
    assert np.array_equal(np.concatenate(router), calls[1].topk_weights)
    assert wants["group"] is group is wants["workspace"].group and wants["presum"] is False
    assert wants["activation"] == Activation("geglu_erf") and wants["stream"] == "a stream"
    wants["out"][1][:] = 7
    assert (y[3:] == 7).all() and (y[:3] == 0xFFFF).all()
    method.call(2)
    assert seen[1][0][3] == ["a", "b"]


@pytest.fixture
def bench_ranks(bench, cupy, monkeypatch):
    """Experts of each rank's share, by the oracle, in the kernel's place."""
    cupy.cuda.runtime = SimpleNamespace(memGetInfo=lambda: (1 << 40, 0))
    monkeypatch.setattr(ranks, "calls_per_graph", lambda num_tokens: 2)
    monkeypatch.setattr(ranks, "LocalGroup", FakeGroup)

    def y_of(call, weights, **options):
        w13, w2, w13_scale, w2_scale = weights.tensors
        inputs = call.codes, call.scale, call.topk_ids, call.topk_weights
        return reference.mega_moe(*inputs, w13, w13_scale, w2, w2_scale, requantize=True, **options)

    def method_of(calls, y):
        ys = [encode_bf16(y(call)) for call in calls]

        def launch():
            for out, call in zip(ys, calls, strict=True):
                out[:] = encode_bf16(y(call))

        stream = SimpleNamespace(synchronize=lambda: None)
        capture = (lambda: (launch, ys)), (lambda out: out), lambda: None
        return methods.Method(stream, len(calls), lambda i: ys[i], *capture)

    def of_ranks(whole, calls, shares, group, presum):
        assert group.is_open and len(shares) == 4 and len(shares[0]) == group.num_ranks

        def y(call):
            return np.concatenate(
                [
                    sum(
                        y_of(one, own, first_expert=rank * SMALL.num_experts)
                        for rank, own in enumerate(shares[0])
                    )
                    for one in call.of_ranks(group.num_ranks)
                ]
            )

        return method_of(calls, y)

    monkeypatch.setattr(methods, "of_ranks", of_ranks)
    monkeypatch.setattr(
        methods, "of_jitmoe", lambda _, calls, sets: method_of(calls, lambda c: y_of(c, sets[0]))
    )
    return method_of


@pytest.mark.parametrize("most", [ranks.ORACLE_TOKENS, 1], ids=["at once", "rank by rank"])
def test_session_of_ranks(bench_ranks, monkeypatch, most):
    monkeypatch.setattr(ranks, "ORACLE_TOKENS", most)
    points = Points({"small": SMALL}, (1, 3), num_ranks=2, presum=True)
    rows = list(session.run(points, Protocol(), H200, say=lambda text: None))
    found = [(r["shape"], r["num_ranks"], r["num_experts"], r["num_tokens"]) for r in rows]
    assert found == [
        row for n in (1, 3) for row in (("small x 2", 1, 8, 2 * n), ("small", 2, 4, n))
    ]
    assert all(row["status"] == "ok" and row["num_weight_sets"] == 4 for row in rows), rows
    for one, many in zip(rows[::2], rows[1::2], strict=True):
        assert (one["flop"], one["num_bytes"]) == (many["flop"], many["num_bytes"])
        assert many["one_rank_us"] == one["us_median"] and many["of_one_rank"] == 1.0
        assert many["group"] == "LocalGroup" and many["presum"] is True
        assert "link_bytes" not in one and "\n" not in line(one)
    calls = [measure.random_call(replace(SMALL, num_experts=8, num_tokens=6), s) for s in (0, 1)]
    layer = replace(SMALL, num_tokens=3)
    counted = [links.counted_links(layer, np.split(call.topk_ids, 2)) for call in calls]
    mean = links.mean_links(counted[0] + counted[1])
    assert rows[-1]["link_bytes"] == {
        "pairs": round(mean.pairs),
        "once": round(mean.once),
        "presum": round(mean.presum),
        "tables": round(mean.tables),
        "moved": round(mean.presum + mean.tables),
    }
    json.dumps(rows, allow_nan=False)
    start, second = line(rows[-1]).splitlines()
    assert start.endswith("  small: jitmoe  weights in L2")
    assert second.lstrip().startswith("2 ranks, presum: 1.000 of one rank's time; MB that each")


def test_ranks_that_do_not_fit(bench_ranks, monkeypatch):
    def of_ranks(*_):
        raise MemoryError("2 ranks of 9 bytes do not fit on GPU 0")

    monkeypatch.setattr(methods, "of_ranks", of_ranks)
    points = Points({"small": SMALL}, (3,), num_ranks=2)
    one, many = session.run(points, Protocol(), H200, say=lambda text: None)
    assert one["status"] == "ok" and many["status"] == "failed" and many["of_one_rank"] is None
    assert "FAILED small: jitmoe: MemoryError: 2 ranks of 9 bytes do not fit" in line(many)


def test_plans_of_ranks_are_those_of_the_calls():
    points = Points(SHAPES, num_ranks=8)
    one, many = ranks.plans(points, H200, SHAPES["S1"], 512)
    assert (one.num_experts, one.num_ranks) == (256, 1)
    assert (many.num_experts, many.num_ranks, many.local_ranks, many.presum) == (32, 8, 8, False)


def test_weights_leave_room_for_workspaces(bench_ranks, cupy, monkeypatch):
    """Fewer sets where symmetric memory and workspaces of the largest point need the room."""
    spared = []
    sets = measure.expert_sets

    def expert_sets(layer, **options):
        spared.append(options["spare_bytes"] - measure.SPARE_BYTES)
        return sets(layer, **options)

    monkeypatch.setattr(measure, "expert_sets", expert_sets)
    for tokens in ((1,), (3, 1)):
        points = Points({"small": SMALL}, tokens, num_ranks=2)
        list(session.run(points, Protocol(), H200, say=lambda text: None))
    _, plan = ranks.plans(points, H200, SMALL, 3)
    assert spared[1] > spared[0]
    assert spared[1] > 2 * (plan.workspace_bytes(6) + plan.symmetric(3).num_bytes)


@pytest.mark.parametrize(
    "args, names, experts",
    [
        (["--shapes", "S1"], ["S1"], 32),
        (["--model", "deepseek-v3"], ["deepseek-v3, 4 ranks"], 64),
        (["--model", "deepseek-v3", "--ep", 8], ["deepseek-v3, 4 ranks of 8"], 32),
    ],
)
def test_command_of_ranks(args, names, experts, monkeypatch):
    measured = []
    monkeypatch.setattr("jitmoe.cli_bench.gpu_to_measure", lambda command: H200)
    monkeypatch.setattr(
        session, "run", lambda points, *_, **__: measured.append(points) or iter([])
    )
    assert invoke(*args, "--ranks", 4, "--presum").exit_code == 0
    (points,) = measured
    assert (points.num_ranks, points.presum) == (4, True) and list(points.layers) == names
    assert [layer.num_experts for layer in points.layers.values()] == [experts]
