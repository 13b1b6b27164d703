"""Only the port imports SGLang, public interfaces aside, and knows what its objects have; and a request's state is read
through one accessor."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_lazy

PACKAGE = Path(sglang_lazy.__file__).parent

PUBLIC = {
    "sglang.lang.ir": "expressions of the frontend language, which sgl.chunk makes",
    "sglang.lang.backend.runtime_endpoint": "sgl.Runtime, which ours extends",
    "sglang.srt.entrypoints.engine": "sgl.Engine, which ours extends",
    "sglang.launch_server": "the command that ours starts",
    "sglang.cli.serve_backends": "sglang serve, of which ours is a backend",
    "sglang.srt.server_args": "the flags of that command",
    "sglang.srt.plugins": "the plugin interface",
    "sglang.srt.utils.kill_process_tree": "how that command ends",
}
"""Interfaces that SGLang offers to programs, and why each is imported outside of the port."""

SGLANG = {
    *("req", "request", "batch", "running_batch", "forward_batch", "scheduler", "manager", "obj", "runner"),
    *("owner", "probe_req", "tokenizer_manager", "server_args", "model_config", "multimodal_inputs"),
}
"""Names of variables, parameters and attributes that hold objects of SGLang's, wherever they are. Outside of the port
they are handed on, not looked into: what is needed of them comes in, or is asked of `Facts`."""

OURS = {"lazy", "lazy_unused_hits"}
"""What such an object has of ours."""

STATE = {"lazy", "link", "fill"}
ACCESSOR = PACKAGE / "core" / "state.py"


def imported_names(tree: ast.AST) -> Iterator[str]:
    """All names that a module imports from SGLang: by statement, at any depth, or as a string with a module's name."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                found = [f"{module}.{alias.name}" for alias in names]
            case ast.Constant(value=str(text)) if all(
                part.isidentifier() for part in text.replace(":", ".").split(".")
            ):
                found = [text.replace(":", ".")] if "." in text else []
            case _:
                found = []
        yield from (name for name in found if name.split(".")[0] == "sglang")


def is_public(name: str) -> bool:
    return any(name == public or name.startswith(f"{public}.") for public in PUBLIC)


def attribute_guesses(tree: ast.AST) -> Iterator[str]:
    """The attributes of a request's state that a module accesses with getattr, hasattr, setattr or delattr."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"), args=[_, ast.Constant(value=name), *_]
            ) if name in STATE:
                yield name


def attribute_reads(tree: ast.AST) -> Iterator[str]:
    """The attributes that a module uses of objects of SGLang's."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=str(name)) | ast.Attribute(attr=str(name)), attr=attribute) if (
                name in SGLANG and attribute not in OURS
            ):
                yield f"{name}.{attribute}"


def modules(*, outside: Path) -> list:
    found = [path for path in sorted(PACKAGE.rglob("*.py")) if not path.is_relative_to(outside)]
    return [pytest.param(path, id=str(path.relative_to(PACKAGE))) for path in found]


@pytest.mark.parametrize("path", modules(outside=PACKAGE / "port"))
def test_sglang_is_imported_in_the_port_alone(path):
    private = {name for name in imported_names(ast.parse(path.read_text())) if not is_public(name)}
    assert not private, f"belongs in the port: {', '.join(sorted(private))}"


def test_every_public_interface_is_used():
    """The list of exceptions has no stale entries."""
    names = {
        name
        for path in PACKAGE.rglob("*.py")
        if not path.is_relative_to(PACKAGE / "port")
        for name in imported_names(ast.parse(path.read_text()))
    }
    unused = [public for public in PUBLIC if not any(f"{name}.".startswith(f"{public}.") for name in names)]
    assert not unused


@pytest.mark.parametrize("path", modules(outside=PACKAGE / "port"))
def test_sglangs_objects_are_looked_into_in_the_port_alone(path):
    found = set(attribute_reads(ast.parse(path.read_text())))
    assert not found, f"ask the port: {', '.join(sorted(found))}"


@pytest.mark.parametrize("path", modules(outside=ACCESSOR))
def test_state_is_read_through_its_accessor(path):
    assert not list(attribute_guesses(ast.parse(path.read_text())))


def test_imports_in_every_form_are_found():
    source = """
import sglang.srt.managers.io_struct
from sglang.srt import utils
def later():
    from sglang.srt.plugins import load_plugins
    importlib.import_module("sglang.srt.layers.sampler")
    pkgutil.resolve_name("sglang.srt.managers.scheduler:Scheduler.run")
    f"sglang is not a name", "sglang 0.5", "sglang_lazy.core.config", "sglang.srt has two words"
from .sglang import thing
from sglang_lazy.core import state
"""
    assert list(imported_names(ast.parse(source))) == [
        "sglang.srt.managers.io_struct",
        "sglang.srt.utils",
        "sglang.srt.plugins.load_plugins",
        "sglang.srt.layers.sampler",
        "sglang.srt.managers.scheduler.Scheduler.run",
    ]
    guesses = 'getattr(req, "lazy", None); hasattr(req, "link"); getattr(req, "rid"); req.lazy; setattr(r, "fill", 1)'
    assert list(attribute_guesses(ast.parse(guesses))) == ["lazy", "link", "fill"]


def test_reads_in_every_form_are_found():
    source = """
def weight(req, batch):
    req.lazy = [one.kv for one in batch.reqs]
    self.scheduler.waiting_queue[0].rid = req.sampling_params.n
    return len(req.output_ids), facts.row(req), linked(req).prompt
"""
    assert sorted(attribute_reads(ast.parse(source))) == [
        "batch.reqs",
        "req.output_ids",
        "req.sampling_params",
        "scheduler.waiting_queue",
    ]
