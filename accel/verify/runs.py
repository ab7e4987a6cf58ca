"""Whether a model from elsewhere runs at all at the sizes and values that its signature allows."""

from __future__ import annotations

from accel.artifact import Artifact
from accel.errors import BadInputSpec, RunFailed
from accel.runtimes.base import open_session
from accel.verify.gates import case_name


def check_runs(src: Artifact) -> None:
    """Run ``src`` once at every case of its signature. A file that declares no ranges gets accel's own, which may be
    wrong for it: better one sentence now than a reason in each candidate's row later.

    Raises ``BadInputSpec`` with the case that failed.
    """
    with open_session(src) as session:
        for sizes in src.signature.cases():
            try:
                session.run(src.signature.example_inputs(**sizes))
            except RunFailed as error:
                reason = str(error).partition(": ")[2].partition("; check")[0]
                raise BadInputSpec(
                    f"{src.path.name} fails at {case_name(sizes)} ({reason}); say which sizes it "
                    "takes with --dim NAME=MIN:OPT:MAX, and which integers with --input 'NAME:int64[DIM]{LOW..HIGH}'"
                ) from error
