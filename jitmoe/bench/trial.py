"""One method at one point: checked against the oracle, and timed if it is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jitmoe import measure
from jitmoe.bench import times
from jitmoe.bench.methods import Method
from jitmoe.fp8 import decode_bf16
from jitmoe.peers.peer import Peer


@dataclass(frozen=True)
class Protocol:
    """heats: of `times.HEATS`; num_bursts: samples of each median."""

    heats: tuple[str, ...] = ("cool",)
    num_bursts: int = 10


@dataclass(frozen=True)
class Result:
    """What became of a method at a point.

    status   ok: timed; wrong: off against the oracle, not timed; failed or skipped: not run
    reason   why not ok
    errors   of the first call
    times    by heat
    host_us  of an eager call
    """

    status: str
    reason: str | None = None
    errors: measure.Errors | None = None
    times: dict[str, times.Times] | None = None
    host_us: float | None = None


def trial(method: Method, peer: Peer, references: measure.References, protocol: Protocol) -> Result:
    """Run the calls eagerly, then as a graph into poisoned outputs.

    references  of the first call
    """
    y = method.call(0)
    method.stream.synchronize()
    method.check()
    errors = measure.errors(method.bits(y), references)
    if not errors.exact <= peer.max_error:
        return Result("wrong", f"allowed is a relative error of {peer.max_error:g}", errors)
    for i in range(1, method.num_calls):
        method.call(i)
    host_us = times.host_us(lambda: method.call(0), method.stream)
    launch, ys = method.capture()
    ys = [method.bits(y) for y in ys]
    poison(ys)
    measured = {
        heat: times.measure(launch, method.stream, method.num_calls, heat, protocol.num_bursts)
        for heat in protocol.heats
    }
    method.check()
    if is_poisoned(ys):
        return Result("wrong", "the graph left NaN in an output", errors)
    replayed = measure.errors(ys[0], references)
    if not replayed.exact <= peer.max_error:
        return Result("wrong", "the graph gives another result than an eager call", replayed)
    return Result("ok", None, errors, measured, host_us)


def attempt(function: Callable):
    """(what it returns, None) or (None, the result of a method that failed)."""
    try:
        return function(), None
    except Exception as error:  # whatever a method raises must not end the run
        text = str(error).strip().splitlines()
        return None, Result("failed", f"{type(error).__name__}: {text[0] if text else ''}")


def poison(ys) -> None:
    """Fill outputs, bf16 bits, with NaN."""
    import cupy

    for y in ys:
        y.fill(0xFFFF)
    cupy.cuda.Device().synchronize()


def is_poisoned(ys) -> bool:
    """Whether outputs have anything but finite numbers."""
    import cupy

    return not all(bool(cupy.isfinite(decode_bf16(y, cupy)).all()) for y in ys)
