"""Files of `torch.save`, read without trust: zip archives, old archives, and pickles that build plain values only.

zip_records.py, legacy_archive.py    where the bytes of each record are
inert_pickle.py                      a pickle reader that calls nothing but the functions of a table
pickle_table.py, torch_globals.py, numpy_globals.py    that table
torch_archive.py                     the values of a file, with places of tensors instead of elements
record_sums.py, part_in_memory.py    the checksums of many archives, of which small ones are read together
torch_zip.py, safe_values.py         writing: the bytes around the elements
torch_archives.py                    writing several archives into a file
pickle_stream.py                     writing a pickle of millions of entries
"""
