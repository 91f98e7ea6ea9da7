"""How far a run is, on stderr: one line that is rewritten on a terminal, a line every ten seconds in a log."""

from __future__ import annotations

import importlib.util
import io
import re
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

_EVERY_SECONDS = 10.0
_COUNT = re.compile(r"(\d+)/(\d+)\s*")


class Progress:
    """What the stages call with one text a step; ``3/120`` in it is taken as how many of how many are done.

    Args:
        stream: a terminal (``isatty``) gets one updating line, drawn by tqdm where it is installed.
        clock: seconds, the one that deadlines are on.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        # A daemon may have closed stderr.
        self._stream = stream or sys.stderr or io.StringIO()
        self._clock = clock
        self._tty = self._stream.isatty()
        self._bar: Any = None
        self._op = self._label = ""
        self._deadline: float | None = None
        self._drawn = False
        self._next = 0.0

    def stage(self, stage: str, op: str, deadline: float | None = None) -> None:
        """What the next steps belong to; `deadline` is the budget's end."""
        self.close()
        self._op, self._label, self._deadline = op, f"{stage} {op}", deadline
        self._next = self._clock() + _EVERY_SECONDS

    def __call__(self, text: str) -> None:
        """One step, such as ``matmul 3/120 M=4096 ...``."""
        found = _COUNT.search(text)
        done, total = (int(found[1]), int(found[2])) if found else (0, 0)
        details = [f"{max(self._deadline - self._clock(), 0.0):.0f} s left"] if self._deadline is not None else []
        what = text[: found.start()].removeprefix(self._op).strip(": ") if found else ""
        last = text[found.end() :].strip(", ") if found else text
        details += [words for words in (what, last) if words and words != self._label.split(" ")[0]]
        if self._tty and total and importlib.util.find_spec("tqdm") is not None:
            self._draw(done, total, ", ".join(details))
            return
        counted = f"{self._label} {done}/{total}" if total else self._label
        line = ": ".join([counted, *([", ".join(details)] if details else [])])
        if self._tty:
            width = shutil.get_terminal_size().columns - 1
            self._put(f"\r\x1b[K{line[:width]}")
            self._drawn = True
        elif self._clock() >= self._next:
            self._next = self._clock() + _EVERY_SECONDS
            self._put(f"{line}\n")

    def say(self, text: str) -> None:
        """A line that stays."""
        self.close()
        self._put(f"{text}\n")

    def close(self) -> None:
        """End the line that is being rewritten."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._drawn:
            self._put("\r\x1b[K")
            self._drawn = False

    def _draw(self, done: int, total: int, details: str) -> None:
        import tqdm

        if self._bar is not None and self._bar.total != total:
            self.close()
        if self._bar is None:
            self._bar = tqdm.tqdm(
                total=total, desc=self._label, file=self._stream, leave=False, dynamic_ncols=True, mininterval=0.2
            )
        self._bar.set_postfix_str(details, refresh=False)
        self._bar.update(done - self._bar.n)

    def _put(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
