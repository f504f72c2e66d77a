"""The checks of a GPU user: exactness, CUDA graphs, half precision, waits, compilation,
memory, time, streams, JAX and workers, each with its bound.

The adapters are imported from ``backends`` of this checkout: nothing of gradaccum has
to be installed.
"""

import sys
from pathlib import Path

BACKENDS = Path(__file__).parents[2] / "backends"

if str(BACKENDS) not in sys.path:
    # Before the installed packages: core and adapters shall be of one checkout.
    sys.path.insert(0, str(BACKENDS))
