"""What users do to checkpoints that they keep: verify every byte, copy it elsewhere, and remove those that no rule keeps.

verifying.py       `verify`: all bytes of a checkpoint of any format, in several threads; nothing is written
copying.py         `copy`: a checkpoint of this library byte for byte, verified meanwhile, and committed like a save
copied_files.py    its files, in units that are compared with their checksums
pruning.py         `prune`: the checkpoints of a folder, by the rules of a CheckpointManager
"""
