"""Writes docs/api.md from the docstrings: python tools/api_reference.py [--check]

Reads the sources and imports nothing: the page is the same under every Python and torch, and without a build. What is
public is what the modules of MODULES list in `__all__`. `--check` changes nothing, and exits with 1 if the page is
stale.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"

# In the page's order; None: all of `__all__`. A name that several modules have is described at the first.
MODULES: dict[str, list[str] | None] = {
    "fastamp": None,
    "fastamp.grad_scaler": None,
    "fastamp.store": None,
    "fastamp.storage": ["Context"],
    "fastamp.ops": None,
    "fastamp.memory": None,
    "fastamp.profiling": None,
    "fastamp.amp": None,
    "fastamp.cuda.amp": None,
    "fastamp.utils.checkpoint": None,
    "fastamp.integrations.accelerate": None,
    "fastamp.integrations.lightning": None,
}

INTRODUCTION = """# API reference

<!-- Written by tools/api_reference.py from the docstrings: change those and run it again. -->

What each name takes, gives and raises, and whether it synchronises: whether the host waits for the device.
"""

Definition = ast.FunctionDef | ast.ClassDef
SECTIONS = {
    "Args": "Arguments",
    "Attributes": "Attributes",
    "Returns": "Returns",
    "Yields": "Yields",
    "Raises": "Raises",
}


@dataclass(frozen=True)
class Name:
    """A public name: `path` as users write it, and the definition that it leads to (None: torch's own, or a value)."""

    path: str
    home: str
    node: Definition | None
    source: str


# ---- finding what is public --------------------------------------------------------------------------------


def module_file(module: str) -> Path:
    folder = ROOT.joinpath(*module.split("."))
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


@functools.cache
def parsed(module: str) -> tuple[ast.Module, str]:
    """The module's syntax tree and its source."""
    source = module_file(module).read_text()
    return ast.parse(source), source


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """A module's top level, `if TYPE_CHECKING:` included."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from statements(statement.body)


def listed(module: str) -> list[str]:
    """`__all__`; where that is no literal, the names that the module imports from fastamp."""
    tree, _ = parsed(module)
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            if isinstance(statement.value, ast.List):
                return ast.literal_eval(statement.value)
    imports = (s for s in tree.body if isinstance(s, ast.ImportFrom) and (s.module or "").startswith("fastamp"))
    return [alias.asname or alias.name for statement in imports for alias in statement.names]


def find(module: str, name: str) -> tuple[str, Definition | None, str]:
    """(module that defines it, its definition, that module's source), following imports within fastamp."""
    tree, source = parsed(module)
    for statement in statements(tree.body):
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name == name:
            return module, statement, source
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("fastamp"):
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    return find(statement.module or "", alias.name)
    return module, None, source


def public_names(module: str) -> list[Name]:
    names = MODULES[module]
    return [Name(f"{module}.{name}", *find(module, name)) for name in (listed(module) if names is None else names)]


def members(definition: ast.ClassDef) -> list[ast.FunctionDef]:
    """A class's public methods and properties."""
    return [n for n in definition.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]


# ---- signatures --------------------------------------------------------------------------------------------


def text_of(node: ast.expr, source: str) -> str:
    """As it is written, on one line. (What `ast.unparse` writes depends on Python's version.)"""
    return re.sub(r"\s+", " ", ast.get_source_segment(source, node) or "").replace("( ", "(").replace(", )", ")")


def parameters(function: ast.FunctionDef, source: str, method: bool) -> list[str]:
    spec = function.args
    positional = [*spec.posonlyargs, *spec.args]
    defaults: list[ast.expr | None] = [*[None] * (len(positional) - len(spec.defaults)), *spec.defaults]

    def one(argument: ast.arg, default: ast.expr | None = None, stars: str = "") -> str:
        text = stars + argument.arg
        if argument.annotation is not None:
            text += f": {text_of(argument.annotation, source)}"
        if default is not None:
            text += f" = {text_of(default, source)}" if argument.annotation else f"={text_of(default, source)}"
        return text

    found = [one(argument, default) for argument, default in zip(positional, defaults, strict=True)]
    if method and not any(text_of(d, source) == "staticmethod" for d in function.decorator_list):
        found = found[1:]
    if spec.vararg:
        found.append(one(spec.vararg, stars="*"))
    elif spec.kwonlyargs:
        found.append("*")
    found += [one(argument, default) for argument, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)]
    if spec.kwarg:
        found.append(one(spec.kwarg, stars="**"))
    return found


def is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id in ("property", "cached_property") for d in node.decorator_list)


