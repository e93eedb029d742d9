"""Checkpoint folders of trainers: their files and ours appear together, when all of them are complete.

meeting.py   all ranks of a job come to one step of the trainer
looks.py     what the lowest rank finds in a folder, all ranks hear and see
folder.py    one folder that is being saved
removal.py   the removal of one checkpoint

The core knows nothing of this room: plug-ins reach it by `fsdp_optim.plugins`.
"""
