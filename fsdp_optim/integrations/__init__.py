"""Plug-ins for trainers of other packages: each is imported by its users only, and imports its package.

lightning.py, peft.py, torchtitan.py, verl.py     one trainer each
torchtitan_state.py                               what torchtitan has for each rank, at other numbers of ranks
torchdata.py, torchdata_sampler.py                torchdata's loader at other numbers of ranks
torchao.py                                        its optimizer that keeps state on the CPU
transformers.py                                   the models that transformers itself puts on a mesh
nemo_automodel.py, llama_factory.py, prime_rl.py  trainers that call torch.distributed.checkpoint
accelerate.py                                     Accelerate and the Trainer: `enable`, `disable`, the mixin
hugging_face/                                     what takes the place of their methods, and folders of `from_pretrained`
common/                                           names of a trainer's package: required, and replaced

They use `fsdp_optim` and `fsdp_optim.plugins` alone, as plug-ins of other packages do. The modules in this folder are what users
import; those in the rooms are not.
"""
