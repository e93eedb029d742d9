"""The proof of a resume: what the step after a checkpoint led to, in the run that saved it and in a run that resumed from it.

In the order of calls: `watch.py` follows one step by hooks that exist only around it; `observed.py` makes digests of what
the step saw, `measured.py` those of the model, the optimizer and its gradients on this rank; `joined.py` makes one `StepRecord`
(`record.py`) of what all ranks have; `file.py` keeps it beside the checkpoint; `verdict.py` compares two records by the bounds of
`bounds.py`.
"""
