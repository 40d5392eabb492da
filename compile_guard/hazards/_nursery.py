"""Children of a process that has torch imported already: to import it anew costs each child seconds of a processor.

The nursery has one thread and has imported torch, no more: what is forked from it is as good as a fresh process. It serves one
child at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any


class Nursery:
    """Starts `python -m compile_guard.hazards ARGUMENTS` without starting Python; a context manager.

    Args:
        environment: of the process that is forked from.
        serving: module, and its arguments, that ends in `serve()`.
    """

    def __init__(self, environment: Mapping[str, str], serving: Sequence[str] = ("compile_guard.hazards", "--nursery")) -> None:
        command = [sys.executable, "-X", "faulthandler", "-m", *serving]
        # Not buffered: what is in a buffer, `select` does not see.
        self._process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )

    def run(self, arguments: Sequence[str], output: Path, timeout_s: float) -> int | None:
        """Exit status of one child, negative for a signal; None where it was ended after `timeout_s`.

        Raises:
            ChildProcessError: the nursery itself is gone.
        """
        self._ask({"arguments": list(arguments), "output": str(output)})
        child = self._answer()
        ended = self._answers_within(timeout_s)
        # Whatever the child forked or started ends with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not ended:
            os.kill(child, signal.SIGKILL)  # it may not have come as far as to have a session of its own
        status = self._answer()
        return status if ended else None

    def _ask(self, request: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise ChildProcessError("the process that hazards are forked from has ended") from None

    def _answers_within(self, timeout_s: float) -> bool:
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], timeout_s)[0])

    def _answer(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildProcessError("the process that hazards are forked from has ended")
        return int(line)

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def serve(main: Callable[[list[str]], Any]) -> None:
    """The nursery's own side: fork a child for each request, tell its process id, then its exit status."""
    import torch._dynamo  # noqa: F401

    requests, answers = sys.stdin.buffer, os.dup(1)
    for line in iter(requests.readline, b""):
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            os.close(answers)
            nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(request["output"], os.O_WRONLY | os.O_APPEND)
            for target, source in ((0, nothing), (1, output), (2, output)):
                os.dup2(source, target)
            try:
                main(request["arguments"])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(1)  # `main` of a child comes back only by an exception
        os.write(answers, b"%d\n" % child)
        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
