"""Callbacks for trainers of other packages. Each file is named after the package that
it imports. No other file imports that package.
"""
