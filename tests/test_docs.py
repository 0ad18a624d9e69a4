"""The documentation: its links lead somewhere, the files it names exist, the API page is that of the docstrings, and
the docstrings say what a caller needs."""

from __future__ import annotations

import ast
import fnmatch
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from doc_pages import run_page

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def _load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


reference = _load(ROOT / "tools" / "api_reference.py")
NAMES = [
    name
    for module in reference.MODULES
    for name in reference.public_names(module)
    if name.node is not None and not name.path.startswith(("fastamp.amp.", "fastamp.utils."))
]


def shown(page: Path) -> str:
    return str(page.relative_to(ROOT))


# ---- links and names of files ------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    return {reference.anchor(h) for h in re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_links_lead_somewhere(page):
    text = FENCED.sub("", page.read_text())
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", text):
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{shown(page)} links to {target}"
        if fragment:
            assert fragment in anchors(file), f"{shown(page)} links to {target}, and there is no such heading"


def test_readme_leads_to_every_page():
    linked = set(re.findall(r"\]\((docs/[^)#]+)", (ROOT / "README.md").read_text()))
    pages = {shown(page) for page in PAGES if page.parent != ROOT}
    assert pages <= linked, f"README does not link to {sorted(pages - linked)}"


# Users' own files, and headers of others.
ELSEWHERE = {"train.py", "my_script.py", "script.py", "memory.png", "cuda_runtime.h", "torch/extension.h"}
ELSEWHERE |= {"cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"}
FILE = r"[\w./*{},<>-]+\.(?:py|md|h|cpp|cu|cuh|txt|json|toml|supp|png)|\.ci/run"


def tracked() -> list[str]:
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:  # an unpacked archive has no history
        return [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file()]
    return done.stdout.split("\n")


def alternatives(name: str) -> list[str]:
    """`a.{h,cpp}` -> a.h, a.cpp; `<op>` is any."""
    name = re.sub(r"<\w+>", "*", name)
    match = re.search(r"\{([^}]*)\}", name)
    if not match:
        return [name]
    return [a for part in match[1].split(",") for a in alternatives(name[: match.start()] + part + name[match.end() :])]


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in ("api.md", "CHANGELOG.md")], ids=shown)
def test_files_that_it_names_exist(page):
    files = tracked()
    text = page.read_text()
    code = [*re.findall(r"`([^`\n]+)`", FENCED.sub("", text)), *re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)]
    for words in code:
        for word in re.split(r"[\s=\"']+", words):
            if not re.fullmatch(FILE, word) or word in ELSEWHERE or word.startswith("/"):
                continue
            for name in alternatives(word):
                found = any(fnmatch.fnmatch(file, name) or fnmatch.fnmatch(file, f"*/{name}") for file in files)
                assert found, f"{shown(page)} names {word}"


