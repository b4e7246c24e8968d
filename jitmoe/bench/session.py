"""All points of a run: ours, then each peer, layer by layer, as rows. Needs a Hopper GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

from jitmoe import measure, peers, tuned
from jitmoe.bench import ceilings, methods, ranks
from jitmoe.bench.points import ZIPF_EXPONENT, Points, calls_per_graph
from jitmoe.bench.rows import Point
from jitmoe.bench.setting import Setting, free
from jitmoe.bench.trial import Protocol, Result, attempt, trial
from jitmoe.bench.work import mean_work, work_of
from jitmoe.jit.build import build_many
from jitmoe.plan.gpu import GpuSpec
from jitmoe.plan.problem import MoeProblem
from jitmoe.plan.variant import DEFAULT


@dataclass(frozen=True)
class _Prepared:
    """A point with its calls and what the first of them should give."""

    point: Point
    calls: list[measure.Call]
    references: measure.References


def run(
    points: Points,
    protocol: Protocol,
    gpu: GpuSpec,
    *,
    with_peers: bool = False,
    time_limit_s: float | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[dict]:
    """Rows as they are measured, without the conditions.

    with_peers    time those that are available too
    time_limit_s  start no further point after so long
    say           gets the sentences that are no rows
    """
    deadline = time.monotonic() + (time_limit_s or float("inf"))
    _build_in_background(points, gpu)
    found = _available(points, say) if with_peers else []
    roofs = {heat: ceilings.measure(heat) for heat in protocol.heats}
    for heat, roof in roofs.items():
        say(_ceilings_line(heat, roof))
    setting = Setting(points, protocol, gpu, found, roofs, deadline)
    layer_rows = _layer_rows if points.num_ranks == 1 else ranks.layer_rows
    num_left = len(points)
    for name, layer in points.layers.items():
        if not setting.is_over:
            num_left -= yield from layer_rows(name, layer, setting)
            free()
    if num_left:
        say(f"the time limit of {time_limit_s:g} s was reached: {num_left} points are left out")


def _layer_rows(name: str, layer: MoeProblem, setting: Setting):
    """Yields rows, returns how many points they are of."""
    num_points = 0
    weights, experts = measure.weight_sets(layer, variant=setting.points.variant)
    prepared = []
    for num_tokens in setting.points.tokens:
        if setting.is_over:
            break
        sized = replace(layer, num_tokens=num_tokens)
        ready = _prepare(name, sized, len(weights), experts, setting)
        method = methods.of_jitmoe(sized, ready.calls, weights)
        ours = methods.JITMOE[layer.format]
        result = trial(method, ours, ready.references, setting.protocol)
        yield from setting.rows(ready.point, ours, result)
        num_points += 1
        if setting.peers:
            prepared.append(ready)
    for module in setting.peers:
        if layer.format not in module.PEER.formats:
            continue
        for ready, result in _peer_results(module, prepared, weights, setting):
            yield from setting.rows(ready.point, module.PEER, result)
        free()
    return num_points


def _build_in_background(points: Points, gpu: GpuSpec) -> None:
    """Kernels of all layers, while weights and ceilings are made; calls wait for their own."""
    fields = points.variant.plan_fields
    layers = points.layers.values()
    if points.num_ranks == 1:
        plans = [plan for x in layers for plan in tuned.plans_of_model(x, gpu, **fields)]
    else:
        sized = [(layer, tokens) for layer in layers for tokens in points.tokens]
        plans = dict.fromkeys(p for one in sized for p in ranks.plans(points, gpu, *one))
    threading.Thread(target=lambda: list(build_many(plans)), daemon=True).start()


def _available(points: Points, say: Callable[[str], None]) -> list[ModuleType]:
    variant = points.variant
    if variant != DEFAULT:
        order = f", {variant.gate_up}" * (variant.gate_up != DEFAULT.gate_up)
        own = variant.activation.kind + order + ", with biases" * variant.has_bias
        say(f"peers left out: they compute swiglu, gate first, these layers {own}")
        return []
    found = []
    for module in peers.peers():
        reason = module.available()
        if reason is None:
            found.append(module)
        else:
            say(f"peer left out: {module.PEER.name}: {reason}")
    return found


def _ceilings_line(heat: str, roof: ceilings.Ceilings) -> str:
    gemm = (
        f"not measured: {roof.skipped}"
        if roof.skipped
        else f"{roof.fp8_tflops:,.0f} TFLOP/s, {roof.fp8_fast_tflops:,.0f} with fast accumulation, "
        f"in bf16 {roof.bf16_tflops:,.0f}"
    )
    return (
        f"ceilings of this run, {heat}: read {roof.read_gbps:,.0f} GB/s, copy "
        f"{roof.copy_gbps:,.0f} GB/s, FP8 GEMM {gemm}"
    )


def _prepare(name: str, layer: MoeProblem, num_sets: int, experts, setting: Setting) -> _Prepared:
    import cupy

    routing, variant = setting.points.routing, setting.points.variant
    calls = [
        measure.random_call(
            layer, seed, routing=routing, zipf_exponent=ZIPF_EXPONENT, variant=variant
        )
        for seed in range(calls_per_graph(layer.num_tokens))
    ]
    work = mean_work(work_of(layer, cupy.asnumpy(call.topk_ids)) for call in calls)
    is_cold = work.weight_bytes * min(num_sets, len(calls)) > setting.gpu.l2_bytes
    source = tuned.choose(layer, setting.gpu, **variant.plan_fields).source
    kind = variant.activation.kind
    point = Point(name, layer, routing, work, num_sets, is_cold, kind, plan_from=source)
    return _Prepared(point, calls, measure.references(calls[0], experts))


def _peer_results(module: ModuleType, prepared: list[_Prepared], weights, setting: Setting):
    """(point, result) of a peer for each point; its failure is a result."""
    own_weights, failure = attempt(partial(methods.prepare_peer, module, weights))
    for ready in prepared:
        if setting.is_over:
            yield ready, Result("skipped", "the time limit was reached")
        elif failure:
            yield ready, failure
        else:
            result, failed = attempt(partial(_peer_trial, module, ready, own_weights, setting))
            yield ready, result or failed


def _peer_trial(module: ModuleType, ready: _Prepared, own_weights, setting: Setting) -> Result:
    method = methods.of_peer(ready.point.layer, ready.calls, own_weights)
    return trial(method, module.PEER, ready.references, setting.protocol)
