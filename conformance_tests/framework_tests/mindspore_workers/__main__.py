"""One of the two processes that msrun starts. It writes its report, ``RANK.json``, into
the current folder.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

os.environ.setdefault("GLOG_v", "4")

from mindspore.communication import init

from conformance_tests.framework_tests.mindspore_common import set_mode
from conformance_tests.framework_tests.mindspore_workers import CHECKS


def main(rank: int) -> int:
    if os.environ["MS_ROLE"] == "MS_SCHED":
        # msrun runs the script in a third process too, which waits here for the
        # workers' end.
        init()
        return 0
    report = {}
    for name, run in CHECKS.items():
        set_mode("pynative")
        try:
            run(rank)
            report[name] = "passed"
        except Exception:
            report[name] = traceback.format_exc()
        Path(f"{rank}.json").write_text(json.dumps(report), "utf-8")
        if report[name] != "passed":
            # The workers may be at different calls now. msrun then ends the other one,
            # which may wait for this one.
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(os.environ["RANK_ID"])))
