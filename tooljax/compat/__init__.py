"""For users of verl: what their files mean here (`python -m tooljax.compat report`), and their options as .gin."""
