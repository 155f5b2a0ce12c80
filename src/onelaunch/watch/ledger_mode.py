"""The mode of a run whose operations are only noted."""

from __future__ import annotations

from typing import Any

from onelaunch.driver.aten import Operator
from onelaunch.driver.dispatch import no_functions
from onelaunch.watch.ledger import Ledger
from onelaunch.watch.operations import HigherOrder, Watching


class LedgerMode(Watching):
    """A mode that notes the operations of a run in a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._met: HigherOrder | None = None

    def operation(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with no_functions():
            call = self._ledger.call(op, args, kwargs)
            self._ledger.note(call, args, kwargs)
        result = op.func(*args, **kwargs)
        with no_functions():
            call.returned(result)
            self._ledger.note_made(call)
        return result

    def higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator: the run may be the caller's own call. The capture will refuse it."""
        self._met = HigherOrder(func.name())
        return func(*args, **kwargs)

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if self._met is not None:
            self._met.mend_dynamo()
