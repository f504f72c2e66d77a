"""`verify` judges over a hundred losses as people write them."""

from __future__ import annotations

import pytest
import torch

import gradaccum

from .torch_cases import one_thread  # noqa: F401
from .torch_invented_losses import LOSSES, cases


@pytest.mark.deep
def test_verify_judges_invented_losses() -> None:
    """Nearly every verdict, and the first cause of nearly all that are wrong. No loss
    that is right is called wrong: at worst it cannot be compared.
    """
    wrong_verdicts: list[str] = []
    wrong_causes: list[str] = []
    for invented, model, batch in cases():
        report = gradaccum.verify(
            model, invented.loss, batch, steps=4, **invented.options
        )
        kinds = [cause.kind for cause in report.causes]
        if report.equivalent != (not invented.kind):
            wrong_verdicts.append(f"{invented.name}: {report}")
            assert kinds == ["not_repeatable"], report
        elif invented.kind and kinds[0] != invented.kind:
            wrong_causes.append(f"{invented.name}: {kinds}")
    assert len(LOSSES) >= 110
    assert len(wrong_verdicts) <= 2, wrong_verdicts
    mistakes = sum(bool(invented.kind) for invented in LOSSES)
    assert len(wrong_causes) <= 0.05 * mistakes, wrong_causes


def test_coefficients_are_the_shares_of_the_tokens() -> None:
    """The best coefficients of a mean over tokens, beside those of a mean of means."""
    model = torch.nn.Linear(5, 3)
    x = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(6) < torch.tensor([5, 3, 4, 2])[:, None]).float()

    def loss(
        model: torch.nn.Module, x: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        return (model(x).square().sum(-1) * mask).sum() / mask.sum()

    report = gradaccum.verify(model, loss, (x, mask), steps=4)
    assert report.coefficients is not None
    shares = [5 / 14, 3 / 14, 4 / 14, 2 / 14]
    assert report.coefficients.best == pytest.approx(shares, rel=1e-4)
    assert report.coefficients.used == (0.25,) * 4
    assert report.coefficients.unexplained < 1e-5
    assert "0.357 (0.25), 0.214 (0.25), 0.286 (0.25), 0.143 (0.25)" in str(report)
    assert '"best": [' in report.to_json()
