"""How ranks agree and how their bytes travel. Only this package calls collectives.

base.py                          World, Control, Transport: the protocols, and the order of calls
agree.py, meeting.py, verdict.py all ranks agree, or all raise the same error
collective.py, in_process.py     the transports: torch.distributed, and threads of one process
completion.py                    the end of a background save, without a collective call
job/                             the rendezvous store of the job, and signs of life in it
"""
