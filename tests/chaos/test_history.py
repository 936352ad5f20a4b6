"""The history checker: it accepts correct histories and reports each kind of fault."""

from __future__ import annotations

import numpy as np
import pytest

from ringlog.drill.history import NothingToJudge, judge
from ringlog.drill.journal import OPS_PER_CLIENT, ROW, Journal, Outcome, What, load, rows_in


class Story:
    """A history built by hand: every row is one tick later than the previous one."""

    def __init__(self):
        self.rows, self.at, self.ops = [], 0, {}

    def row(self, what, client, op, **more):
        self.at += 1
        row = np.zeros(1, dtype=ROW)
        row["at_ns"], row["what"], row["client"], row["op"] = self.at, what, client, op
        for name, value in more.items():
            row[name] = value
        self.rows.append(row)
        return op

    def begin(self, what, client=1, **more):
        self.ops[client] = self.ops.get(client, -1) + 1
        return self.row(what, client, client * OPS_PER_CLIENT + self.ops[client], **more)

    def end(self, op, outcome=Outcome.OK, **more):
        self.row(What.RETURN, op // OPS_PER_CLIENT, op, outcome=outcome, **more)

    def append(self, value, seq, client=1, outcome=Outcome.OK):
        op = self.begin(What.APPEND, client, value=value, digest=value * 7)
        self.end(op, outcome, seq=seq)

    def delete(self, below, outcome=Outcome.OK):
        self.end(self.begin(What.DELETE, 8, seq=below), outcome)

    def read(self, pairs, what=What.READ, client=9, after=0, head=None, cursor=None):
        op = self.begin(what, client, seq=after)
        for seq, value in pairs:
            self.row(What.RECORD, client, op, seq=seq, value=value, digest=value * 7)
        last = pairs[-1][0] if pairs else after
        self.end(op, seq=last if head is None else head, value=last if cursor is None else cursor)

    def wrong(self):
        return set(judge(np.concatenate(self.rows), ["t"]).wrong)


@pytest.fixture
def story():
    return Story()


def final(story, pairs, **more):
    story.read(pairs, What.FINAL, client=99, **more)


def test_a_correct_history_is_accepted_and_counted(story):
    story.append(10, 1)
    story.append(11, 2, client=2)
    story.read([(1, 10), (2, 11)])
    story.append(12, 3)
    story.delete(2)
    story.read([(3, 12)], after=2)
    final(story, [(2, 11), (3, 12)])
    found = judge(np.concatenate(story.rows), ["t"])
    assert found.wrong == {}
    assert (found.ops, found.acked, found.read, found.survivors) == (7, 3, 5, 2)
    assert found.deletes == 1


def test_a_run_without_work_or_without_a_final_read_gets_no_verdict(story):
    with pytest.raises(NothingToJudge):
        judge(np.zeros(0, dtype=ROW), ["t"])
    story.append(10, 1)
    with pytest.raises(NothingToJudge):
        story.wrong()


def test_a_missing_acknowledged_record_is_lost(story):
    story.append(10, 1)
    story.append(11, 2)
    final(story, [(1, 10)])
    assert "lost" in story.wrong()


def test_a_record_that_was_read_once_and_is_missing_is_lost(story):
    story.begin(What.APPEND, value=10, digest=70)
    story.read([(1, 10)])
    final(story, [])
    assert "lost" in story.wrong()


def test_one_value_with_two_seqs_is_doubled(story):
    story.append(10, 1)
    final(story, [(1, 10), (2, 10)])
    assert story.wrong() == {"doubled"}


def test_one_seq_for_two_values_is_doubled(story):
    story.append(10, 1)
    story.append(11, 1, client=2)
    final(story, [(1, 10)])
    assert "doubled" in story.wrong()


def test_a_key_with_two_seqs_is_doubled(story):
    story.append(10, 1, client=1)
    story.append(11, 2, client=1)
    story.append(10, 3, client=2)
    final(story, [(1, 10), (2, 11), (3, 10)])
    assert "doubled" in story.wrong()


def test_a_key_resent_by_another_client_gets_the_first_seq(story):
    story.begin(What.APPEND, 1, value=10, digest=70)
    story.append(11, 2, client=1)
    story.append(10, 1, client=2)
    final(story, [(1, 10), (2, 11)])
    assert story.wrong() == set()


def test_a_record_of_unknown_outcome_may_be_present_or_not(story):
    """A checker that ignores unknown outcomes reports a false fault here, or misses one in the next test
    (mutant 48)."""
    story.begin(What.APPEND, 1, value=10, digest=70)
    story.end(story.begin(What.APPEND, 2, value=11, digest=77), Outcome.UNKNOWN)
    story.append(12, 2, client=3)
    final(story, [(1, 11), (2, 12)])
    assert story.wrong() == set()


def test_a_record_of_unknown_outcome_is_never_present_twice(story):
    story.end(story.begin(What.APPEND, 2, value=11, digest=77), Outcome.UNKNOWN)
    final(story, [(1, 11), (2, 11)])
    assert story.wrong() == {"doubled"}


def test_a_record_of_unknown_outcome_keeps_real_time_order(story):
    """It began after seq 2 was known, so it cannot have seq 1."""
    story.append(10, 2)
    story.begin(What.APPEND, 2, value=11, digest=77)
    final(story, [(1, 11), (2, 10)])
    assert story.wrong() == {"reordered"}


def test_a_record_of_a_failed_append_must_not_be_present(story):
    story.end(story.begin(What.APPEND, 2, value=11, digest=77), Outcome.FAIL)
    final(story, [(1, 11)])
    assert story.wrong() == {"altered"}


def test_forged_and_changed_records_are_altered(story):
    story.append(10, 1)
    final(story, [(1, 10), (2, 99)])
    assert story.wrong() == {"altered"}
    story.rows[2]["digest"] = 1
    assert story.wrong() == {"altered"}


def test_a_later_append_with_a_smaller_seq_is_reordered(story):
    story.append(10, 2)
    story.append(11, 1, client=2)
    final(story, [(1, 11), (2, 10)])
    assert story.wrong() == {"reordered"}


def test_the_records_of_one_writer_keep_their_order(story):
    first, second = (story.begin(What.APPEND, 1, value=v, digest=v * 7) for v in (10, 11))
    story.end(first, seq=2)
    story.end(second, seq=1)
    final(story, [(1, 11), (2, 10)])
    assert story.wrong() == {"reordered"}


def test_a_read_without_an_acknowledged_record_is_stale(story):
    story.append(10, 1)
    story.read([], head=0)
    final(story, [(1, 10)])
    assert story.wrong() == {"stale"}


def test_a_read_with_a_lower_head_than_an_earlier_read_is_stale(story):
    story.begin(What.APPEND, value=10, digest=70)
    story.read([(1, 10)], client=8)
    story.read([], head=0, client=9)
    final(story, [(1, 10)])
    assert story.wrong() == {"stale"}


def test_a_deleted_record_that_is_read_is_resurrected(story):
    story.append(10, 1)
    story.append(11, 2)
    story.delete(2)
    final(story, [(1, 10), (2, 11)])
    assert story.wrong() == {"resurrected"}


def test_a_delete_of_unknown_outcome_may_have_happened_or_not(story):
    story.append(10, 1)
    story.append(11, 2)
    story.begin(What.DELETE, 8, seq=2)
    story.read([(2, 11)])
    final(story, [(1, 10), (2, 11)])
    assert story.wrong() == set()


def test_a_record_that_a_read_skips_is_a_gap(story):
    for n in range(1, 4):
        story.append(9 + n, n)
    story.read([(1, 10), (3, 12)])
    final(story, [(1, 10), (2, 11), (3, 12)])
    assert story.wrong() == {"gaps"}


def test_a_cursor_beyond_the_returned_records_is_a_gap(story):
    story.append(10, 1)
    story.append(11, 2)
    story.read([(1, 10)], head=2, cursor=2)
    final(story, [(1, 10), (2, 11)])
    assert story.wrong() == {"gaps"}


def test_a_cursor_that_goes_back_is_reported(story):
    story.append(10, 1)
    story.append(11, 2)
    story.read([(1, 10), (2, 11)], cursor=1)
    final(story, [(1, 10), (2, 11)])
    assert story.wrong() == {"backwards"}


def frame(story, *values, first=0):
    """Append records as one frame. Their outcome is unknown unless `first` is given."""
    ops = [story.begin(What.APPEND, 3, value=value, digest=value * 7, seq=len(values)) for value in values]
    for row in story.rows[-len(values) :]:
        row["at_ns"] = story.at
    for n, op in enumerate(ops if first else ()):
        story.end(op, seq=first + n)


def test_a_part_of_a_frame_is_halved_whether_or_not_it_was_acked(story):
    frame(story, 10, 11, first=1)
    frame(story, 12, 13)
    final(story, [(1, 10), (2, 11)])
    assert story.wrong() == set()
    story.read([(1, 10), (2, 11), (3, 12)], What.FINAL, client=98)
    assert story.wrong() == {"halved"}


def test_only_the_first_records_of_a_frame_may_be_deleted(story):
    frame(story, 10, 11, 12, first=1)
    story.delete(3)
    final(story, [(3, 12)])
    assert story.wrong() == set()
    frame(story, 13, 14)
    story.read([(3, 12), (4, 14)], What.FINAL, client=98)
    assert story.wrong() == {"halved"}


def test_an_announced_loss_is_a_loss(story):
    story.append(10, 1)
    op = story.begin(What.FINAL, 9)
    story.row(What.GAP, 9, op, seq=1, value=1)
    story.end(op, seq=1, value=1)
    assert {"announced", "lost"} <= story.wrong()


def test_a_journal_records_the_operations_of_a_client(tmp_path):
    journal = Journal(tmp_path / "a.journal", 3)
    ops = journal.begin(What.APPEND, 0, values=[1, 2], digests=[7, 14])
    journal.end(0, ops, Outcome.OK, np.array([1, 2]))
    (op,) = journal.begin(What.FINAL, 0)
    journal.records(0, op, [1, 2], [1, 2], [7, 14])
    journal.end(0, np.array([op]), Outcome.OK, 2, 2)
    assert rows_in(tmp_path) == 8
    journal.close()
    found = judge(load(tmp_path), ["t"])
    assert (found.wrong, found.acked, found.survivors) == ({}, 2, 2)
    with pytest.raises(FileExistsError):
        Journal(tmp_path / "a.journal", 4)
