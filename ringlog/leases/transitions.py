"""Transitions: the effect of every event on the state of leased seqs, as a table that is executed. Pure."""

from __future__ import annotations

from typing import Final

from ringlog.leases.runs import FREE, STATES

ACK: Final = 0
"""The holder processed it, or its copy in the dead-letter topic is durable."""
NACK: Final = 1
"""The holder returns it, or its process exited: ready at once."""
DELAY: Final = 2
"""The holder returns it: ready after a delay."""
REJECT: Final = 3
EXTEND: Final = 4
EXPIRE: Final = 5
"""The deadline of a lease, or the end of a delay, has passed."""
BACK_OFF: Final = 6
"""The deadline of a lease has passed, and the backoff after it has not ended."""
EXHAUST: Final = 7
"""It was returned after all its deliveries."""
RESTORE: Final = 8
"""The dead-letter topic does not exist any more."""
DELETE: Final = 9
"""Its records were deleted by a request."""
REMOVE: Final = 10
"""Its records left the topic for another reason."""
_STATES: Final = 6

TRANSITIONS = """
          leased     delayed   returned   gone  exhausted
ack       done       done      done       done  done
nack      returned   -         -          -     -
delay     delayed    -         -          -     -
reject    exhausted  -         -          -     -
extend    leased     -         -          -     -
expire    returned   returned  -          done  -
rest      delayed    -         -          -     -
exhaust   -          -         exhausted  -     -
restore   -          -         -          -     returned
delete    gone       done      done       -     done
remove    done       done      done       -     done
"""
"""Event x state: the next state. "done": the run is removed; "-": the event has no effect.

A claim creates leased runs from returned ones and from seqs without a run; a steal also from leased and
delayed ones. Requests reach only runs that `match` found to be held by the requesting node. A replay may be
ahead of the time."""
PASSED: Final = 255


def _parsed(drawing: str) -> bytes:
    """Return the next states as bytes, indexed by event * len(STATES) + state."""
    head, *lines = (line.split() for line in drawing.strip().splitlines())
    numbers = {name: number for number, name in enumerate(STATES)} | {"done": FREE, "-": PASSED}
    found = bytearray()
    for _, *after in lines:
        of_state = dict(zip(head, after, strict=True))
        found += bytes(numbers[of_state.get(state, "-")] for state in STATES)
    return bytes(found)


_NEXT = _parsed(TRANSITIONS)


def next_state(event: int, state: int) -> int:
    """Return the state after this event: FREE if the run is removed, PASSED if the event has no effect."""
    return _NEXT[event * _STATES + state]
