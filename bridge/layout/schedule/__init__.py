"""Pipeline schedules as values: the actions of each rank in order. A schedule is checked and timed
before a run starts.
"""

from bridge.layout.schedule.action import Action, Kind, Schedule
from bridge.layout.schedule.check import prove
from bridge.layout.schedule.generate import (
    SCHEDULES,
    Shape,
    check_size,
    generate,
    partly_kept,
    problems,
)
from bridge.layout.schedule.program import program, trimmed
from bridge.layout.schedule.timeline import Costs, Timeline, timeline

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Kind",
    "Schedule",
    "Shape",
    "Timeline",
    "check_size",
    "generate",
    "partly_kept",
    "problems",
    "program",
    "prove",
    "timeline",
    "trimmed",
]
