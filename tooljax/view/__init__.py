"""A local web page over the trajectories of runs: `python -m tooljax.view RUN`. It reads, and never writes.

`library` finds runs and steps, `index` lists a step's trajectories without their tokens, `why` says in a line how each
one ended, `conversation` is one of them in full, and `server` hands it all out as JSON to the page in static/.
"""
