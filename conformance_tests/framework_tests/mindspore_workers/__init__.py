"""Run by two processes: what they compute together against one that has everything.
Each check has its own line in the report.
"""

from . import refusals, sharded, windows
from .checks import CHECKS

__all__ = ["CHECKS", "refusals", "sharded", "windows"]
