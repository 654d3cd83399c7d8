"""Code in the documentation runs, has the signatures that it claims, and is what it was copied from."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import comm_core
import comm_mnnvl
import comm_nvlink
from comm_core import UlyssesBackendError, UlyssesCommunicator
from comm_core.plugins import register, unregister
from comm_core.testing.contract import TransportContract

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "docs/examples/shm_transport.py"


def execute(blocks, namespace):
    """Run blocks one after the other in one namespace; errors and asserts show the page and the line in it."""
    for page, line, text in blocks:
        exec(compile("\n" * (line - 1) + text, page, "exec"), namespace)


def run_on_ranks(group, blocks):
    namespace = {"__name__": "example", "group": group}
    if any("comm_lowp" in text for _, _, text in blocks):
        # Installed plugins are kept out of tests, and whoever copies the example has installed this one.
        importlib.import_module("comm_core.plugins").register(
            "lowp-here", importlib.import_module("comm_lowp.plugin").LowpPlugin()
        )
    try:
        execute(blocks, namespace)
    finally:
        unregister("lowp-here")
        for value in namespace.values():
            if isinstance(value, UlyssesCommunicator):
                value.close()


def test_examples_run(runnable, read_blocks, request):
    """Whoever copies an example gets what the page says; blocks of a page build on each other."""
    if runnable == "README.md":
        return  # test_the_example_of_the_readme_is_right
    python = [block for block in read_blocks(runnable) if block.language == "python"]
    alone = [(block.page, block.line, block.text) for block in python if block.kind == ""]
    together = [(block.page, block.line, block.text) for block in python if block.kind == "ranks"]
    execute(alone, {"__name__": "example"})
    if together:
        request.getfixturevalue("ranks").run(run_on_ranks, together, ranks=2)


def test_blocks_are_marked_as_the_tests_know_them(all_blocks):
    """A misspelt mark would be a block that nobody runs."""
    known = {"", "ranks", "signature", "fragment", "quote"}
    wrong = [(b.page, b.line, b.kind) for b in all_blocks if b.language == "python" and b.kind not in known]
    assert wrong == []
    for block in all_blocks:
        if block.language == "python" and block.kind == "fragment":
            compile(block.text, f"{block.page}:{block.line}", "exec")
        if block.language == "json":
            json.loads(block.text)


# Signatures


def parameters(arguments: ast.arguments) -> list[tuple[str, str, object]]:
    """Return (name, kind, default) of each argument of a ``def`` but self."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [inspect.Parameter.empty] * (len(positional) - len(arguments.defaults))
    defaults += [ast.literal_eval(node) for node in arguments.defaults]
    found = [(arg.arg, "positional", default) for arg, default in zip(positional, defaults, strict=True)]
    for arg, node in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((arg.arg, "keyword", inspect.Parameter.empty if node is None else ast.literal_eval(node)))
    return [item for item in found if item[0] != "self"]


