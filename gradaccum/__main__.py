"""The ``gradaccum`` command: ``versions`` runs anywhere, the other commands live in the
conformance package.
"""

from __future__ import annotations

import sys
from importlib import import_module

from gradaccum import __version__, versions

HELP = """Usage: gradaccum [--version] [--help] COMMAND

versions     Print the versions that a report of a fault needs.
demo         Train on handwritten digits in every installed framework.
conformance  Test that accumulated gradients equal the large batch's.

All but versions need: pip install 'gradaccum[conformance]'"""


def main() -> None:
    """Run the command line, or say what to install."""
    arguments = sys.argv[1:]
    if arguments == ["versions"]:
        print(versions.report())
        return
    if arguments == ["--version"]:
        print(f"gradaccum {__version__}")
        return
    try:
        cli = import_module("gradaccum_conformance.cli")
    except ModuleNotFoundError as error:
        if arguments in ([], ["--help"]):
            print(HELP)
            return
        if arguments[0] not in ("demo", "conformance"):
            sys.exit(f"gradaccum: no command {arguments[0]!r}. {HELP}")
        sys.exit(
            f"gradaccum: {arguments[0]} needs {error.name!r}. Run: pip install"
            " 'gradaccum[conformance]'"
        )
    cli.main()


if __name__ == "__main__":
    main()
