"""Tables and lists in the documentation say what the code says."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch

import comm_core
import comm_lowp
import comm_mnnvl
import comm_nvlink
import dev
from comm_core import UlyssesCommunicator, _env, errors, known
from comm_core._dtypes import check_dtype
from comm_core.allreduce.backend import AllReduceBackend
from comm_core.allreduce.patterns import PATTERNS
from comm_core.allreduce.workspace import AllReduceFusionWorkspace
from comm_core.cli.main import app
from comm_core.errors import ArgumentValueError
from comm_core.plugins.hookspecs import CommSpecs
from comm_core.testing import topologies
from comm_core.testing.contract import TransportContract
from comm_core.testing.cuda_modules import CudaModulesContract
from comm_core.testing.device_contract import DeviceContract
from comm_core.testing.reference import DTYPES
from comm_core.topology import predicates
from comm_core.transport import builtin, interface
from comm_core.transport.dist import DistSession, DistTransport
from comm_core.transport.plan import Copy, Level, Plan
from comm_core.transport.wire import wire
from comm_core.ulysses import plans
from comm_core.ulysses.preparation import WHOLE_HEAD_CALLS
from comm_core.windows.session import WindowSession
from comm_core.windows.signals import MAX_RANKS
from comm_core.windows.table import MAX_LEVELS, MAX_SOURCES, PIECE_BYTES
from comm_core.windows.transport import blocks_per_peer
from comm_core.windows.window import MAX_WINDOWS
from comm_mnnvl.multicast import SWITCHES
from comm_mnnvl.plugin import plugin as mnnvl_plugin
from comm_mnnvl.session import MnnvlSession
from comm_nvlink.plugin import plugin as nvlink_plugin
from comm_nvlink.transport import VARIABLES as NVLINK_VARIABLES
from comm_nvlink.transport import NvlinkTransport
from comm_pcie.plugin import plugin as pcie_plugin
from comm_pcie.rdma.verbs import VARIABLES as PCIE_VARIABLES
from comm_pcie.session import PcieSession


def table(text: str, first_column: str) -> list[list[str]]:
    """Return the rows of the table whose first column is headed so, without its head."""
    lines = text.splitlines()
    (start,) = [i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |")]
    rows: list[list[str]] = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return rows


def prose(text: str) -> str:
    """Return `text` without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def one(pattern: str, text: str) -> str:
    """Return what the group of the only match of `pattern` holds."""
    (found,) = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
    return found


def names(text: str) -> list[str]:
    """Return what stands in backticks."""
    return re.findall(r"`([^`]+)`", prose(text))


@pytest.fixture
def read(root):
    return lambda page: (root / page).read_text(encoding="utf-8")


# Environment


CORE = "packages/comm-core/src/comm_core"
VARIABLE = re.compile(r"\bCOMM_[A-Z]+(?:_[A-Z]+)*\b")


def test_every_variable_is_documented_and_no_other(read, root):
    """A variable that nobody reads any more, or that nobody is told of."""
    own, _, rest = read("docs/environment.md").partition("## Of other libraries")
    assert [names(row[0])[0] for row in table(own, "variable")] == [
        *_env.VARIABLES,
        *NVLINK_VARIABLES,
        *PCIE_VARIABLES,
    ]
    others = {names(row[0])[0] for row in table(rest.partition("## Of tools and tests")[2], "variable")}
    kit = root / "packages" / "comm-core" / "src" / "comm_core" / "testing"
    source = "".join(path.read_text(encoding="utf-8") for path in (*root.glob("tools/*.py"), *kit.glob("*.py")))
    assert others == set(VARIABLE.findall(source)) - set(_env.VARIABLES)


def test_the_variables_of_comm_lowp_are_documented(read):
    """Those that the package reads, and no other."""
    from comm_lowp import _env as lowp

    rows = table(read("docs/environment.md"), "variable of comm-lowp")
    assert [names(row[0])[0] for row in rows] == list(lowp.VARIABLES)


