"""The calls between memory and memory, one file per verb: gather, iterate, shard, scatter, transfer, load and rekey."""
