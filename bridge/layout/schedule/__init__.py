"""Pipeline schedules as values: the actions of each rank in order. A schedule is checked and timed
before a run starts.
"""

from bridge.layout.schedule.action import Action, ActionKind, Schedule
from bridge.layout.schedule.check import prove_schedule
from bridge.layout.schedule.generate import (
    SCHEDULES,
    ScheduleShape,
    check_size,
    generate_schedule,
    partly_kept,
    schedule_problems,
)
from bridge.layout.schedule.program import program_rows, trim_backward
from bridge.layout.schedule.timeline import Costs, Timeline, make_timeline

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Costs",
    "Schedule",
    "ScheduleShape",
    "Timeline",
    "check_size",
    "generate_schedule",
    "make_timeline",
    "partly_kept",
    "program_rows",
    "prove_schedule",
    "schedule_problems",
    "trim_backward",
]
