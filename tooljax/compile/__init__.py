"""The parts of `tooljax.compile_check`: chips and topologies, model shapes, a reader of HLO, the report."""
