"""Measuring in a process of its own, which may crash or hang without ending the sweep."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from jitmoe.tune.trial import Trial

_PROGRAM = "from jitmoe.tune.worker import answer; answer()"
KILL_S = 10  # for a killed process to be gone


class Worker:
    """Answers trials with outcomes, by a process that is started when it is needed and replaced
    after a failure: an error on a GPU can spoil all that follows it.

    measurer  "module:function" of a function(Trial) -> outcome: a dict of status ("ok" or "wrong"),
              reason and what of `trial.MEASURED` there is
    """

    def __init__(self, measurer: str):
        self._measurer = measurer
        self._process = self._pipe = self._log = None

    def ask(self, trial: Trial, limit_s: float) -> dict:
        """The outcome; its status is failed for an exception, crashed if the process died, hung if
        it took longer than `limit_s`.
        """
        if self._process is None:
            self._start()
        try:
            self._pipe.send(trial)
            if self._pipe.poll(limit_s):
                outcome = self._pipe.recv()
            else:
                outcome = {"status": "hung", "reason": f"no answer within {limit_s:g} s"}
        except (EOFError, OSError):
            outcome = {"status": "crashed", "reason": self._why()}
        if outcome["status"] not in ("ok", "wrong"):
            self.close()
        return outcome

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        number = theirs.fileno()
        # A session of its own: Ctrl-C is for the sweep, which then ends this process.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, self._measurer, str(number)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[number],
            start_new_session=True,
        )
        theirs.close()

    def _why(self) -> str:
        """How the process ended, and its last words."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)
        code = self._process.poll()
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"the measuring process ended by {how}" + (f": {lines[-1]}" if lines else "")

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._process is None:
            return
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)
        self._pipe.close()
        self._log.close()
        self._process = self._pipe = self._log = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def answer() -> None:
    """The process: answer until the pipe is closed, as when the sweep is killed."""
    module, _, name = sys.argv[1].partition(":")
    pipe = Connection(int(sys.argv[2]))
    measure = getattr(importlib.import_module(module), name)
    while True:
        try:
            trial = pipe.recv()
        except EOFError:
            return
        try:
            outcome = measure(trial)
        except Exception as error:  # whatever a candidate raises is its row
            first = str(error).strip().splitlines()[:1]
            outcome = {"status": "failed", "reason": f"{type(error).__name__}: {''.join(first)}"}
        pipe.send(outcome)
