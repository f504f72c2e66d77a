"""One question per file: what is measured, beside which baseline, and what was
found.
"""
