"""Decode launches that overlap, whose blocks do not all run, whose tiles are in parts: emulated."""

from dataclasses import replace

import numpy as np
import pytest
from parts import with_small_parts

from jitmoe import fp8, reference
from jitmoe.emulate.compile import NoHostCompiler, build, compiler
from jitmoe.emulate.mega_moe import Call, EmulatedLayer
from jitmoe.jit.render import render
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import choose
from jitmoe.plan.problem import MoeProblem

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 256, 384, 8, 2


def make(
    sizes=(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K), unroll_k: int = 1, **options
) -> EmulatedLayer:
    hidden, intermediate, num_experts, top_k = sizes
    plan = replace(choose(MoeProblem(1, *sizes), GPUS["h200"]), unroll_k=unroll_k)
    layer = reference.random_layer(num_experts, hidden, intermediate, seed=1)
    return EmulatedLayer(plan, layer, **{"max_tokens": 40, "num_blocks": 6} | options)


def random_call(emulated: EmulatedLayer, num_tokens: int, seed: int, is_late: bool = False):
    """A Call of fp8 tokens, and its y by the oracle. Late inputs start as another call's."""
    plan = emulated.plan

    def draw(seed):
        tokens = reference.random_tokens(
            num_tokens, plan.hidden, plan.num_experts, plan.top_k, seed
        )
        codes, scale = fp8.quantize_tokens(tokens.x)
        return {
            "x": codes,
            "x_scale": scale,
            "topk_ids": tokens.topk_ids,
            "topk_weights": tokens.topk_weights,
        }

    final, before = draw(seed), draw(seed + 1000 if is_late else seed)
    y = reference.mega_moe(*final.values(), *emulated.layer, requantize=True)
    x = before["x"], before["x_scale"]
    return Call(x, before["topk_ids"], before["topk_weights"], final if is_late else {}), y


def assert_right(y, expected):
    assert reference.relative_error(y, expected) < 4e-3
    assert reference.worst_element(y, expected) < 0.06


@pytest.mark.parametrize(("checked", "seeds"), [(False, range(12)), (True, range(12, 15))])
def test_launches_overlap(checked, seeds):
    """Each sorts and loads while the one before ends; some are given stale ids until then."""
    emulated = make(checked=checked)
    for seed in seeds:
        drawn = [
            random_call(emulated, n, 10 * seed + i, is_late=(seed + i) % 3 == 0)
            for i, n in enumerate((16, 7, 33))
        ]
        ys = emulated.run_in_stream([call for call, _ in drawn], seed=seed)
        for y, (_, expected) in zip(ys, drawn, strict=True):
            assert_right(y, expected)


@pytest.mark.parametrize("num_tokens", [1, 30])
def test_one_block_at_a_time(num_tokens):
    """A launch comes to its end even if all blocks but one wait for that one to end."""
    emulated = make()
    text = render(emulated.plan, layer="emulated")
    word = "p.header + 40"  # of the control words that nobody uses
    starts, ends = "run_head(p, smem);", "add_expert_counts(p, smem);\n}"
    assert text.count(starts) == 1 and text.count(ends) == 1
    wait = f"while (block_idx() != 0 && load_acquire_gpu({word}) == 0) {{}}\n"
    done = f"if (block_idx() == 0 && lane_idx() == 0) store_release_gpu({word}, 1);\n"
    text = text.replace("const Head head = run_head", wait + "const Head head = run_head")
    text = text.replace(ends, ends[:-1] + done + "}")
    emulated.executable = build(text, emulated.plan.name, checked=False)
    for seed in range(4):
        emulated._control["header"].view(np.uint32)[40] = 0
        call, expected = random_call(emulated, num_tokens, seed)
        assert_right(emulated(*call[:3], seed=seed), expected)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(
    "sizes, unroll_k", [((4096, 128, 1, 1), 1), ((256, 4224, 2, 1), 1), ((4352, 256, 1, 1), 2)]
)
def test_tiles_in_parts(sizes, unroll_k, checked):
    """Few tiles and many blocks: parts along k are added in one order, whoever comes last. Parts of
    17 of 34 k-blocks have a rest where k-blocks are taken two by two.
    """
    emulated = make(sizes, unroll_k, max_tokens=64, num_blocks=9, checked=checked)
    for num_tokens in (1, 12, 64):
        call, expected = random_call(emulated, num_tokens, seed=num_tokens)
        ys = [emulated(*call[:3], seed=seed) for seed in range(1 if checked else 3)]
        assert_right(ys[0], expected)
        assert all((y == ys[0]).all() for y in ys)


def test_both_gemms_in_parts():
    """GEMM 2 of one expert begins while parts of the other's GEMM 1 wait to be added up."""
    emulated = make((256, 512, 2, 2), max_tokens=4, num_blocks=16)
    text = with_small_parts(render(emulated.plan, layer="emulated"))
    emulated.executable = build(text, emulated.plan.name, checked=False)
    for seed in range(20):
        drawn = [random_call(emulated, 1, 10 * seed + i) for i in range(4)]
        ys = emulated.run_in_stream([call for call, _ in drawn], seed=seed)
        for y, (_, expected) in zip(ys, drawn, strict=True):
            assert_right(y, expected)
