"""The front page's loops are the large batch's, the pages quote files word for word, and
their links lead to files that exist.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import gradaccum
from conformance_tests.programs import PYTHON_BLOCK, ROOT

from .mutants import MUTANTS

README = (ROOT / "README.md").read_text("utf-8")
FOLDERS = (".", ".github", "gradaccum", "backends", "backends/*", "benchmarks")
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for page in ROOT.glob(f"{folder}/*.md")
)
FOUND_BY_NAME = (
    ".github/pull_request_template.md",
    "AGENTS.md",
    "CODE_OF_CONDUCT.md",
    "SECURITY.md",
)
"""Pages that hosts of repositories, and assistants, look for under these names."""


def quoted(page: str) -> list[tuple[str, str]]:
    return re.findall(
        r"<!-- file: (\S+) -->\n```python\n(.*?)```",
        (ROOT / page).read_text("utf-8"),
        re.DOTALL,
    )


MEASURED = json.loads((ROOT / "benchmarks/scoreboard/results.json").read_text("utf-8"))


def shown(row: str, figure: str) -> str:
    value = MEASURED[row]["unequal"][figure]
    return f"{value:.2f}" if figure == "length" else f"{100 * value:.0f} %"


@pytest.mark.parametrize(
    ("row", "figure", "sentence"),
    [
        ("accelerate_rows.short_window", "length", "the update is only {}"),
        ("lightning_rows.short_window", "length", "the update is only {}"),
        ("trl_rows.dpo", "distance", "TRL's DPO is off by {}"),
        ("keras_rows.short_batch", "distance", "in Keras by {}"),
        ("mindspore_rows.mindcv_clipped", "distance", "training step is off by {}"),
    ],
)
def test_numbers_are_the_scoreboard_s(row: str, figure: str, sentence: str) -> None:
    prose = " ".join(README.split())
    assert sentence.format(shown(row, figure)) in prose


IN_SHORT = {
    "yes, by `flush()`": "right",
    "no (1)": "carried over",
    "no (3)": "too small",
}
"""The scoreboard's words for a short last window, and the front page's."""


def rows_below(page: str, heading: str) -> dict[str, list[str]]:
    """The cells of the first table below a heading, by the name of their row."""
    table = re.search(r"^\|.*?(?=\n\n)", page[page.index(heading) :], re.M | re.DOTALL)
    assert table is not None
    rows = [line.strip("| ").split(" | ") for line in table[0].splitlines()[2:]]
    return {re.sub(r"\[(.*?)\]\(.*?\)", r"\1", name): cells for name, *cells in rows}


def test_table_is_the_scoreboard_s() -> None:
    scoreboard = (ROOT / "benchmarks/SCOREBOARD.md").read_text("utf-8")
    expected = {}
    for name, cells in rows_below(scoreboard, "## Features, one by one").items():
        short_window = IN_SHORT.get(cells[0], cells[0])
        weights = cells[1].replace("yes", "right")
        half_precision = re.split(r"[ ,]", cells[2])[0]
        expected[name] = [short_window, weights, half_precision, cells[5]]
    assert rows_below(README, "## Compared with other packages") == expected


def test_number_of_planted_faults() -> None:
    assert f"each of {len(MUTANTS)} planted faults" in " ".join(README.split())


def programs_of_the_diff() -> tuple[str, str]:
    """The loop before and after; the context below an ``if`` stands deeper in it."""
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    before = ""
    after = ""
    deeper = ""
    for line in diff.splitlines():
        if line[0] == " ":
            before += f"{deeper}{line[1:]}\n"
        if line[0] == "-":
            before += f"{line[1:]}\n"
        if line[0] != "+" and line[1:].strip().startswith("if "):
            deeper = "    "
        if line[0] in " +":
            after += f"{line[1:]}\n"
    return before, after


SIZES = (6, 6, 6, 3, 6, 6)
"""Items of the micro-batches: the last window is short, and so is one of them."""
LARGE = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for rate, window in ((1e-3, loader[:4]), (second_rate, loader[4:])):
    optimizer.param_groups[0]["lr"] = rate
    x, y = map(torch.cat, zip(*window))
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    for p in model.parameters():
        p.grad /= max(norm / clip_norm, 1)
    optimizer.step()
"""


