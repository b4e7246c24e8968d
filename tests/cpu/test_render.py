"""Plan -> text: what is printed, what is refused, and every plan of a grid of real shapes."""

import re
from dataclasses import dataclass, replace

import pytest
from tiny_plan import ROOM, TinyPlan, make_templates

from jitmoe.jit import render
from jitmoe.jit.render import RenderError, constant_name, constant_type
from jitmoe.plan import heuristics
from jitmoe.plan.gpu import gpu_spec
from jitmoe.plan.problem import MoeProblem

PLAN = TinyPlan("sm_90a")


@pytest.fixture
def room(tmp_path):
    """Renders TinyPlan with a room of the test's own; files can be added to `room.templates`."""
    templates = make_templates(tmp_path / "templates")

    def run(text, plan=PLAN, **kwargs):
        (templates / "tiny.cu.jinja").write_text(text)
        return render.render(plan, templates=templates, **kwargs)

    run.templates = templates
    return run


def test_prints_constants_structs_and_tables(room):
    text = room(ROOM)
    for line in (
        "constexpr u32 kNumRows = 2;",
        "constexpr i32 kBias = -3;",
        "constexpr u64 kBig = 5000000000;",
        "constexpr u32 kNumThreads = 256;",
        "constexpr u32 kAddWarpBegin = 4;",
        "constexpr u32 kAddWarpEnd = 8;",
        "constexpr u32 kAddRegs = 96;",
        "    alignas(1024) float rows[2][256];  // copy -> add",
        "    alignas(1) u8 flag[3];",
        "static_assert(OFFSET_OF(Smem, counts) == 2068,",
        "static_assert(sizeof(Smem) == 3072,",
        "    const float* x;  // [256]",
        "    float factor;",
        "static_assert(OFFSET_OF(Params, y) == 144,",
        "static_assert(sizeof(Params) == 192,",
        "//   add     4..7    96  write the row back",
        "//   rows                0  1,024      2  copy -> add",
    ):
        assert line in text, line
    assert text.startswith(f"// tiny for sm_90a, plan {render.plan_hash(PLAN)}\n")


def test_role_switch_sets_registers_once_a_group(room):
    text = room(ROOM)
    switch = text[text.index("const u32 warp") :]
    assert switch == (
        """const u32 warp = warp_idx();
    if (warp < kPauseWarpEnd) {  // warps 0..3
        set_registers<kCopyRegs>();
        if (warp < kCopyWarpEnd) {
            role_copy(p, smem);
        } else {
            role_pause(p, smem);
        }
    } else {  // warps 4..7
        set_registers<kAddRegs>();
        role_add(p, smem);
    }
}
"""
    )


@dataclass(frozen=True)
class ManyRoles(TinyPlan):
    num_roles: int = 1

    @property
    def roles(self):
        return tuple(
            replace(super(ManyRoles, self).roles[2], name=f"r{i}", num_regs=40 + 8 * i)
            for i in range(self.num_roles)
        )


def test_role_switch_of_one_and_of_three_groups(room):
    text = '{% import "macros.jinja" as m with context %}\n{{ m.role_switch(plan, "p") }}\n'
    one = room(text, ManyRoles("sm_90a", num_roles=1))
    assert " ".join(one.split()) == "{ // warps 0..3 set_registers<kR0Regs>(); role_r0(p); }"
    three = room(text, ManyRoles("sm_90a", num_roles=3))
    assert three.count("set_registers<") == 3
    assert re.findall(r"(?:if|else if|else)\b[^{]*{", three) == [
        "if (warp < kR0WarpEnd) {",
        "else if (warp < kR1WarpEnd) {",
        "else {",
    ]


def test_paste_is_verbatim_under_a_banner(room):
    (room.templates / "device/odd.cuh").write_text('#pragma once\nasm("{%0}" "{{ x }}");\n')
    assert room('{{ paste("device/odd.cuh") }}') == (
        '// ==== device/odd.cuh ====\nasm("{%0}" "{{ x }}");\n'
    )


def test_paste_renders_jinja_files(room):
    (room.templates / "device/n.cuh.jinja").write_text("{{ plan.num_rows }}\n")
    assert room('{{ paste("device/n.cuh.jinja") }}') == "// ==== device/n.cuh.jinja ====\n2\n"


def test_layer_replaces_device_and_nothing_else(room):
    (room.templates / "emulated").mkdir(exist_ok=True)
    (room.templates / "emulated/types.cuh").write_text("emulated\n")
    text = '{{ paste("device/types.cuh") }}{{ paste("roles/load.cuh") }}'
    lines = room(text, layer="emulated").splitlines()
    assert lines[:3] == [
        "// ==== emulated/types.cuh ====",
        "emulated",
        "// ==== roles/load.cuh ====",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{{ paste("device/types.cuh") }}' * 2, "device/types.cuh is pasted twice"),
        ('{{ paste("device/none.cuh") }}', "no file device/none.cuh"),
        ("{{ plan.num_wheels }}", "no attribute 'num_wheels'"),
        ("{{ wheels }}", "'wheels' is undefined"),
        ("{% if %}", "cannot be rendered"),
        ("int x;\n  # include <cuda.h>\n", "must include nothing, found '# include <cuda.h>'"),
    ],
)
def test_refuses(room, text, message):
    with pytest.raises(RenderError, match=re.escape(message)):
        room(text)


def test_a_missing_room_is_named(room):
    (room.templates / "tiny.cu.jinja").unlink()
    with pytest.raises(RenderError, match=r"no file tiny\.cu\.jinja"):
        render.render(PLAN, templates=room.templates)


def test_constant_names():
    assert constant_name("num_stages") == "kNumStages"
    assert constant_name("num_k_blocks_1") == "kNumKBlocks1"
    assert constant_name("load_warp_end") == "kLoadWarpEnd"


def test_constant_types():
    values = {0: "u32", 2**32 - 1: "u32", -1: "i32", -(2**31): "i32", 2**32: "u64"}
    values |= {-(2**31) - 1: "i64", 2**64 - 1: "u64"}
    assert {value: constant_type(value) for value in values} == values
    with pytest.raises(RenderError):
        constant_type(2**64)


def real_plans():
    for hidden, intermediate, experts, top_k in (
        (7168, 2048, 32, 8),
        (7168, 2048, 256, 8),
        (2048, 768, 128, 8),
        (2944, 2880, 32, 4),
        (4096, 192, 60, 4),
        (128, 16, 1, 1),
    ):
        problem = MoeProblem(1, hidden, intermediate, experts, top_k)
        yield from heuristics.plans_of_model(problem, gpu_spec("h200")).values()


@pytest.mark.parametrize(
    "plan", list(real_plans()), ids=lambda p: f"{p.bucket}-{render.plan_hash(p)}"
)
def test_real_plans(plan):
    text = render.render(plan)
    assert text == render.render(plan)
    assert "#include" not in text
    assert not re.search(r"{{ |{% |{%-|{# ", text)
    assert f"// {plan.name} for sm_90a" in text
    assert f"constexpr u32 kNumStages = {plan.num_stages};" in text
    for role in plan.roles:
        assert text.count(f"role_{role.name}(p, smem") == 1
    banners = re.findall(r"^// ==== (.*) ====$", text, re.MULTILINE)
    assert len(banners) == len(set(banners)) > 10
    assert text.isascii()


def test_different_plans_differ():
    plans = list(real_plans())
    assert len({render.render(plan) for plan in plans}) == len(plans)
