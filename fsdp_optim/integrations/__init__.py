"""Plug-ins for trainers of other packages: each is imported by its users only, and imports its package.

lightning.py, peft.py, torchtitan.py, verl.py     one trainer each
torchtitan_state.py                               what torchtitan has for each rank, at other numbers of ranks
torchdata.py, torchdata_sampler.py                torchdata's loader at other numbers of ranks
torchao.py                                        its optimizer that keeps state on the CPU
transformers.py                                   the models that transformers itself puts on a mesh
nemo_automodel.py, llama_factory.py, prime_rl.py  trainers that call torch.distributed.checkpoint
pretrained_folder.py                              a checkpoint with a configuration and a tokenizer, for several of them
accelerate.py                                     Accelerate and the Trainer: `enable`, `disable`, the mixin
accelerator_state.py, trainer_folder.py           what takes the place of their methods
accelerate_start.py, empty_files.py               `weights_from`: the start of a run from a Hugging Face folder
hugging_face_folders.py, signs.py, settings.py    their folders and files; the options of both
needed.py, patches.py                             names of a trainer's package: required, and replaced

They use `fsdp_optim` and `fsdp_optim.plugins` alone, as plug-ins of other packages do.
"""
