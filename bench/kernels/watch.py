"""Passes the tensors of a session to a function as they are computed."""

from __future__ import annotations

from collections.abc import Callable

from pyorch import engine
from pyorch.native.tensor import Tensor

See = Callable[[Tensor, bool], bool]


class Watch:
    """A callback for `Model.session(watch=...)`: with `ask`, `see(tensor, ask)` returns whether it
    wants the tensor (all up to it are then computed, and it is called again without `ask`). Its
    errors are raised by `prefill` and `decode`."""

    def __init__(self, see: See) -> None:
        self._see = see
        self._error: BaseException | None = None

    def attach(self, session: engine.Session) -> None:
        """There is nothing to learn from the session."""

    def node(self, address: int, ask: bool) -> bool:
        try:  # an exception cannot pass through C
            return self._see(Tensor.from_address(address), ask)
        except BaseException as error:  # noqa: BLE001
            self._error = self._error or error
            return not ask

    def done(self, n_past: int) -> None:
        """Raise an error of `see`."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def reset(self) -> None:
        """Nothing is counted."""
