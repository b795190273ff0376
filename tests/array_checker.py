"""The type checker that pytest applies to tooljax and pallas_kernels (--jaxtyping-packages in pyproject.toml).

A module of its own because the option cannot carry arguments after a list of packages (jaxtyping 0.3.11 splits them
at the wrong comma).
"""

from beartype import BeartypeConf, beartype

# As in PEP 484, and as pyright has it, an int will do where a float is asked for.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
