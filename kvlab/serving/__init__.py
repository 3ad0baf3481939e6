"""Serving many requests from one memory: requests, a scheduler, allocators, an engine and its trace."""

from kvlab.serving.allocator import Allocator, PagedAllocator
from kvlab.serving.engine import Engine
from kvlab.serving.request import Request, Status
from kvlab.serving.scheduler import Scheduler
from kvlab.serving.trace import Event, Held, State, Trace

__all__ = ["Allocator", "Engine", "Event", "Held", "PagedAllocator", "Request", "Scheduler", "State", "Status", "Trace"]
