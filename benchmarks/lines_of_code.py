"""Lines of code of a package, by folder: lines that hold a token of code, without docstrings, comments and blanks.

python benchmarks/lines_of_code.py unitsphere
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of_code(source: str) -> int:
    """Count the lines of a file's text."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented = [n for n in ast.walk(ast.parse(source)) if isinstance(n, kinds) and ast.get_docstring(n) is not None]
    docstrings = {line for n in documented for line in range(n.body[0].lineno, (n.body[0].end_lineno or 0) + 1)}
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in NO_CODE]
    return len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - docstrings)


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        found: Counter[str] = Counter()
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).parts
            found[parts[0] if len(parts) > 1 else "(the package itself)"] += lines_of_code(path.read_text())
        for name, count in [*sorted(found.items()), ("all", sum(found.values()))]:
            print(f"{count:7,}  {folder.name}  {name}")
