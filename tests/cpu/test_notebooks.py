"""Notebooks run from top to bottom without a GPU, and draw what they say."""

import base64
import os
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def execute(name, monkeypatch):
    """The code cells of a notebook, with their outputs."""
    nbformat = pytest.importorskip("nbformat", reason="notebooks need the dev extra")
    nbclient = pytest.importorskip("nbclient", reason="notebooks need the dev extra")
    for package in ("ipykernel", "matplotlib", "pandas"):
        pytest.importorskip(package, reason="notebooks need the notebook extra")
    paths = filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    book = nbformat.read(EXAMPLES / name, as_version=4)
    resources = {"metadata": {"path": str(EXAMPLES)}}
    nbclient.NotebookClient(book, timeout=280, kernel_name="python3", resources=resources).execute()
    return [cell for cell in book.cells if cell.cell_type == "code"]


def pictures(cells):
    return [
        base64.b64decode(output.data["image/png"])
        for cell in cells
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]


def printed(cells):
    return "".join(o.text for cell in cells for o in cell.outputs if o.output_type == "stream")


def is_drawn(png):
    """Of some size, and with more than a few colours."""
    from matplotlib import image

    pixels = image.imread(BytesIO(png), format="png")
    colours = np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)
    return min(pixels.shape[:2]) > 200 and len(colours) > 20


@pytest.mark.parametrize(
    "name, num_pictures, words",
    [
        ("04_tuning.ipynb", 4, ["rows: {'ok':", "plans kept -> tuned.json"]),
        ("12_reading_a_trace.ipynb", 2, ["heuristic: ", "2 task slots: ", "steps, first"]),
    ],
)
def test_notebook(name, num_pictures, words, monkeypatch):
    cells = execute(name, monkeypatch)
    assert all(word in printed(cells) for word in words), printed(cells)
    drawn = pictures(cells)
    assert len(drawn) == num_pictures and all(map(is_drawn, drawn))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.name)
def test_notebooks_are_kept_without_outputs(path):
    import json

    cells = json.loads(path.read_text())["cells"]
    assert all(not c.get("outputs") and c.get("execution_count") is None for c in cells)
