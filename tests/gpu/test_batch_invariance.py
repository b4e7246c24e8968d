"""batch_invariant=True on a GPU: a token's bits are those of any batch."""

import pytest
from cancelling import HIDDEN, cancel, repeat

from jitmoe import ExpertWeights, reference
from jitmoe.fp8 import quantize_tokens
from jitmoe.plan.formats import format_of
from jitmoe.plan.heuristics import choose
from jitmoe.run.driver import device_spec

EXPERTS, INTERMEDIATE, TOP_K = 64, 256, 2
# Decode in parts and whole, sorted together; prefill, but in MXFP4 decode for all.
BATCHES = (5, 60, 300, 3000, 5000)


def rows_of(call, num_tokens):
    return call._replace(
        tokens=reference.Tokens(*(part[:num_tokens] for part in call.tokens)),
        codes=call.codes[:num_tokens],
        scale=None if call.scale is None else call.scale[:num_tokens],
    )


@pytest.mark.parametrize("format", ["fp8_block", "bf16", "mxfp4_fp8", "mxfp4_bf16"])
@pytest.mark.parametrize("x_is_fp8", [True, False])
def test_random_layer(make_layer, make_call, workspace, format, x_is_fp8):
    if x_is_fp8 and not format_of(format).quantizes:
        pytest.skip(f"{format} takes tokens in bf16")
    whole = make_call(make_layer(EXPERTS, HIDDEN, INTERMEDIATE, format=format), 5000, TOP_K)
    alone = None
    for num_tokens in (1, *BATCHES):
        call = rows_of(whole, num_tokens)
        x = call.fp8 if x_is_fp8 else call.bf16
        y = call.run(x, workspace, batch_invariant=True)
        alone = y[:1].copy() if alone is None else alone
        assert (y[:1] == alone).all(), num_tokens


@pytest.mark.parametrize("format", ["fp8_block", "mxfp4_fp8"])
def test_sums_that_cancel(make_layer, make_call, workspace, format):
    """Every rounding shows; by default the first batch differs, for its tiles are in parts, and
    MXFP4's last, for it is prefill.
    """
    import cupy

    is_mx = format_of(format).is_mx
    layer = make_layer(EXPERTS, HIDDEN, INTERMEDIATE, format=format)
    codes = reference.Layer(*(part.copy() for part in layer.codes))
    cancel(codes.w13, codes.w13_scale, signs=0x88 if is_mx else 0x80)
    said = format if is_mx else None
    scales = codes.w13_scale, codes.w2_scale
    weights = ExpertWeights(codes.w13, codes.w2, *scales, format=said)
    layer = layer._replace(codes=codes, weights=weights)
    whole = make_call(layer, 5000, TOP_K)
    x_codes, scale = quantize_tokens(whole.tokens.x, cupy)
    repeat(x_codes, scale)
    whole = whole._replace(codes=x_codes, scale=scale)
    runs = {
        batch_invariant: [
            (call := rows_of(whole, n)).run(call.fp8, workspace, batch_invariant=batch_invariant)
            for n in (1, *BATCHES)
        ]
        for batch_invariant in (True, False)
    }
    alone = runs[True][0]
    assert (alone & 0x7FFF).any()
    for y in runs[True]:
        assert (y[:1] == alone).all()
    assert not (runs[False][0] & 0x7FFF).any(), "opposite parts"
    decode = choose(weights.problem(1, TOP_K), device_spec(0))
    kernel = {"plan": decode} if is_mx else {}
    assert (whole.run(whole.fp8, workspace, **kernel)[:1] == alone).all()
