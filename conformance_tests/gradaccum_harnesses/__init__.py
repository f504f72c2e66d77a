"""The harnesses of the adapters that stand in this project: the suite drives a
framework through its harness.
"""
