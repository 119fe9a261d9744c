"""Pictures of the lessons: pure functions from data to a matplotlib figure, and widgets that only wrap them.

style.py holds what all of them share. A lesson shows a figure with `show(fig, alt)`. The pictures of an event log
belong to no single lesson, and are here by name: `from minillm.viz import timeline, timelines, scheduler_explorer`.
"""

from minillm.viz.scheduler_explorer import scheduler_explorer, scheduler_figure
from minillm.viz.timeline import timeline, timelines

__all__ = ["scheduler_explorer", "scheduler_figure", "timeline", "timelines"]
