"""The example's harness after the fault that the environment variable ``MUTANT`` names
was planted. The suite's workers load it too, each in its process.
"""

from __future__ import annotations

import inspect
import os
from importlib import import_module

from . import MUTANTS, PLACES
from .planting import changed

MODULES = {name: import_module(name) for name in PLACES}
SOURCES = {name: inspect.getsource(module) for name, module in MODULES.items()}

for name, text in changed(MUTANTS[os.environ["MUTANT"]], SOURCES).items():
    exec(compile(text, name, "exec"), vars(MODULES[name]))

harness = import_module("plain_harness").harness
