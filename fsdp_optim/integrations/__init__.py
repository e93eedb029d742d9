"""Plug-ins for trainers of other packages: each is imported by its users only, and imports its package.

lightning.py, peft.py, torchtitan.py, verl.py   one trainer each
torchtitan_state.py                             what torchtitan has for each rank, at other numbers of ranks
torchdata.py, torchdata_sampler.py              torchdata's loader at other numbers of ranks
torchao.py                                      its optimizer that keeps state on the CPU
accelerate.py                                   Accelerate and the Trainer: `enable`, `disable`, the mixin
accelerator_state.py, trainer_folder.py         what takes the place of their methods
hugging_face_folders.py, signs.py, settings.py  their folders and files; the options of both
needed.py, patches.py                           names of a trainer's package: required, and replaced

They use `fsdp_optim` and `fsdp_optim.plugins` alone, as plug-ins of other packages do.
"""
