"""Programs: which thread does what, as data that can be written to a file, generated and made smaller."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Program:
    """What each of some threads does, one operation after the other."""

    name: str
    threads: tuple[tuple[str, ...], ...]
    """Names of `operations.OPERATIONS`; of a function of the user's, one `call` for each thread."""
    target: str = ""
    """`module:function` of the user, called once by each thread; empty for the operations."""
    function: Callable[[], Any] | None = field(default=None, compare=False)
    """What `target` names, where that cannot be imported by its name (a function inside a function). Not saved."""

    @property
    def shape(self) -> str:
        """Its name, without the number of one that was made at random."""
        return self.name.rstrip("0123456789").strip()

    @property
    def key(self) -> str:
        """What it does, as a text."""
        return json.dumps([self.target, self.threads])

    def __str__(self) -> str:
        lines = [f"program {self.name}:" + (f" {self.target}" if self.target else "")]
        return "\n".join([*lines, *(f"  thread {number}: {', '.join(each)}" for number, each in enumerate(self.threads))])


SHAPES: tuple[Program, ...] = tuple(
    Program(name, tuple(tuple(thread.split()) for thread in text.split(" | ")))
    for name, text in {
        "one compile, many callers": "cold call | cold cold | cold call",
        "warm calls beside a trace": "call call module | trace trace | call eager",
        "warm calls beside make_fx": "call module call | make_fx | make_fx eager",
        "warm calls beside resets": "call module call | reset | call cold call",
        "resets beside compiles": "compile call | reset compile | cold reset",
        "two traces": "trace eager | trace | construct eager call",
        "trace beside compile": "trace | compile eager | module construct",
        "training beside tracing": "train | trace make_fx | train call",
        "lazy backwards": "train compile | train | compile train",
        "checkpoints": "checkpoint draw | checkpoint | draw compile draw",
        "checkpoints beside traces": "checkpoint call | trace | checkpoint eager",
        "export beside all": "export | call eager compile | trace",
        "loads": "load | load eager | call trace",
        "graph breaks": "graph_break | graph_break call | cold",
        "full graphs": "fullgraph | fullgraph call | trace",
        "failing backends": "failing | failing call | cold",
        "compiled in checkpoints": "compiled_block | compiled_block | compile",
        "stances": "stance call | call module call | stance cold",
        "configuration": "config config | config compile | compile config",
        "configuration beside resets": "config call | reset config | cold",
        "random numbers beside compiles": "draw draw draw | compile | draw cold",
        "model construction": "construct construct | trace | export construct",
        "fork beside compiles": "fork | compile call | cold",
        "fork beside traces": "fork call | trace | call fork",
        "everything": "compile reset call | trace train | stance checkpoint config | cold export draw",
    }.items()
)


def mixed(seed: int, names: Sequence[str]) -> Program:
    """A program made at random: two to four threads of one to four operations."""
    chooser = random.Random(seed)
    threads = [[chooser.choice(names) for _ in range(chooser.randint(1, 4))] for _ in range(chooser.randint(2, 4))]
    return Program(f"mixed {seed}", tuple(map(tuple, threads)))


@dataclass(frozen=True, slots=True)
class Failure:
    """A schedule under which a program breaks an invariant, as it is saved for a replay."""

    program: Program
    strategy: str
    seed: int
    problem: str
    """What broke, first line short enough to compare by."""
    guard: bool
    torch: str
    choices: list[int] | None = None
    """Threads chosen; None where the process died before it could tell: strategy and seed choose the same again."""
    steps: list[tuple[int, str]] = field(default_factory=list)

    def save(self, folder: Path) -> Path:
        """Write it into a folder; returns the file."""
        written = asdict(replace(self, program=replace(self.program, function=None)))
        del written["program"]["function"]
        text = json.dumps(written, indent=1)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}.json"
        path.write_text(text, encoding="utf-8")
        return path

    @staticmethod
    def load(path: Path) -> Failure:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is not one of these.
            OSError: it cannot be read.
        """
        try:
            read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            program = read.pop("program")
            threads = tuple(tuple(thread) for thread in program.pop("threads"))
            steps = [(number, name) for number, name in read.pop("steps")]
            return Failure(program=Program(threads=threads, **program), steps=steps, **read)
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no saved schedule ({error}); `compile-guard stress` writes them on failure") from error

    def __str__(self) -> str:
        steps = " ".join(f"{number}:{name.replace(' ', '-')}" for number, name in self.steps)
        schedule = steps or "(died before it could tell)"
        return f"{self.problem}\n{self.program}\nschedule ({self.strategy}, seed {self.seed}): {schedule}"


def digest(program: Program, steps: Sequence[tuple[int, str]]) -> bytes:
    """Tells schedules apart: the program, and which thread passed which point in which order."""
    return hashlib.blake2b(f"{program.key}{steps}".encode(), digest_size=12).digest()