def names_after(*programs: str, **names: Any) -> dict[str, Any]:
    """Run programs on the same model and items, and return their variables."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3).double()
    x, y = torch.randn(2, sum(SIZES), 3, dtype=torch.float64)
    names |= {
        "gradaccum": gradaccum,
        "torch": torch,
        "model": model,
        "loader": list(zip(x.split(SIZES), y.split(SIZES), strict=True)),
        "loss_fn": torch.nn.functional.mse_loss,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
    }
    for program in programs:
        exec(program, names)
    return names


@pytest.mark.parametrize("page", ["README.md", "AGENTS.md", "llms.txt"])
def test_loop_makes_the_large_batches_updates(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the front page's loop before does not."""
    text = (ROOT / page).read_text("utf-8")
    programs = PYTHON_BLOCK.findall(text)
    if page == "README.md":
        before, after = programs_of_the_diff()
        programs = [after]
    clip_norm = 1.0 if "clip_norm" in programs[0] else math.inf
    rate = 5e-4 if "scheduler" in programs[0] else 1e-3
    large = names_after(LARGE, clip_norm=clip_norm, second_rate=rate)["model"].weight
    names = names_after(*programs)
    assert names["optimizer"].result.optimizer_step == 2
    close = names["torch"].testing.assert_close
    close(names["model"].weight, large, rtol=1e-12, atol=1e-12)
    if page == "README.md":
        assert (names_after(before)["model"].weight - large).abs().max() > 1e-5
    if len(programs) > 1:
        printed = capsys.readouterr().out
        assert "Accumulation is right for this loss" in printed
        assert "StepResult(applied=True" in printed


def test_report_is_the_loop_check_s() -> None:
    torch = pytest.importorskip("torch")
    section = README[README.index("## Is my loop right?") :]
    program, report = re.findall(r"```(?:py|text)\n(.*?)```", section, re.DOTALL)[:2]
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
    model = torch.nn.Sequential(*layers)
    x = torch.randn(43, 8)
    y = torch.randint(0, 3, (43,))
    names = {
        "gradaccum": gradaccum,
        "model": model,
        "loader": list(zip(x.split(8), y.split(8), strict=True)),
        "loss_fn": torch.nn.functional.cross_entropy,
        "optimizer": torch.optim.AdamW(model.parameters()),
    }
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(program, names)
    assert output.getvalue().split() == report.split()


def test_quotations_equal_their_files() -> None:
    found = [(page, file, text) for page in PAGES for file, text in quoted(page)]
    assert found
    for page, file, text in found:
        assert text == (ROOT / file).read_text("utf-8"), (
            f"{page} quotes an older {file}"
        )


def prose_of(path: Path) -> str:
    return re.sub(
        r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL
    )


def anchors_of(path: Path) -> set[str]:
    """The addresses of a page's headings; "" is its beginning."""
    headings = re.findall(r"^#+ (.*)$", prose_of(path), flags=re.MULTILINE)
    return {
        "",
        *(
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in headings
        ),
    }


@pytest.mark.parametrize("page", [*PAGES, "llms.txt"])
def test_links_lead_somewhere(page: str) -> None:
    """The links to files of this repository, and to headings in its pages. No page is
    read from the network.
    """
    path = ROOT / page
    links = re.findall(r"\]\(([^):#]*)#?([^):]*)\)", prose_of(path))
    missing = [link for link, _ in links if not (path.parent / link).exists()]
    assert not missing
    assert not [
        (link, to)
        for link, to in links
        if to and to not in anchors_of(path.parent / link if link else path)
    ]


def test_front_page_links_every_page() -> None:
    assert set(PAGES) - {"README.md", *FOUND_BY_NAME} <= set(
        re.findall(r"\]\(([^)#:]+)\)", README)
    )
