"""Proves that a signal handler can request a stop while the main thread waits for the request."""

from __future__ import annotations

import subprocess
import sys

from accel.serve.process.stop_request import StopRequest

# The handler interrupts ``wait`` at least 3000 times, at arbitrary places.
SCRIPT = """
import signal
from accel.serve.process.stop_request import StopRequest
stop, count = StopRequest(), 0
def handler(number, frame):
    global count
    count += 1
    stop.make()
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
while count < 3000:
    stop.made = False
    stop.wait(1e-3)
signal.setitimer(signal.ITIMER_REAL, 0)
print("done")
"""


def test_a_signal_at_any_moment() -> None:
    """Fails if a signal that arrives inside ``wait`` deadlocks the process."""
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "done\n"


def test_it_is_remembered() -> None:
    """Fails if a stop request before the wait is lost, or if ``wait`` reports a request that nobody made."""
    stop = StopRequest()
    assert not stop.wait(0)
    stop.make()
    assert stop.wait(60)
    assert stop.made
