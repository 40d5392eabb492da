"""Where a model's files are, for `from_pretrained`."""

from __future__ import annotations

from pathlib import Path


class TargetError(ValueError):
    """A target that cannot be loaded or used; the message has its path and the next step."""


def model_place(path: Path) -> dict[str, str]:
    """How `from_pretrained` is told of a local folder or a .gguf file.

    Raises:
        TargetError: there is neither.
    """
    if path.is_file() and path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if (path / "config.json").is_file():
        return {"pretrained_model_name_or_path": str(path)}
    raise TargetError(
        f"{path} is neither a folder with a config.json nor a .gguf file; models are read from disk only: download it, and "
        "name its folder"
    )
