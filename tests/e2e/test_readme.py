"""What the READMEs say is there: every path exists, every command parses, and both languages say the same."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
# What the README's own commands make: the environment, run folders.
MADE = (".venv/", "runs/")
# A name that stands for a file of the reader's, or of any task.
STANDS_FOR = ("task.py",)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATH_LIKE = re.compile(r"[\w.-]+(/[\w.-]+)*/?")
SUFFIXES = (".py", ".md", ".toml", ".lock", ".json", ".yaml")


def blocks(text: str, language: str) -> list[str]:
    return [body for name, body in FENCE.findall(text) if name == language]


def commands(text: str) -> list[str]:
    """The lines of all ```bash blocks in order, without comments, joined where a backslash ends them."""
    lines = "".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    split = (shlex.join(shlex.split(line, comments=True)) for line in lines)
    return [line for line in split if line]


def given_files(text: str) -> dict[str, str]:
    """The Python files that the text itself gives, by the name in their first comment."""
    found = {}
    for body in blocks(text, "python"):
        if name := re.match(r"# (\S+\.py)\n", body):
            found[name[1]] = body
    return found


def paths(text: str) -> list[str]:
    """Targets of relative links, and inline code that looks like a path."""
    prose = FENCE.sub("", text)
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", prose) if "://" not in link]
    spans = [span for span in re.findall(r"`([^`\n]+)`", prose) if PATH_LIKE.fullmatch(span)]
    return links + [span for span in spans if "/" in span or span.endswith(SUFFIXES) or span == "LICENSE"]


@functools.cache
def help_of(command: str) -> tuple[int, str]:
    """Exit status and text of ``stretto COMMAND --help`` on a wide terminal without colours."""
    environment = {"COLUMNS": "250", "NO_COLOR": "1", "TERM": "dumb", "LC_ALL": "C.UTF-8"}
    program = [str(Path(sys.executable).parent / "stretto"), command, "--help"]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=50)
    return done.returncode, done.stdout + done.stderr


class Reader:
    """Reads one README as a person who types each command, and notes what is not there."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.given = given_files(text)
        self.made = list(MADE)
        self.problems: list[str] = []

    def read(self) -> list[str]:
        for path in paths(self.text):
            self._expect_path(path, "the text")
        for command in commands(self.text):
            self._command(command)
        return self.problems

    def _expect_path(self, path: str, where: str) -> None:
        known = path in self.given or path in STANDS_FOR or path.startswith(tuple(self.made))
        if not known and not (ROOT / path).exists():
            self.problems.append(f"{where}: there is no {path}")

    def _command(self, command: str) -> None:
        program, *words = shlex.split(command)
        if program == "make":
            self._make(command, words)
        elif program == "stretto" and words:
            self._stretto(command, words)
        elif program in ("source", "python") and len(words) == 1:
            self._expect_path(words[0], command)
        else:
            self.problems.append(f"{command}: this test does not know how to check it")

    def _make(self, command: str, words: list[str]) -> None:
        rules = (ROOT / "Makefile").read_text(encoding="utf-8")
        for word in words:
            if "=" not in word and not re.search(rf"^{re.escape(word)}:", rules, re.MULTILINE):
                self.problems.append(f"{command}: the Makefile has no target {word}")

    def _stretto(self, command: str, words: list[str]) -> None:
        status, text = help_of(words[0])
        if status:
            self.problems.append(f"{command}: `stretto {words[0]} --help` ends with {status}: {text[-300:]}")
            return
        flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
        for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
            if flag not in flags:
                self.problems.append(f"{command}: no flag {flag}; `stretto {words[0]}` has {sorted(flags)}")
        if not words[1].startswith("-"):
            self._expect_path(words[1], command)
        for flag, value in pairwise(words):
            if flag in ("-o", "--out"):
                self.made.append(value)
            elif flag.startswith("--") and value.endswith(SUFFIXES):
                self._expect_path(value, command)


@pytest.mark.parametrize("readme", [ENGLISH, CHINESE], ids=lambda path: path.name)
def test_every_path_and_command_exists(readme: Path) -> None:
    problems = Reader(readme.read_text(encoding="utf-8")).read()
    assert not problems, "\n" + "\n".join(problems)


def test_the_two_commands_come_first() -> None:
    assert commands(ENGLISH.read_text(encoding="utf-8"))[:2] == ["make train", "make test"]


def test_every_command_of_the_table_is_shown_at_work() -> None:
    text = ENGLISH.read_text(encoding="utf-8")
    shown = {line.split()[1] for line in commands(text) if line.startswith("stretto ")}
    assert shown == set(re.findall(r"^\| `stretto (\w+)", text, re.MULTILINE))


def skeleton(text: str) -> dict[str, list[str]]:
    """What two languages must share: commands, code, the order of headings, lists and tables, names."""
    prose = FENCE.sub("", text)
    return {
        "commands": commands(text),
        "code": [ast.dump(ast.parse(body)) for body in blocks(text, "python")],
        "shape": [line[:2].strip() for line in prose.splitlines() if line.startswith(("#", "- ", "|"))],
        "inline code": sorted(re.findall(r"`([^`\n]+)`", prose)),
    }


def test_both_languages_say_the_same() -> None:
    english, chinese = (skeleton(path.read_text(encoding="utf-8")) for path in (ENGLISH, CHINESE))
    for part, lines in english.items():
        assert chinese[part] == lines, part


def test_the_task_in_the_text_is_a_whole_task() -> None:
    tree = ast.parse(given_files(ENGLISH.read_text(encoding="utf-8"))["curve.py"])
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {"model", "data", "loss", "optimizer", "recipe"} <= defined


# ------------------------------------------------------------------------------------- these tests can fail


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("See `docs/nowhere.md`.", "no docs/nowhere.md"),
        ("See [it](docs/nowhere.md).", "no docs/nowhere.md"),
        ("`nowhere.py`", "no nowhere.py"),
        ("```bash\nmake nothing\n```\n", "no target nothing"),
        ("```bash\npython nowhere.py\n```\n", "no nowhere.py"),
        ("```bash\nrm -r runs\n```\n", "does not know"),
        ("```bash\nstretto nothing examples/gpt\n```\n", "`stretto nothing --help` ends with"),
        ("```bash\nstretto train examples/nothing\n```\n", "no examples/nothing"),
        ("```bash\nstretto train examples/gpt --wrokers 2\n```\n", "no flag --wrokers"),
        ("```bash\nstretto train examples/gpt \\\n  --nothing=2\n```\n", "no flag --nothing"),
    ],
)
def test_a_planted_mistake_is_found(text: str, problem: str) -> None:
    found = Reader(text).read()
    assert len(found) == 1, found
    assert problem in found[0]


def test_a_planted_difference_is_found() -> None:
    text = ENGLISH.read_text(encoding="utf-8")
    for old, new in (
        ("--workers 3", "--workers 4"),
        ("steps: int = 400", "steps: int = 40"),
        ("## What is promised\n", ""),
        ("`make help`", "make help"),
    ):
        assert old in text
        assert skeleton(text) != skeleton(text.replace(old, new))
