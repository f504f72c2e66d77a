"""Stage 8: the host's time for a micro-batch and for a window's end, and the tokens per
second of a GPT-2 small, beside the bare loop, Accelerate and Lightning Fabric.

All take turns in each round; a ratio is the median over the rounds, with its quartiles.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import gradaccum
from benchmarks.contestants import torch_loops
from benchmarks.contestants.torch_loops import STEPS
from benchmarks.contestants.transformer import GPT2_SMALL, TINY, Shape
from benchmarks.gpu.problem import backward
from benchmarks.gpu.records import NOT_INSTALLED, Check, Measured, Setting, is_installed
from benchmarks.rounds import Plan, Timing, measure

BARE = "bare"
OURS = "gradaccum"
ACCELERATE = "Accelerate"
FABRIC = "Lightning Fabric"
FABRIC_MODULE = torch_loops.fabric_module()
ELEMENTS = 64
"""Of each tensor: so few that the host's work is what takes the time."""
TENSORS = (10, 150, 1000)


class Stopwatch:
    """The seconds of one section of a window, which `clock` reads."""

    def __init__(self, section: str) -> None:
        self.section = section
        self.seconds = 0.0

    def clock(self) -> float:
        return self.seconds

    @contextmanager
    def running(self, section: str) -> Iterator[None]:
        """Add the time of the block if it is the section of this stopwatch."""
        begin = time.perf_counter()
        yield
        if section == self.section:
            self.seconds += time.perf_counter() - begin


class HalfSquare(torch.autograd.Function):
    """Half the sum of squares, whose gradient is the parameters: a few operations for
    all tensors, so that little but the loop's own work is measured.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.parameters = [parameter.detach() for parameter in parameters]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return tuple(torch._foreach_mul(ctx.parameters, upstream[0]))


class ManyTensors(nn.Module):
    """A model of so many small tensors; it returns its loss."""

    def __init__(self, setting: Setting, tensors: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        values = torch.randn(tensors, ELEMENTS, device=setting.device)
        self.tensors = nn.ParameterList([nn.Parameter(row.clone()) for row in values])

    def forward(self) -> Tensor:
        loss: Tensor = HalfSquare.apply(*self.tensors)  # type: ignore[no-untyped-call]
        return loss


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)


MicroBatch = Callable[[bool], None]
"""One micro-batch of a loop, with the update if it is the window's last."""


def bare_loop(setting: Setting, model: nn.Module) -> MicroBatch:
    optimizer = make_optimizer(model)

    def micro_batch(is_last: bool) -> None:
        backward(model() / STEPS)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

    return micro_batch


def our_loop(setting: Setting, model: nn.Module) -> MicroBatch:
    opt = gradaccum.wrap(make_optimizer(model), steps=STEPS)

    def micro_batch(is_last: bool) -> None:
        backward(model())
        opt.step()
        opt.zero_grad()

    return micro_batch


def accelerate_loop(setting: Setting, model: nn.Module) -> MicroBatch:
    from accelerate import Accelerator

    accelerator = Accelerator(
        gradient_accumulation_steps=STEPS, cpu=setting.device == "cpu"
    )
    prepared, optimizer = accelerator.prepare(model, make_optimizer(model))

    def micro_batch(is_last: bool) -> None:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared())
            optimizer.step()
            optimizer.zero_grad()

    return micro_batch


def fabric_loop(setting: Setting, model: nn.Module) -> MicroBatch:
    fabric = torch_loops.import_fabric()(accelerator=setting.device, devices=1)
    prepared, optimizer = fabric.setup(model, make_optimizer(model))

    def micro_batch(is_last: bool) -> None:
        with fabric.no_backward_sync(prepared, enabled=not is_last):
            fabric.backward(prepared() / STEPS)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

    return micro_batch


def loops() -> Mapping[str, Callable[[Setting, nn.Module], MicroBatch]]:
    """Return the loops that can run here, the bare one first."""
    found = {BARE: bare_loop, OURS: our_loop}
    if is_installed("accelerate"):
        found[ACCELERATE] = accelerate_loop
    if is_installed(FABRIC_MODULE):
        found[FABRIC] = fabric_loop
    return found


def window(micro_batch: MicroBatch, stopwatch: Stopwatch) -> None:
    """Run one window; its end includes what the device has left to do."""
    torch_loops.wait()
    with stopwatch.running(INSIDE):
        for _ in range(STEPS - 1):
            micro_batch(False)
    torch_loops.wait()
    with stopwatch.running(END):
        micro_batch(True)
        torch_loops.wait()


INSIDE = "micro-batch"
END = "window end"