def test_the_layouts_of_the_low_precision_page_are_the_code_s(read):
    """Groups, largest values and widths, which a consumer relies on."""
    from comm_lowp.sage2.grid import SM89_SM120, SM90
    from comm_lowp.sage2.reference import V_SOURCE_ROWS

    text = read("docs/lowp.md")
    rows = {row[0]: row[1:] for row in table(text, "layout")}
    for column, layout in enumerate((SM90, SM89_SM120)):
        assert rows["rows of a Q, K group"][column] == f"{layout.q_group}, {layout.k_group}"
        assert rows["V is scaled to"][column].partition(":")[0] == f"{layout.v_max:g}"
        assert rows["V's last dimension"][column] == f"S rounded up to {layout.v_block}"
        assert rows["width of Q scales for n rows"][column] == f"`4 * ceil(n / {layout.q_block})`"
        assert layout.q_block // layout.q_group == 4
        assert rows["width of K scales"][column] == f"`ceil(n / {layout.k_group})`"
        capabilities = ", ".join(f"{major}.{minor}" for major, minor in layout.capabilities)
        assert capabilities in rows["devices"][column]
    assert f"`{' '.join(map(str, V_SOURCE_ROWS))}`[x]" in text


def test_pages_name_no_other_variable(read, page):
    """COMM_ variables that do not exist would be set in vain."""
    text = re.sub(r"^```c\n.*?^```$", "", read(page), flags=re.MULTILINE | re.DOTALL)  # macros are spelled alike
    assert set(VARIABLE.findall(text)) <= set(VARIABLE.findall(read("docs/environment.md")))


# Plugin guide


def test_the_plugin_guide_has_every_hook_with_its_arguments(read):
    """Who implements a hook finds it, with the arguments that it is called with."""
    found = re.findall(r"^### `(comm_\w+\(.*\))`$", read("docs/plugin-guide.md"), re.MULTILINE)
    hooks = {name: hook for name, hook in vars(CommSpecs).items() if name.startswith("comm_")}
    expected = []
    for name, hook in hooks.items():
        arguments = [item for item in inspect.signature(hook).parameters if item != "self"]
        expected.append(f"{name}({', '.join(arguments)})")
    assert found == expected


def members(cls: type) -> list[str]:
    own = {name for name in vars(cls) if not name.startswith("_")} | set(getattr(cls, "__annotations__", ()))
    if dataclasses.is_dataclass(cls):
        own |= {field.name for field in dataclasses.fields(cls)}
    return sorted(name for name in own if not name.startswith("_"))


@pytest.mark.parametrize(
    "cls",
    [
        *(getattr(interface, name) for name in interface.__all__),
        *(Plan, Copy, Level),
    ],
    ids=lambda cls: cls.__name__,
)
def test_the_plugin_guide_names_every_member(read, cls):
    """The interface member by member."""
    text = read("docs/plugin-guide.md")
    assert f"`{cls.__name__}`" in text
    quoted = " ".join(names(text))
    assert [name for name in members(cls) if not re.search(rf"\b{name}\b", quoted)] == []


@pytest.mark.parametrize("cls", [interface.Transport, interface.TransportSession], ids=lambda cls: cls.__name__)
def test_the_plugin_guide_has_the_arguments_of_the_methods(read, cls):
    """In the first column of its tables: `open(stages, request, plan, device)`."""
    text = read("docs/plugin-guide.md")
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if name.startswith("_"):
            continue
        shown = [
            f"{item.name}={item.default!r}" if item.default is not item.empty else item.name
            for item in inspect.signature(method).parameters.values()
            if item.name != "self"
        ]
        keyword = [
            item.name for item in inspect.signature(method).parameters.values() if item.kind == item.KEYWORD_ONLY
        ]
        if keyword:
            shown.insert(-len(keyword), "*")
        assert f"| `{name}({', '.join(shown)})` |" in text


# Backends


