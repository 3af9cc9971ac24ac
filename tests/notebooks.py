"""Run a notebook's code cells as Jupyter would, without Jupyter: `python -m tests.notebooks` saves their outputs anew.

A cell's output is what it printed, the pictures that it drew and the value of its last expression.
"""

import ast
import base64
import json
import sys
from contextlib import redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook, name):
    """The outputs of each code cell, in nbformat's words."""
    names = {"__name__": "__main__"}
    return [outputs_of("".join(cell["source"]), names, f"{name}[{i}]") for i, cell in enumerate(code_cells(notebook))]


def outputs_of(source, names, where):
    tree, printed, value = ast.parse(source, where), StringIO(), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(printed):
        exec(compile(tree, where, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), where, "eval"), names)
    outputs = [{"output_type": "stream", "name": "stdout", "text": printed.getvalue()}] if printed.getvalue() else []
    pictures = list(drawn())
    outputs += [{"output_type": "display_data", "data": {"image/png": p}, "metadata": {}} for p in pictures]
    if value is not None:
        data = {"text/plain": repr(value)}
        outputs.append({"output_type": "execute_result", "data": data, "metadata": {}, "execution_count": None})
    return outputs


def drawn():
    """The figures that are open, as PNG; they are closed, as Jupyter does after a cell."""
    if "matplotlib.pyplot" not in sys.modules:
        return
    from matplotlib import pyplot

    for number in pyplot.get_fignums():
        content = BytesIO()
        pyplot.figure(number).savefig(content, format="png", dpi=90, bbox_inches="tight")
        yield base64.b64encode(content.getvalue()).decode()
    pyplot.close("all")


def save(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for count, (cell, outputs) in enumerate(zip(code_cells(notebook), run(notebook, path.name), strict=True), 1):
        for output in outputs:
            if "execution_count" in output:
                output["execution_count"] = count
        cell.update(outputs=outputs, execution_count=count)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    import matplotlib

    matplotlib.use("agg")
    for given in NOTEBOOKS:
        save(given)
        print(given)
