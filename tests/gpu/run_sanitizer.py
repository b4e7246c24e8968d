"""Small layers of both buckets for compute-sanitizer; not a test of its own.

compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \\
    python tests/gpu/run_sanitizer.py
and --tool synccheck, and --tool racecheck with the argument `racecheck`; with `transfers`, dispatch
and combine alone. (cuda-bindings asks the driver for functions it may lack, which memcheck would
report.) Exits with 1 if a result is wrong.

Racecheck takes an mbarrier arrival for the arriving lane's alone: it reports the copies of a stage
that is used again, behind __syncwarp and one lane's arrival for its warp. So it gets no tile of
more k-blocks than the ring has stages. The emulator's checker knows that order.
"""

import dataclasses
import sys

import cupy
import numpy as np

from jitmoe import (
    ExpertWeights,
    GroupWorkspace,
    LocalGroup,
    Workspace,
    combine,
    dispatch,
    mega_moe,
    reference,
)
from jitmoe.fp8 import decode_e4m3, encode_bf16, quantize_tokens
from jitmoe.plan import heuristics
from jitmoe.plan.formats import format_of
from jitmoe.plan.problem import MAX_TOKENS, MoeProblem
from jitmoe.run.driver import device_spec

# experts, hidden, intermediate, top_k, tokens, bucket, pairs a CTA sorts alone, x is bf16, and the
# format unless it is fp8_block. With 204 tokens some of two experts has up to 13 rows beyond a full
# tile.
CASES = [
    (4, 256, 128, 2, 5, "decode", 2048, True),
    (6, 384, 208, 3, 90, "decode", 512, False),
    (4, 256, 128, 2, 90, "decode", 2, True),
    (4, 256, 128, 2, 150, "prefill", 0, False),
    (6, 384, 208, 3, 200, "prefill", 0, True),
    (2, 384, 208, 2, 204, "prefill", 0, False),
    (4, 384, 96, 2, 70, "decode", 2048, False, "mxfp4_fp8"),
    (4, 384, 96, 2, 150, "prefill", 0, True, "mxfp4_fp8"),
    (2, 384, 224, 2, 204, "prefill", 0, False, "mxfp4_fp8"),
    (4, 352, 96, 2, 70, "decode", 64, True, "mxfp4_bf16"),
    (2, 128, 96, 2, 204, "prefill", 0, True, "mxfp4_bf16"),
    (4, 176, 80, 2, 70, "decode", 2048, True, "bf16"),
    (2, 176, 80, 2, 204, "prefill", 0, True, "bf16"),
    (2, 384, 208, 2, 204, "prefill", 0, False, "fp8_channel"),
]
TURNS_THE_RING = (1, 4096, 128, 1, 8, "decode", 2048, False)  # and tiles in parts


def run(
    experts,
    hidden,
    intermediate,
    top_k,
    num_tokens,
    bucket,
    local_pairs,
    is_bf16,
    format="fp8_block",
) -> float:
    """Relative error of two launches in a row."""
    sized = MoeProblem(
        1 if bucket == "decode" else MAX_TOKENS, hidden, intermediate, experts, top_k, format
    )
    plan = heuristics.choose(sized, device_spec(cupy.cuda.Device().id))
    plan = dataclasses.replace(plan, num_local_pairs=local_pairs)
    layer = reference.random_layer(experts, hidden, intermediate, seed=1, format=format)
    device = [None if part is None else cupy.asarray(part) for part in layer]
    said = format if format_of(format).is_mx else None
    weights = ExpertWeights(device[0], device[2], device[1], device[3], format=said)
    tokens = reference.random_tokens(num_tokens, hidden, experts, top_k, 2, "unused")
    codes, scale = quantize_tokens(tokens.x, np)
    x = encode_bf16(tokens.x, np) if is_bf16 else (codes, scale)
    x = cupy.asarray(x) if is_bf16 else tuple(map(cupy.asarray, x))
    ids, router = cupy.asarray(tokens.topk_ids), cupy.asarray(tokens.topk_weights)
    out = cupy.empty((num_tokens, hidden), cupy.uint16)
    workspace = Workspace(timeout_s=600)
    for _ in range(2):
        mega_moe(x, ids, router, weights, out=out, workspace=workspace, plan=plan)
        cupy.cuda.Device().synchronize()  # launches that overlap are no matter of these tools
    workspace.check()
    if not format_of(format).quantizes:
        codes, scale = tokens.x, None
    inputs = codes, scale, *tokens[1:], *layer
    ref = reference.mega_moe(*inputs, requantize=True, format=format)
    return reference.relative_error(out.get(), ref)