def test_the_transports_table_is_true(read, root):
    """Properties are the session's own, and nobody has verified what the descriptor does not say."""
    rows = {names(row[0])[0]: row[1:] for row in table(read("docs/backends.md"), "transport")}
    planned = [name for name in known.TRANSPORTS if not known.TRANSPORTS[name].built_in]
    assert list(rows) == ["nccl", "gloo", "windows", "windows-ce", *planned]
    yes = {True: "yes", False: "no"}
    for transport in builtin.comm_transports():
        if isinstance(transport, DistTransport):
            properties, device_types, sizes = DistSession.properties, transport.device_types, "any"
        else:
            properties, device_types = WindowSession.properties, ("cuda",)
            request = interface.Request(transport.name, 2, "cuda")
            able = [n for n in range(1, 20) if transport.assess(request, topologies.nvlink_mesh(n)).eligible]
            assert able == list(range(able[0], able[-1] + 1))
            sizes = f"{able[0]} to {able[-1]}"
            assert not transport.assess(request, topologies.cpu_host(2)).eligible
        assert rows[transport.name] == [
            "comm-core",
            ", ".join(device_types),
            sizes if properties.max_batch == 0 else "?",
            "used" if properties.staging else "unused",
            yes[properties.registered_outputs],
            yes[properties.graph_capturable],
            yes[properties.peer_pointers],
            "collective" if properties.shared_resources else "local",
            ", ".join(transport.verified_on) or "nothing yet",
        ]
    sizes = {
        "nvlink": ", ".join(map(str, predicates.NVLINK_SIZES)),
        "pcie": ", ".join(map(str, predicates.PCIE_SIZES)),
        "mnnvl": f"{predicates.MNNVL_MIN_RANKS} to {MAX_RANKS}",
    }
    here = {path.parent.name for path in root.glob("packages/*/pyproject.toml")}
    for name, size in sizes.items():
        package = known.TRANSPORTS[name].distribution
        assert rows[name][0] == (package if package in here else f"{package}, planned")
        assert rows[name][2] == size
    # As windows, on which it stands; its own tests compare its session's properties with those.
    verified = ", ".join(NvlinkTransport.verified_on) or "nothing yet"
    assert rows["nvlink"][3:] == [*rows["windows"][3:-1], verified]
    (mnnvl,) = mnnvl_plugin.comm_transports()
    assert MnnvlSession.properties == WindowSession.properties
    assert rows["mnnvl"][3:] == [*rows["windows"][3:-1], ", ".join(mnnvl.verified_on) or "nothing yet"]
    able = [n for n in range(1, 20) if mnnvl.assess(request_of("mnnvl", n), topologies.nvlink_mesh(n)).eligible]
    assert able == list(range(predicates.MNNVL_MIN_RANKS, MAX_RANKS + 1))
    (pcie,) = pcie_plugin.comm_transports()
    asked = [interface.Request("pcie", n, "cuda") for n in range(1, 20)]
    able = [item.world_size for item in asked if pcie.assess(item, topologies.nvlink_mesh(item.world_size)).eligible]
    assert tuple(able) == predicates.PCIE_SIZES
    properties = PcieSession.properties
    assert rows["pcie"][3:] == [
        "refused",
        yes[properties.registered_outputs],
        yes[properties.graph_capturable],
        yes[properties.peer_pointers],
        "collective" if properties.shared_resources else "local",
        ", ".join(pcie.verified_on) or "nothing yet",
    ]


def request_of(name: str, size: int) -> interface.Request:
    return interface.Request(name, size, "cuda")


def test_the_switches_of_multicast_are_documented(read):
    """With the values that turn it off; and the variables are in the list of those of other libraries."""
    rows = table(read("docs/mnnvl.md"), "switch")
    assert {names(row[0])[0]: names(row[1])[0] for row in rows} == dict(SWITCHES)
    others = read("docs/environment.md").partition("## Of other libraries")[2].partition("\n## ")[0]
    assert set(SWITCHES) <= set(names(others))


def test_the_numbers_in_the_windows_page_are_the_code_s(read):
    """Limits that a reader plans with."""
    text = " ".join(read("docs/windows.md").split())
    assert f"at most {MAX_WINDOWS} windows a session" in text
    assert f"At most {MAX_RANKS} ranks, {MAX_SOURCES} sources, {MAX_LEVELS} levels" in text
    assert f"longer than {PIECE_BYTES >> 10} KiB" in text
    blocks = blocks_per_peer(topologies.nvlink_mesh(2)) * 2
    threads = one(r"kExchangeThreads = (\d+);", read(f"{CORE}/include/comm_core/exchange.cuh"))
    kernels = read(f"{CORE}/include/comm_core/exchange_kernels.cuh")
    fit = int(one(r"__launch_bounds__\(kExchangeThreads, (\d)\)", kernels))
    assert f"within {blocks} blocks of {threads} threads" in text
    assert fit == 3 and "Three such blocks fit an SM" in text and f"needs {-(-blocks // fit)} SMs" in text
    record = read("docs/adr/0008-launches-follow-from-the-facts.md")
    assert f"{blocks} blocks of {threads} threads" in record
    assert f"a shared GPU needs {-(-blocks // fit)} SMs" in record
    eight, sixteen = (blocks_per_peer(topologies.same_gpu(topologies.nvlink_mesh(n))) for n in (8, 16))
    assert f"{blocks // 2} for two ranks on two GPUs, {eight} for eight on one, {sixteen} for sixteen" in record


