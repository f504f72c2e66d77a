"""Mutants made by machine: small changes of a package's code, and the share of them
that its tests notice.
"""
