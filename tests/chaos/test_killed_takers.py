"""`make chaos` with --groups in small, and what its judge finds."""

import pytest

from .groups import Judge, run_on


def judged(*lines: str, **repeated: float) -> list[str]:
    """What the judge finds; all messages were sent, and leases end at 50 s."""
    judge = Judge(lambda _group, _number: True, repeated)
    for at_s, line in enumerate(lines):
        kind, batch, *names = line.split()
        judge.read(f"{at_s} {kind} {batch}@50 {' '.join(names)}")
    return [problem.partition(":")[0] for problem in judge.problems]


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        ([], ["got a 1:0 1:1 2:0", "ending a 1:0 2:0", "ended a 1:0 2:0", "back a 1:1", "got b 1:1"]),
        ([], ["got a 1:0", "ending a 1:0", "got b 1:0"]),  # whether it was acknowledged nobody knew
        (["overlap"], ["got a 1:0", "got b 1:0"]),
        (["overlap", "inversion"], ["got a 1:0", "got b 1:1"]),
        (["inversion"] * 2, ["got a 1:1 1:0"]),
        (["inversion"], ["got a 1:0", "ending a 1:0", "got b 1:1", "ending b 1:1", "got c 1:0"]),
        (["handed out again"], ["got a 1:0", "ending a 1:0", "ended a 1:0", "got b 1:0"]),
    ],
)
def test_the_judge_finds_what_must_not_be(found: list[str], lines: list[str]) -> None:
    assert judged(*lines) == found


@pytest.mark.parametrize(("sent_again_s", "found"), [(0.5, ["handed out again"]), (1.5, [])])
def test_a_repeated_send_is_another_message_once_the_first_is_done(
    sent_again_s: float, found: list[str]
) -> None:
    lines = ("got a 1:0", "ending a 1:0", "ended a 1:0", "got b 1:0")
    assert judged(*lines, **{"1:0": sent_again_s}) == found


@pytest.mark.breadth  # its takers must wait for the leases of those that were killed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_unique", [False, True])
def test_killed_takers_keep_the_order_of_groups(tmp_path, is_unique):
    told: list[str] = []
    url = f"sqlite:///{tmp_path}/q.db"
    assert run_on(url, None, 1_000, 1, tmp_path, told.append, pause_s=0.5, is_unique=is_unique) == [], told
    assert "'lost': 0" in told[-1]
