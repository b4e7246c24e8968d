"""A small kernel from plan to cubin with the real compiler, and what is said when that fails."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_plan import ROOM, TinyPlan, make_templates

from jitmoe import settings
from jitmoe.jit import build, nvrtc, render
from jitmoe.jit.nvrtc import CompileError, ToolchainError

ROOT = Path(__file__).resolve().parents[2]
PLAN = TinyPlan("sm_90a")


@pytest.fixture
def templates(tmp_path, monkeypatch):
    directory = make_templates(tmp_path / "templates")
    monkeypatch.setattr(render, "templates_dir", lambda: directory)
    monkeypatch.setattr(build, "_memo", {})
    monkeypatch.setenv("JITMOE_CACHE_DIR", str(tmp_path / "cache"))
    return directory


def test_plan_to_cubin(templates):
    built = build.build(PLAN)
    assert built.origin == "compiled"
    assert built.cubin.data[:4] == b"\x7fELF"
    assert b"tiny" in built.cubin.data
    assert built.cubin.resources.num_regs > 0
    assert built.cubin.seconds <= built.seconds
    assert built.path.is_dir()


def test_version_is_complete():
    assert nvrtc.version().count(".") == 2
    assert all(part.isdigit() for part in nvrtc.version().split("."))


def test_options_follow_the_setting(monkeypatch):
    plain = nvrtc.options()
    assert plain == nvrtc.options()
    monkeypatch.setenv("JITMOE_LINEINFO", "1")
    assert nvrtc.options() != plain
    text = 'extern "C" __global__ void f(int* p) { p[0] = 1; }'
    assert b".debug_line" in nvrtc.compile(text, "sm_90a", "f.cu").data


def test_an_error_carries_log_and_source(templates, monkeypatch, tmp_path):
    monkeypatch.setenv("JITMOE_DUMP", str(tmp_path / "dump"))
    (templates / "tiny.cu.jinja").write_text(ROOM + "int broken = ;\n")
    with pytest.raises(CompileError) as caught:
        build.build(PLAN)
    error = caught.value
    assert "error: expected an expression" in error.log
    source = Path(error.source)
    assert source.parent == tmp_path / "dump"
    assert "int broken" in source.read_text()
    assert "expected an expression" in source.with_suffix(".log").read_text()
    assert str(source) in str(error)
    assert f"{source.name}(" in error.log  # the compiler names the file that was kept
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.log, copy.source) == (str(error), error.log, error.source)
    assert not list((tmp_path / "cache").glob("tiny-*"))
    with pytest.raises(CompileError):  # and is not taken for built
        build.build(PLAN)


def test_a_failed_source_is_kept_without_a_dump_directory(templates, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (templates / "tiny.cu.jinja").write_text(ROOM + "int broken = ;\n")
    with pytest.raises(CompileError) as caught:
        build.build(PLAN)
    assert "int broken" in Path(caught.value.source).read_text()


def test_a_kernel_that_spills_is_refused_and_not_cached(templates, tmp_path, monkeypatch):
    monkeypatch.setenv("JITMOE_DUMP", str(tmp_path / "dump"))
    loop = (
        "float v[64];\n#pragma unroll\n"
        "for (int i = 0; i < 64; ++i) v[i] = p.x[thread_idx() + i * 256];\n"
        "for (int k = 0; k < p.x[0]; ++k) {\n#pragma unroll\n"
        "for (int i = 0; i < 64; ++i) v[i] = v[i] * v[(i * 7 + 1) % 64] + k; }\n"
        "#pragma unroll\nfor (int i = 0; i < 64; ++i) p.y[thread_idx() + i * 256] = v[i];\n"
    )
    room = ROOM.replace("const u32 warp =", loop + "const u32 warp =")
    (templates / "tiny.cu.jinja").write_text(room.replace("(kNumThreads, 1)", "(kNumThreads, 8)"))
    with pytest.raises(CompileError, match="registers spill") as caught:
        build.build(PLAN)
    assert Path(caught.value.source).is_file()
    assert not list((tmp_path / "cache").glob("tiny-*"))


def test_dump_has_source_cubin_and_log_also_on_a_hit(templates, monkeypatch, tmp_path):
    built = build.build(PLAN)
    for origin in ("memory", "disk"):
        dump = tmp_path / origin
        monkeypatch.setenv("JITMOE_DUMP", str(dump))
        if origin == "disk":
            build._memo.clear()
        assert build.build(PLAN).origin == origin
        names = {path.name for path in dump.iterdir()}
        assert names == {f"{built.name}.cu", f"{built.name}.cubin", f"{built.name}.log"}
        assert (dump / f"{built.name}.cu").read_text() == built.source
        assert (dump / f"{built.name}.cubin").read_bytes() == built.cubin.data


def test_a_dump_that_cannot_be_written_is_only_a_warning(templates, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JITMOE_DUMP", str(tmp_path / "file"))
    assert build.build(PLAN).origin == "compiled"
    assert "JITMOE_DUMP" in caplog.text


def test_print_plan(templates, monkeypatch, capsys):
    monkeypatch.setenv("JITMOE_PRINT_PLAN", "1")
    build.build(PLAN)
    build.build(PLAN)
    printed = capsys.readouterr().err
    assert printed.startswith("tiny for sm_90a, plan ")
    assert printed.count("write the row back") == 1


def test_missing_packages_are_named(monkeypatch):
    nvrtc.version.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ToolchainError, match=r"install jitmoe\[cu12\] or jitmoe\[cu13\]"):
        nvrtc.compile("", "sm_90a", "f.cu")
    nvrtc.version.cache_clear()


def test_a_missing_library_is_named(monkeypatch):
    from cuda.bindings import nvrtc as bindings

    def fail(*args):
        raise RuntimeError("Failure finding libnvrtc.so")

    nvrtc.version.cache_clear()
    monkeypatch.setattr(bindings, "nvrtcCreateProgram", fail)
    with pytest.raises(ToolchainError, match=r"NVRTC was not found; install.*libnvrtc\.so"):
        nvrtc.compile("", "sm_90a", "f.cu")
    nvrtc.version.cache_clear()


FIRST_USE_ON_THREADS = """
import sys
from pathlib import Path
from tiny_plan import TinyPlan
from jitmoe.jit import build, render
render.templates_dir = lambda: Path(sys.argv[1])
plans = [TinyPlan("sm_90a", num_rows=n) for n in range(1, 7)]
outcomes = list(build.build_many(plans, jobs=6))
assert {o.plan for o in outcomes} == set(plans)
print([str(o.error) for o in outcomes if o.error])
"""


def test_first_use_on_many_threads(templates):
    """In a process of its own: imports of the CUDA packages must not race."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    result = subprocess.run(
        [sys.executable, "-c", FIRST_USE_ON_THREADS, str(templates)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_build_many_reports_failures_as_outcomes(templates):
    room = ROOM.replace("const u32 warp =", "static_assert(kNumRows != 3); const u32 warp =")
    (templates / "tiny.cu.jinja").write_text(room)
    plans = [TinyPlan("sm_90a", num_rows=n) for n in (2, 3, 4)]
    outcomes = {o.plan.num_rows: o for o in build.build_many(plans, jobs=2)}
    assert {n: o.error is None for n, o in outcomes.items()} == {2: True, 3: False, 4: True}
    assert isinstance(outcomes[3].error, CompileError)
    assert list(build.build_many([])) == []


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("JITMOE_LINEINFO", None, False),
        ("JITMOE_LINEINFO", "", False),
        ("JITMOE_LINEINFO", "0", False),
        ("JITMOE_LINEINFO", "True", True),
        ("JITMOE_TIMEOUT_S", None, 30.0),
        ("JITMOE_TIMEOUT_S", "2.5", 2.5),
        ("JITMOE_DUMP", " /x ", "/x"),
    ],
)
def test_settings(monkeypatch, name, text, value):
    monkeypatch.delenv(name, raising=False)
    if text is not None:
        monkeypatch.setenv(name, text)
    assert settings.get(name) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [("JITMOE_LINEINFO", "maybe"), ("JITMOE_TIMEOUT_S", "soon"), ("JITMOE_TIMEOUT_S", "-1")]
    + [("JITMOE_TIMEOUT_S", "nan"), ("JITMOE_TIMEOUT_S", "inf")],
)
def test_bad_settings_are_named(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name} must be .*got '{text}'"):
        settings.get(name)


def test_misspelt_settings_are_found(monkeypatch):
    monkeypatch.setenv("JITMOE_CACHEDIR", "/x")
    assert settings.unknown() == ["JITMOE_CACHEDIR"]
    with pytest.raises(KeyError):
        settings.get("JITMOE_CACHEDIR")
