"""Pipeline schedules as data: lists of actions that the executor, the simulator, the picture and the planner share."""

from stretto.schedule.action import Action, Flow, Kind, Schedule
from stretto.schedule.build import SCHEDULES, build_schedule
from stretto.schedule.check import check_schedule
from stretto.schedule.draw import chrome_trace, picture
from stretto.schedule.simulate import Costs, Span, Timeline, simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Flow",
    "Kind",
    "Schedule",
    "Span",
    "Timeline",
    "build_schedule",
    "check_schedule",
    "chrome_trace",
    "picture",
    "simulate",
]
