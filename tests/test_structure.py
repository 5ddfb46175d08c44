"""The house: what may import what, what is documented, and what the configurations say."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import fedmuon_pl
import fedmuon_pl.compare

PACKAGE = Path(fedmuon_pl.__file__).parent
CONFIGS = PACKAGE.parent / "configs"
FILES = {p.relative_to(PACKAGE).as_posix(): p for p in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}

# Nothing of Lightning in these: a notebook or another framework can use them.
FREE = ["algorithms", "optim", "clients.py", "schedules.py", "seeding.py", "errors.py", "models"]
FREE += [f"data/{n}.py" for n in ("arrays", "augment", "feature_skew", "files")]
FREE += [f"data/{n}.py" for n in ("label_skew", "partition", "sampling", "size_skew")]

# Imports point one way: a part may not know the parts named here.
UPWARDS = {"server", "module", "training", "cli", "arguments", "compare"}
FORBIDDEN = {
    "seeding.py": UPWARDS | {"algorithms", "data", "tasks", "models", "clients", "optim"},
    "clients.py": UPWARDS | {"algorithms", "data", "tasks", "models", "optim"},
    "optim": UPWARDS | {"algorithms", "data", "tasks", "models", "clients", "seeding"},
    "schedules.py": UPWARDS | {"algorithms", "data", "tasks", "models", "clients", "optim"},
    "algorithms": UPWARDS | {"data", "tasks", "models"},
    "data": UPWARDS | {"algorithms", "optim", "clients", "tasks", "models"},
    "tasks.py": UPWARDS | {"algorithms", "optim", "data", "models"},
    "models": UPWARDS | {"algorithms", "optim", "clients", "data", "tasks"},
    "server": {"module", "training", "cli", "arguments", "compare", "tasks", "models"},
    "launch.py": UPWARDS | {"algorithms", "optim", "clients", "data", "tasks", "models"},
    "parallel.py": UPWARDS | {"algorithms", "optim", "clients", "data", "tasks", "models"},
    "module.py": {"training", "cli", "arguments", "compare", "models"},
}

# Lines that a module may have; a few are longer, and no longer than this.
LIMIT = 350
LONGER = {
    "data/partition.py": 500,  # a class for each way to partition, with its checks
    "server/callback.py": 400,  # one callback
    "compare/execute.py": 400,  # one loop and the processes it watches
}


def under(name, part):
    return name == part or name.startswith(part + "/")


def imports(name):
    """The parts of the package that a module imports when it runs, and where."""
    here = ["fedmuon_pl", *name.split("/")[:-1]]
    for node, typing_only in nodes(TREES[name]):
        if typing_only:
            continue
        if isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            module = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                yield [*module, alias.name], node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split("."), node.lineno


def nodes(tree, typing_only=False):
    for node in ast.iter_child_nodes(tree):
        inside = typing_only or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        yield node, inside
        yield from nodes(node, inside)


@pytest.mark.parametrize("part", FORBIDDEN)
def test_imports_point_one_way(part):
    members = [name for name in FILES if under(name, part)]
    assert members
    for name in members:
        for target, line in imports(name):
            if target[0] == "fedmuon_pl" and len(target) > 1:
                assert target[1] not in FORBIDDEN[part], f"{name}:{line} imports {target}"


def test_the_import_reader_sees_what_is_there():
    seen = {".".join(t) for t, _ in imports("module.py")}
    assert "fedmuon_pl.server.callback.FederatedServer" in seen
    assert "pytorch_lightning.LightningModule" in seen
    typing_only = {".".join(t) for t, _ in imports("server/callback.py")}
    assert "fedmuon_pl.module.FederatedModule" not in typing_only


def test_who_imports_lightning_and_torch():
    modules = [name for name in FILES if any(under(name, part) for part in FREE)]
    names = ["fedmuon_pl." + n[:-3].replace("/", ".").removesuffix(".__init__") for n in modules]
    assert len(names) > 15
    script = f"""
import importlib, sys
def heavy(*names): return [n for n in names if n in sys.modules]
import fedmuon_pl, fedmuon_pl.cli
assert fedmuon_pl.cli.main(["--help"]) == 0
found = heavy("torch", "pytorch_lightning", "lightning_fabric", "numpy", "pandas")
assert not found, f"the command imports {{found}}"
for name in {sorted(names)!r}:
    importlib.import_module(name)
    found = heavy("pytorch_lightning", "lightning_fabric", "lightning", "jsonargparse")
    assert not found, f"{{name}} imports {{found}}"
assert heavy("torch")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_exported_name_exists():
    for name in fedmuon_pl.__all__:
        assert getattr(fedmuon_pl, name) is not None
    for name in fedmuon_pl.compare.__all__:
        assert callable(getattr(fedmuon_pl.compare, name))
        assert f"compare/{name}.py" not in FILES  # once imported, the module would hide the name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        fedmuon_pl.Nothing  # noqa: B018


@pytest.mark.parametrize("name", [n for n in FILES if n != "compare/__init__.py"])
def test_what_is_public_is_documented(name):
    tree, missing = TREES[name], []
    if tree.body and not ast.get_docstring(tree):
        missing.append("the module")

    def visit(node, path):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if child.name.startswith("_") or "overload" in map(
                    ast.unparse, child.decorator_list
                ):
                    continue
                if not ast.get_docstring(child):
                    missing.append(".".join([*path, child.name]))
                if isinstance(child, ast.ClassDef):
                    visit(child, [*path, child.name])

    visit(tree, [])
    assert not missing


