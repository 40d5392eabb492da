"""Yield points: where a thread may be made to wait while another runs. One global, None unless schedules are explored."""

from __future__ import annotations

from collections.abc import Callable

hook: Callable[[str], None] | None = None
"""Called with the point's name, on the thread that has come to it."""


def point(name: str) -> None:
    """A place where the explored schedule may go on with another thread. Programs of your own may have theirs."""
    if hook is not None:
        hook(name)
