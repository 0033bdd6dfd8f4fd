"""Files, classes and functions stay short enough to read, and documents and results small."""

import ast
from functools import cache

import pytest

from tools.imports import used_names
from tools.size import BUDGETS, PUBLIC_NAMES, ROOT, Measure, branches, measure, parameters

measured = cache(measure)


@pytest.mark.parametrize("name", BUDGETS)
def test_no_size_exceeds_its_limit(name):
    found: Measure = measured()[name]
    assert found.value <= BUDGETS[name], f"{name}: {found.value} at {found.where}; make size"


def test_every_package_has_a_limit_of_names():
    packages = {path.parent.name for path in (ROOT / "serve_spec").glob("*/__init__.py")}
    assert packages <= set(PUBLIC_NAMES)


def test_the_used_names_of_a_module_are_those_imported_and_those_read_from_it(tmp_path):
    user = tmp_path / "user.py"
    user.write_text(
        "from house import room, other as named\n"
        "from house.room import Name, _hidden\n"
        "def late():\n"
        "    from house.door import shown\n"
        "    return room.value, room._private, named.thing, shown.attribute, Name.member\n"
    )
    modules = {"house.room", "house.other", "house.door"}
    assert used_names(user, modules) == {
        ("house.room", "Name"),
        ("house.room", "value"),
        ("house.other", "thing"),
        ("house.door", "shown"),
    }


def test_branches_and_parameters_are_counted():
    text = """
def method(self, a, *rest, b=1, **more):
    if a:
        pass
    elif b:
        pass
    else:
        pass
    for each in rest:
        def inner():
            while each:
                pass
    try:
        pass
    except ValueError:
        pass
    finally:
        pass
"""
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert parameters(function) == 4
    assert branches(function) == 6
