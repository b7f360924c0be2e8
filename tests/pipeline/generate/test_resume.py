"""Files that came late, of writers that their driver had given up: after a session began, or the books were closed."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.generate.resume import remove_late
from pipeline.store.run_folder import RunFolder

FIRST, SECOND, SUCCESSOR = "aaaaaaaa", "bbbbbbbb", "cccccccc"


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in (root / "data").rglob("*.parquet")}


def part(session: str, number: int, status: str = "ok") -> str:
    return f"data/status={status}/part-{session}-0a0b0c-{number}.parquet"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two files of each session, of which the books know the first ones."""
    for session in (FIRST, SECOND, SUCCESSOR):
        for name in (part(session, 0), part(session, 1, "failed")):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
    return tmp_path


def state_of(state: str, **known: Any) -> Any:
    return {"state": state, "sessions": [{"id": FIRST}, {"id": SECOND}], "former": [], **known}


def test_what_came_after_the_close_goes(root: Path) -> None:
    """Of both sessions, since both are over; what the books count stays, and so does what a successor writes."""
    notes: list[str] = []
    known = {part(session, 0): {"rows": 1} for session in (FIRST, SECOND)}
    remove_late(RunFolder.open(str(root)), state_of("finished", files=known), lambda: None, notes.append)
    assert files(root) == {*known, part(SUCCESSOR, 0), part(SUCCESSOR, 1, "failed")}
    assert len(notes) == 2
    assert all("its writer was late" in log for log in notes)


def test_what_came_after_the_last_session_began_goes(root: Path) -> None:
    """Of the first session alone: the second is at work."""
    remove_late(RunFolder.open(str(root)), state_of("running", known=[part(FIRST, 0)]), lambda: None, lambda _: None)
    late = part(FIRST, 1, "failed")
    assert files(root) == {part(s, n, k) for s in (FIRST, SECOND, SUCCESSOR) for n, k in ((0, "ok"), (1, "failed"))} - {
        late
    }


def test_sessions_of_a_run_that_was_here_before_are_earlier(root: Path) -> None:
    state = {"state": "running", "sessions": [{"id": SECOND}], "former": [FIRST], "known": []}
    remove_late(RunFolder.open(str(root)), state, lambda: None, lambda _: None)  # type: ignore[arg-type]
    assert {name.split("-")[1] for name in files(root)} == {SECOND, SUCCESSOR}


def test_a_driver_that_has_lost_its_lease_removes_nothing_more(root: Path) -> None:
    asked: list[None] = []

    def check() -> None:
        asked.append(None)
        if len(asked) == 2:
            raise PermissionError("another session has the folder")

    before = files(root)
    with pytest.raises(PermissionError):
        remove_late(RunFolder.open(str(root)), state_of("finished", files={}), check, lambda _: None)
    assert len(before - files(root)) == 1