def quotations(page: Path) -> list[tuple[str, list[str]]]:
    """Blocks that say which file they are from: (file, lines)."""
    blocks = re.findall(r"^```\w+ (\S+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [(file, [line.strip() for line in text.splitlines() if line.strip()]) for file, text in blocks]


@pytest.mark.parametrize("file, lines", quotations(ROOT / "docs" / "add-an-op.md"), ids=lambda value: str(value)[:40])
def test_quotations_are_true(file, lines):
    """The lines of a quotation are lines of the file, in this order; others may be left out between."""
    source = iter([line.strip() for line in (ROOT / file).read_text().splitlines()])
    for line in lines:
        assert line in source, f"add-an-op.md quotes what {file} does not have there: {line}"


def test_readme_loop_runs():
    """With what it takes for granted, on a CPU."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (code,) = (block for block in blocks if "GradScaler" in block)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    names = {
        "loader": [(torch.randn(3, 4), torch.tensor([0, 1, 1]))] * 2,
        "loss_fn": lambda outputs, targets: torch.nn.functional.cross_entropy(outputs.float(), targets),
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
    }
    before = model.weight.detach().clone()
    exec(code.replace('"cuda"', '"cpu"'), names)
    assert scheduler.last_epoch == 2 and names["scaler"].is_enabled()
    assert not torch.equal(model.weight, before)


def test_faq_snippets_run():
    run_page("faq")


# ---- the API page ------------------------------------------------------------------------------------------


def test_api_page_is_that_of_the_docstrings():
    written = reference.PAGE.read_text()
    assert written == reference.page(), "docs/api.md is stale: run python tools/api_reference.py"


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_api_page_tells_the_signature(name):
    """What was read from the source is what Python has."""
    module, _, attribute = name.path.rpartition(".")
    if module.startswith("fastamp.integrations.lightning"):
        pytest.importorskip("lightning", reason="lightning is not installed")
    found = getattr(importlib.import_module(module), attribute)
    assert inspect.getdoc(found) == inspect.cleandoc(ast.get_docstring(name.node))
    if isinstance(name.node, ast.FunctionDef):
        listed = [p.split(":")[0].split("=")[0] for p in reference.parameters(name.node, name.source, False)]
        kinds = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        actual = [kinds.get(p.kind, "") + p.name for p in inspect.signature(found).parameters.values()]
        assert [p for p in listed if p != "*"] == actual


# ---- what a docstring must say -----------------------------------------------------------------------------

# Where tensors are at work, so that a caller wants to know what waits for the device.
ON_A_DEVICE = {"grad_scaler", "clip", "checkpointing", "store", "scheduling", "ops"}
AS_ANOTHER = (
    r"[Aa]s (in |for |that )?`|\b[Aa]rgs (and Raises )?as|keyword-only arguments of|as in torch|[Tt]he rest is as"
)
SHAPES = r"dtype|shape|float32|\bbool\b|0-dim|1-D|one element|scalar"


def functions():
    """(where, its docstring and its class's and module's, node, module, source) of public functions and methods."""
    for name in NAMES:
        module = name.home.removeprefix("fastamp.")
        module_doc = ast.get_docstring(reference.parsed(name.home)[0]) or ""
        if isinstance(name.node, ast.FunctionDef):
            yield name.path, module_doc, name.node, module, name.source
        else:
            class_doc = ast.get_docstring(name.node) or ""
            for method in reference.members(name.node):
                yield f"{name.path}.{method.name}", f"{class_doc}\n{module_doc}", method, module, name.source


FUNCTIONS = list(functions())


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_every_name_has_a_docstring(name):
    docstring = ast.get_docstring(name.node)
    assert docstring, f"{name.path} has no docstring"
    assert not re.search(r"\w\n\n[a-z]", docstring), f"{name.path}: a sentence is torn apart by an empty line"


@pytest.mark.parametrize("where, around, node, module, source", FUNCTIONS, ids=[f[0] for f in FUNCTIONS])
def test_docstring_tells_what_a_caller_needs(where, around, node, module, source):
    docstring = ast.get_docstring(node)
    assert docstring, f"{where} has no docstring"
    assert not re.search(r"\w\n\n[a-z]", docstring), f"{where}: a sentence is torn apart by an empty line"
    elsewhere = re.search(AS_ANOTHER, docstring)

    spec = node.args
    arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
    for argument in arguments:
        name = re.escape(argument.arg)
        told = rf"^ +[^:\n]*\b{name}\b[^:\n]*: " if "Args:" in docstring else rf"\b{name.rstrip('_')}"
        mentioned = argument.arg == "self" or elsewhere or re.search(told, docstring, re.MULTILINE)
        assert mentioned, f"{where}: the docstring does not tell what {argument.arg} is"

    raises = any(isinstance(n, ast.Raise) and n.exc is not None for n in ast.walk(node)) or module == "ops"
    assert not raises or elsewhere or "aises" in docstring or "raise " in docstring, f"{where}: what does it raise?"

    annotations = [a.annotation for a in arguments] + [node.returns]
    takes_tensors = any(re.search(r"\bTensor\b", reference.text_of(a, source)) for a in annotations if a is not None)
    if takes_tensors and module != "memory.estimate":
        assert elsewhere or re.search(SHAPES, docstring), f"{where}: of which shapes and dtypes?"

    if module.split(".")[0] in ON_A_DEVICE and not where.endswith(
        ("set_growth_factor", "set_backoff_factor", "_interval")
    ):
        own = docstring if "GradScaler" in where else f"{docstring}\n{around}"
        stats = where.startswith("fastamp.store.StorageStats")
        assert stats or re.search(r"\bsync|Sync", own), f"{where}: does it wait for the device?"