def signature(path: str, node: Definition, source: str, method: bool = False) -> str:
    if isinstance(node, ast.FunctionDef) and is_property(node):
        return f"{path}: {text_of(node.returns, source)}" if node.returns else path
    if isinstance(node, ast.ClassDef):
        makers = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        if not makers:
            return f"class {path}"
        arguments, result, path = parameters(makers[0], source, True), "", f"class {path}"
    else:
        arguments = parameters(node, source, method)
        result = f" -> {text_of(node.returns, source)}" if node.returns else ""
    line = f"{path}({', '.join(arguments)}){result}"
    if len(line) <= 100:
        return line
    return "\n".join([f"{path}(", *[f"    {argument}," for argument in arguments], f"){result}"])


# ---- docstrings to Markdown --------------------------------------------------------------------------------


def markdown(docstring: str) -> str:
    text = inspect.cleandoc(docstring)
    text = re.sub(r":\w+:`([^`]+)`", r"`\1`", text).replace("``", "`")
    lines, written = text.splitlines(), []
    number = 0
    while number < len(lines):
        title = lines[number].removesuffix(":")
        if lines[number].endswith(":") and title in SECTIONS:
            stop = number + 1
            while stop < len(lines) and (not lines[stop] or lines[stop].startswith(" ")):
                stop += 1
            body = inspect.cleandoc("\n".join(["", *lines[number + 1 : stop]])).splitlines()
            written += [
                "",
                f"*{SECTIONS[title]}*",
                "",
                *(body if title in ("Returns", "Yields") else entries(body)),
                "",
            ]
            number = stop
        else:
            written.append(lines[number])
            number += 1
    return re.sub(r"\n{3,}", "\n\n", "\n".join(written)).strip()


def entries(lines: list[str]) -> list[str]:
    """`name: what it is`, with continuations indented, as a list."""
    items = []
    for line in lines:
        match = re.match(r"(\*{0,2}\w[\w., \"*-]*): (.*)", line)
        if match:
            names = match[1].replace(", ", "`, `")
            items.append(f"- `{names}`: {match[2]}")
        else:
            items.append(f"  {line[4:] if line.startswith('    ') else line}".rstrip())
    return items


# ---- the page ----------------------------------------------------------------------------------------------


def anchor(heading: str) -> str:
    """GitHub's, of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def described(name: Name) -> list[str]:
    node = name.node
    assert node is not None
    lines = ["", f"### `{name.path}`", "", "```python", signature(name.path, node, name.source), "```", ""]
    lines.append(markdown(ast.get_docstring(node, clean=False) or ""))
    if isinstance(node, ast.ClassDef):
        for member in members(node):
            docstring = ast.get_docstring(member, clean=False)
            if docstring:
                path = f"{node.name}.{member.name}"
                lines += ["", f"#### `{name.path}.{member.name}`", "", "```python"]
                lines += [signature(path, member, name.source, method=True), "```", "", markdown(docstring)]
    return lines


def page() -> str:
    seen: dict[tuple[str, str], str] = {}
    index, body = [], []
    for module in MODULES:
        docstring = ast.get_docstring(parsed(module)[0], clean=False) or ""
        body += ["", f"## `{module}`", "", markdown(docstring)]
        links, elsewhere = [], []
        for name in public_names(module):
            if name.node is None:
                continue
            key = name.home, name.node.name
            if key in seen:
                elsewhere.append(f"[`{name.path}`](#{anchor(seen[key])})")
                continue
            seen[key] = name.path
            links.append(f"[`{name.path.removeprefix(module + '.')}`](#{anchor(name.path)})")
            body += described(name)
        if elsewhere:
            body += ["", f"Described above: {', '.join(elsewhere)}."]
        index.append(f"- [`{module}`](#{anchor(module)})" + (f": {', '.join(links)}" if links else ""))
    return "\n".join([INTRODUCTION, *index, *body]).rstrip() + "\n"


def main() -> int:
    written = page()
    if PAGE.exists() and PAGE.read_text() == written:
        return 0
    if "--check" in sys.argv:
        print(f"{PAGE.relative_to(ROOT)} differs from the docstrings: run python tools/api_reference.py")
        return 1
    PAGE.write_text(written)
    print(f"{PAGE.relative_to(ROOT)}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
