"""The size of the house: ``python -m benchmarks.house``. Nothing here is a time, so no machine changes it.

How each row is counted:

- *lines, files*: ``git ls-files``, the working tree's content, blank lines and comments too.
- *hops*: the functions of ``mptune/`` on the call stack when the first plan's latency is taken, from the command's
  function to the job that the parent sends (``Worker.call``), and from the child's ``main`` to the first value
  (``value_ms``): two real stacks of one search on this CPU, read by a profile hook in both processes. A hop *only
  forwards* if its body, without the docstring, is one call, perhaps returned, perhaps inside one ``with``.
- *widest protocol, widest class*: public and private methods and properties; attributes count as members of protocols.
- *files to touch*: files whose code (neither comments nor docstrings) names BF16, as the newest precision; that name
  ``tensorrt-rtx`` outside a folder of that name, as the newest backend; that name a code of a finding,
  from the code with the fewest to the one with the most; the same of the metrics, of which the default has the most.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = Path(__file__).parent / "models" / "digits_vit.onnx"
DATA = Path(__file__).parent / "models" / "digits_calib.npz"

_HOOK = """
import json, os, sys, threading, time
PARENT = ("worker/parent.py", "call")
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
    code = list(_files("mptune"))
    print("| | |\n| --- | --- |")
    for name, value in (
        ("lines of Python in `mptune/`", f"{_lines(code):,}"),
        ("files there", f"{len(code)}"),
        ("lines in `tests/`", f"{_lines(_files('tests')):,}"),
        ("hops from `mptune search` to a timed plan, of which only forward", _hops()),
        ("members of the widest protocol; methods of the widest class", _widest(code)),
        ("files to touch for a new precision; a new backend; a new finding; a new metric", _touched(code)),
    ):
        print(f"| {name} | {value} |")
    return 0


def _files(folder: str) -> Iterator[Path]:
    listed = subprocess.run(
        ["git", "ls-files", f"{folder}/*.py"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
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


def _widest(files: Iterable[Path]) -> str:
    protocols, classes = {"": 0}, {"": 0}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                if any("Protocol" in ast.unparse(base) for base in node.bases):
                    members = {
                        i.target.id
                        for i in node.body
                        if isinstance(i, ast.AnnAssign) and isinstance(i.target, ast.Name)
                    }
                    protocols[node.name] = len(methods | members)
                else:
                    classes[node.name] = len(methods)
    protocol, widest = max(protocols, key=protocols.__getitem__), max(classes, key=classes.__getitem__)
    return f"{protocols[protocol]} ({protocol}); {classes[widest]} ({widest})"


def _touched(files: Iterable[Path]) -> str:
    from mptune.data.metrics.accuracy import METRICS
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
    source = path.read_text()
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.add((node.value.lineno, node.value.col_offset))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    kept = [
        t.string
        for t in tokens
        if t.type != tokenize.COMMENT and (t.type != tokenize.STRING or t.start not in docstrings)
    ]
    return " ".join(kept)


if __name__ == "__main__":
    raise SystemExit(main())