@cache
def timings(setting: Setting, tensors: int, section: str) -> Mapping[str, Timing]:
    stopwatch = Stopwatch(section)
    contestants = {
        name: partial(window, loop(setting, ManyTensors(setting, tensors)), stopwatch)
        for name, loop in loops().items()
    }
    plan = Plan(rounds=60, least=3, seconds=setting.seconds(0.06, small=0.2))
    found = measure(contestants, BARE, plan, stopwatch.clock)
    return {timing.contestant: timing for timing in found}


def host_time(
    setting: Setting, tensors: int, section: str, contestant: str = OURS
) -> Measured:
    found = timings(setting, tensors, section)
    number = STEPS - 1 if section == INSIDE else 1
    usual = 1e3 * found[BARE].median_ms / number
    theirs = ""
    if contestant == OURS:
        theirs = with_spread(found.get(ACCELERATE))
    text = with_spread(found.get(contestant))
    return Measured(None, text, bare=f"{usual:,.0f} us", accelerate=theirs)


def with_spread(timing: Timing | None) -> str:
    """Return a ratio to the bare loop, with its quartiles."""
    if timing is None:
        return NOT_INSTALLED
    return f"{timing.ratio:.2f} ({timing.ratio_low:.2f} to {timing.ratio_high:.2f})"


# GPT-2 small.


class Gpt(NamedTuple):
    """A model, and its loss for ids of shape ``(sequences, length)``."""

    model: nn.Module
    loss: Callable[[nn.Module, Tensor], Tensor]


def gpt_shape(setting: Setting) -> Shape:
    """Return GPT-2 small's shape, with fewer sequences where memory is short: three
    models have to fit.
    """
    if setting.is_small:
        return TINY
    if setting.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        return GPT2_SMALL._replace(sequences=8 if total > 40 * 2**30 else 1)
    return GPT2_SMALL


def make_gpt(setting: Setting) -> Gpt:
    """Make transformers' GPT-2, or the benchmarks' own decoder of that shape."""
    shape = gpt_shape(setting)
    torch.manual_seed(0)
    if not is_installed("transformers"):
        from benchmarks.questions.torch_transformer import Decoder

        return Gpt(Decoder(shape).to(setting.device), _loss_of_logits)
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.length,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return Gpt(GPT2LMHeadModel(config).to(setting.device), _loss_of_labels)


def _loss_of_logits(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)[:, :-1].flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, ids[:, 1:].flatten())


def _loss_of_labels(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


@cache
def gpt_timings(setting: Setting) -> Mapping[str, Timing]:
    shape = gpt_shape(setting)
    ids = torch.randint(
        shape.vocabulary, (shape.sequences, shape.length), device=setting.device
    )
    recipes: dict[str, torch_loops.Recipe] = {
        BARE: torch_loops.hand_written,
        OURS: torch_loops.wrapped,
    }
    if is_installed("accelerate"):
        recipes[ACCELERATE] = torch_loops.accelerate
    windows = {}
    for name, recipe in recipes.items():
        gpt = make_gpt(setting)

        def loss(model: nn.Module, loss_of: Any = gpt.loss) -> Tensor:
            with torch.autocast(setting.device, dtype=torch.bfloat16):
                value: Tensor = loss_of(model, ids)
            return value

        windows[name] = recipe(gpt.model, make_optimizer(gpt.model), loss)
    plan = Plan(rounds=30, least=3, seconds=setting.seconds(0.4))
    found = measure(windows, BARE, plan)
    return {timing.contestant: timing for timing in found}


def tokens_per_second(setting: Setting) -> Measured:
    shape = gpt_shape(setting)
    found = gpt_timings(setting)

    def rate(name: str) -> str:
        if name not in found:
            return NOT_INSTALLED
        return f"{shape.tokens / found[name].median_ms * 1e3:,.0f} tokens/s"

    text = f"{rate(OURS)}, time {with_spread(found[OURS])}"
    return Measured(None, text, bare=rate(BARE), accelerate=rate(ACCELERATE))


def gpt_name() -> str:
    if is_installed("transformers"):
        return "GPT-2 small of transformers, autocast bfloat16"
    return "a decoder of GPT-2 small's shape, autocast bfloat16"


def _checks() -> Iterator[Check]:
    for tensors in TENSORS:
        for section in (INSIDE, END):
            name = f"{tensors:,} tensors, {section}"
            one = partial(host_time, tensors=tensors, section=section)
            yield Check(name, one)
            yield Check(
                f"{name}, {FABRIC}",
                partial(one, contestant=FABRIC),
                packages=(FABRIC_MODULE,),
            )
    yield Check(gpt_name(), tokens_per_second)


CHECKS = tuple(_checks())
