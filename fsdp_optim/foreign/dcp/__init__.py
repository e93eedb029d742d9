"""Folders of torch.distributed.checkpoint (DCP), written by torch, torchtitan, Accelerate, Lightning, OLMo-core or this library.

probe.py                       is it complete, and whose is it?
metadata.py                   `.metadata`, checked and read without executing it:
metadata_tables.py, metadata_patterns.py, metadata_memo.py, metadata_rows.py     as tables, where it is written as torch writes it
metadata_pickle.py, pickle_operations.py                  by objects, however it is written
tensor_table.py, stored_table.py                          its tensors as columns
keys.py, full_dict.py          which keys are the model's, and the optimizer's dict made of the others
items.py, safetensors_items.py, sharding_info.py, boxes.py     where the chunks of each tensor are
reader.py, writer.py, values.py, written_metadata.py, format.py     the Format
"""
