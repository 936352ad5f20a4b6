"""What the kernel says of a process that a case of chaos looks at."""

from __future__ import annotations

import os
import subprocess
import sys

from ringlog.drill.targets import ProcessFacts, facts_of, is_alive
from ringlog.testing.real_engine import wait_until


def test_a_process_is_alive_until_it_exits() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = facts_of(child.pid)
        assert (found.parent, found.is_exiting) == (os.getpid(), False)
        assert is_alive(child.pid)
        child.kill()
        wait_until(lambda: not is_alive(child.pid), 10.0, "the child to exit")
        zombie = facts_of(child.pid)
        assert (zombie.parent, zombie.is_exiting) == (os.getpid(), True)
    assert facts_of(child.pid) == ProcessFacts()
    assert not is_alive(child.pid)
