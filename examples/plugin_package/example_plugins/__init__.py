"""An example of a package that adds to fsdp_optim: a wrapper (`masters`), a store (`sqlite_store`) and a format (`raw_format`).

It imports `fsdp_optim`, `fsdp_optim.plugins` and, in `conformance`, `fsdp_optim.testing`, and nothing else of that package. When
it is installed, its entry points (pyproject.toml) make all three known:

    fsdp_optim.save("sqlite:///data/run.db/step-1000", model, optim, format="raw")       # model: example_plugins.masters.Mixed
"""