def test_what_was_verified_is_said_everywhere_alike(read):
    """Nothing is claimed that was not run, and what was run is not left out."""
    transports = builtin.comm_transports()
    text = "; ".join(f"{item.name}: {', '.join(item.verified_on) or 'not yet'}" for item in transports)
    assert text in read("README.md")
    assert text in read("packages/comm-core/README.md")
    unverified = {item.name for item in transports if not item.verified_on}
    assert ("nobody has run it yet" in read("docs/backends.md")) == ("nccl" in unverified)


def test_the_types_table_is_true(read):
    """Listed types are those that are tested and accepted; the others are refused, or said to be untested."""
    text = read("docs/backends.md")
    rows = table(text, "dtype")
    listed = {getattr(torch, names(row[0])[0]): row for row in rows}
    assert tuple(listed) == DTYPES
    for dtype, row in listed.items():
        assert row[1:] == [str(dtype.itemsize), *["all operations"] * 3]
        assert dtype.itemsize in DistSession.properties.itemsizes & WindowSession.properties.itemsizes
        check_dtype(dtype)
    refused = names(one(r"^Refused: (.*?)\(8 bytes", text))
    for name in refused:
        with pytest.raises(ArgumentValueError):
            check_dtype(getattr(torch, name))
    large = {str(d) for d in vars(torch).values() if isinstance(d, torch.dtype) and d.itemsize > 4}
    assert {f"torch.{name}" for name in refused} == large


def test_every_operation_is_in_the_backends_page(read):
    """And in the list of what works with every type, or in the one of what does not."""
    text = read("docs/backends.md")
    methods = [
        name
        for name, value in vars(UlyssesCommunicator).items()
        if inspect.isfunction(value) and not name.startswith("_") and name not in ("check", "close")
    ]
    assert [name for name in methods if name not in names(text)] == []
    assert set(WHOLE_HEAD_CALLS) <= set(methods)


def test_the_local_passes_are_those_of_the_plans(read):
    """What a call costs besides the exchange."""

    def passes(batch: int) -> dict[str, str]:
        ranks, local, shape = 2, 3, (batch, 4, 6, 8)
        band = (batch, 8, 2, 8)
        strides = {s: (s[1] * s[2] * s[3], s[2] * s[3], s[3], 1) for s in (shape, band)}
        built = {
            "scatter_heads": plans.scatter_heads(shape, 2, 1, ranks),
            "gather_heads": plans.gather_heads((batch, 8, local, 8), 2, 1, ranks),
            "exchange_chunks": plans.exchange_chunks(64, 2, 1, ranks),
            "scatter_qkv_head_chunk": plans.scatter_qkv_head_chunk(
                shape, (strides[shape],) * 3, 2, 1, ranks, head_offset=0, head_count=2
            ),
            "gather_output_head_chunk": plans.gather_output_head_chunk(
                band, strides[band], 2, 1, ranks, local_heads=local, head_offset=0
            ),
        }
        layouts = {name: wire(plan) for name, plan in built.items()}
        return {
            name: ", ".join(["pack"] * (not w.send_in_place) + ["unpack"] * (not w.receive_in_place)) or "none"
            for name, w in layouts.items()
        }

    rows = {names(row[0])[0]: row[1:] for row in table(read("docs/backends.md"), "operation")}
    one, two = passes(1), passes(2)
    assert rows == {name: [one[name], two[name]] for name in one}


# Errors, tools, packages


def test_the_errors_page_says_what_each_is(read):
    """Every error is there, with builtins that it really is."""
    rows = {names(row[0])[0]: names(row[1]) for row in table(read("docs/ops/errors.md"), "error")}
    assert set(rows) == set(errors.__all__)
    for name, bases in rows.items():
        cls = getattr(errors, name)
        assert bases and all(issubclass(cls, getattr(builtins, base)) for base in bases), name
        assert set(bases) >= {"ValueError", "TypeError", "RuntimeError", "TimeoutError"} & {
            base.__name__ for base in cls.__mro__
        }


def test_the_commands_are_those_of_the_tools(read):
    """The developers' commands in CONTRIBUTING, the user's in all pages."""
    rows = table(read("CONTRIBUTING.md"), "command")
    assert {one(r"^`python tools/dev.py (\S+?)[` ]", row[0]) for row in rows} == set(dev.COMMANDS)


def test_commctl_commands_exist(read, page):
    """A page that tells users to run something that is not there."""
    commands = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    commands |= {group.typer_instance.info.name for group in app.registered_groups}
    commands |= {name for name, _ in pcie_plugin.comm_commands()}
    assert set(re.findall(r"\bcommctl ([a-z]+)", read(page))) <= commands


