"""The contestants: ours, what people use today, code by hand, and the work that none of
them can do without.
"""
