"""Nothing that can run code is made of bytes: no pickle, no marshal, no eval, no tensors but by safetensors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("services", "engine_core", "models")

MODULES = frozenset(
    {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle", "dbm"}
    | {"multiprocessing.connection", "multiprocessing.managers", "xmlrpc", "xml.sax", "xml.dom", "xml.etree"}
)
"""What reads objects, or sends them so."""

CALLS = frozenset(
    {"eval", "exec", "compile", "__import__", "torch.load", "torch.jit.load", "torch.package.PackageImporter"}
    | {"numpy.load", "np.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "pandas.read_pickle"}
    | {"torch.distributed.recv_object_list", "torch.distributed.broadcast_object_list"}
    | {"torch.distributed.all_gather_object", "torch.distributed.gather_object"}
    | {"torch.distributed.scatter_object_list"}
)
"""What reads objects, by the name under which it is called."""


def findings(source: str) -> Iterator[str]:
    """What a module does that it must not, one line each."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call):
            name = _dotted(node.func)
            if name in CALLS and not _safe(name, node):
                yield f"line {node.lineno}: calls {name}"
            continue
        else:
            continue
        for name in names:
            if any(name == module or name.startswith(f"{module}.") for module in MODULES):
                yield f"line {node.lineno}: imports {name}"


def _safe(name: str, call: ast.Call) -> bool:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if name == "torch.load":
        wanted = given.get("weights_only")
        return isinstance(wanted, ast.Constant) and wanted.value is True
    if name in ("np.load", "numpy.load"):
        allowed = given.get("allow_pickle")
        return allowed is None or (isinstance(allowed, ast.Constant) and allowed.value is False)
    return False


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_unpickles_or_evaluates(package: str) -> None:
    modules = sorted((ROOT / package).rglob("*.py"))
    assert len(modules) > 10
    found = {str(path.relative_to(ROOT)): list(findings(path.read_text())) for path in modules}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "from multiprocessing import connection",
        "from multiprocessing.connection import Client",
        "import xml.etree.ElementTree",
        "eval(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
    ],
)
def test_what_it_must_find_is_found(source: str) -> None:
    assert len(list(findings(source))) >= 1


@pytest.mark.parametrize(
    "source",
    [
        "import yaml; yaml.safe_load(text)",
        "torch.load(path, weights_only=True)",
        "np.load(path)",
        "np.load(path, allow_pickle=False)",
        "import re; re.compile('x')",
        "model.eval()",
        "from safetensors.torch import load_file",
    ],
)
def test_what_is_harmless_passes(source: str) -> None:
    assert list(findings(source)) == []
