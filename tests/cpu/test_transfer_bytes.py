"""Bytes that dispatch and combine move, on tokens that are counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from jitmoe.bench import transfer_bytes
from jitmoe.bench.transfer_bytes import Bytes, Traffic
from jitmoe.plan.transfer_pairs import dispatch_plan

# 4 ranks of 2 experts; on two nodes ranks 0 and 1 have experts 0 to 3, ranks 2 and 3 the others.
SHAPE = "sm_90a", 256, 2, 3, 4
IDS = [
    [[0, 1, -1], [-1, -1, -1]],  # both here
    [[0, 3, 4], [8, -1, -1]],  # ranks 0 and 1, and 2; and none, for 8 is no expert
    [],
    [[4, 5, 7]],  # ranks 2 and 3, this node's
]
TOKENS = Traffic(tokens=5, rows=6, sums=6, node_sums=4, sent=1)
EXPERTS = replace(TOKENS, rows=8)


def counted(plan, ids=IDS, **options):
    arrays = [np.array(own, np.int64).reshape(-1, 3) for own in ids]
    return transfer_bytes.count(plan, arrays, **options)


@pytest.mark.parametrize("by_expert, wanted", [(False, TOKENS), (True, EXPERTS)])
def test_counts(by_expert, wanted):
    plan = dispatch_plan(*SHAPE, expert_rows=by_expert, num_nodes=2)
    assert counted(plan) == wanted
    moved = [[[i + 16 for i in token] for token in own] for own in IDS]
    assert counted(plan, moved, first_expert=16) == wanted
    assert counted(plan, moved) == Traffic(5, 0, 0, 0, 0)
    # A rank is a node: 0 keeps its token, 1 sends to 0 and 2, 3 to 2.
    alone = counted(replace(plan, num_nodes=4))
    assert alone == replace(wanted, node_sums=6, sent=3)
    one = counted(dispatch_plan(*SHAPE, expert_rows=by_expert))
    assert (one.rows, one.sums, one.sent) == (wanted.rows, wanted.sums, 0)


@pytest.mark.parametrize("format, row", [("bf16", 512), ("fp8", 256 + 8)])
def test_bytes(format, row):
    plan = dispatch_plan(*SHAPE, format=format, expert_rows=True)
    plain = Bytes(512 * 5, row * 8), Bytes(512 * (8 + 6), 512 * (6 + 5))

    def moved(plan):
        return [of(plan, EXPERTS) for of in (transfer_bytes.dispatch, transfer_bytes.combine)]

    assert moved(plan) == [*plain]
    hybrid = dispatch_plan(*SHAPE, format=format, expert_rows=True, num_nodes=2)
    assert transfer_bytes.plain_dispatch(hybrid, EXPERTS) == plain[0]
    assert transfer_bytes.plain_combine(hybrid, EXPERTS) == plain[1]
    message = -(-(row + 4 * (1 + 4 * 3)) // 128) * 128  # and its words, for 3 slots
    assert moved(hybrid) == [
        Bytes(512 * 5 + message + row * 4, row * 5 + message + row * 8, message),
        Bytes(512 * (8 + 6 + 1 + 4), 512 * (6 + 4 + 1 + 5), 512),
    ]
    assert plain[1].moved == 512 * 25
