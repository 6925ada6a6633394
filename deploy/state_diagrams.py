"""Makes Mermaid diagrams of the states of a slot and of a request from the tables that the service runs.

`python -m deploy.state_diagrams FILE` replaces the diagrams between the file's markers.
"""

import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Final, TypeVar

from deploy import markers
from service.claims.states import REQUEST, SLOT, RequestState, SlotState

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


def diagram(first: S, moves: Mapping[tuple[S, E], S]) -> str:
    """Return a Mermaid state diagram, a line for each move, in a fence."""
    lines = ["```mermaid", "stateDiagram-v2", f"  [*] --> {_label(first)}"]
    lines += [f"  {_label(state)} --> {_label(after)}: {event.value}" for (state, event), after in moves.items()]
    return "\n".join([*lines, "```"]) + "\n"


def _label(state: Enum) -> str:
    return str(state.value).replace(" ", "_")


DIAGRAMS: Final = {
    "slot states": diagram(SlotState.VACANT, SLOT),
    "request states": diagram(RequestState.QUEUED, REQUEST),
}


def put(text: str) -> str:
    """Return the text with each diagram between its markers."""
    for name, generated in DIAGRAMS.items():
        text = markers.put(text, name, generated)
    return text


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        path = Path(argument)
        path.write_text(put(path.read_text(encoding="utf-8")), encoding="utf-8")
