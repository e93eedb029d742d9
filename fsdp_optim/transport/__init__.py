"""How ranks agree and how their bytes travel. Only this package calls collectives.

base.py                          World, Control, Transport: the protocols, and the order of calls
agree.py, meeting.py, verdict.py all ranks agree, or all raise the same error
tree.py, long_wait.py            who tells whom in a meeting, and what a rank does that waits for long
collective.py, in_process.py     the transports: torch.distributed, and threads of one process
completion.py                    the end of a background save, without a collective call
job/                             the rendezvous store of the job, and signs of life in it
"""

from fsdp_optim.transport.base import Item, RankGroup
from fsdp_optim.transport.completion import Completion
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.meeting import Meeting
from fsdp_optim.transport.parcels import NOTHING, Parcel, send
from fsdp_optim.transport.world import alone, world_here

__all__ = ["NOTHING", "Completion", "Failure", "Item", "Meeting", "Parcel", "RankGroup", "alone", "send", "world_here"]
