"""A task's file and what lies beside it: imports of its own, copies in the run folder, what changed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stretto.errors import TaskError
from stretto.mistakes import in_one_line
from stretto.taskfile import changes, import_file, keep_sources, sources


def task_in(folder: Path, helper: str, text: str = "import helper\nfrom tools.deep import DEPTH\n") -> Path:
    (folder / "tools").mkdir(parents=True)
    (folder / "task.py").write_text(text)
    (folder / "helper.py").write_text(helper)
    (folder / "tools" / "__init__.py").write_text("")
    (folder / "tools" / "deep.py").write_text(f"import further\nDEPTH = {len(helper)}\n")
    (folder / "further.py").write_text("")
    (folder / "unrelated.py").write_text("")
    return folder / "task.py"


def test_two_tasks_in_one_process_each_get_their_own_modules(tmp_path: Path) -> None:
    one = import_file(task_in(tmp_path / "a" / "same", "NAME = 'one'\n"))
    two = import_file(task_in(tmp_path / "b" / "same", "NAME = 'the other'\n"))
    assert (one.helper.NAME, two.helper.NAME) == ("one", "the other")
    assert one.DEPTH != two.DEPTH, "of packages too"
    assert one.__name__ != two.__name__ and sys.modules[one.__name__] is one
    again = import_file(tmp_path / "a" / "same" / "task.py")
    assert again.helper.NAME == "one"


def test_a_module_of_python_is_not_thrown_out_for_a_file_of_its_name(tmp_path: Path) -> None:
    import_file(task_in(tmp_path / "a", ""))
    path = task_in(tmp_path / "b", "")
    (path.parent / "json.py").write_text("")
    before = sys.modules["json"]
    import_file(path)
    assert sys.modules["json"] is before


def test_what_a_task_imports_from_its_folder_is_found_through_modules_and_packages(tmp_path: Path) -> None:
    path = task_in(tmp_path, "import torch\n", "def data():\n    import helper\n    from tools import deep\n")
    assert sorted(sources(path)) == ["further.py", "helper.py", "task.py", "tools/__init__.py", "tools/deep.py"]


def test_the_copies_are_a_task_of_their_own(tmp_path: Path) -> None:
    path = task_in(tmp_path / "from", "NAME = 'kept'\n")
    renamed = path.rename(path.with_name("curve.py"))
    (tmp_path / "run").mkdir()
    keep_sources(tmp_path / "run", renamed)
    assert changes(tmp_path / "run", renamed) == ""
    for file in (tmp_path / "from").rglob("*.py"):
        file.unlink()
    assert import_file(tmp_path / "run" / "task.py").helper.NAME == "kept"
    keep_sources(tmp_path / "run", tmp_path / "run" / "task.py")  # onto itself: nothing happens
    assert (tmp_path / "run" / "helper.py").read_text() == "NAME = 'kept'\n"


def test_a_difference_is_told_in_a_few_lines(tmp_path: Path) -> None:
    path = task_in(tmp_path / "from", "RATE = 1\n")
    (tmp_path / "run").mkdir()
    keep_sources(tmp_path / "run", path)
    (path.parent / "helper.py").write_text("RATE = 2\n")
    told = changes(tmp_path / "run", path).splitlines()
    assert told[0] == "--- helper.py (as the run has it)"
    assert told[-2:] == ["-RATE = 1", "+RATE = 2"]
    path.write_text(path.read_text() + "x = 1\n" * 100)
    told = changes(tmp_path / "run", path).splitlines()
    assert len(told) == 21 and told[-1] == "... 89 more lines"


def test_a_file_that_cannot_be_imported_is_one_line(tmp_path: Path) -> None:
    path = task_in(tmp_path, "def (\n")
    with pytest.raises(TaskError, match=r"^task: .*helper.py, line 1: invalid syntax$"):
        import_file(path)
    (tmp_path / "helper.py").write_text("\nimport no_such_thing\n")
    with pytest.raises(TaskError, match=r"^task: helper.py, line 2: No module named 'no_such_thing'; install it"):
        import_file(path)


# ------------------------------------------------------------------------- which errors one line tells whole


def fails(text: str, *arguments: object, folder: Path) -> Exception:
    path = folder / "user.py"
    path.write_text(text)
    try:
        import_file(path).f(*arguments)
    except Exception as error:
        assert error.__traceback__ is not None
        return error.with_traceback(error.__traceback__.tb_next)  # without this frame, which is no user's
    raise AssertionError("it was to fail")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return batch['z']", "task: loss() asked the batch for 'z'; it has: x, labels"),
        ("return batch[\n        'z']", None),  # over two lines: the traceback says it
        ("y = 2; return (y, batch['label'])", "asked the batch for 'label'; it has: x, labels; did you mean 'labels'?"),
        ("return {'a': 1}['z']", None),
        ("other = {'a': 1}\n    return other['z']", None),
        ("return batch['x']['z']", None),
        ("return batch[len]", "asked the batch for <built-in function len>"),
        ("return {}[batch['x']['a']]", None),
        ("raise KeyError('z')", None),
        ("raise KeyError", None),
    ],
)
def test_a_missing_entry_is_told_only_of_the_batch(tmp_path: Path, body: str, told: str | None) -> None:
    batch = {"x": {"a": 1}, "labels": 2}
    error = fails(f"def f(output, batch):\n    {body}\n", None, batch, folder=tmp_path)
    line = in_one_line(error, "loss", (None, batch), {})
    assert (line is None) if told is None else (line is not None and told in line)


def test_a_setting_is_blamed_only_where_the_traceback_has_nothing_to_add(tmp_path: Path) -> None:
    error = fails("def f():\n    int('x')\n", folder=tmp_path)
    told = "task: model() does not work with --set a=1: ValueError: invalid literal"
    assert str(in_one_line(error, "model", (), {"a": 1})).startswith(told)
    assert in_one_line(error, "model", (), {}) is None, "nothing was set"
    assert in_one_line(error, "loss", (), {"a": 1}) is None, "not what builds, but what runs"
    error = fails("def f():\n    g()\ndef g():\n    int('x')\n", folder=tmp_path)
    assert in_one_line(error, "model", (), {"a": 1}) is None, "the way to it is worth seeing"
