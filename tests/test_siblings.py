"""The scripts repeat what they share, word for word: `diff` between two of them shows the algorithm alone."""

import ast
from itertools import combinations

import pytest
from conftest import ROOT

SCRIPTS = [name for name in ("ppo_ddp", "ppo_lstm_ddp", "grpo_ddp", "ppo_vla_async") if (ROOT / f"{name}.py").exists()]
OWN = {"Args", "Agent", "Learner", "main"}
OWN_ARGS = {"advantage"}  # which kinds there are is what makes the algorithm
pytestmark = pytest.mark.smoke


def parsed(name: str):
    source = (ROOT / f"{name}.py").read_text()
    return source, ast.parse(source)


def definitions(name: str) -> dict[str, str]:
    source, tree = parsed(name)
    lines = source.splitlines()
    found = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    start = {n.name: min([n.lineno, *(d.lineno for d in n.decorator_list)]) - 1 for n in found}
    return {n.name: "\n".join(lines[start[n.name] : n.end_lineno]) for n in found}


def fields(name: str) -> dict[str, tuple[str, str]]:
    """Type and help (the comment behind it) of each argument."""
    source, tree = parsed(name)
    (args,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    lines = source.splitlines()
    found = {}
    for field in args.body:
        _, _, comment = lines[field.end_lineno - 1].partition("  # ")
        found[field.target.id] = (ast.unparse(field.annotation), comment)
    return found


@pytest.mark.parametrize("pair", list(combinations(SCRIPTS, 2)), ids=str)
def test_same_name_means_same_source(pair):
    one, two = map(definitions, pair)
    shared = [name for name in one if name in two and name not in OWN]
    assert len(shared) >= 14
    for name in shared:
        assert one[name] == two[name], name
    assert shared == [name for name in two if name in one and name not in OWN]  # in the same order


@pytest.mark.parametrize("pair", list(combinations(SCRIPTS, 2)), ids=str)
def test_arguments_of_the_same_name_mean_the_same(pair):
    one, two = map(fields, pair)
    shared = [name for name in one if name in two and name not in OWN_ARGS]
    assert len(shared) >= 28
    for name in shared:
        assert one[name] == two[name], name


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_argument_says_what_it_is(name):
    assert all(isinstance(doc, str) and doc for _, doc in fields(name).values())


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_imports_no_other(name):
    _, tree = parsed(name)
    imports = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    imports += [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert not {i.split(".")[0] for i in imports} & {*SCRIPTS, "utils", "benchmarks", "tests"}
