"""Writing results to files."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def require_folder(folder: Path, option: str) -> None:
    """Make `folder`, which `option` names. If nothing can be written to it, end the
    command in one line, with exit code 2.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        print(
            f"gradaccum: cannot write to {folder}: {error.strerror}. Name another"
            f" folder: {option} FOLDER",
            file=sys.stderr,
        )
        sys.exit(2)


def write_json(path: Path, value: object) -> None:
    """Write `value` as strict JSON, which has no infinity and no NaN: they become the
    texts ``"inf"``, ``"-inf"`` and ``"nan"``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(_strict(value), indent=2, allow_nan=False) + "\n", "utf-8"
    )


def _strict(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_strict(item) for item in value]
    return value