# experts and tokens of each of 2 ranks, hidden, intermediate, top_k, presum
RANK_CASES = [
    (3, (5, 20), 256, 128, 2, True),
    (3, (20, 0), 256, 128, 2, False),
    (2, (90, 150), 384, 208, 3, True),
    (2, (150, 90), 256, 128, 2, False),
]


def run_ranks(experts, counts, hidden, intermediate, top_k, presum) -> float:
    """Largest relative error of the ranks in the second of two launches."""
    layer = reference.random_layer(2 * experts, hidden, intermediate, seed=1)
    shares = []
    for rank in range(2):
        own = [cupy.asarray(part[rank * experts :][:experts]) for part in layer]
        shares.append(ExpertWeights(own[0], own[2], own[1], own[3]))
    group = LocalGroup(2)
    workspace = GroupWorkspace(group, timeout_s=600)
    sizes = hidden, 2 * experts, top_k
    tokens = [reference.random_tokens(n, *sizes, 2 + r) for r, n in enumerate(counts)]
    x = [cupy.asarray(encode_bf16(each.x, np)) for each in tokens]
    ids = [cupy.asarray(each.topk_ids) for each in tokens]
    router = [cupy.asarray(each.topk_weights) for each in tokens]
    options = {"group": group, "workspace": workspace, "presum": presum}
    for _ in range(2):
        ys = mega_moe(x, ids, router, shares, **options)
        cupy.cuda.Device().synchronize()
    workspace.check()
    errors = [0.0]
    for y, each in zip(ys, tokens, strict=True):
        if len(each.x):
            given = *quantize_tokens(each.x, np), each.topk_ids, each.topk_weights
            ref = reference.mega_moe(*given, *layer, requantize=True)
            errors.append(reference.relative_error(y.get().view(np.uint16), ref))
    return max(errors)


# layout, format, tokens of each rank, and nodes
TRANSFER_CASES = [
    ("tokens", "bf16", (9, 0, 40)),
    ("experts", "fp8", (30, 5, 1)),
    ("tokens", "bf16", (9, 0, 40), 3),
    ("experts", "fp8", (30, 5, 1, 12), 2),
]


def run_transfer(layout, format, counts, nodes=1) -> float:
    """Relative error of tokens that go to their experts and come back as they are, twice, and once
    more the same ways.
    """
    hidden, num_experts, top_k = 512, 12, 3
    tokens = [reference.random_tokens(n, hidden, num_experts, top_k, n) for n in counts]
    x = [cupy.asarray(encode_bf16(each.x, np)) for each in tokens]
    ids = [cupy.asarray(each.topk_ids) for each in tokens]
    router = [cupy.asarray(each.topk_weights) for each in tokens]
    with LocalGroup(len(counts), nodes=nodes) as group:
        shared = {"group": group, "workspace": GroupWorkspace(group, timeout_s=600)}
        options = {"num_experts": num_experts, "layout": layout, "format": format}
        for turn in range(3):
            if turn < 2:
                found = dispatch(x, ids, router, **options, **shared)
                handles = [own.handle for own in found]
            else:
                found = dispatch(x, handle=handles, **shared)
            rows = [own.x for own in found]
            if format == "fp8":
                rows = [_decoded(*pair) for pair in rows]
            ys = combine(rows, handles, bias=x, **shared)
            cupy.cuda.Device().synchronize()
        shared["workspace"].check()
    errors = [0.0]
    for y, each in zip(ys, tokens, strict=True):
        if layout == "experts":
            factor = each.topk_weights.sum(1)
        else:
            local = num_experts // len(counts)
            factor = np.array([len({e // local for e in row}) for row in each.topk_ids.tolist()])
        if len(each.x):
            wanted = each.x * (1 + factor.reshape(-1, 1))
            errors.append(reference.relative_error(y.get().view(np.uint16), wanted))
    return max(errors) / 5  # e4m3 has 3 bits behind the point


def _decoded(codes, scale):
    """Rows as bf16; those that no token filled are zeros."""
    values = decode_e4m3(codes.get(), np) * scale.get().repeat(128, 1)
    return cupy.asarray(encode_bf16(np.nan_to_num(values), np))


if __name__ == "__main__":
    errors = []
    if "transfers" not in sys.argv:
        more = [] if "racecheck" in sys.argv else [TURNS_THE_RING]
        errors += [run(*case) for case in CASES + more] + [run_ranks(*case) for case in RANK_CASES]
    errors += [run_transfer(*case) for case in TRANSFER_CASES]
    print("relative errors", *(f"{error:.1e}" for error in errors))
    sys.exit(max(errors) > 1e-2)
