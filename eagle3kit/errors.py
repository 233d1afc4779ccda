"""The one family of errors that the kit raises on purpose, and how it is shown."""

from __future__ import annotations


class KitError(Exception):
    """Something the user can mend: what happened, what was seen, what was wanted, and what mends it.

    In a notebook, in papermill and on the command line it is shown as these lines alone, without a traceback: the place in the
    kit's code where it was raised helps nobody who has to fix a parameter.

    Args:
        what: what happened, one sentence without a full stop at its end.
        seen: the value that was found.
        wanted: what would have been right.
        fix: the parameter, command or notebook that mends it.
    """

    def __init__(self, what: str, *, seen: object = None, wanted: object = None, fix: str | None = None) -> None:
        self.what, self.seen, self.wanted, self.fix = what, seen, wanted, fix
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """The error on one line: `what; seen ...; wanted ...; fix: ...`."""
        parts = [self.what]
        if self.seen is not None:
            parts.append(f"seen {self.seen}")
        if self.wanted is not None:
            parts.append(f"wanted {self.wanted}")
        if self.fix is not None:
            parts.append(f"fix: {self.fix}")
        return "; ".join(" ".join(part.split()) for part in parts)

    def _render_traceback_(self) -> list[str]:
        """IPython's hook: these lines stand where a traceback would."""
        return [f"{type(self).__name__}: {self.message}"]
