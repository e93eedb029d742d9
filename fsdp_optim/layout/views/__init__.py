"""Views: live parameters seen as the canonical ones that they are made of, for weights and moments alike. No torch, no ranks.

    View(name, axes, parts, **sizes)       # fusion.py: checked on axes when it is made (axes.py, patterns.py)
        .bind(name, shape) -> BoundView    # the sizes of the axes, and a Part for each canonical name
    placement_of_part(live, part)          # placed_part.py: the Placement of a part, from that of the live parameter
    fitted_view(name, shape, numbers)      # fitted.py, numbered.py: the View of parts whose element numbers are known
    .inverse -> InverseView                # inverse.py: the live parameters that parts make, for checkpoints
    tiles_of_part, tiles_of_live           # tiles.py: a range of a part, or of the live parameter, from elements of the other

A `Part` (part.py) is arithmetic: the Blocks of a part are found from the Blocks of the live parameter, a few for each group or
row of axes that lie apart, however long the rows are.
"""

from fsdp_optim.layout.views.by_name import ViewsByName
from fsdp_optim.layout.views.fitted import fitted_view
from fsdp_optim.layout.views.fusion import View
from fsdp_optim.layout.views.inverse import BoundView, InverseView, SomeView
from fsdp_optim.layout.views.numbered import numbers_of_part
from fsdp_optim.layout.views.part import Part
from fsdp_optim.layout.views.placed_part import PlacedPart, live_placement, placed_part, placement_of_part
from fsdp_optim.layout.views.tiles import Tile, run_in_live, tiles_of_live, tiles_of_part

__all__ = [
    "BoundView",
    "InverseView",
    "Part",
    "PlacedPart",
    "SomeView",
    "Tile",
    "View",
    "ViewsByName",
    "fitted_view",
    "live_placement",
    "numbers_of_part",
    "placed_part",
    "placement_of_part",
    "run_in_live",
    "tiles_of_live",
    "tiles_of_part",
]
