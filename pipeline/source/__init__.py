"""Places read with Spark: pieces at work in tasks, and the Data Source ``tallystick`` of notebooks.

``over_pieces`` gives a function each piece of a place and its reader; ``entries`` is all of them as a DataFrame;
``over_numbers`` is for tasks that read whole files.
"""

from pipeline.source.frames import entries, in_tasks, open_pieces, over_numbers, over_pieces

__all__ = ["entries", "in_tasks", "open_pieces", "over_numbers", "over_pieces"]
