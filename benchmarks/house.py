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
- *widest protocol, widest class*: public and private methods and properties; attributes count as members of protocols.
- *files to touch*: files whose code (neither comments nor docstrings) names BF16, as the newest precision; that name
  ``tensorrt-rtx`` outside a folder of that name, as the newest backend; that name a code of a finding,
  from the code with the fewest to the one with the most; the same of the metrics, of which the default has the most.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = Path(__file__).parent / "models" / "digits_vit.onnx"
DATA = Path(__file__).parent / "models" / "digits_calib.npz"

_HOOK = """
import json, os, sys, threading, time
PARENT = ("processes/parent.py", "call")
CHILD = "value_ms"
LOG = os.environ["HOUSE_LOG"]
def stack(frame):
    rows = []
    while frame is not None:
        code = frame.f_code
        if os.sep + "mptune" + os.sep in code.co_filename and not code.co_name.startswith("<"):
            rows.append([code.co_filename, code.co_firstlineno, code.co_name])
        frame = frame.f_back
    return rows[::-1]
def hook(frame, event, _):
    code = frame.f_code
    if event != "call":
        return
    is_parent = code.co_name == PARENT[1] and code.co_filename.endswith(PARENT[0])
    if is_parent or (code.co_name == CHILD and "/engines/" in code.co_filename):
        with open(LOG, "a") as file:
            row = {"time": time.monotonic(), "is_parent": is_parent, "stack": stack(frame)}
            file.write(json.dumps(row) + "\\n")
        if not is_parent:
            sys.setprofile(None)
sys.setprofile(hook)
threading.setprofile(hook)
"""


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
        ("members of the widest protocol; methods of the widest class", _widest(trees)),
        ("files to touch for a new precision; a new backend; a new finding; a new metric", _touched(code)),
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
        (Path(folder) / "sitecustomize.py").write_text(_HOOK)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((folder, str(ROOT))), "HOUSE_LOG": str(log)}
        command = [sys.executable, "-m", "mptune", "search", str(MODEL), "--data", str(DATA), "--budget", "2"]
        command += ["--target", "cpu", "--engine", "onnxruntime", "--out", str(Path(folder) / "run")]
        subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True)
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    timed = next(row for row in rows if not row["is_parent"])
    sent = [row for row in rows if row["is_parent"] and row["time"] < timed["time"]][-1]
    asked = [frame for frame in sent["stack"] if "/commands/" in frame[0]][:1]
    stack = [*sent["stack"][sent["stack"].index(asked[0]) :], *timed["stack"]]
    for path, line, name in stack:
        print(
            f"  {'->' if _only_forwards(path, line) else '  '} {Path(path).relative_to(ROOT)}:{name}", file=sys.stderr
        )
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


def _classes(trees: Iterable[ast.Module]) -> tuple[list[ast.ClassDef], list[ast.ClassDef]]:
    """The protocols, and the other classes."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    protocols = [node for node in classes if any("Protocol" in ast.unparse(base) for base in node.bases)]
    return protocols, [node for node in classes if node not in protocols]


def _methods(node: ast.ClassDef) -> set[str]:
    return {item.name for item in node.body if isinstance(item, ast.FunctionDef)}


def _members(node: ast.ClassDef) -> set[str]:
    fields = (item for item in node.body if isinstance(item, ast.Assign | ast.AnnAssign))
    names = (name for item in fields for name in ast.walk(item) if isinstance(name, ast.Name))
    return _methods(node) | {name.id for name in names if isinstance(name.ctx, ast.Store)}


def _protocols(trees: Iterable[ast.Module]) -> str:
    protocols, classes = _classes(trees)
    named = {node.name: node for node in (*protocols, *classes)}

    def having(node: ast.ClassDef) -> set[str]:
        stored = (i for i in ast.walk(node) if isinstance(i, ast.Attribute) and isinstance(i.ctx, ast.Store))
        bases = (named.get(ast.unparse(base).partition("[")[0]) for base in node.bases)
        return _members(node).union({item.attr for item in stored}, *(having(base) for base in bases if base))

    have = [having(node) for node in classes]
    counts = [sum(having(protocol) <= members for members in have) for protocol in protocols]
    return f"{len(protocols)}; {counts.count(1)}"


def _widest(trees: Iterable[ast.Module]) -> str:
    protocols, classes = _classes(trees)
    protocol = max(protocols, key=lambda node: len(_members(node)))
    widest = max(classes, key=lambda node: len(_methods(node)))
    return f"{len(_members(protocol))} ({protocol.name}); {len(_methods(widest))} ({widest.name})"


def _touched(files: Iterable[Path]) -> str:
    from mptune.data.metrics.table import METRICS
    from mptune.finding import CODES

    texts = {path.relative_to(ROOT / "mptune"): _code(path) for path in files}

    def naming(pattern: str) -> int:
        return sum(1 for text in texts.values() if re.search(pattern, text))

    backend = sum(
        1 for path, text in texts.items() if "tensorrt_rtx" not in path.parts and re.search("tensorrt[-_]rtx", text)
    )
    findings = [naming(rf"[\"']{re.escape(code)}[\"']") for code in CODES]
    metrics = [naming(rf"[\"']{re.escape(name)}[\"']|\b{re.escape(name)}\b") for name in METRICS]
    precision = naming("(?i)bf16|bfloat16")
    return f"{precision}; {backend}; {min(findings)} to {max(findings)}; {min(metrics)} to {max(metrics)}"


def _code(path: Path) -> str:
    """The file without comments and docstrings: what a change of behaviour has to touch."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ...
    return ast.unparse(tree)


if __name__ == "__main__":
    raise SystemExit(main())
