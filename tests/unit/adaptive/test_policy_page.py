"""docs/policy.md lists the constants of today."""

from pathlib import Path

from benchmarks.policy_constants import MARKS, constants

PAGE = Path(__file__).parents[3] / "docs" / "policy.md"


def listed():
    """Return name, value and meaning of every constant on the page."""
    start, end = MARKS
    table = PAGE.read_text().split(start)[1].split(end)[0]
    found = []
    for line in table.splitlines():
        if line.startswith("| "):
            name, value, meaning = [cell.strip() for cell in line.split("|")[1:4]]
            if name:
                found.append([name.strip("`"), value, meaning])
            else:  # a meaning that goes on
                found[-1][2] += f" {meaning}"
    return found[2:]  # without the head


def test_the_table_of_constants_is_current():
    now = []
    for name, value, meaning in constants():
        values = value if isinstance(value, tuple) else (value,)
        now.append([name, ", ".join(f"{each:g}" for each in values), meaning])
    fix = "run PYTHONPATH=. python benchmarks/policy_constants.py --markdown docs/policy.md"
    assert listed() == now, fix
