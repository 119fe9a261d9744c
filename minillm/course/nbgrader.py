"""Export the exercises as an nbgrader course.

nbgrader runs the check cells inside the student's own notebook and reads the points from what the cell evaluates to.
That is convenient and trusting: an answer that tampers with the process can change its score there. `minillm grade`
on the collected files (it reads nbgrader's `submitted/` layout too) gives the score that was made in a sandbox.
Tooling of all lessons.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from minillm.course import notebook as nbk
from minillm.course.exercises import exercise_of
from minillm.errors import MinillmError

CONFIG = '''"""nbgrader configuration of the minillm exercises."""

c = get_config()  # noqa: F821  (given by nbgrader)
c.CourseDirectory.course_id = "minillm"
# `check` knows this error as "not attempted"; any other stub would count as a wrong answer.
c.ClearSolutions.code_stub = {"python": 'raise NotImplementedError("not attempted yet: write it here")'}
c.ClearSolutions.enforce_metadata = True
c.ExecutePreprocessor.timeout = 120
c.ExecutePreprocessor.interrupt_on_timeout = True
c.ExecutePreprocessor.startup_timeout = 180  # seconds for a kernel: a machine that grades is busy
c.ExecutePreprocessor.iopub_timeout = 60  # and for what a cell printed, or its points would be lost
'''

README = """# The minillm exercises as an nbgrader course

    nbgrader generate_assignment 00_roofline     makes release/ from source/
    nbgrader collect 00_roofline                 or put files into submitted/STUDENT/00_roofline/
    nbgrader autograde 00_roofline --create      scores them, with partial credit
    minillm grade --dir submitted                scores them in a sandbox, and prints a table

minillm must be installed where nbgrader runs. Keep source/ to yourself: it holds the answers.
"""


def export(folder: Path, solutions: Path) -> list[str]:
    """Write `nbgrader_config.py` and `source/NN_topic/NN_topic.ipynb` into `folder`; returns the assignments' names."""
    sources = sorted(solutions.glob("[0-9][0-9]_*.ipynb"))
    if not sources:
        raise MinillmError(f"{solutions} holds no NN_topic.ipynb; run this in the course's root or give --solutions")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise MinillmError(f"{folder} exists and is not an empty folder; give a new one")
    for path in sources:
        exercise_of(nbk.read(path))  # refuse a broken solution before anything is written
    try:
        for path in sources:
            target = folder / "source" / path.stem
            target.mkdir(parents=True)
            shutil.copyfile(path, target / path.name)
        (folder / "nbgrader_config.py").write_text(CONFIG, encoding="utf-8")
        (folder / "README.md").write_text(README, encoding="utf-8")
    except OSError as error:
        raise MinillmError(f"cannot write {folder}: {error.strerror}; give a folder you may write to") from None
    return [path.stem for path in sources]
