"""Benchmarks: questions, contestants, and the machinery here that lets them meet.
``python -m benchmarks`` answers them.
"""
