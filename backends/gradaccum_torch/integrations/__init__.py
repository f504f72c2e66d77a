"""Callbacks for trainers of other packages. Each file is named after the package that
it supports, and is the only file that imports this package.
"""
