"""Data goes one way: nothing is imported by anything to its left."""

import ast
from pathlib import Path

import fedcpsl

ROOT = Path(fedcpsl.__file__).parent
ORDER = [
    ["errors", "torchrun", "trees", "__init__"],
    ["storage"],
    ["settings"],
    ["models", "problem", "schedule"],
    ["prior"],
    ["engine"],
    ["views"],
    ["algorithm"],
    ["averaging", "device_round", "held_out"],
    ["algorithms"],
    ["edge"],
    ["config", "methods"],
    ["data"],
    ["simulation"],
    ["evaluation"],
    ["step_size"],
    ["theory"],
    ["sklearn"],
    ["recorded_runs", "runs"],
    ["export"],
    ["federation"],
    ["deployment"],
    ["flower"],
    ["report"],
    ["cli"],
    ["__main__"],
]
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fedcpsl"):
            rest = node.module.split(".")[1:]
            yield from [rest[0]] if rest else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from [a.name.split(".")[1] for a in node.names if a.name.startswith("fedcpsl.")]


def rooms():
    return {path: (path.relative_to(ROOT).parts[0].removesuffix(".py")) for path in ROOT.rglob("*.py")}


def test_every_room_has_a_place():
    assert set(rooms().values()) == set(RANK)


def test_nothing_is_imported_from_the_right():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path, room in rooms().items()
        for name in imports(path)
        if name in RANK and RANK[name] > RANK[room]
    ]
    assert wrong == []


def test_the_engine_has_one_door():
    """Algorithms take it from `fedcpsl.engine`; nothing of the maths asks how it is done."""
    maths = [ROOT / "algorithm.py", ROOT / "averaging.py", ROOT / "problem.py", *(ROOT / "algorithms").glob("*.py")]
    assert [path.name for path in maths if "fedcpsl.engine." in path.read_text()] == []
    assert [path.name for path in maths if "batched" in path.read_text()] == []
    assert "fedcpsl.engine" not in (ROOT / "problem.py").read_text()


def test_files_stay_small():
    long = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py") if len(p.read_text().splitlines()) > 600]
    assert long == []


def test_no_pickle_anywhere():
    """Nothing is loaded with pickle."""
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        assert "import pickle" not in text
        assert "torch.load" not in text
        assert "allow_pickle=True" not in text
