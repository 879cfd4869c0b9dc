"""The size of the house: ``python -m benchmarks.house``. Nothing here is a time, so no machine changes it.

How each row is counted:

- *lines, files*: ``git ls-files``, the working tree's content, blank lines and comments too; *page scripts, styles,
  templates* are the files of ``mptune/`` that are not Python modules.
- *protocols*: a class implements one that has its members, inherited ones and attributes set in methods included.
- *hops*: the functions of ``mptune/`` on the call stack when the first plan's latency is taken, from the command's
  function to the job that the parent sends (``Worker.call``), and from the child's ``main`` to the first value
  (``value_ms``): two real stacks of one search on this CPU, read by a profile hook in both processes. A hop *only
  forwards* if its body, without the docstring, is one call, perhaps returned, perhaps inside one ``with``.
- *widest import list*: the lines of a file's import statements.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = Path(__file__).parent / "models" / "digits_vit.onnx"
DATA = Path(__file__).parent / "models" / "digits_calib.npz"


def main() -> int:
    """Print the table."""
    code = list(_files("mptune/*.py"))
    trees = [ast.parse(path.read_text()) for path in code]
    print("| | |\n| --- | --- |")
    for name, value in (
        ("lines of Python in `mptune/`", f"{_lines(code):,}"),
        ("files there", f"{len(code)}"),
        ("page scripts, styles, templates", f"{_lines(set(_files('mptune/**')) - set(code)):,}"),
        ("lines in `tests/`", f"{_lines(_files('tests/*.py')):,}"),
        ("lines of Python in `benchmarks/`", f"{_lines(_files('benchmarks/*.py')):,}"),
        ("protocols; of which have one implementation", _protocols(trees)),
        ("hops from `mptune search` to a timed plan, of which only forward", _hops()),
        ("widest import list", f"{max(map(_import_lines, trees))} lines"),
    ):
        print(f"| {name} | {value} |")
    return 0


def _files(pattern: str) -> Iterator[Path]:
    listed = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return (path for line in listed.splitlines() if (path := ROOT / line).exists())


def _lines(files: Iterable[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in files)


def _hops() -> str:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stacks"
        paths = os.pathsep.join((str(ROOT / "benchmarks" / "stacks"), str(ROOT)))
        environment = {**os.environ, "PYTHONPATH": paths, "HOUSE_LOG": str(log)}
        command = [sys.executable, "-m", "mptune", "search", str(MODEL), "--data", str(DATA), "--budget", "2"]
        command += ["--target", "cpu", "--engine", "onnxruntime", "--out", str(Path(folder) / "run")]
        subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True)
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    timed = next(row for row in rows if not row["is_parent"])
    sent = [row for row in rows if row["is_parent"] and row["time"] < timed["time"]][-1]
    asked = [frame for frame in sent["stack"] if "/commands/" in frame[0]][:1]
    stack = [*sent["stack"][sent["stack"].index(asked[0]) :], *timed["stack"]]
    for path, line, name in stack:
        mark = "->" if _only_forwards(path, line) else "  "
        print(f"  {mark} {Path(path).relative_to(ROOT)}:{name}", file=sys.stderr)
    return f"{len(stack)}, {sum(_only_forwards(path, line) for path, line, _ in stack)}"


def _only_forwards(path: str, line: int) -> bool:
    for node in ast.walk(ast.parse(Path(path).read_text())):
        if isinstance(node, ast.FunctionDef):
            first = min((decorator.lineno for decorator in node.decorator_list), default=node.lineno)
            if line in (first, node.lineno):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                return len(body) == 1 and _is_call(body[0])
    return False


def _is_call(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.With) and len(statement.body) == 1:
        return _is_call(statement.body[0])
    return isinstance(statement, ast.Return | ast.Expr) and isinstance(statement.value, ast.Call)


def _import_lines(tree: ast.Module) -> int:
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return sum((node.end_lineno or 0) - node.lineno + 1 for node in statements)


def _protocols(trees: Iterable[ast.Module]) -> str:
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    named = {node.name: node for node in classes}

    def members(node: ast.ClassDef) -> set[str]:
        """Methods, fields and attributes that methods set, of the class and its bases here."""
        methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        fields = (item for item in node.body if isinstance(item, ast.Assign | ast.AnnAssign))
        names = (name for item in fields for name in ast.walk(item) if isinstance(name, ast.Name))
        stored = (i for i in ast.walk(node) if isinstance(i, ast.Attribute) and isinstance(i.ctx, ast.Store))
        bases = (named.get(ast.unparse(base).partition("[")[0]) for base in node.bases)
        own = methods | {name.id for name in names if isinstance(name.ctx, ast.Store)} | {i.attr for i in stored}
        return own.union(*(members(base) for base in bases if base))

    protocols = [node for node in classes if any("Protocol" in ast.unparse(base) for base in node.bases)]
    others = [members(node) for node in classes if node not in protocols]
    counts = [sum(members(protocol) <= other for other in others) for protocol in protocols]
    return f"{len(protocols)}; {counts.count(1)}"


if __name__ == "__main__":
    raise SystemExit(main())
