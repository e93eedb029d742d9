"""Accelerate, transformers' Trainer and `from_pretrained`, behind `integrations/accelerate.py`, which users import.

accelerator_state.py, trainer_folder.py    what takes the place of the methods that save and load
folders.py, signs.py                       their folders: names of files, which ones go; files that say what to call instead
settings.py, proofs.py                     the options of both, and the proof of resumes
accelerate_start.py, empty_files.py        `weights_from`: the start of a run from a Hugging Face folder
pretrained_folder.py                       a checkpoint that is also a folder of `from_pretrained`, for several trainers
"""
