"""The live table: one line for each host, redrawn in a terminal, told line by line elsewhere."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import TextIO

from openssh.rollout import Course

_WIDTH = 100


class Board:
    """Where every host is right now. `tell` may be called by many threads."""

    def __init__(self, courses: Sequence[Course], stream: TextIO) -> None:
        self._phases = {course.host.name: "" for course in courses}
        self._stream = stream
        self._lock = threading.Lock()
        self._drawn = 0

    def tell(self, course: Course, phase: str) -> None:
        """Show that ``course`` is in ``phase``; without one, show its result."""
        text = phase or f"{course.result}  {course.message}".rstrip()
        with self._lock:
            self._phases[course.host.name] = text
            # A rollout goes on when nobody looks any more: the pipe or the terminal is gone.
            with contextlib.suppress(OSError):
                if self._stream.isatty():
                    self._redraw()
                else:
                    self._stream.write(f"{course.host.name}: {text}\n")
                self._stream.flush()

    def _redraw(self) -> None:
        width = max(len(name) for name in self._phases)
        lines = [f"{name:{width}}  {text}"[:_WIDTH] for name, text in self._phases.items()]
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        self._stream.write(up + "".join(f"\x1b[2K{line}\n" for line in lines))
        self._drawn = len(lines)
