"""Pages about results, for a browser: one file each, which needs no network.

inspect_page.py    what a checkpoint contains: an area for each layer, as large as its bytes
rank_page.py       its part that shows which rank would hold what
diff_page.py       the differences of two checkpoints: a strip of colours for each layer
output_file.py     where a page, and any other file that a call writes for its user, goes: a path or a URL
"""