def real_parameters(function: Any) -> list[tuple[str, str, object]]:
    kinds = {inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional", inspect.Parameter.KEYWORD_ONLY: "keyword"}
    return [
        (item.name, kinds[item.kind], item.default)
        for item in inspect.signature(function).parameters.values()
        if item.name != "self"
    ]


def test_signatures_are_those_of_the_code(all_blocks, root):
    """An argument that is missing, renamed, moved or has another default is found here, not by a reader."""
    signatures = [block for block in all_blocks if block.kind == "signature"]
    for block in signatures:
        (definition,) = ast.parse(block.text).body
        assert isinstance(definition, ast.FunctionDef), f"{block.page}:{block.line}"
        (title,) = [name for name in titles(root / block.page) if name.rpartition(".")[2] == definition.name]
        assert parameters(definition.args) == real_parameters(resolve(title)), f"{block.page}:{block.line}"
    # Every operation page whose subject takes arguments shows them.
    shown = {block.page for block in signatures}
    for page in sorted((root / "docs" / "ops").glob("*.md")):
        first = resolve(titles(page)[0]) if titles(page) else None
        takes_arguments = inspect.isfunction(first) or first in (UlyssesCommunicator, comm_core.Mapping)
        assert not takes_arguments or str(page.relative_to(root)) in shown, page


def titles(page: Path) -> list[str]:
    """Return the names in backticks in the title of an operation page."""
    return re.findall(r"`([\w.]+)`", page.read_text(encoding="utf-8").partition("\n")[0])


def resolve(name: str) -> Any:
    """Return what the public name `name` of comm_core, or of one of its plugins, means."""
    first, *rest = name.split(".")
    module = next(module for module in (comm_core, comm_mnnvl, comm_nvlink) if first in module.__all__)
    value: Any = getattr(module, first)
    for part in rest:
        value = getattr(value, part)
    return value


def test_operation_pages_are_about_public_names(root):
    """A page about something that was renamed or removed must go with it."""
    for page in sorted((root / "docs" / "ops").glob("*.md")):
        if page.name == "README.md":
            continue
        names = titles(page)
        assert names, f"{page}: the title must name its subject in backticks"
        for name in names:
            public = {*comm_core.__all__, *comm_mnnvl.__all__, *comm_nvlink.__all__}
            assert name.partition(".")[0] in public, (page, name)
            resolve(name)


def test_every_public_name_has_an_operation_page(root):
    """And every method of the communicator."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted((root / "docs" / "ops").glob("*.md")))
    names = [name for name in (*comm_core.__all__, *comm_mnnvl.__all__) if name != "__version__"]
    names += [name for name in vars(UlyssesCommunicator) if not name.startswith("_")]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


# The README


@contextlib.contextmanager
def as_the_whole_job(group):
    """Make `group` WORLD, as it is for a script that a launcher starts once for each of its ranks."""
    asked: list[object] = []
    world, init, destroy = dist.group.WORLD, dist.init_process_group, dist.destroy_process_group
    dist.group.WORLD = group
    dist.init_process_group = lambda *arguments: asked.append(arguments)
    dist.destroy_process_group = lambda: asked.append("destroyed")
    try:
        yield asked
    finally:
        dist.init_process_group, dist.destroy_process_group = init, destroy
        dist.group.WORLD = world


def run_readme(group, block):
    torch.manual_seed(group.rank())
    namespace = {"__name__": "__main__"}
    with as_the_whole_job(group) as asked:
        execute([block], namespace)
    assert asked == [("gloo",), "destroyed"]
    return namespace["o"]


def test_the_example_of_the_readme_is_right(ranks, read_blocks):
    """It is short, complete, and gives what attention on one machine gives."""
    (block,) = [block for block in read_blocks("README.md") if block.language == "python"]
    assert len(block.text.splitlines()) <= 15
    outputs = ranks.run(run_readme, (block.page, block.line, block.text), ranks=2)
    parts = []
    for rank in range(2):
        torch.manual_seed(rank)
        parts.append(torch.randn(3, 1, 512, 8, 64, dtype=torch.bfloat16))
    q, k, v = torch.cat(parts, dim=2).transpose(2, 3)
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=2e-2, atol=2e-2)
    assert (whole - torch.cat(outputs[::-1], dim=1)).abs().max() > 0.1  # so the comparison can fail


def test_the_example_of_the_readme_ends_cleanly_under_torchrun(read_blocks, tmp_path):
    """As a user runs it. A closed communicator that kept its process group alive would abort the end."""
    (block,) = [block for block in read_blocks("README.md") if block.language == "python"]
    script = tmp_path / "example.py"
    script.write_text(block.text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "packages" / "comm-core" / "src"), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(launcher, env=environment, capture_output=True, text=True, timeout=110, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 0: gloo, because" in done.stdout and "rank 1: gloo, because" in done.stdout


# The worked example of the plugin guide


def load_example():
    spec = importlib.util.spec_from_file_location("shm_transport", ROOT / EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def worked_plugin():
    return load_example().plugin


class TestWorkedTransport(TransportContract):
    """All operations over it are right, and it keeps what a transport must keep."""

    transport = "shm"
    plugin = worked_plugin
    world_sizes = (3,)
    dtypes = (torch.bfloat16,)


def left_behind() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob("comm-shm-*")]


def open_with_a_bad_rank(group):
    module = load_example()
    if group.rank() == group.size() - 1:
        module.ShmSession.write_test_value = lambda self: None
    register("shm", module.plugin)
    try:
        with pytest.raises(UlyssesBackendError) as caught:
            UlyssesCommunicator(group, max_bytes=1 << 16, dtype=torch.bfloat16, backend="shm")
    finally:
        unregister("shm")
    return str(caught.value)


def test_a_self_test_that_fails_takes_the_worked_transport_down(ranks):
    """B1: as the guide says: every rank raises the same error with the rank that found it, and no file is left."""
    first, *others = ranks.run(open_with_a_bad_rank, ranks=3)
    assert re.search(r"read the test values.*rank 0: rank 2 wrote \(2, 0\) here, and \(0, 0\) arrived", first)
    assert others == [first, first]
    assert left_behind() == []


def test_the_worked_transport_is_typed(root, tmp_path):
    """As strictly as the packages are: it is what others begin with."""
    shutil.copy(root / EXAMPLE, tmp_path)
    settings = {
        "include": [Path(EXAMPLE).name],
        "typeCheckingMode": "strict",
        "pythonVersion": "3.10",
        "extraPaths": [str(root / "packages" / "comm-core" / "src")],
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    # What the developers' command sets as well: no look for a newer version on the network.
    env = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, env=env)
    found = json.loads(done.stdout)
    assert found["generalDiagnostics"] == []
    assert found["summary"]["filesAnalyzed"] == 1


def test_quotes_are_what_they_quote(all_blocks, root):
    """The guide shows the example as it is run."""
    source = (root / EXAMPLE).read_text(encoding="utf-8")
    quotes = [block for block in all_blocks if block.kind == "quote"]
    assert quotes
    for block in quotes:
        assert block.text in source, f"{block.page}:{block.line} is not in {EXAMPLE}"
