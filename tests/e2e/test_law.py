"""Plans that would change the numbers are refused before launch in one line; forced, they train and it is recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from stretto.launch import Job, JobResult, LocalLauncher
from stretto.order import TrainOrder
from stretto.plan import Plan
from stretto.runfolder import read_resolved

ROOT = Path(__file__).resolve().parents[2]
STRETTO = str(Path(sys.executable).parent / "stretto")
TASK = (ROOT / "tests" / "tasks" / "uncuttable.py").read_text()
COUNTED = TASK.replace(
    'def data(kind: str = "contrast") -> Dataset[Any]:\n',
    'def data(kind: str = "contrast") -> Dataset[Any]:\n    open("reads", "a").write("read\\n")\n',
)
SCRIPT = """
import sys
import stretto
run = stretto.start("task.py", run=sys.argv[1], force=sys.argv[2:] == ["force"])
for batch in run.batches():
    run.step(batch)
run.finish()
"""

pytestmark = pytest.mark.timeout(150)


@dataclass
class Room:
    """A folder with a task that notes each reading of its data, and a launcher whose jobs run there."""

    folder: Path
    launcher: LocalLauncher
    notes: list[str] = field(default_factory=list)

    def train(self, plan: str, attempt: int = 1, force: bool = False, **sets: Any) -> JobResult:
        """As `stretto train` does, and from the second attempt on `stretto resume`."""
        (self.folder / "run").mkdir(exist_ok=True)
        order = TrainOrder("task.py", sets, plan, "test", "run", attempt > 1, attempt, attempt, force)
        entries = {"entry": "stretto.training:work", "prepare": "stretto.training:prepare"}
        job = Job(
            payload=order.to_payload(), num_workers=Plan.parse(plan).world_size, first_member=9 * attempt, **entries
        )
        return self._run(job)

    def script(self, *words: str) -> JobResult:
        return self._run(Job("stretto.script:work", {"script": "loop.py", "args": list(words)}, 2))

    def _run(self, job: Job) -> JobResult:
        self.notes.clear()
        return self.launcher.run(job, lambda member, event: self._hear(event))

    def _hear(self, event: dict[str, Any]) -> None:
        if event["kind"] == "note":
            self.notes.append(event["text"])

    def reads(self) -> int:
        return len((self.folder / "reads").read_text().split()) if (self.folder / "reads").exists() else 0

    def summary(self, run: str = "run") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / run / "summary.json").read_text())
        return found


@pytest.fixture
def room(launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
    assert COUNTED != TASK
    (tmp_path / "task.py").write_text(COUNTED)
    (tmp_path / "loop.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return Room(tmp_path, launcher)


def test_train_refuses_in_one_line_and_forced_it_trains_and_records(room: Room) -> None:
    words = [STRETTO, "train", "task.py", "--workers", "2"]
    refused = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1 and "Traceback" not in refused.stderr
    assert refused.stderr.startswith("stretto: plan dp=2 cuts each batch into 2 pieces, but loss(): the sum over 5")
    assert refused.stderr.endswith("; or train all the same with --force\n")
    assert [path.name for path in (room.folder / "runs").iterdir()] == [".probes"], "nothing was begun"
    assert room.reads() == 1
    forced = subprocess.run([*words, "--force", "--json"], capture_output=True, text=True, timeout=120)
    assert forced.returncode == 0, forced.stderr
    assert room.reads() == 3, "both workers, and no second probe: the first one's findings were kept"
    assert "note: the law is not kept: plan dp=2 cuts each batch" in forced.stderr
    summary = json.loads(forced.stdout)
    assert summary["law_kept"] is False
    assert "loss(): the sum over 5 samples" in summary["law_broken"]
    law = yaml.safe_load((room.folder / summary["run"] / "resolved.yaml").read_text())["law"]
    assert law == {"kept": False, "reason": summary["law_broken"]}


def test_resume_asks_again_and_what_was_broken_once_stays_so(room: Room) -> None:
    first = room.train("dp=2", force=True)
    assert first.failure is None, first.failure
    again = room.train("dp=2", attempt=2)
    assert again.failure is not None and again.failure.kind == "user"
    assert "loss(): the sum over 5 samples" in again.failure.text
    alone = room.train("dp=1", attempt=2)
    assert alone.failure is None, alone.failure
    assert room.notes == []
    assert room.summary()["law_kept"] is False
    assert room.summary()["law_broken"].startswith("plan dp=2 cuts")
    assert read_resolved(Path("run")).law.reason == room.summary()["law_broken"]
    assert room.reads() == 4, "one probe, two workers and one: the resumed ones were answered from the cache"


def test_a_lawful_run_says_so_and_a_vain_force_is_told(room: Room) -> None:
    done = room.train("dp=2", force=True, kind="plain")
    assert done.failure is None, done.failure
    assert room.notes == ["--force has no effect: nothing was refused"]
    assert room.summary()["law_kept"] is True and "law_broken" not in room.summary()
    text = Path("run/resolved.yaml").read_text()
    Path("run/resolved.yaml").write_text(text[: text.index("law:")])
    assert read_resolved(Path("run")).law.kept, "a file of before there was a law in it"


def test_a_script_is_refused_by_all_its_workers_before_it_makes_a_folder(room: Room) -> None:
    refused = room.script("scripted")
    assert refused.failure is not None and refused.failure.kind == "user"
    assert refused.failure.text.endswith("; or train all the same with start(force=True)")
    assert not Path("scripted").exists()
    assert room.reads() == 1
    forced = room.script("scripted", "force")
    assert forced.failure is None, forced.failure
    assert room.reads() == 3
    assert any(note.startswith("the law is not kept: plan dp=2") for note in room.notes)
    assert room.summary("scripted")["law_kept"] is False
    assert read_resolved(Path("scripted")).law.kept is False


def test_force_makes_no_run_that_would_never_end(room: Room) -> None:
    (room.folder / "task.py").write_text((ROOT / "tests" / "tasks" / "traps.py").read_text())
    refused = room.train("dp=2,zero=3", force=True, kind="experts")
    assert refused.failure is not None and refused.failure.kind == "user"
    assert "the layer layers.0 runs for some samples" in refused.failure.text
    assert "--force" not in refused.failure.text


def test_a_recomputation_that_finds_nothing_to_do_is_told(room: Room) -> None:
    done = room.train("dp=2,zero=3,recompute=full", kind="plain")
    assert done.failure is None, done.failure
    (note,) = room.notes
    assert note.startswith("recompute=full is inactive: the model has no list of layers")
    assert Path("run/resolved.yaml").read_text().count("recompute:") == 1
    again = room.train("dp=1", attempt=2, kind="plain")
    assert again.failure is None and room.notes == []
