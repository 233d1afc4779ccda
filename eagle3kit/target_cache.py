"""Targets that the kit made, kept as folders on this machine: where they lie, and which of them are complete."""

from __future__ import annotations

import json
import os
from pathlib import Path

from eagle3kit.rundir import write_json

FORMAT = 1
"""Raised when a conversion changes, so that folders made by an older kit are not used any more."""

ORIGIN = "eagle3kit.json"
"""In a folder that the kit made: where it came from. Written last, so that its presence means the folder is complete."""


def folder() -> Path:
    """Where targets that the kit makes are kept, once a machine: `$EAGLE3KIT_CACHE/targets` or `~/.cache/eagle3kit/targets`."""
    root = os.environ.get("EAGLE3KIT_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "eagle3kit").resolve() / "targets"


def find(name: str, root: Path) -> Path | None:
    """The complete folder of a target that was made earlier with this version's format, or None."""
    for origin in sorted(root.glob(f"{name}-*/{ORIGIN}")):
        if json.loads(origin.read_bytes()).get("format") == FORMAT:
            return origin.parent
    return None


def mark(folder: Path, origin: str) -> None:
    """Write where a folder came from. Done last: from then on it counts as complete."""
    write_json(folder / ORIGIN, {"origin": origin, "format": FORMAT})


def origin(folder: Path) -> str:
    """Where a folder that the kit made came from, in words."""
    return str(json.loads((folder / ORIGIN).read_bytes())["origin"])
