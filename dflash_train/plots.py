"""What `eval --plots` draws from a report: acceptance by position, speed by budget, the tree of one step."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_train.config import ConfigError


def plot_report(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write PNG files of what the report holds into a folder; returns their paths.

    Raises:
        ConfigError: matplotlib is not installed; the message has the command.
    """
    rows = [row for row in report["rows"] if row["task"] == "all"]
    drafted = [row for row in rows if row["mode"] not in ("ar", "generate")]
    figures = {}
    if drafted:
        figures["acceptance.png"] = _acceptance(drafted)
    if any(row["budget"] for row in rows):
        figures["budget.png"] = _budgets(rows)
    if report.get("tree"):
        figures["tree.png"] = _tree(report["tree"])
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=120)
    return [folder / name for name in figures]


def check_plots() -> None:
    """Before the work and not after it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    _figure(1, 1)


def _figure(width: float, height: float) -> Any:
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError("--plots needs matplotlib: pip install 'compile-guard[plots]'") from error
    return figures.Figure(figsize=(width, height), layout="constrained")


def _way(row: Mapping[str, Any]) -> str:
    return str(row["mode"]) if row["budget"] is None else f"{row['mode']} {row['budget']}"


def _acceptance(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Share of steps in which at least 1, 2, … drafts were accepted; tau is 1 and the sum of a line."""
    figure = _figure(6, 4)
    axes = figure.subplots()
    for row in rows:
        shares = [math.nan if share is None else share for share in row["acceptance_by_position"]]
        tau = "" if row["tau"] is None else f", tau {row['tau']:.2f}"
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=_way(row) + tau)
    axes.set_xlabel("position in the block")
    axes.set_ylabel("share of steps that accept it")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8)
    return figure


def _budgets(rows: Sequence[Mapping[str, Any]]) -> Any:
    """tau and speed-up of trees by their nodes, the other modes as level lines."""
    figure = _figure(10, 4)
    trees = sorted((row for row in rows if row["budget"]), key=lambda row: int(row["budget"]))
    names = {"tau": "tau, tokens a step", "speedup": "speed-up over plain decoding"}
    for axes, (name, title) in zip(figure.subplots(1, 2), names.items(), strict=True):
        axes.plot(
            [row["budget"] for row in trees],
            [math.nan if row[name] is None else row[name] for row in trees],
            marker="o",
            label="ddtree",
        )
        for number, row in enumerate(row for row in rows if not row["budget"] and row["mode"] != "generate"):
            if row[name] is not None:
                axes.axhline(row[name], linestyle="--", color=f"C{number + 1}", linewidth=1, label=row["mode"])
        axes.set_xscale("log", base=2)
        axes.set_xlabel("drafted nodes")
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=8)
    return figure


def _tree(tree: Mapping[str, Any]) -> Any:
    """Nodes by depth, leaves one below the other, each parent in the middle of its children; what was accepted is red."""
    parents, depths = tree["parents"], tree["depths"]
    children: dict[int, list[int]] = {}
    for node in range(1, len(parents)):
        children.setdefault(parents[node], []).append(node)
    heights: dict[int, float] = {}
    leaves = 0
    for node in _deepest_first(children):
        below = children.get(node)
        heights[node] = sum(heights[child] for child in below) / len(below) if below else float(leaves)
        leaves += not below
    accepted = set(tree["accepted"])
    figure = _figure(2 + 1.6 * (max(depths) + 1), max(2.0, 0.22 * leaves))
    axes = figure.subplots()
    for node in range(len(parents)):
        color = "C3" if node in accepted else "0.5"
        if node:
            ends = [depths[parents[node]], depths[node]], [-heights[parents[node]], -heights[node]]
            axes.plot(*ends, color=color, linewidth=1.5 if node in accepted else 0.6, zorder=0)
        share = f" {math.exp(tree['log_probs'][node]):.2f}" if node else ""
        axes.annotate(
            repr(tree["texts"][node])[1:-1].replace("$", r"\$") + share,
            (depths[node], -heights[node]),
            fontsize=7,
            color=color,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            va="center",
        )
    axes.set_xlim(-0.2, max(depths) + 0.9)
    axes.set_ylim(-leaves, 1)
    axes.set_yticks([])
    axes.set_xticks(range(max(depths) + 1))
    axes.set_xlabel("tokens ahead, and probability of each path", fontsize=8)
    return figure


def _deepest_first(children: Mapping[int, Sequence[int]]) -> list[int]:
    """Every node after its children, siblings in order."""
    order: list[int] = []
    waiting: list[tuple[int, bool]] = [(0, False)]
    while waiting:
        node, done = waiting.pop()
        if done:
            order.append(node)
        else:
            waiting.append((node, True))
            waiting += [(child, False) for child in reversed(children.get(node, ()))]
    return order
