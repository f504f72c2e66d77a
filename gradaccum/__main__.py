"""The ``gradaccum`` command. ``versions`` and ``check`` need only this package.
``demo`` and ``conformance`` also need ``gradaccum[conformance]``.
"""

from __future__ import annotations

import sys
from importlib import import_module

from gradaccum import __version__, versions
from gradaccum.loop_check import LoopReport

HELP = """Usage: gradaccum [--version] [--help] COMMAND

versions     Print the versions that a bug report needs.
check        Call module:function, which must return a report of gradaccum.check_loop,
             and print the report. The exit status is 1 unless the loop is right.
demo         Train on handwritten digits in every installed framework.
conformance  Test that accumulated gradients equal the large batch's gradient.

demo and conformance need: pip install 'gradaccum[conformance]'"""


def main() -> None:
    """Run the user's command. If the command needs a package that is not installed,
    exit with a message that names the package.
    """
    arguments = sys.argv[1:]
    if arguments == ["versions"]:
        print(versions.report())
        return
    if arguments[:1] == ["check"]:
        sys.exit(check(arguments[1:]))
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
            sys.exit(f"gradaccum: there is no command {arguments[0]!r}. {HELP}")
        sys.exit(
            f"gradaccum: {arguments[0]} needs {error.name!r}. Run: pip install"
            " 'gradaccum[conformance]'"
        )
    cli.main()


def check(arguments: list[str]) -> int | str:
    """Call the function named on the command line, print its report, and return the
    exit status.
    """
    module, _, name = "".join(arguments[:1]).partition(":")
    if not name:
        return "gradaccum: name the function to call: gradaccum check module:function"
    sys.path.insert(0, "")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        return f"gradaccum: {module}:{name} cannot be imported: {error}"
    report = function()
    if not isinstance(report, LoopReport):
        kind = type(report).__name__
        return (
            f"gradaccum: {module}:{name} returned an object of type {kind}. Return the"
            " report of gradaccum.check_loop."
        )
    print(report)
    return 0 if report.right else 1


if __name__ == "__main__":
    main()
