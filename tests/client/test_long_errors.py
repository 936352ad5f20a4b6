"""An error reply that repeats a huge request is truncated and stays decodable."""

from ringlog.envelope.messages import ErrorReply
from ringlog.envelope.wire import ERROR_BYTES_MAX, decode, encode
from ringlog.limits import ENVELOPE_BYTES_MAX


def test_an_error_with_huge_details_is_truncated_and_decodable():
    """An error above the maximum envelope size cannot be sent, and its client waits until its timeout."""
    huge = {"topic": "a" * ENVELOPE_BYTES_MAX, "found": ["x" * 1_000] * 1_000, "max": 7, "ok": None}
    data = encode(ErrorReply(404, "m" * 10_000, huge, "unknown"), 5)
    assert len(data) < ERROR_BYTES_MAX
    envelope = decode(data)
    assert envelope.corr == 5
    error = envelope.message
    assert (error.status, error.outcome, error.detail["max"], error.detail["ok"]) == (404, "unknown", 7, None)
    assert error.detail["topic"] == "a" * 256


def test_an_error_of_normal_size_is_not_truncated():
    error = ErrorReply(400, "no", {"topic": "t", "known": ["a", "b"]})
    assert decode(encode(error)).message == error
