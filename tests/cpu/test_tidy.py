"""The rules of the house: who imports whom, what stays small, what lives where, formatting."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jitmoe

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "jitmoe"
TEMPLATES = ROOT / "templates"
MODULES = sorted(PACKAGE.rglob("*.py"))

# The import rule: what a folder may import of jitmoe and of other packages. LATE ones only inside
# functions.
JITMOE_ARROWS = {
    "settings.py": set(),
    "plan": {"plan"},
    "jit": {"plan", "settings", "jit"},
    "run": {"plan", "jit", "settings", "run"},
    "emulate": {"plan", "jit", "settings", "mxfp4", "reference", "reference_biases", "emulate"},
    "tracing": {"plan", "jit", "tracing"},
    "peers": {"peers"},
    "bench": {
        *(
            "plan",
            "jit",
            "run",
            "fp8",
            "reference",
            "weights",
            "measure",
            "links",
            "peers",
            "bench",
        ),
        "tuned",
    },
    "tune": {*("plan", "jit", "run", "reference", "measure", "bench", "tracing", "tuned", "tune")},
    "integrations": {"integrations", "mxfp4", *jitmoe.__all__},
}
PACKAGES = {
    "settings.py": set(),
    "plan": set(),
    "jit": {"numpy", "jinja2", "cuda"},
    "run": {"numpy", "cupy", "cuda", "ml_dtypes", "torch", "mpi4py", "nccl"},
    "emulate": {"numpy", "ml_dtypes", "ziglang"},
    "tracing": {"numpy", "matplotlib"},
    "peers": {"torch", "triton", "transformers", "deep_gemm"},
    "bench": {"numpy", "cupy", "torch"},
    "tune": {"numpy", "cupy", "matplotlib", "tqdm"},
    "integrations": {"ml_dtypes", "sglang", "torch", "transformers", "vllm"},
}
TOP_PACKAGES = {"numpy", "ml_dtypes", "rich", "typer", "cupy", "torch", "cuda"}
LATE = {
    "cupy",
    "cuda",
    "torch",
    "transformers",
    "deep_gemm",
    "matplotlib",
    "mpi4py",
    "nccl",
    "tqdm",
}
LATE_FOLDER = "integrations"  # its modules are imported on demand, and may import such at their top
# Modules of a folder, each of which imports only those before it.
ORDER = {
    "plan": [
        "formats",
        "problem",
        "variant",
        "models",
        "gpu",
        "memory_map",
        "spread",
        "plan",
        "scales",
        "mega_moe_params",
        "mega_moe_scratch",
        "mega_moe_smem",
        "mega_moe_check",
        "mega_moe_constants",
        "mega_moe",
        "heuristics",
        "transfer",
        "dispatch",
        "combine",
        "hybrid",
        "hybrid_dispatch",
        "hybrid_combine",
        "transfer_pairs",
    ],
    "jit": ["params", "render", "nvrtc", "link", "cache", "store", "build"],
    "run": [
        "driver",
        "arrays",
        "families",
        "streams",
        "launch",
        "tma",
        "workspace",
        "ranks",
        "symmetric",
        "meeting",
        "process_group",
        "shared_memory",
        "file_handover",
        "shared_allocation",
        "peer_group",
        "nccl_library",
        "nccl_allocation",
        "nccl_rail",
        "nccl_group",
        "host_counts",
        "group_workspace",
    ],
    "peers": [
        "peer",
        "weights",
        "steps",
        "torch_grouped_mm",
        "torch_scaled_grouped_mm",
        "transformers_grouped_mm",
        "sgl_mega_moe",
    ],
    "bench": [
        "points",
        "work",
        "times",
        "ceilings",
        "methods",
        "trial",
        "rows",
        "setting",
        "ranks",
        "session",
        "conditions",
        "records",
    ],
    "tune": [
        "space",
        "trial",
        "store",
        "worker",
        "pairs",
        "on_gpu",
        "progress",
        "winners",
        "sweeping",
        "plot",
    ],
    "tracing": ["events", "summary", "perfetto", "plot", "trace"],
    "integrations": [
        "torch_memory",
        "torch_scales",
        "torch",
        "static_scales",
        "transformers_refusals",
        "transformers_gates",
        "transformers_weights",
        "transformers",
        "transformers_mxfp4",
        "expert_maps",
        "vllm",
        "sglang",
    ],
}
MODULE_LINES, ROOM_LINES, ROLE_LINES = 300, 80, 350
LONGER_MODULES: dict[str, int] = {}


def imports(path: Path) -> list[tuple[str, bool]]:
    """(dotted name, is inside a function) of every import that runs."""
    found = []

    def visit(node, inside):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import):
                found.extend((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: imports are absolute"
                found.extend((f"{child.module}.{alias.name}", inside) for alias in child.names)
            is_function = isinstance(child, (ast.FunctionDef, ast.Lambda))
            visit(child, inside or is_function)

    visit(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_point_one_way(path):
    place = relative(path).split("/")[0]
    folder = place if place in PACKAGES else "top"
    allowed_packages = PACKAGES.get(place, TOP_PACKAGES)
    for name, inside in imports(path):
        package, _, rest = name.partition(".")
        if package == "jitmoe":
            target = rest.split(".")[0]
            target = f"{target}.py" if f"{target}.py" in JITMOE_ARROWS else target
            assert folder == "top" or target.removesuffix(".py") in JITMOE_ARROWS[place], (
                f"{relative(path)} may not import {name}"
            )
            assert target != "cli" or relative(path) == "__main__.py", "nobody imports cli"
            assert target != LATE_FOLDER or place == target, f"nobody imports {name}"
        elif package not in sys.stdlib_module_names:
            assert package in allowed_packages, f"{relative(path)} may not import {name}"
            late = package in LATE and place != LATE_FOLDER
            assert inside or not late, f"{relative(path)} imports {name} at its top"


@pytest.mark.parametrize("folder", ORDER)
def test_modules_of_a_folder_import_in_order(folder):
    order = ORDER[folder]
    for path in (PACKAGE / folder).glob("*.py"):
        if path.stem == "__init__":
            continue
        assert path.stem in order, f"{relative(path)} has no place in the order of {folder}/"
        earlier = order[: order.index(path.stem)]
        for name, _ in imports(path):
            parts = name.split(".")
            if parts[:2] == ["jitmoe", folder]:
                assert parts[2] in earlier, f"{relative(path)} may not import {name}"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_modules_stay_small(path):
    ceiling = LONGER_MODULES.get(relative(path), MODULE_LINES)
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert num_lines <= ceiling, f"{num_lines} lines: split it or think it over"


def test_templates_stay_small():
    for ceiling, pattern in ((ROOM_LINES, "*.cu.jinja"), (ROLE_LINES, "roles/*")):
        for path in TEMPLATES.glob(pattern):
            assert len(path.read_text().splitlines()) <= ceiling, path


def test_every_module_says_what_it_is():
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        assert not text or ast.get_docstring(ast.parse(text)), path


def test_inline_ptx_lives_in_device():
    for path in TEMPLATES.rglob("*"):
        if path.is_file() and path.parent.name != "device":
            assert not re.search(r"\basm\b", path.read_text()), f"{path} has inline PTX"
    assert not any(re.search(r"\basm\b *(volatile)? *\(", p.read_text()) for p in MODULES)


def test_device_templates_include_nothing():
    for path in TEMPLATES.rglob("*"):
        if path.is_file() and path.parent.name != "emulated":
            assert "#include" not in path.read_text(), path


def test_only_rooms_constants_macros_and_wgmma_are_jinja():
    paths = {p.relative_to(TEMPLATES).as_posix() for p in TEMPLATES.rglob("*.jinja")}
    jinja = {path for path in paths if not path.startswith("emulated/")}
    rooms = {name for name in jinja if name.endswith(".cu.jinja")}
    wgmma = {f"device/wgmma{kind}.cuh.jinja" for kind in ("", "_bf16", "_registers")}
    assert jinja - rooms == {"constants.cuh.jinja", "macros.jinja"} | wgmma


def run(*command, **kwargs):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, **kwargs)


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff(command):
    pytest.importorskip("ruff", reason="ruff is in the dev extra")
    result = run(sys.executable, "-m", "ruff", *command, "--no-cache", ".")
    assert result.returncode == 0, result.stdout + result.stderr


def test_clang_format():
    pytest.importorskip("clang_format", reason="clang-format is in the dev extra")
    runtime = PACKAGE / "emulate" / "runtime"
    files = [str(path) for path in sorted([*TEMPLATES.rglob("*.cuh"), *runtime.iterdir()])]
    code = "import clang_format; clang_format.clang_format()"
    result = run(sys.executable, "-c", code, "--dry-run", "-Werror", *files)
    assert result.returncode == 0, result.stderr


def test_import_touches_nothing(tmp_path):
    """No CuPy, no CUDA bindings, no driver, no thread, no file."""
    code = (
        "import sys\n"
        "sys.modules['cupy'] = sys.modules['torch'] = sys.modules['cuda'] = None\n"
        "import jitmoe, threading\n"
        "assert threading.active_count() == 1\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libcuda' not in maps and 'libnvrtc' not in maps\n"
    )
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert not list(tmp_path.iterdir())


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_licence_and_extras():
    assert project()["license"] == "MIT"
    assert {"cu12", "cu13", "dev"} <= set(project()["optional-dependencies"])


def test_public_names_exist():
    assert jitmoe.__all__ == sorted(jitmoe.__all__)
    assert all(hasattr(jitmoe, name) for name in jitmoe.__all__)
