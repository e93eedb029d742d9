"""The boundary between the library and its users: what each public call does besides its work.

tracebacks.py   `public`: the library's own errors end at the line of the user
collector.py    fewer collections of garbage while a call makes many objects that stay
heap.py         memory that a long call no longer needs goes back to the system
"""
