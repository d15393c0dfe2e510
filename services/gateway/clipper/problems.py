"""What goes wrong in Clipper's words: `{"error", "cause"}`, most of it with status 400."""

from typing import Any

from infaas.errors import Refused
from services.gateway.codes import called, retry_after
from services.gateway.door import Problem, without_subjects

JSON = "Json error"
REQUEST = "Request error"
PROCESSING = "Query processing error"
_NAMES = {"internal": "Internal error", "unauthenticated": "Not allowed", "forbidden": "Not allowed"}


class ClipperProblem(Problem):
    """A problem with Clipper's name for its kind."""

    def __init__(self, name: str, cause: str, status: int | None = 400, *, code: str = "bad_request") -> None:
        super().__init__(status, cause, code=code)
        self.name = name


def refused(refusal: Refused, name: str = PROCESSING) -> ClipperProblem:
    """A refusal of the system. What the client could have said better is its bad request, as in Clipper."""
    refusal = without_subjects(refusal)
    status = 400 if refusal.code in ("bad_request", "unknown_model", "unsatisfiable") else called(refusal.code).http
    problem = ClipperProblem(name, refusal.message, status, code=refusal.code)
    problem.headers = retry_after(refusal.code, refusal.retry_after_ms)
    return problem


def error_body(problem: Problem) -> dict[str, Any]:
    """What a problem becomes."""
    name = problem.name if isinstance(problem, ClipperProblem) else _NAMES.get(problem.code, REQUEST)
    return {"error": name, "cause": problem.message}
