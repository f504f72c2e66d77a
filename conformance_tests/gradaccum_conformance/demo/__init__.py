"""The demo: a small convolutional network on handwritten digits, in each framework,
with and without accumulation.

Each framework trains it four times from the same weights on the same batches: with the
large batch; with gradaccum in four equal micro-batches; with gradaccum in micro-batches
of a fixed size, so that the window of the epoch's tail is shorter; and with the loop
found in many tutorials, which divides every window by the same number.
``python -m gradaccum_conformance.demo`` runs one framework;
`gradaccum_conformance.demo.command.run_demo` runs them all. This file imports nothing,
so that a framework's process loads no plotting.
"""
