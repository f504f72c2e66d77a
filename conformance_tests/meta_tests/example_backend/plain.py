"""A framework of one class, to write a backend for."""


class Optimizer:
    """Updates the NumPy arrays in ``parameters`` by a rule that keeps ``state``."""

    def __init__(self, rule):
        self.rule = rule
        self.parameters = rule.parameters
        self.state = rule.state

    def step(self, gradient):
        self.rule.step(gradient)
