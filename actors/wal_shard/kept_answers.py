"""Answers about jobs that are kept for who asks again under the same number. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ringlog.envelope import messages as m
from ringlog.limits import ANSWER_ROWS_KEPT_MAX, ANSWERS_KEPT_MAX


class KeptAnswers:
    """The latest of one shard, by the number of their request: bounded by how many they are, and by what they
    name. Whoever asks again for one that is gone is told what is true then."""

    def __init__(self) -> None:
        self._answers: OrderedDict[int, m.Message] = OrderedDict()
        self._rows = 0

    def __contains__(self, call: int) -> bool:
        return call in self._answers

    def get(self, call: int) -> m.Message | None:
        """What this request was answered."""
        return self._answers.get(call)

    def keep(self, call: int, answer: m.Message) -> None:
        """Keep this one, in place of what the request was answered before."""
        if call in self._answers:
            self._rows -= _rows_in(self._answers.pop(call))
        self._answers[call] = answer
        self._rows += _rows_in(answer)
        while len(self._answers) > ANSWERS_KEPT_MAX or self._rows > ANSWER_ROWS_KEPT_MAX:
            self._rows -= _rows_in(self._answers.popitem(last=False)[1])


def _rows_in(answer: Any) -> int:
    return 1 + (len(answer.runs) if isinstance(answer, m.ClaimReply) else len(answer.skipped) // 8)
