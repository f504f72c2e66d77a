"""Vectors of the specification: what an implementation of gradient accumulation is
given, and what must come out, in JSON.

``run.py`` plays them on any implementation. ``python -m
gradaccum_conformance.vectors.make`` writes them from the reference.
"""
