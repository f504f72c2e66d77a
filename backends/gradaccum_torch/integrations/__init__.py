"""Callbacks for trainers from other packages. Each file is named after the package that
it supports. No other file imports that package.
"""
