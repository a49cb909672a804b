"""When a run is at its end, from what its processes say of themselves and from their silence."""

from easy_context.training.watch.judge import FROZEN_AFTER, Judge


def judge_of(size: int, hang_timeout: float = 1000.0) -> Judge:
    judge = Judge(size, hang_timeout)
    for rank in range(size):
        judge.hear(rank, {"host": f"host-{rank}", "where": "in step 3", "moves": 7, "still": 0.0})
    return judge


def pass_time(judge: Judge, seconds: float, heard: dict[int, dict], beat: float = 1.0):
    """Let seconds pass in which some processes are heard; return the first verdict."""
    verdict, passed = None, 0.0
    while verdict is None and passed < seconds:
        for rank, message in heard.items():
            judge.hear(rank, message)
        passed += beat
        verdict = judge.judge(beat)
    return verdict


def test_a_run_whose_processes_are_heard_goes_on():
    assert pass_time(judge_of(3), 500, {rank: {"still": 900.0} for rank in range(3)}) is None


def test_a_process_that_is_not_heard_for_a_minute_is_frozen():
    judge = judge_of(3)
    heard = {0: {"still": 1.0}, 2: {"still": 1.0}}
    assert pass_time(judge, FROZEN_AFTER, heard) is None
    verdict = pass_time(judge, 5, heard)
    assert verdict.rank == 1 and verdict.hang
    assert verdict.reason == "rank 1 on host-1 has not answered for 61 s; last in step 3"


def test_a_shorter_hang_timeout_makes_silence_shorter_too():
    assert pass_time(judge_of(2, hang_timeout=5), 7, {0: {}}).rank == 1
    assert pass_time(judge_of(2, hang_timeout=0), 10_000, {0: {}}) is None, "0 is for never"


def test_where_nothing_moves_the_least_far_process_is_named():
    """All are still: the others wait in a collective for it."""
    judge = judge_of(3, hang_timeout=30)
    judge.hear(1, {"moves": 6, "where": "reading rows"})
    still = {rank: {"still": 29.0} for rank in range(3)}
    assert pass_time(judge, 10, still) is None
    verdict = pass_time(judge, 10, still | {0: {"still": 31.0}})
    assert verdict.rank == 1 and verdict.hang
    assert "(--hang-timeout 30)" in verdict.reason and "rank 1 on host-1, reading rows" in verdict.reason


def test_a_process_that_has_gone_without_a_word_ends_the_run_at_once():
    judge = judge_of(2)
    judge.processes[1].gone = True
    verdict = judge.judge(0.1)
    assert verdict.rank == 1 and not verdict.hang and "has ended without a word" in verdict.reason


def test_a_process_that_has_finished_may_be_gone_and_silent():
    judge = judge_of(2)
    judge.hear(1, {"finished": True})
    judge.processes[1].gone = True
    assert pass_time(judge, 10 * FROZEN_AFTER, {0: {}}) is None


def test_the_first_failure_counts_and_a_killed_process_before_it():
    """That others fail because one has gone is known before it is known that it has gone."""
    judge = judge_of(3)
    judge.hear(2, {"failure": "ValueError: a row"})
    assert judge.judge(0.1) is None, "there may be a cause that is not known yet"
    judge.hear(0, {"failure": "RuntimeError: Connection closed by peer"})
    assert pass_time(judge, 10, {}, beat=0.1).reason == "rank 2 failed: ValueError: a row"
    judge = judge_of(3)
    judge.hear(0, {"failure": "RuntimeError: Connection closed by peer"})
    assert judge.judge(0.1) is None
    judge.processes[1].gone = True
    assert judge.judge(0.1).rank == 1
