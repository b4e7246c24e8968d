"""The package as a user gets it: wheel and sdist hold the templates, and render from them."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from jitmoe.jit.render import render
from jitmoe.plan.gpu import gpu_spec
from jitmoe.plan.heuristics import choose
from jitmoe.plan.problem import MoeProblem

ROOT = Path(__file__).resolve().parents[2]
RENDER = """
import sys
from pathlib import Path
import jitmoe
from jitmoe.jit.render import render, templates_dir
from jitmoe.plan.gpu import gpu_spec
from jitmoe.plan.heuristics import choose
from jitmoe.plan.problem import MoeProblem
assert Path(jitmoe.__file__).is_relative_to(sys.argv[1]), jitmoe.__file__
assert templates_dir().is_relative_to(sys.argv[1]), templates_dir()
sys.stdout.write(render(choose(MoeProblem(8, 1024, 320, 16, 4), gpu_spec("h200"))))
"""


def run(*command, cwd=ROOT, **environment):
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "HOME": str(cwd), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution and the wheel made from it."""
    pytest.importorskip("build", reason="build is in the dev extra")
    pytest.importorskip("hatchling", reason="hatchling is in the dev extra")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def expected():
    return render(choose(MoeProblem(8, 1024, 320, 16, 4), gpu_spec("h200")))


def templates():
    root = ROOT / "templates"
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_wheel_holds_the_package_and_nothing_else(built):
    names = zipfile.ZipFile(built[1]).namelist()
    prefix = "jitmoe/templates/"
    assert {name.removeprefix(prefix) for name in names if name.startswith(prefix)} == templates()
    assert {"jitmoe/plan/models.toml", "jitmoe/tuned.json"} <= set(names)
    tops = {name.split("/")[0].split("-")[0] for name in names}
    assert tops == {"jitmoe"}


def test_installed_wheel_renders(built, tmp_path):
    """In an environment of its own; dependencies are those of this interpreter, so no network."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=True, symlinks=True)
    python = home / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", "-q", built[1], cwd=tmp_path)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    own = [path for path in sys.path if Path(path).name == "site-packages"]
    # After the environment's own packages, so that its jitmoe is found first.
    Path(site, "dependencies.pth").write_text("".join(f"{path}\n" for path in own))
    assert run(python, "-c", RENDER, home.resolve(), cwd=tmp_path) == expected()
    assert "deepseek-v3" in run(
        home / "bin" / "jitmoe", "plan", "--model", "deepseek-v3", cwd=tmp_path
    )
    assert "jitmoe 0" in run(home / "bin" / "jitmoe", "--version", cwd=tmp_path)


def test_unpacked_source_renders(built, tmp_path):
    with tarfile.open(built[0]) as archive:
        archive.extractall(tmp_path)
    (folder,) = tmp_path.iterdir()
    for name in ("README.md", "templates", "tests", "examples", ".clang-format"):
        assert (folder / name).exists(), name
    text = run(sys.executable, "-c", RENDER, folder, cwd=tmp_path, PYTHONPATH=str(folder))
    assert text == expected()
