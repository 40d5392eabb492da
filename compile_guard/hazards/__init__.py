"""The catalogue: one module per hazard of `torch.compile` in threads.

A module of this package that defines `HAZARD` is an entry. `doctor`, `repro/`, the tests and `docs/hazards.md` are all
made from what is found here, so that a new hazard is one new file. Modules with a leading underscore are the machinery.
"""

from compile_guard.hazards._hazard import Affected, Hazard, catalogue

__all__ = ["Affected", "Hazard", "catalogue"]
