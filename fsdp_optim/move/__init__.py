"""The one executor: state values move from one end to another.

ends.py       a value, elements of it on one rank, and one side of a move
routes.py     the way of a value from one end to the other
executor.py   the move: in batches and windows that fit a budget
short.py      short values, whose rows travel together to the rank that writes them
"""

from fsdp_optim.move.ends import CompleteValues, End, Key, Parts, Slice, StateValue, Taken
from fsdp_optim.move.executor import move
from fsdp_optim.move.short import has_room_for_short, is_short

__all__ = [
    "CompleteValues",
    "End",
    "Key",
    "Parts",
    "Slice",
    "StateValue",
    "Taken",
    "has_room_for_short",
    "is_short",
    "move",
]
