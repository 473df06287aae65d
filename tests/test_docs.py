"""What the documentation says can be run: its Python blocks do run, page by page, and its command lines are understood."""

import re
import shlex
from pathlib import Path

import pytest

import cyclic_jax as cj
from experiments import accuracy, language, launch
from experiments.config import check

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(DOCS.glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"-m experiments\.(\w+)([^\"#\n]*)")
EXPERIMENTS = {"accuracy": accuracy, "language": language}


def blocks(text: str, kind: str) -> list[str]:
    return [body for name, body in BLOCK.findall(text) if name == kind]


def run(text: str) -> None:
    """All Python blocks of a page, one after the other, as one program."""
    names: dict = {}
    for body in blocks(text, "python"):
        exec(compile(body, "block", "exec"), names)


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Experiment and options of each command line."""
    found = []
    for body in blocks(text, "bash"):
        found += [(name, shlex.split(rest)) for name, rest in COMMAND.findall(body.replace("\\\n", " "))]
    return found


def understand(name: str, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse and check what a command line asks for, without running it."""
    if name == "launch":
        cut = options.index("--")
        monkeypatch.setattr(launch, "run", lambda commands, grace: 0)
        with pytest.raises(SystemExit, match=r"^0$"):
            launch.main(options)
        return understand(options[cut + 1], options[cut + 2 :], monkeypatch)
    monkeypatch.setattr(EXPERIMENTS[name], "command", lambda config, run_study: check(config))
    return EXPERIMENTS[name].main(options)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run(page, monkeypatch):
    monkeypatch.setattr(cj, "simulate_devices", lambda count: None)  # the tests have theirs
    run(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_command_lines_are_understood(page, monkeypatch):
    for name, options in commands(page.read_text()):
        understand(name, options, monkeypatch)


def test_the_pages_have_what_is_checked():
    text = "\n".join(page.read_text() for page in PAGES)
    assert len(blocks(text, "python")) >= 8
    assert len(commands(text)) >= 8
    assert {name for name, _ in commands(text)} == {"accuracy", "launch"}


def test_mistakes_are_seen(monkeypatch):
    with pytest.raises(NameError):
        run("```python\nx = 1\n```\ntext\n```python\nprint(x + y)\n```\n")
    ((name, options),) = commands("```bash\npython -m experiments.accuracy \\\n  --no-such-flag 3  # so\n```\n")
    assert options == ["--no-such-flag", "3"]
    with pytest.raises(SystemExit):
        understand(name, options, monkeypatch)