def test_the_architecture_lists_every_module(read, root):
    """Of comm-core, once."""
    listed = [name for row in table(read("docs/architecture.md"), "module of comm-core") for name in names(row[0])]
    folder = root / "packages" / "comm-core" / "src" / "comm_core"
    modules = {path.stem for path in folder.glob("*.py")} | {
        path.parent.name for path in folder.glob("*/__init__.py")
    }
    assert sorted(listed) == sorted(name for name in modules if not name.startswith("_"))


def test_the_faked_machines_exist(read):
    """What the page on testing names."""
    section = read("docs/testing.md").partition("## Machines that you don't have\n")[2].partition("\n## ")[0]
    listed = {name for name in names(section) if re.fullmatch(r"\w+", name)}
    assert listed <= set(topologies.__all__) and "two_islands" in listed


def test_the_readme_lists_every_package(read, root):
    """And those that are planned. No version is written there: a release would leave it wrong."""
    rows = {re.sub(r"\[(.*?)\].*", r"\1", row[0]): row for row in table(read("README.md"), "package")}
    here = {folder.name for folder in (root / "packages").iterdir() if (folder / "pyproject.toml").is_file()}
    all_known = {item.distribution for item in (*known.TRANSPORTS.values(), *known.CODECS.values())}
    assert set(rows) == here | all_known
    for name, row in rows.items():
        here_or_not = f"[changelog](packages/{name}/CHANGELOG.md)" if name in here else "planned, not released"
        assert row[1] == here_or_not


def test_names_to_migrate_to_exist(read):
    """What the page says is the same, or more, or differs, is there, with the arguments that it shows."""
    text = read("docs/migrating.md").partition("## Not here")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if re.match(r"\| `", line)]
    seen = set()
    for name, kind, *_ in rows:
        for item in names(name):
            what, _, arguments = item.rstrip(")").partition("(")
            found = getattr(comm_core, what, None) or getattr(UlyssesCommunicator, what, None)
            found = found or getattr(comm_lowp, what, None) or getattr(comm_nvlink, what, None)
            found = found or getattr(comm_mnnvl, what, None)
            assert (found is None) == (kind.strip() == "absent"), item
            if found is not None and arguments and arguments != "…":
                shown = [part.strip() for part in arguments.split(",")]
                real = [name for name in inspect.signature(found).parameters if name != "owner"]
                assert [part for part in shown if part != "*"] == real, item
            seen.add(what)
    public = {name for name in vars(UlyssesCommunicator) if not name.startswith("_")}
    more = {"dtype", "device", "rank", "world_size", "bytes_sent", "memory_pool", "check"}
    assert public - seen == more | {"checkpoint_prepare", "checkpoint_restore"}


# All-reduce


def test_the_all_reduce_tables_are_true(read):
    """Codes, what each pattern needs, fills and returns, and who provides the backends."""
    text = read("docs/allreduce.md")
    backends = {names(row[0])[0]: row for row in table(text, "backend")}
    assert set(backends) == set(known.ALLREDUCE)
    for name, item in known.ALLREDUCE.items():
        assert backends[name][1] == item.distribution
    providers = (builtin, nvlink_plugin, mnnvl_plugin)
    assert {item.name for provider in providers for item in provider.comm_allreduce()} == set(known.ALLREDUCE)
    rows = table(text, "code")
    assert [(int(row[0]), names(row[1])[0]) for row in rows] == [(int(item), item.name) for item in PATTERNS]
    outputs: dict[int, set[str]] = {}
    for row, spec in zip(rows, PATTERNS.values(), strict=True):
        like = re.match(r"as (\d+)", row[3])
        outputs[int(row[0])] = set(names(row[3])) | (outputs[int(like[1])] if like else set())
        assert outputs[int(row[0])] == {*spec.returns, *spec.may_return}
        if like is None:
            assert one(r"\*\*`(\w+)`\*\*", row[3]) == spec.primary
        elif "**" in row[3]:
            assert spec.primary in row[3]


def test_the_codes_are_those_of_the_enumerations(read):
    """By name and number."""
    for row in table(read("docs/ops/allreduce_codes.md"), "enumeration"):
        (name,) = names(row[0])
        if name != "AllReduceFusionPattern":
            shown = re.findall(r"`(\w+)` (\d+)", row[1])
            assert shown == [(item.name, str(int(item))) for item in getattr(comm_core, name)], name


