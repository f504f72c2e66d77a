"""``gradaccum`` on the command line: ``doctor`` runs anywhere; the other commands live in the conformance package.

That package may not be fully installed, which is when a doctor is called.
"""

from __future__ import annotations

import sys
from importlib import import_module

from gradaccum import doctor


def main() -> None:
    """Run the command line, or say what to install."""
    if sys.argv[1:2] == ["doctor"]:
        sys.exit(doctor.main(sys.argv[2:]))
    try:
        cli = import_module("gradaccum_conformance.cli")
    except ModuleNotFoundError as error:
        sys.exit(
            f"gradaccum: its commands need the package {error.name!r}. Run: pip install 'gradaccum[conformance]' (or: gradaccum doctor)"
        )
    cli.main()


if __name__ == "__main__":
    main()
