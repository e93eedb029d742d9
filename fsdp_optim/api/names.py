"""The public function that says which canonical parameters the live ones of a model are made of."""

from __future__ import annotations

from fsdp_optim.boundary.tracebacks import public
from fsdp_optim.layout.views import View
from fsdp_optim.model_views import known_views
from fsdp_optim.options import Model
from fsdp_optim.verbs.arguments import check_model


@public
def views_for(model: Model) -> list[View]:
    """Return the Views of all that is known of a model: by the state-dict hooks of its modules, and by the lists of known models.

    The model may be wrapped, and on the meta device. Nothing of it is changed, and no rank asks another. The Views are Python
    that can be printed, edited and given to any call as `views=`; `views="hooks"` is those of the hooks alone, learned anew in
    each call. Layers that have equal Views have one, with a placeholder for their numbers.

        print(*fsdp_optim.views_for(model), sep="\\n")

    Args:
        model: a module, or a list of pipeline stages.

    Raises:
        WrapperError: `model` is no module; a state-dict hook does something else than to rename, cut or permute a parameter: it
            computes, joins two parameters, makes a collective call, uses or changes live tensors, or is not undone by the hook
            of load_state_dict(). The error names the module, the hook, the parameter and the fix.
        LayoutError: transformers' conversion of a parameter to the names of its files computes elements, loses or repeats them; a
            layer of megatron-core has another shape than its config says.
    """
    check_model(model)
    return known_views(model)