def test_the_plugin_guide_names_what_an_all_reduce_backend_implements(read):
    """Every member of the descriptor, and every one of a workspace that a backend may override."""
    text = read("docs/plugin-guide.md").partition("## An all-reduce backend\n")[2].partition("\n## ")[0]
    quoted = " ".join(names(text))
    hooks = {
        "_run",
        "_destroy",
        "check_call",
        "patterns",
        "shared_resources",
        *AllReduceFusionWorkspace.__abstractmethods__,
    }
    wanted = [*members(AllReduceBackend), *members(interface.Candidate), *hooks]
    assert [name for name in wanted if not re.search(rf"\b{name}\b", quoted)] == []


# Links


def slug(heading: str) -> str:
    """Return the anchor that a heading gets."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")


def test_links_lead_somewhere(read, root, page):
    """To files of this repository, and to headings in them."""
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(read(page))):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        where = (root / page).parent / path if path else root / page
        if not where.resolve().is_relative_to(root) or not where.exists():
            wrong.append(target)
        elif anchor:
            headings = re.findall(r"^#+ (.+)$", where.read_text(encoding="utf-8"), re.MULTILINE)
            if anchor not in map(slug, headings):
                wrong.append(target)
    assert wrong == []


def test_every_page_is_reached_from_the_readme(read, root):
    """A page that nothing links to is not read."""
    seen, todo = set(), ["README.md"]
    while todo:
        page = todo.pop()
        if page in seen:
            continue
        seen.add(page)
        for target in re.findall(r"\]\(([^)\s#]+\.md)[^)]*\)", read(page)):
            if "://" not in target:
                todo.append(str(((root / page).parent / target).resolve().relative_to(root)))
    written = {str(path.relative_to(root)) for path in root.glob("docs/**/*.md")}
    assert written - seen == set()


# Scenarios


def defined_tests(root: Path) -> dict[str, set[str]]:
    """Return file name -> tests in it, as ``test_x`` or ``TestX::test_x``, inherited contract tests included."""
    contracts = {kit.__name__: kit for kit in (TransportContract, DeviceContract, CudaModulesContract)}
    found: dict[str, set[str]] = {}
    for path in (*root.glob("packages/*/tests/**/test_*.py"), *root.glob("tests/*/test_*.py")):
        own = found.setdefault(path.name, set())
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                own.add(node.name)
            elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                own |= {f"{node.name}::{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
                kits = [
                    contracts[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in contracts
                ]
                own |= {f"{node.name}::{name}" for kit in kits for name in vars(kit) if name.startswith("test_")}
    return found


ID = r"[A-MV]\d{1,2}"


def documented_ids(root: Path) -> dict[str, set[str]]:
    """Return scenario id -> where a test's docstring claims it: at the beginning, or in brackets at the end."""
    found: dict[str, set[str]] = {}
    kit = root / "packages" / "comm-core" / "src" / "comm_core" / "testing" / "contract.py"
    for path in (kit, *root.glob("packages/*/tests/**/test_*.py"), *root.glob("tests/*/test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            text = ast.get_docstring(node) or ""
            listed = re.match(rf"({ID}(?:, {ID})*)[:.]", text) or re.search(rf"[(:] ?({ID}(?:, {ID})*)\)?\.$", text)
            for name in re.findall(ID, listed[1]) if listed else ():
                found.setdefault(name, set()).add(f"{path.name}::{node.name}")
    return found


@pytest.fixture
def scenarios(read):
    """Scenario id -> its row."""
    text = read("docs/scenarios.md")
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in text.splitlines()
        if re.match(rf"\| {ID} \|", line)
    ]
    found = {row[0].strip("| "): row for row in rows}
    assert len(found) == len(rows), "an id twice"
    return found


def test_the_tests_of_the_scenarios_exist(scenarios, root):
    """A row whose test was renamed or removed claims what nobody checks."""
    tests = defined_tests(root)
    for name, row in scenarios.items():
        named = re.findall(r"`(test_\w+\.py)::([\w:]+)`", row[-1])
        assert named or row[-1].startswith("later"), f"{name} names no test"
        for file, test in named:
            assert test in tests.get(file, ()), f"{name}: {file}::{test}"


def test_the_ids_in_tests_are_explained(scenarios, root):
    """Who meets an id in a test finds here what it means."""
    found = documented_ids(root)
    assert len(found) > 30
    assert sorted(set(found) - set(scenarios)) == []
