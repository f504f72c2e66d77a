"""``gradaccum doctor``: is this environment one in which gradaccum works?

It needs the standard library only, since it must run where something is missing. It imports no framework into its own process, which a
broken one would end. Exit codes: 0, nothing is wrong; 1, something is; 2, an argument is wrong.
"""

from gradaccum.doctor.command import main
from gradaccum.doctor.diagnosis import LIMIT, Diagnosis, diagnose

__all__ = ["LIMIT", "Diagnosis", "diagnose", "main"]
