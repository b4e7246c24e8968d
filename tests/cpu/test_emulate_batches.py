"""batch_invariant=True: a token's bits do not depend on the batch, in both buckets, emulated."""

import numpy as np
import pytest
from cancelling import HIDDEN, cancel, repeat

from jitmoe import ExpertWeights, fp8, mega_moe, reference
from jitmoe.emulate.compile import NoHostCompiler, compiler

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

EXPERTS, INTERMEDIATE = 3, 32  # a tile of GEMM 1 for each, and 4 emulated blocks


@pytest.fixture(scope="module")
def weights():
    layer = reference.random_layer(EXPERTS, HIDDEN, INTERMEDIATE, seed=1)
    cancel(layer.w13, layer.w13_scale)
    return ExpertWeights(layer.w13, layer.w2, layer.w13_scale, layer.w2_scale)


@pytest.fixture(scope="module")
def tokens():
    """Of decode and, all of them, of prefill."""
    tokens = reference.random_tokens(220, HIDDEN, EXPERTS, 1, seed=2)
    codes, scale = fp8.quantize_tokens(tokens.x)
    repeat(codes, scale)
    return codes, scale, tokens.topk_ids, tokens.topk_weights


def run(weights, tokens, rows, **arguments):
    codes, scale, ids, router = (np.ascontiguousarray(part[rows]) for part in tokens)
    return mega_moe((codes, scale), ids, router, weights, backend="emulated", **arguments)


def test_bits_of_a_token_are_those_of_any_batch(weights, tokens):
    alone = run(weights, tokens, slice(0, 1), batch_invariant=True)
    assert alone.any(), "rounding errors"
    for num_tokens in (12, 220):
        batch = run(weights, tokens, slice(0, num_tokens), batch_invariant=True)
        assert np.array_equal(batch[:1], alone)


def test_the_default_cuts_sums_where_tiles_are_few(weights, tokens):
    """Else the test above would show nothing."""
    assert not run(weights, tokens, slice(0, 1)).any()
    assert run(weights, tokens, slice(0, 12))[:1].any()
