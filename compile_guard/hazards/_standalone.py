"""A trigger as a program for a bug report."""

from __future__ import annotations

import ast
import inspect
import textwrap

from compile_guard.hazards import _threads
from compile_guard.hazards._hazard import Hazard


def standalone(hazard: Hazard) -> str:
    """The trigger as one self-contained file for a bug report: plain torch, nothing of this package."""
    module = inspect.getmodule(hazard.trigger)
    assert module is not None
    source = inspect.getsource(module)
    statements: dict[str, ast.stmt] = {}
    imports = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            statements[statement.name] = statement
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            statements[statement.targets[0].id] = statement
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            text = ast.get_source_segment(source, statement) or ""
            if "compile_guard" not in text and "__future__" not in text:
                imports.append(text)
    needed = {"trigger"}
    todo = ["trigger"]
    while todo:
        used = {node.id for node in ast.walk(statements[todo.pop()]) if isinstance(node, ast.Name)}
        new = (used & statements.keys()) - needed
        needed |= new
        todo += sorted(new)

    def text_of(statement: ast.stmt) -> str:
        decorators = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
        return "\n".join(source.splitlines()[first - 1 : statement.end_lineno])

    # `from __future__` must come first, hence the text of `_threads` before anything of the entry's own.
    about = [f"{hazard.title} ({hazard.id} of compile_guard's catalogue).", hazard.symptom, hazard.mechanism]
    head = "\n\n".join(textwrap.fill(paragraph, 118) for paragraph in about)
    threads = inspect.getsource(_threads).split('"""', 2)[2].strip("\n")
    entry = ["\n".join(line for line in imports if line not in threads.splitlines())]
    if hazard.environment:
        entry.append(f"import os\n\nos.environ.update({hazard.environment!r})")
    entry += [text_of(statement) for name, statement in statements.items() if name in needed]
    tail = 'if __name__ == "__main__":\n    print(trigger() or "did not occur")\n'
    return f'"""{head}\n"""\n\n' + "\n\n\n".join([threads, *filter(None, entry), tail])
