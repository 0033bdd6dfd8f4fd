"""Pages are read as a new user reads them."""

from pathlib import Path

import pytest

from tools.newcomer import PAGES, ROOT, Command, commands, is_as_said

PAGE = """\
# Page

```sh
pip install .   # don't forget the dot
serve-spec serve asset:tiny
curl http://127.0.0.1:8000/ -d '{"a": 1,
    "b": 2}' \\
    -N
#> {"text": "..."}
#>
#> [DONE]
make clean
```

```sh no-run
serve-spec serve a/published-model
```

```python
for each in range(2):
    print(each)

#> 0
#> 1
```

```yaml
sh: not a command
```
"""


def test_commands_are_what_a_shell_runs_with_what_the_page_says_they_print():
    install, serve, curl, clean, python = commands(PAGE)
    assert install == Command(4, "sh", "pip install .   # don't forget the dot")
    assert (serve.line, serve.is_server) == (5, True)
    assert curl.text.count("\n") == 2
    assert curl.output == '{"text": "..."}\n\n[DONE]'
    assert clean == Command(12, "sh", "make clean")
    assert (python.line, python.language, python.output) == (20, "python", "0\n1")
    assert python.text == "for each in range(2):\n    print(each)\n"


@pytest.mark.parametrize(
    ("printed", "said", "agrees"),
    [
        ("0.5 tokens\n", "0.5 tokens", True),
        ("0.5 tokens", "0.6 tokens", False),
        ("0.5 tokens\nand more", "0.5 tokens", False),
        ("a [b] c\nd", "a [b] ...d", True),
        ("a [b] c", "...d", False),
    ],
)
def test_three_dots_stand_for_any_text_and_all_else_for_itself(printed, said, agrees):
    assert is_as_said(printed, said) is agrees


@pytest.mark.parametrize("name", PAGES)
def test_a_page_serves_asks_and_says_what_is_answered(name):
    found = commands(Path(ROOT / name).read_text())
    first_server = next(i for i, command in enumerate(found) if command.is_server)
    assert any(command.text.startswith("curl") for command in found[first_server:])
    assert any(command.output for command in found)