def test_all_names_what_is_there():
    for name, tree in TREES.items():
        listed = [
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "__all__"
            and name not in ("__init__.py", "compare/__init__.py")  # lists made of a table
        ]
        if listed:
            module = importlib.import_module(
                "fedmuon_pl." + name[:-3].replace("/", ".").removesuffix(".__init__")
            )
            assert all(hasattr(module, entry) for entry in listed[0]), name


def test_no_module_is_too_long():
    lines = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    long = {name: n for name, n in lines.items() if n > LONGER.get(name, LIMIT)}
    assert not long


# -- configurations -------------------------------------------------------------------------------

ALGORITHMS = sorted((CONFIGS / "algorithm").glob("*.yaml"))


def algorithm(path):
    config = yaml.safe_load(path.read_text())
    assert list(config) == ["method", "model"]
    assert list(config["model"]) == ["algorithm"]
    assert list(config["model"]["algorithm"]) == ["class_path", "init_args"]
    return config["method"], config["model"]["algorithm"]


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda p: p.stem)
def test_an_algorithms_yaml_states_all_arguments_in_order(path):
    # A later class_path silently keeps an earlier class's arguments of the same name.
    method, entry = algorithm(path)
    assert method == path.stem
    kind = getattr(importlib.import_module("fedmuon_pl.algorithms"), entry["class_path"])
    signature = inspect.signature(kind).parameters
    assert list(entry["init_args"]) == list(signature)
    text = path.read_text()
    assert text.startswith("# "), "a comment says what it is"


def test_every_method_has_a_yaml():
    from fedmuon_pl import algorithms

    classes = {algorithm(path)[1]["class_path"] for path in ALGORITHMS}
    assert classes >= set(algorithms.__all__) - {"Algorithm"}


def test_class_paths_exist():
    def walk(value):
        if isinstance(value, dict):
            if "class_path" in value:
                yield value["class_path"]
            for v in value.values():
                yield from walk(v)
        elif isinstance(value, list):
            for v in value:
                yield from walk(v)

    import fedmuon_pl.algorithms
    import fedmuon_pl.data.catalogue
    import fedmuon_pl.models
    import fedmuon_pl.schedules
    import fedmuon_pl.tasks

    data = fedmuon_pl.data.catalogue
    places = [fedmuon_pl.algorithms, *(getattr(data, name) for name in data.__all__)]
    places += [fedmuon_pl.models, fedmuon_pl.schedules, fedmuon_pl.tasks]
    files = sorted(CONFIGS.rglob("*.yaml"))
    assert len(files) > 8
    for path in files:
        for name in walk(yaml.safe_load(path.read_text()) or {}):
            module, _, short = name.rpartition(".")
            found = [importlib.import_module(module)] if module else places
            assert any(hasattr(place, short) for place in found), f"{path.name}: {name}"


def test_base_says_the_defaults_and_names_no_algorithm():
    from fedmuon_pl import FederatedModule, FederatedServer
    from fedmuon_pl.schedules import Constant

    base = yaml.safe_load((CONFIGS / "base.yaml").read_text())
    assert list(base) == ["seed_everything", "server", "model", "trainer"]
    assert "algorithm" not in base["model"]
    defaults = {n: p.default for n, p in inspect.signature(FederatedModule).parameters.items()}
    # The method, the task and the local work belong to other files; the seed is the run's.
    rest = set(defaults) - {"task", "algorithm", "local_steps", "local_epochs", "seed"}
    assert set(base["model"]) == rest
    assert base["model"].pop("lr_schedule") == {"class_path": "Constant"}
    assert defaults["lr_schedule"] is None
    assert vars(Constant()) == {}
    assert base["model"] == {k: defaults[k] for k in base["model"]}
    assert base["seed_everything"] == defaults["seed"] == 0
    server = {n: p.default for n, p in inspect.signature(FederatedServer).parameters.items()}
    assert base["server"] == {k: v for k, v in server.items() if k != "clients_per_round"}
    assert base["trainer"]["inference_mode"] is False
    assert base["trainer"]["devices"] == 1


def test_experiments_have_the_same_keys_in_the_same_order():
    def keys(value, path=""):
        for k, v in value.items():
            yield f"{path}{k}"
            if isinstance(v, dict) and k != "init_args":
                yield from keys(v, f"{path}{k}.")

    # What base.yaml says for all, an experiment may say for itself.
    content = yaml.safe_load((CONFIGS / "base.yaml").read_text())
    base = {(part, k) for part in ("model", "trainer") for k in content[part]}
    shapes = {}
    for path in sorted((CONFIGS / "experiment").glob("*.yaml")):
        config = yaml.safe_load(path.read_text())
        assert config["experiment"] == path.stem
        assert "algorithm" not in config["model"]
        shapes[path.stem] = [key for key in keys(config) if tuple(key.split(".")[:2]) not in base]
    assert len(shapes) > 1
    assert len(set(map(tuple, shapes.values()))) == 1
