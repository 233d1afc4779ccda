"""eagle3kit: train an EAGLE-3 drafter for Kimi-K2.5, step by step, and know what it is worth.

In a notebook:

    import eagle3kit
    p = eagle3kit.load(globals())
    run = eagle3kit.open_run(p, "03_extract_hidden_states")
"""

from eagle3kit.errors import KitError
from eagle3kit.params import Params, load
from eagle3kit.rundir import Run, project_path

__version__ = "0.1.0"
__all__ = ["KitError", "Params", "Run", "load", "open_run", "project_path"]


def open_run(params: Params, stage: str) -> Run:
    """Open the run that `params` names for one notebook, for example `03_extract_hidden_states`."""
    return Run(params, stage)
