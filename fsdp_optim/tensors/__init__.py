"""Tensors of one process: their memory, their elements, and where those of a DTensor are. No ranks are asked.

memory.py       the Budget, memory for tensors, the names of dtypes, the copies of a plan
transposed.py   copies of large transposed tensors
rows.py         runs of many short values, as tables; side_by_side.py: their elements in one piece of memory
elements.py     values whose elements cannot be copied, refused by name
dtensors.py     DTensors: where their elements live, whatever they belong to; their local tensors
"""
