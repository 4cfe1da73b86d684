"""No file of the repository names a place that exists on one machine only, or a package registry's host.

A registry is a matter of each machine's own settings: a host written into a file breaks behind a mirror.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Written in pieces, so that this file does not hold the words that it looks for.
FOLDERS = (
    *("wor" + "k", "roo" + "t", "tmp/" + "work", "opt/" + "wheels", "opt/" + "pypi"),
    *(r"home/[a-z][\w-]*", r"Users/\w+"),
)
HOSTS = (
    *("pypi" + r"\.org", "files" + r"\.pythonhosted\.org", "download" + r"\.pytorch\.org"),
    *("registry" + r"\.npmjs\.org", "crates" + r"\.io", "proxy" + r"\.golang\.org", "deb" + r"\.debian\.org"),
)
FORBIDDEN = re.compile(rf"(?<![\w.*)}}\]-])/(?:{'|'.join(FOLDERS)})/|\b(?:{'|'.join(HOSTS)})\b")


def repository_files() -> list[Path]:
    """What git tracks, and what it would with the next `git add`: a word is found before it is committed."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=30).stdout
    paths = (ROOT / name for name in listed.decode().split("\0") if name)
    return [path for path in paths if path.is_file()]


def forbidden_words(text: str) -> list[str]:
    return [match[0] for match in FORBIDDEN.finditer(text)]


def test_no_file_names_a_machine_or_a_registry() -> None:
    files = repository_files()
    assert ROOT / "pyproject.toml" in files
    found = [
        f"{path.relative_to(ROOT)}:{number}: {word}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        for word in forbidden_words(line)
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "planted",
    [
        "cd /wor" + "k/main",
        "see '/roo" + "t/notes'",
        "open('/ho" + "me/someone/data')",
        "--index-url https://py" + "pi.org/simple",
        "https://files.python" + "hosted.org/packages",
        "--index-url=https://download.py" + "torch.org/whl/cpu",
    ],
)
def test_a_planted_word_is_found(planted: str) -> None:
    assert forbidden_words(planted)


@pytest.mark.parametrize("fine", ["net/wor" + "k/x", "{path}/wor" + "k/", "tests/helpers", "file:///tmp/store"])
def test_other_words_are_let_through(fine: str) -> None:
    assert not forbidden_words(fine)
