"""Pictures of the lessons: pure functions from data to a matplotlib figure, and widgets that only wrap them.

style.py holds what all of them share. A lesson shows a figure with `show(fig, alt)`.
"""
