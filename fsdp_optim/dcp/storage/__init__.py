"""Storage for torch's own calls: `save(..., storage_writer=Writer(path))` and `load(..., storage_reader=Reader(path))`.

Torch calls, on a save (writer.py):

    set_up_storage_writer, prepare_local_plan    all ranks
    prepare_global_plan                          the coordinator: planned_boxes.py, which rank writes which box of a tensor;
                                                 staged_save.py, the save in the store
    write_data                                   all ranks: box_writing.py, each box to its rows of the files
    finish                                       the coordinator: the manifest

and on a load (reader.py): `read_metadata` (torch_metadata.py: the index as torch's metadata), `prepare_local_plan`,
`prepare_global_plan`, `read_data`. at_path.py has what both have in common; saved_values.py turns torch's bytes into plain
values, and back; model_places.py says where the model belongs in a state dict that has several.
"""
