"""Views that are learned from a model: from the hooks of its modules, and by what is known of its kind.

    ModelReader.hooked_units(view)           # adapters: the modules with hooks of their own
      kind_of(unit)                          # kinds.py: equal units are learned once
      learned_views(unit)                    # hooks.py: on numbers (numbering.py) in place of weights, or on twins.py
        run_save, run_load                   # running.py: as state_dict() and load_state_dict() run the hooks
          Guard, untouched                   # guard.py: no collective calls, and no live tensors
    joined(views, names)                     # patterns.py: one View for all layers
    known_views(model)                       # known.py: the hooks first, then learners by the kind of a model
      views_of_transformers(model)           # transformers_models.py, layers.py: the names that save_pretrained writes
        Conversion                           # conversions.py: transformers' own conversion, on tensors in place of weights
        element_maps(conversion)             # element_maps.py: on numbers, or on twins (conversion_twins.py)
      views_of_megatron(model)               # megatron_models.py: the fused layers of megatron-core

No rank asks another, and nothing of the model is changed. This room is imported when a call asks for it: `views="hooks"`,
`views="hub"`, `views_for`.
"""

from fsdp_optim.model_views.known import known_views, learned_by
from fsdp_optim.model_views.of_hooks import views_of_hooks

__all__ = ["known_views", "learned_by", "views_of_hooks"]
