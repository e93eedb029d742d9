"""`save` and `load` with the arguments of torch.distributed.checkpoint: a state dict is a tree.

state_tree.py     the weights of a state dict, told from the rest, which a save stores as a model's, with the optimizer
saving.py         `save` and `async_save`
loading.py        `load`: into the tensors of the state dict; meta_values.py: memory for those on the meta device
tree_view.py      every checkpoint as one tree, for a load; seen_tree.py: through Views
"""
